/* A driver with a fault, for LD_PRELOAD: what clEnqueueReadBuffer delivers has one bit wrong, for
 * one in four sizes. Which ones depends on the size alone, so that the same configuration always
 * meets the fault. A control of tests: the tool must notice, and its failures must repeat. */
#define _GNU_SOURCE
#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

typedef cl_int CL_API_CALL read_buffer(cl_command_queue, cl_mem, cl_bool, size_t, size_t, void *,
                                       cl_uint, const cl_event *, cl_event *);

static int is_faulty(size_t size) { return ((uint32_t)size * UINT32_C(2654435761) >> 30) == 1; }

/* A high bit of the middle element: no tolerance covers it. */
static void spoil(unsigned char *bytes, size_t size) { bytes[size / 2 | 1] ^= 0x40; }

typedef struct pending {
  unsigned char *bytes;
  size_t size;
  cl_event delivered; /* what the caller waits for */
} pending;

static void CL_CALLBACK deliver(cl_event event, cl_int status, void *data) {
  pending *p = data;
  if (status == CL_COMPLETE) spoil(p->bytes, p->size);
  clSetUserEventStatus(p->delivered, status);
  clReleaseEvent(p->delivered);
  clReleaseEvent(event);
  free(p);
}

/* Puts an event of ours between the read and the caller. */
static void chain(cl_command_queue queue, cl_event read, void *bytes, size_t size, cl_event *out) {
  cl_context context;
  pending *p = malloc(sizeof *p);
  if (p == NULL ||
      clGetCommandQueueInfo(queue, CL_QUEUE_CONTEXT, sizeof context, &context, NULL) != CL_SUCCESS)
    abort();
  *p = (pending){bytes, size, clCreateUserEvent(context, NULL)};
  *out = p->delivered;
  clRetainEvent(p->delivered);
  clSetEventCallback(read, CL_COMPLETE, deliver, p);
  clFlush(queue);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueReadBuffer(cl_command_queue queue, cl_mem buffer,
                                                    cl_bool blocking, size_t offset, size_t size,
                                                    void *ptr, cl_uint num_waits,
                                                    const cl_event *waits, cl_event *event) {
  read_buffer *real = (read_buffer *)(uintptr_t)dlsym(RTLD_NEXT, "clEnqueueReadBuffer");
  cl_event read = NULL;
  if (real == NULL) abort();
  if (!is_faulty(size) || (!blocking && event == NULL))
    return real(queue, buffer, blocking, offset, size, ptr, num_waits, waits, event);
  if (blocking) {
    const cl_int code = real(queue, buffer, blocking, offset, size, ptr, num_waits, waits, event);
    if (code == CL_SUCCESS) spoil(ptr, size);
    return code;
  }
  const cl_int code = real(queue, buffer, blocking, offset, size, ptr, num_waits, waits, &read);
  if (code == CL_SUCCESS) chain(queue, read, ptr, size, event);
  return code;
}

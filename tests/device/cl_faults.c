#include <stdlib.h>

#include "cl_gates.h"

cl_faults faults;

/* Declares a wrapper and the real function, then defines the wrapper. */
#define WRAP(type, name, params)                                                                   \
  type __real_##name params;                                                                       \
  type __wrap_##name params;                                                                       \
  type __wrap_##name params

/* ---- which call fails ---- */

static struct {
  int left; /* calls until then; 0: never */
  unsigned mask;
  cl_int code;
  const char *failed;
} fault;

void fault_arm(int n, unsigned mask, cl_int code) {
  for (int i = 0; i < NUM_FAULT_CALLS; i++) faults.calls[i] = 0;
  fault.left = n;
  fault.mask = mask;
  fault.code = code;
  fault.failed = NULL;
}

const char *fault_disarm(void) {
  fault.left = 0;
  return fault.failed;
}

int fault_count(unsigned mask) {
  int sum = 0;
  for (int i = 0; i < NUM_FAULT_CALLS; i++) sum += (mask >> i & 1) != 0 ? faults.calls[i] : 0;
  return sum;
}

/* Counts a call; the code it must return, CL_SUCCESS to perform it. */
static cl_int enter(fault_call call) {
#define NAME(name) #name,
  static const char *const names[] = {FAULT_CALLS(NAME)};
#undef NAME
  faults.calls[call]++;
  if (fault.left == 0 || (fault.mask >> call & 1) == 0 || --fault.left > 0) return CL_SUCCESS;
  fault.failed = names[call];
  return fault.code;
}

#define ENTER(name)                                                                                \
  do {                                                                                             \
    const cl_int enter_code_ = enter(FAULT_##name);                                                \
    if (enter_code_ != CL_SUCCESS) return enter_code_;                                             \
  } while (0)

/* The same for functions that return an object. */
#define ENTER_CREATE(name)                                                                         \
  do {                                                                                             \
    const cl_int enter_code_ = enter(FAULT_##name);                                                \
    if (enter_code_ == CL_SUCCESS) break;                                                          \
    if (code != NULL) *code = enter_code_;                                                         \
    return NULL;                                                                                   \
  } while (0)

/* ---- objects that are left ---- */

typedef enum kind { CONTEXT, QUEUE, PROGRAM, KERNEL, BUFFER } kind;

typedef struct object {
  void *id;
  kind kind;
} object;

static object *objects;
static int num_objects, max_objects;

static int *count_of(kind k) {
  switch (k) {
  case CONTEXT: return &faults.live.contexts;
  case QUEUE: return &faults.live.queues;
  case PROGRAM: return &faults.live.programs;
  case KERNEL: return &faults.live.kernels;
  default: return &faults.live.buffers;
  }
}

static void created(kind k, void *id) {
  if (id == NULL) return;
  if (num_objects == max_objects) {
    max_objects = 2 * max_objects + 64;
    objects = realloc(objects, (size_t)max_objects * sizeof *objects);
    if (objects == NULL) fault_give_up("no memory");
  }
  objects[num_objects++] = (object){id, k};
  ++*count_of(k);
}

static void released(kind k, const void *id) {
  int i = num_objects - 1;
  while (i >= 0 && objects[i].id != id) i--;
  if (i < 0 || objects[i].kind != k) fault_give_up("an object is released once too often");
  objects[i] = objects[--num_objects];
  --*count_of(k);
}

/* ---- queues and events ---- */

WRAP(cl_context, clCreateContext,
     (const cl_context_properties *properties, cl_uint num, const cl_device_id *devices,
      void(CL_CALLBACK *notify)(const char *, const void *, size_t, void *), void *data,
      cl_int *code)) {
  const cl_context context = __real_clCreateContext(properties, num, devices, notify, data, code);
  created(CONTEXT, context);
  return context;
}

WRAP(cl_int, clReleaseContext, (cl_context context)) {
  released(CONTEXT, context);
  return __real_clReleaseContext(context);
}

WRAP(cl_command_queue, clCreateCommandQueue,
     (cl_context context, cl_device_id device, cl_command_queue_properties properties,
      cl_int *code)) {
  const cl_command_queue queue = __real_clCreateCommandQueue(context, device, properties, code);
  created(QUEUE, queue);
  return queue;
}

WRAP(cl_int, clReleaseCommandQueue, (cl_command_queue queue)) {
  released(QUEUE, queue);
  fault_forget_queue(queue);
  return __real_clReleaseCommandQueue(queue);
}

WRAP(cl_int, clFlush, (cl_command_queue queue)) {
  ENTER(clFlush);
  if (queue == faults.deaf_queue) return CL_SUCCESS;
  if (faults.lost_flush > 0 && --faults.lost_flush == 0) return CL_SUCCESS;
  fault_flushed(queue);
  return __real_clFlush(queue);
}

WRAP(cl_int, clFinish, (cl_command_queue queue)) {
  ENTER(clFinish);
  fault_flushed(queue);
  return __real_clFinish(queue);
}

WRAP(cl_int, clWaitForEvents, (cl_uint num, const cl_event *events)) {
  ENTER(clWaitForEvents);
  fault_flushed_by_wait(num, events);
  return __real_clWaitForEvents(num, events);
}

WRAP(cl_int, clGetEventInfo,
     (cl_event event, cl_event_info name, size_t size, void *value, size_t *size_ret)) {
  ENTER(clGetEventInfo);
  return __real_clGetEventInfo(event, name, size, value, size_ret);
}

WRAP(cl_event, clCreateUserEvent, (cl_context context, cl_int *code)) {
  const cl_event event = __real_clCreateUserEvent(context, code);
  if (event != NULL) fault_add_user_event(event);
  return event;
}

WRAP(cl_int, clRetainEvent, (cl_event event)) {
  ENTER(clRetainEvent);
  fault_retain_event(event);
  return __real_clRetainEvent(event);
}

WRAP(cl_int, clReleaseEvent, (cl_event event)) {
  fault_release_event(event);
  return __real_clReleaseEvent(event);
}

/* ---- commands ---- */

WRAP(cl_int, clEnqueueNDRangeKernel,
     (cl_command_queue queue, cl_kernel kernel, cl_uint dim, const size_t *offset,
      const size_t *global, const size_t *local, cl_uint num, const cl_event *waits,
      cl_event *event)) {
  ENTER(clEnqueueNDRangeKernel);
  fault_command c = fault_begin(FAULT_clEnqueueNDRangeKernel, queue, CL_FALSE, num, waits);
  return fault_enqueued(&c, event,
                        __real_clEnqueueNDRangeKernel(queue, kernel, dim, offset, global, local,
                                                      c.num, c.waits, event));
}

WRAP(cl_int, clEnqueueCopyBuffer,
     (cl_command_queue queue, cl_mem src, cl_mem dst, size_t src_offset, size_t dst_offset,
      size_t size, cl_uint num, const cl_event *waits, cl_event *event)) {
  ENTER(clEnqueueCopyBuffer);
  fault_command c = fault_begin(FAULT_clEnqueueCopyBuffer, queue, CL_FALSE, num, waits);
  return fault_enqueued(&c, event,
                        __real_clEnqueueCopyBuffer(queue, src, dst, src_offset, dst_offset, size,
                                                   c.num, c.waits, event));
}

WRAP(cl_int, clEnqueueCopyBufferRect,
     (cl_command_queue queue, cl_mem src, cl_mem dst, const size_t *src_origin,
      const size_t *dst_origin, const size_t *region, size_t src_row, size_t src_slice,
      size_t dst_row, size_t dst_slice, cl_uint num, const cl_event *waits, cl_event *event)) {
  ENTER(clEnqueueCopyBufferRect);
  fault_command c = fault_begin(FAULT_clEnqueueCopyBufferRect, queue, CL_FALSE, num, waits);
  return fault_enqueued(&c, event,
                        __real_clEnqueueCopyBufferRect(queue, src, dst, src_origin, dst_origin,
                                                       region, src_row, src_slice, dst_row,
                                                       dst_slice, c.num, c.waits, event));
}

WRAP(cl_int, clEnqueueWriteBuffer,
     (cl_command_queue queue, cl_mem mem, cl_bool blocking, size_t offset, size_t size,
      const void *from, cl_uint num, const cl_event *waits, cl_event *event)) {
  ENTER(clEnqueueWriteBuffer);
  fault_command c = fault_begin(FAULT_clEnqueueWriteBuffer, queue, blocking, num, waits);
  return fault_enqueued(&c, event,
                        __real_clEnqueueWriteBuffer(queue, mem, blocking, offset, size, from, c.num,
                                                    c.waits, event));
}

WRAP(cl_int, clEnqueueReadBuffer,
     (cl_command_queue queue, cl_mem mem, cl_bool blocking, size_t offset, size_t size, void *to,
      cl_uint num, const cl_event *waits, cl_event *event)) {
  ENTER(clEnqueueReadBuffer);
  fault_command c = fault_begin(FAULT_clEnqueueReadBuffer, queue, blocking, num, waits);
  return fault_enqueued(&c, event,
                        __real_clEnqueueReadBuffer(queue, mem, blocking, offset, size, to, c.num,
                                                   c.waits, event));
}

WRAP(cl_int, clEnqueueWriteBufferRect,
     (cl_command_queue queue, cl_mem mem, cl_bool blocking, const size_t *mem_origin,
      const size_t *host_origin, const size_t *region, size_t mem_row, size_t mem_slice,
      size_t host_row, size_t host_slice, const void *from, cl_uint num, const cl_event *waits,
      cl_event *event)) {
  ENTER(clEnqueueWriteBufferRect);
  fault_command c = fault_begin(FAULT_clEnqueueWriteBufferRect, queue, blocking, num, waits);
  return fault_enqueued(&c, event,
                        __real_clEnqueueWriteBufferRect(queue, mem, blocking, mem_origin,
                                                        host_origin, region, mem_row, mem_slice,
                                                        host_row, host_slice, from, c.num, c.waits,
                                                        event));
}

WRAP(cl_int, clEnqueueReadBufferRect,
     (cl_command_queue queue, cl_mem mem, cl_bool blocking, const size_t *mem_origin,
      const size_t *host_origin, const size_t *region, size_t mem_row, size_t mem_slice,
      size_t host_row, size_t host_slice, void *to, cl_uint num, const cl_event *waits,
      cl_event *event)) {
  ENTER(clEnqueueReadBufferRect);
  fault_command c = fault_begin(FAULT_clEnqueueReadBufferRect, queue, blocking, num, waits);
  return fault_enqueued(&c, event,
                        __real_clEnqueueReadBufferRect(queue, mem, blocking, mem_origin,
                                                       host_origin, region, mem_row, mem_slice,
                                                       host_row, host_slice, to, c.num, c.waits,
                                                       event));
}

WRAP(cl_int, clEnqueueMarkerWithWaitList,
     (cl_command_queue queue, cl_uint num, const cl_event *waits, cl_event *event)) {
  ENTER(clEnqueueMarkerWithWaitList);
  fault_command c = fault_begin(FAULT_clEnqueueMarkerWithWaitList, queue, CL_FALSE, num, waits);
  return fault_enqueued(&c, event,
                        __real_clEnqueueMarkerWithWaitList(queue, c.num, c.waits, event));
}

/* ---- buffers, kernels, programs ---- */

WRAP(cl_mem, clCreateBuffer,
     (cl_context context, cl_mem_flags flags, size_t size, void *host, cl_int *code)) {
  ENTER_CREATE(clCreateBuffer);
  const cl_mem mem = __real_clCreateBuffer(context, flags, size, host, code);
  created(BUFFER, mem);
  return mem;
}

WRAP(cl_int, clReleaseMemObject, (cl_mem mem)) {
  released(BUFFER, mem);
  return __real_clReleaseMemObject(mem);
}

WRAP(cl_kernel, clCreateKernel, (cl_program program, const char *name, cl_int *code)) {
  ENTER_CREATE(clCreateKernel);
  const cl_kernel kernel = __real_clCreateKernel(program, name, code);
  created(KERNEL, kernel);
  return kernel;
}

WRAP(cl_int, clReleaseKernel, (cl_kernel kernel)) {
  released(KERNEL, kernel);
  return __real_clReleaseKernel(kernel);
}

WRAP(cl_int, clSetKernelArg, (cl_kernel kernel, cl_uint index, size_t size, const void *value)) {
  ENTER(clSetKernelArg);
  const bool is_struct = size > sizeof(cl_mem);
  if (is_struct && faults.lost_args != 0 && (faults.lost_args < 0 || --faults.lost_args == 0))
    return CL_SUCCESS;
  return __real_clSetKernelArg(kernel, index, size, value);
}

WRAP(cl_program, clCreateProgramWithSource,
     (cl_context context, cl_uint num, const char **texts, const size_t *sizes, cl_int *code)) {
  ENTER_CREATE(clCreateProgramWithSource);
  const cl_program program = __real_clCreateProgramWithSource(context, num, texts, sizes, code);
  created(PROGRAM, program);
  return program;
}

WRAP(cl_program, clCreateProgramWithBinary,
     (cl_context context, cl_uint num, const cl_device_id *devices, const size_t *sizes,
      const unsigned char **binaries, cl_int *statuses, cl_int *code)) {
  ENTER_CREATE(clCreateProgramWithBinary);
  const cl_program program =
      __real_clCreateProgramWithBinary(context, num, devices, sizes, binaries, statuses, code);
  created(PROGRAM, program);
  return program;
}

WRAP(cl_int, clReleaseProgram, (cl_program program)) {
  released(PROGRAM, program);
  return __real_clReleaseProgram(program);
}

WRAP(cl_int, clBuildProgram,
     (cl_program program, cl_uint num, const cl_device_id *devices, const char *options,
      void(CL_CALLBACK *done)(cl_program, void *), void *data)) {
  ENTER(clBuildProgram);
  return __real_clBuildProgram(program, num, devices, options, done, data);
}

/* ---- the end of a stuck group ---- */

static void release(const object *o) {
  switch (o->kind) {
  case CONTEXT: __wrap_clReleaseContext(o->id); break;
  case QUEUE: __wrap_clReleaseCommandQueue(o->id); break;
  case PROGRAM: __wrap_clReleaseProgram(o->id); break;
  case KERNEL: __wrap_clReleaseKernel(o->id); break;
  case BUFFER: __wrap_clReleaseMemObject(o->id); break;
  }
}

void fault_release_left(void) {
  for (int i = 0; i < num_objects; i++)
    if (objects[i].kind == QUEUE) __real_clFinish(objects[i].id);
  for (int k = BUFFER; k >= CONTEXT; k--)
    for (int i = num_objects - 1; i >= 0; i--) {
      const object o = objects[i];
      if ((int)o.kind == k) release(&o);
    }
}

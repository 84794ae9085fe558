/* Preloaded into the tool while oclgrind looks for uninitialised values: writes and copies become
 * launches of a kernel that moves them.
 *
 * oclgrind 21.10 follows what kernels do, byte by byte. But a write or copy of a part of a buffer
 * makes it forget everything it knew about the buffer, and all of it counts as uninitialised from
 * then on. The kernel may move bytes that nobody set: its own findings are not looked at. */
#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>

static const char source[] =
    "__kernel void moved_by_the_test(__global const ushort *from, __global ushort *to, ulong8 p) "
    "{\n"
    "  const size_t x = get_global_id(0), y = get_global_id(1), z = get_global_id(2);\n"
    "  to[p.s3 + z * p.s5 + y * p.s4 + x] = from[p.s0 + z * p.s2 + y * p.s1 + x];\n"
    "}\n";

static void check(cl_int code, const char *what) {
  if (code == CL_SUCCESS) return;
  fprintf(stderr, "moves: %s: %d\n", what, (int)code);
  abort();
}

static cl_context context_of(cl_command_queue queue) {
  cl_context context;
  check(clGetCommandQueueInfo(queue, CL_QUEUE_CONTEXT, sizeof(context), &context, NULL), "context");
  return context;
}

/* Of one context: the tool has no other. */
static cl_kernel get_kernel(cl_command_queue queue) {
  static cl_kernel kernel;
  cl_int code;
  if (kernel != NULL) return kernel;
  const char *text = source;
  cl_program program = clCreateProgramWithSource(context_of(queue), 1, &text, NULL, &code);
  check(code, "program");
  check(clBuildProgram(program, 0, NULL, "", NULL, NULL), "build");
  kernel = clCreateKernel(program, "moved_by_the_test", &code);
  check(code, "kernel");
  return kernel;
}

/* A rectangle in a buffer: first byte, bytes from row to row and from slice to slice. */
typedef struct place {
  size_t first, row, slice;
} place;

static place place_of(const size_t *origin, const size_t *region, size_t row, size_t slice) {
  if (row == 0) row = region[0];
  if (slice == 0) slice = row * region[1];
  return (place){origin[0] + origin[1] * row + origin[2] * slice, row, slice};
}

static void check_even(size_t x) {
  if (x % 2 != 0) check(CL_INVALID_VALUE, "an odd number of bytes");
}

typedef struct waits {
  cl_uint num;
  const cl_event *list;
  cl_event *event;
} waits;

static cl_int move(cl_command_queue queue, cl_mem from, place a, cl_mem to, place b,
                   const size_t *region, waits w) {
  const size_t bytes[8] = {a.first, a.row, a.slice, b.first, b.row, b.slice, region[0]};
  const size_t global[3] = {region[0] / 2, region[1], region[2]};
  const cl_kernel kernel = get_kernel(queue);
  cl_ulong8 p = {{0}};
  for (int i = 0; i < 7; i++) {
    check_even(bytes[i]);
    p.s[i] = bytes[i] / 2;
  }
  check(clSetKernelArg(kernel, 0, sizeof(from), &from), "argument");
  check(clSetKernelArg(kernel, 1, sizeof(to), &to), "argument");
  check(clSetKernelArg(kernel, 2, sizeof p, &p), "argument");
  return clEnqueueNDRangeKernel(queue, kernel, 3, NULL, global, NULL, w.num, w.list, w.event);
}

/* Host memory as a buffer, which lives to the end of the process: a command may be reading it. */
static cl_mem copy_of(cl_command_queue queue, const void *host, size_t bytes) {
  cl_int code;
  const cl_mem mem = clCreateBuffer(context_of(queue), CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR,
                                    bytes, (void *)(size_t)host, &code);
  check(code, "buffer");
  return mem;
}

static const size_t zero[3];

cl_int clEnqueueWriteBuffer(cl_command_queue queue, cl_mem buffer, cl_bool blocking, size_t offset,
                            size_t size, const void *host, cl_uint num, const cl_event *list,
                            cl_event *event) {
  const size_t region[3] = {size, 1, 1}, at[3] = {offset, 0, 0};
  const cl_int code = move(queue, copy_of(queue, host, size), place_of(zero, region, 0, 0), buffer,
                           place_of(at, region, 0, 0), region, (waits){num, list, event});
  return code == CL_SUCCESS && blocking ? clFinish(queue) : code;
}

cl_int clEnqueueWriteBufferRect(cl_command_queue queue, cl_mem buffer, cl_bool blocking,
                                const size_t *to, const size_t *from, const size_t *region,
                                size_t to_row, size_t to_slice, size_t from_row, size_t from_slice,
                                const void *host, cl_uint num, const cl_event *list,
                                cl_event *event) {
  const place a = place_of(from, region, from_row, from_slice);
  const size_t size = a.first + (region[2] - 1) * a.slice + (region[1] - 1) * a.row + region[0];
  const cl_int code =
      move(queue, copy_of(queue, host, size), a, buffer, place_of(to, region, to_row, to_slice),
           region, (waits){num, list, event});
  return code == CL_SUCCESS && blocking ? clFinish(queue) : code;
}

cl_int clEnqueueCopyBuffer(cl_command_queue queue, cl_mem from, cl_mem to, size_t from_offset,
                           size_t to_offset, size_t size, cl_uint num, const cl_event *list,
                           cl_event *event) {
  const size_t region[3] = {size, 1, 1}, a[3] = {from_offset, 0, 0}, b[3] = {to_offset, 0, 0};
  return move(queue, from, place_of(a, region, 0, 0), to, place_of(b, region, 0, 0), region,
              (waits){num, list, event});
}

cl_int clEnqueueCopyBufferRect(cl_command_queue queue, cl_mem from, cl_mem to, const size_t *a,
                               const size_t *b, const size_t *region, size_t a_row, size_t a_slice,
                               size_t b_row, size_t b_slice, cl_uint num, const cl_event *list,
                               cl_event *event) {
  return move(queue, from, place_of(a, region, a_row, a_slice), to,
              place_of(b, region, b_row, b_slice), region, (waits){num, list, event});
}

/* A new buffer may get the number of a released one, and oclgrind then takes the size of the old
 * one for its: nothing is released. */
cl_int clReleaseMemObject(cl_mem mem) {
  (void)mem;
  return CL_SUCCESS;
}

#include "cl_faults.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

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

/* ---- queues and events ---- */

enum { MAX_QUEUES = 256, NUM_BUCKETS = 4096 };

typedef struct queue_state {
  cl_command_queue id;
  long enqueued, flushed; /* commands */
  bool is_blocked;        /* the last one waits for a user event */
} queue_state;

static queue_state queues[MAX_QUEUES];
static int num_queues;

typedef struct event_state {
  cl_event id;
  queue_state *queue; /* NULL: a user event */
  long command;       /* its number in the queue */
  int references;
  bool is_blocked; /* it waits for a user event, or is one */
  struct event_state *next;
} event_state;

static event_state *buckets[NUM_BUCKETS];

static void give_up(const char *why) {
  fprintf(stderr, "cl_faults: %s\n", why);
  abort();
}

static queue_state *queue_of(cl_command_queue id) {
  for (int i = 0; i < num_queues; i++)
    if (queues[i].id == id) return &queues[i];
  if (num_queues == MAX_QUEUES) give_up("too many queues");
  queues[num_queues].id = id;
  return &queues[num_queues++];
}

/* The link to an event, which holds NULL if it is unknown. */
static event_state **find_event(cl_event id) {
  event_state **at = &buckets[((uintptr_t)id >> 4) % NUM_BUCKETS];
  while (*at != NULL && (*at)->id != id) at = &(*at)->next;
  return at;
}

static cl_event *noted;
static size_t num_noted, max_noted;

static void note(cl_event id) {
  if (num_noted == max_noted) {
    max_noted = 2 * max_noted + 64;
    noted = realloc(noted, max_noted * sizeof(*noted));
    if (noted == NULL) give_up("no memory");
  }
  noted[num_noted++] = id;
}

static void add_event(cl_event id, queue_state *q) {
  event_state **at = find_event(id);
  if (*at != NULL) give_up("a new event has the address of a live one");
  event_state *e = calloc(1, sizeof *e);
  if (e == NULL) give_up("no memory");
  *e = (event_state){.id = id,
                     .queue = q,
                     .command = q == NULL ? 0 : q->enqueued,
                     .references = 1,
                     .is_blocked = q == NULL || q->is_blocked};
  *at = e;
  faults.live.events++;
  if (faults.note_events) note(id);
}

cl_int __real_clWaitForEvents(cl_uint num, const cl_event *events);

/* A driver's thread that has completed a command may still have to tell those that wait for it:
 * nothing says when it has, so it gets some time. */
void fault_settle(void) {
  for (size_t i = 0; i < num_noted; i++) {
    const event_state *e = *find_event(noted[i]);
    if (e != NULL && !e->is_blocked) __real_clWaitForEvents(1, &e->id);
  }
  nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
  for (int i = 0; i < num_queues; i++) queues[i].is_blocked = false;
  free(noted);
  noted = NULL;
  num_noted = max_noted = 0;
}

static void flushed(queue_state *q) {
  if (!faults.forget_flushes) q->flushed = q->enqueued;
}

int fault_num_unflushed_commands(void) {
  long sum = 0;
  for (int i = 0; i < num_queues; i++) sum += queues[i].enqueued - queues[i].flushed;
  return (int)sum;
}

static bool waits_are_blocked; /* of the command being enqueued */

static void check_waits(cl_command_queue id, cl_uint num, const cl_event *waits) {
  waits_are_blocked = false;
  for (cl_uint i = 0; i < num; i++) {
    const event_state *e = *find_event(waits[i]);
    if (e == NULL) give_up("a wait list has an event that was released or never made");
    waits_are_blocked |= e->is_blocked;
    if (e->queue != NULL && e->queue->id != id && e->queue->flushed < e->command)
      faults.unflushed++;
  }
}

/* After an enqueue: notes the command and its event. Blocking calls flush. */
static cl_int enqueued(cl_command_queue id, cl_bool blocking, const cl_event *out, cl_int code) {
  if (code != CL_SUCCESS) return code;
  queue_state *q = queue_of(id);
  q->enqueued++;
  q->is_blocked |= waits_are_blocked;
  if (out != NULL) add_event(*out, q);
  if (blocking) flushed(q);
  return code;
}

WRAP(cl_int, clFlush, (cl_command_queue queue)) {
  ENTER(clFlush);
  flushed(queue_of(queue));
  return __real_clFlush(queue);
}

WRAP(cl_int, clFinish, (cl_command_queue queue)) {
  ENTER(clFinish);
  flushed(queue_of(queue));
  return __real_clFinish(queue);
}

WRAP(cl_int, clWaitForEvents, (cl_uint num, const cl_event *events)) {
  ENTER(clWaitForEvents);
  for (cl_uint i = 0; i < num; i++) {
    const event_state *e = *find_event(events[i]);
    if (e == NULL) give_up("clWaitForEvents: an event that was released or never made");
    if (e->queue != NULL) flushed(e->queue);
  }
  return __real_clWaitForEvents(num, events);
}

WRAP(cl_int, clGetEventInfo,
     (cl_event event, cl_event_info name, size_t size, void *value, size_t *size_ret)) {
  ENTER(clGetEventInfo);
  return __real_clGetEventInfo(event, name, size, value, size_ret);
}

WRAP(cl_event, clCreateUserEvent, (cl_context context, cl_int *code)) {
  const cl_event event = __real_clCreateUserEvent(context, code);
  if (event != NULL) add_event(event, NULL);
  return event;
}

WRAP(cl_int, clRetainEvent, (cl_event id)) {
  event_state *e = *find_event(id);
  if (e == NULL) give_up("clRetainEvent: an event that was released or never made");
  e->references++;
  faults.live.events++;
  return __real_clRetainEvent(id);
}

WRAP(cl_int, clReleaseEvent, (cl_event id)) {
  event_state **at = find_event(id), *e = *at;
  if (e == NULL) give_up("clReleaseEvent: an event that was released or never made");
  faults.live.events--;
  if (--e->references == 0) {
    *at = e->next;
    free(e);
  }
  return __real_clReleaseEvent(id);
}

/* ---- commands ---- */

WRAP(cl_int, clEnqueueNDRangeKernel,
     (cl_command_queue queue, cl_kernel kernel, cl_uint dim, const size_t *offset,
      const size_t *global, const size_t *local, cl_uint num, const cl_event *waits,
      cl_event *event)) {
  check_waits(queue, num, waits);
  ENTER(clEnqueueNDRangeKernel);
  return enqueued(queue, CL_FALSE, event,
                  __real_clEnqueueNDRangeKernel(queue, kernel, dim, offset, global, local, num,
                                                waits, event));
}

WRAP(cl_int, clEnqueueCopyBuffer,
     (cl_command_queue queue, cl_mem src, cl_mem dst, size_t src_offset, size_t dst_offset,
      size_t size, cl_uint num, const cl_event *waits, cl_event *event)) {
  check_waits(queue, num, waits);
  ENTER(clEnqueueCopyBuffer);
  return enqueued(queue, CL_FALSE, event,
                  __real_clEnqueueCopyBuffer(queue, src, dst, src_offset, dst_offset, size, num,
                                             waits, event));
}

WRAP(cl_int, clEnqueueCopyBufferRect,
     (cl_command_queue queue, cl_mem src, cl_mem dst, const size_t *src_origin,
      const size_t *dst_origin, const size_t *region, size_t src_row, size_t src_slice,
      size_t dst_row, size_t dst_slice, cl_uint num, const cl_event *waits, cl_event *event)) {
  check_waits(queue, num, waits);
  ENTER(clEnqueueCopyBufferRect);
  return enqueued(queue, CL_FALSE, event,
                  __real_clEnqueueCopyBufferRect(queue, src, dst, src_origin, dst_origin, region,
                                                 src_row, src_slice, dst_row, dst_slice, num, waits,
                                                 event));
}

WRAP(cl_int, clEnqueueWriteBuffer,
     (cl_command_queue queue, cl_mem mem, cl_bool blocking, size_t offset, size_t size,
      const void *from, cl_uint num, const cl_event *waits, cl_event *event)) {
  check_waits(queue, num, waits);
  ENTER(clEnqueueWriteBuffer);
  return enqueued(queue, blocking, event,
                  __real_clEnqueueWriteBuffer(queue, mem, blocking, offset, size, from, num, waits,
                                              event));
}

WRAP(cl_int, clEnqueueReadBuffer,
     (cl_command_queue queue, cl_mem mem, cl_bool blocking, size_t offset, size_t size, void *to,
      cl_uint num, const cl_event *waits, cl_event *event)) {
  check_waits(queue, num, waits);
  ENTER(clEnqueueReadBuffer);
  return enqueued(queue, blocking, event,
                  __real_clEnqueueReadBuffer(queue, mem, blocking, offset, size, to, num, waits,
                                             event));
}

WRAP(cl_int, clEnqueueWriteBufferRect,
     (cl_command_queue queue, cl_mem mem, cl_bool blocking, const size_t *mem_origin,
      const size_t *host_origin, const size_t *region, size_t mem_row, size_t mem_slice,
      size_t host_row, size_t host_slice, const void *from, cl_uint num, const cl_event *waits,
      cl_event *event)) {
  check_waits(queue, num, waits);
  ENTER(clEnqueueWriteBufferRect);
  return enqueued(queue, blocking, event,
                  __real_clEnqueueWriteBufferRect(queue, mem, blocking, mem_origin, host_origin,
                                                  region, mem_row, mem_slice, host_row, host_slice,
                                                  from, num, waits, event));
}

WRAP(cl_int, clEnqueueReadBufferRect,
     (cl_command_queue queue, cl_mem mem, cl_bool blocking, const size_t *mem_origin,
      const size_t *host_origin, const size_t *region, size_t mem_row, size_t mem_slice,
      size_t host_row, size_t host_slice, void *to, cl_uint num, const cl_event *waits,
      cl_event *event)) {
  check_waits(queue, num, waits);
  ENTER(clEnqueueReadBufferRect);
  return enqueued(queue, blocking, event,
                  __real_clEnqueueReadBufferRect(queue, mem, blocking, mem_origin, host_origin,
                                                 region, mem_row, mem_slice, host_row, host_slice,
                                                 to, num, waits, event));
}

WRAP(cl_int, clEnqueueMarkerWithWaitList,
     (cl_command_queue queue, cl_uint num, const cl_event *waits, cl_event *event)) {
  check_waits(queue, num, waits);
  ENTER(clEnqueueMarkerWithWaitList);
  return enqueued(queue, CL_FALSE, event,
                  __real_clEnqueueMarkerWithWaitList(queue, num, waits, event));
}

/* ---- buffers, kernels, programs ---- */

WRAP(cl_mem, clCreateBuffer,
     (cl_context context, cl_mem_flags flags, size_t size, void *host, cl_int *code)) {
  ENTER_CREATE(clCreateBuffer);
  const cl_mem mem = __real_clCreateBuffer(context, flags, size, host, code);
  faults.live.buffers += mem != NULL;
  return mem;
}

WRAP(cl_int, clReleaseMemObject, (cl_mem mem)) {
  faults.live.buffers--;
  return __real_clReleaseMemObject(mem);
}

WRAP(cl_kernel, clCreateKernel, (cl_program program, const char *name, cl_int *code)) {
  ENTER_CREATE(clCreateKernel);
  const cl_kernel kernel = __real_clCreateKernel(program, name, code);
  faults.live.kernels += kernel != NULL;
  return kernel;
}

WRAP(cl_int, clReleaseKernel, (cl_kernel kernel)) {
  faults.live.kernels--;
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
  faults.live.programs += program != NULL;
  return program;
}

WRAP(cl_program, clCreateProgramWithBinary,
     (cl_context context, cl_uint num, const cl_device_id *devices, const size_t *sizes,
      const unsigned char **binaries, cl_int *statuses, cl_int *code)) {
  ENTER_CREATE(clCreateProgramWithBinary);
  const cl_program program =
      __real_clCreateProgramWithBinary(context, num, devices, sizes, binaries, statuses, code);
  faults.live.programs += program != NULL;
  return program;
}

WRAP(cl_int, clReleaseProgram, (cl_program program)) {
  faults.live.programs--;
  return __real_clReleaseProgram(program);
}

WRAP(cl_int, clBuildProgram,
     (cl_program program, cl_uint num, const cl_device_id *devices, const char *options,
      void(CL_CALLBACK *done)(cl_program, void *), void *data)) {
  ENTER(clBuildProgram);
  return __real_clBuildProgram(program, num, devices, options, done, data);
}

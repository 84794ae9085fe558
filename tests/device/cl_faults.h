/* OpenCL calls that fail on demand, commands that start late or never, and what all of them leave
 * behind. The linker puts these functions in front of the real ones (--wrap, see FAULT_CALLS and
 * the end of tests/CMakeLists.txt). They belong to one thread. */
#ifndef KVR_TESTS_DEVICE_CL_FAULTS_H
#define KVR_TESTS_DEVICE_CL_FAULTS_H

#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 120
#endif
#include <CL/cl.h>

#include <stdbool.h>
#include <stdint.h>

/* Calls that can fail. Others are wrapped to count: references to objects taken and let go. */
#define FAULT_CALLS(X)                                                                             \
  X(clSetKernelArg)                                                                                \
  X(clEnqueueNDRangeKernel)                                                                        \
  X(clEnqueueCopyBuffer)                                                                           \
  X(clEnqueueCopyBufferRect)                                                                       \
  X(clEnqueueWriteBuffer)                                                                          \
  X(clEnqueueWriteBufferRect)                                                                      \
  X(clEnqueueReadBuffer)                                                                           \
  X(clEnqueueReadBufferRect)                                                                       \
  X(clEnqueueMarkerWithWaitList)                                                                   \
  X(clFlush)                                                                                       \
  X(clFinish)                                                                                      \
  X(clWaitForEvents)                                                                               \
  X(clGetEventInfo)                                                                                \
  X(clRetainEvent)                                                                                 \
  X(clCreateBuffer)                                                                                \
  X(clCreateKernel)                                                                                \
  X(clCreateProgramWithSource)                                                                     \
  X(clCreateProgramWithBinary)                                                                     \
  X(clBuildProgram)

#define FAULT_ENUM(name) FAULT_##name,
typedef enum fault_call { FAULT_CALLS(FAULT_ENUM) NUM_FAULT_CALLS } fault_call;
#undef FAULT_ENUM

enum { FAULT_ALL = (1 << NUM_FAULT_CALLS) - 1 };

typedef struct cl_objects {
  int events, buffers, kernels, programs, queues, contexts; /* references that the process holds */
} cl_objects;

typedef struct cl_faults {
  int calls[NUM_FAULT_CALLS]; /* since the last fault_arm */
  cl_objects live;
  /* Events in a wait list of another queue whose own queue was not flushed after their command. */
  int unflushed;
  bool forget_flushes; /* clFlush is performed, but not noted: a control of the rule */
  /* The n-th kernel argument that is a struct from now on is not set, although the call says so;
   * -1: none of them is. 0: off. */
  int lost_args;
  bool lost_waits;             /* commands wait for no event of another queue */
  cl_command_queue deaf_queue; /* its clFlush does nothing */
  int lost_flush;              /* the n-th clFlush from now does nothing; 0: off */
  bool note_events;            /* new events, for fault_settle */
} cl_faults;

extern cl_faults faults;

/* ---- calls ---- */

/* The n-th call from now whose bit (1 << FAULT_clFoo) is in mask returns code and does nothing. */
void fault_arm(int n, unsigned mask, cl_int code);
/* The name of the call that failed, NULL if there was none; no call fails from here on. */
const char *fault_disarm(void);
/* Calls since fault_arm whose bit is in mask. */
int fault_count(unsigned mask);

/* ---- when commands start ---- */

/* From now on commands start once their own queue has been flushed (also by clFinish, a blocking
 * call, or a wait for one of its events), as on devices that collect commands until then. */
void fault_hold(bool on);

/* From now on there is a random delay before every command of a queue, up to a most of 5 ms. */
void fault_delay(cl_command_queue queue, uint64_t seed);
/* The same with a fixed delay. */
void fault_delay_by(cl_command_queue queue, long microseconds);
void fault_delay_end(void);

/* The n-th command from now whose bit is in mask does not start. */
void fault_stop(int n, unsigned mask);
/* Ends what stops it: with CL_COMPLETE it starts, with an error it fails. False: none was stopped,
 * and none will be. */
bool fault_let_go(cl_int status);

/* Waits until the device does nothing more for the commands whose events were noted, but for those
 * that wait for a user event, directly or not; forgets them all. */
void fault_settle(void);

/* ---- afterwards ---- */

/* Commands that are in no queue's last flush. */
int fault_num_unflushed_commands(void);
/* Waits for all queues that there are and releases every object but events. */
void fault_release_left(void);

#endif

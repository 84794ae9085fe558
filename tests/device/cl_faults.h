/* OpenCL calls that fail on demand, and what they leave behind. The linker puts these functions in
 * front of the real ones (--wrap, see FAULT_CALLS and the end of tests/CMakeLists.txt). They belong
 * to one thread. */
#ifndef KVR_TESTS_DEVICE_CL_FAULTS_H
#define KVR_TESTS_DEVICE_CL_FAULTS_H

#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 120
#endif
#include <CL/cl.h>

#include <stdbool.h>

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
  int events, buffers, kernels, programs; /* references that the process holds */
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
  bool note_events; /* new events, for fault_settle */
} cl_faults;

extern cl_faults faults;

/* The n-th call from now whose bit (1 << FAULT_clFoo) is in mask returns code and does nothing. */
void fault_arm(int n, unsigned mask, cl_int code);
/* The name of the call that failed, NULL if there was none; no call fails from here on. */
const char *fault_disarm(void);
/* Calls since fault_arm whose bit is in mask. */
int fault_count(unsigned mask);
/* Waits until the device does nothing more for the commands whose events were noted, but for those
 * that wait for a user event, directly or not; forgets them all. */
void fault_settle(void);
/* Commands that are in no queue's last flush. */
int fault_num_unflushed_commands(void);

#endif

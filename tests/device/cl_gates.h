/* The inside of cl_faults: queues, events, and the gates that keep commands from starting. A gate
 * is a user event that a command waits for besides its own wait list. */
#ifndef KVR_TESTS_DEVICE_CL_GATES_H
#define KVR_TESTS_DEVICE_CL_GATES_H

#include "cl_faults.h"

/* A command on its way into a queue: waits is its wait list with the gates. */
typedef struct fault_command {
  cl_command_queue queue;
  cl_bool blocking;
  bool is_blocked; /* waits for a user event that a test completes, directly or not */
  cl_uint num;
  const cl_event *waits; /* NULL if there are none */
  cl_event *list;
  cl_event late; /* a gate that another thread opens, maybe before the call; NULL: none */
} fault_command;

fault_command fault_begin(fault_call call, cl_command_queue queue, cl_bool blocking, cl_uint num,
                          const cl_event *waits);
/* After the real call: notes the command and its event (NULL: nobody asked for one). */
cl_int fault_enqueued(fault_command *command, const cl_event *event, cl_int code);

/* The queue was flushed. */
void fault_flushed(cl_command_queue queue);
void fault_flushed_by_wait(cl_uint num, const cl_event *events);
void fault_forget_queue(cl_command_queue queue);

void fault_add_user_event(cl_event event);
void fault_retain_event(cl_event event);
void fault_release_event(cl_event event);

/* Ends the program: the code under test broke a rule of OpenCL. */
void fault_give_up(const char *why);

/* The real functions that both files call. */
cl_event __real_clCreateUserEvent(cl_context context, cl_int *code);
cl_int __real_clWaitForEvents(cl_uint num, const cl_event *events);
cl_int __real_clRetainEvent(cl_event event);
cl_int __real_clReleaseEvent(cl_event event);

#endif

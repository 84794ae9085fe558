/* Waiting for the device with a limit. clFinish and clWaitForEvents cannot be left again when a
 * command never ends, so the host waits here: it looks at events and sleeps in between.
 *
 * A group in which a command did not end in time is stuck: its in-order queues will not go on. Its
 * OpenCL objects are left to the driver, since drivers may wait for commands in the calls that
 * release queues, contexts and buffers. */
#ifndef KVR_DEVICE_WATCH_H
#define KVR_DEVICE_WATCH_H

#include "device/group.h"

/* How many commands have ended among those that belong together; never falls. */
typedef int kvr_watch_count(void *data);

/* Execution status of a command: CL_QUEUED to CL_COMPLETE, or a negative error. */
kvr_status kvr_watch_status(cl_event event, cl_int *status);
static inline bool kvr_watch_has_ended(cl_event event) {
  cl_int status;
  return kvr_watch_status(event, &status) == KVR_OK && status <= CL_COMPLETE;
}

/* Waits until the command of an event has ended. Gives up when for the group's timeout neither it
 * has nor count (NULL: nothing else) has grown: KVR_E_TIMEOUT, and the group is stuck. In a group
 * that is stuck already it looks once. Errors of the command itself: "command: CL_...". */
kvr_status kvr_watch_event(kvr_group *group, cl_event event, kvr_watch_count *count, void *data);
/* The same for all commands of a queue so far, in whatever way they end. */
kvr_status kvr_watch_queue(kvr_group *group, cl_command_queue queue, kvr_watch_count *count,
                           void *data);

bool kvr_group_is_stuck(const kvr_group *group);
/* Says why, with this thread's message, unless another thread did; only for stuck groups. */
void kvr_group_explain_stuck(kvr_group *group);
/* KVR_E_STATE when the group is stuck, and why. */
kvr_status kvr_group_check_moving(const kvr_group *group);

/* free(), but memory that commands of a stuck group may still use is left to them for good. */
void kvr_group_free_host(const kvr_group *group, void *memory);

#endif

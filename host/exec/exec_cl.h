/* Device executor: walks a schedule and enqueues every op on its rank's queues. Only events order
 * work; the device never idles for the host, and the host blocks only where it is told to. */
#ifndef KVR_EXEC_EXEC_CL_H
#define KVR_EXEC_EXEC_CL_H

#include "device/cache.h"
#include "device/group.h"
#include "kvring/opencl.h"
#include "schedule/footprint.h"

typedef struct kvr_exec kvr_exec;

/* Shapes that do not change from step to step. */
typedef struct kvr_exec_desc {
  int num_q_heads;
  kvr_dtype out_dtype; /* widest */
  kvr_math math;
  kvr_footprint footprint;
  int max_requests;
  int max_table_entries; /* block table entries of one request */
} kvr_exec_desc;

/* Allocates all buffers. group and cache are borrowed. Errors: KVR_E_OOM, KVR_E_CL. */
kvr_status kvr_exec_create(kvr_group *group, kvr_cache *cache, const kvr_exec_desc *desc,
                           kvr_exec **out);
void kvr_exec_destroy(kvr_exec *exec); /* accepts NULL; nothing may be in flight */
/* What long launches of a rank compute with. */
kvr_math kvr_exec_math(const kvr_exec *exec, int rank);
/* Device bytes of one rank. */
size_t kvr_exec_bytes(const kvr_exec *exec);

/* Builds the kernels for an output type, unless they are there. */
kvr_status kvr_exec_build(kvr_exec *exec, kvr_dtype out_dtype);

/* Checks inputs and outputs of a step against its schedule; touches nothing. */
kvr_status kvr_exec_check_io(const kvr_exec *exec, const kvr_schedule *schedule, const kvr_io *io);

/* Enqueues a whole step. records (schedule->num_ops) is filled as ops complete, at the latest by
 * kvr_exec_wait. On failure everything has been drained. events: as kvr_plan_enqueue. */
kvr_status kvr_exec_enqueue(kvr_exec *exec, const kvr_schedule *schedule, const kvr_io *io,
                            cl_uint num_waits, const cl_event *waits, cl_event *events,
                            kvr_trace_record *records);
/* Waits until everything is done and checks the status of every op. */
kvr_status kvr_exec_wait(kvr_exec *exec);

/* For tests of the order: gate gives an event that op i must wait for as well (borrowed), or NULL.
 */
typedef cl_event kvr_exec_gate(void *data, int op);
void kvr_exec_set_gate(kvr_exec *exec, kvr_exec_gate *gate, void *data);

#endif

/* Interoperation with the caller's OpenCL code. */
#ifndef KVRING_OPENCL_H
#define KVRING_OPENCL_H

#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 120
#endif
#include <CL/cl.h>

#include "kvring/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Context and compute queue of a rank (borrowed). */
KVR_API kvr_status kvr_group_context(const kvr_group *group, int rank, cl_context *out);
KVR_API kvr_status kvr_group_queue(const kvr_group *group, int rank, cl_command_queue *out);

/* Enqueues the step and returns. The first op of every rank waits for the num_waits events.
 * events (num_ranks) receives one event per rank that completes with the rank's outputs and cache
 * writes (owned; release each), or may be NULL. The session is busy, and the step's requests
 * cannot be released, truncated, appended to or given other pages, until kvr_plan_wait.
 * Errors: as kvr_plan_run. */
KVR_API kvr_status kvr_plan_enqueue(kvr_plan *plan, const kvr_io *io, cl_uint num_waits,
                                    const cl_event *waits, cl_event *events);
/* Waits for an enqueued step, checks every event and commits the new cache lengths. */
KVR_API kvr_status kvr_plan_wait(kvr_plan *plan);

#ifdef __cplusplus
}
#endif
#endif

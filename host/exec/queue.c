#include <stdlib.h>

#include "base/error.h"
#include "device/cl_error.h"
#include "exec/exec.h"

int kvr_exec_queue_of(const kvr_exec *exec, const kvr_op *op) {
  if (!exec->group->has_copy_queues) return 0;
  switch (op->kind) {
  case KVR_OP_ATTEND:
  case KVR_OP_MERGE_STATES:
  case KVR_OP_MERGE_OUTPUTS:
  case KVR_OP_CACHE_WRITE: return 0;
  default: return 1;
  }
}

cl_command_queue kvr_exec_queue(const kvr_exec *exec, int rank, int queue) {
  const kvr_rank *r = &exec->group->ranks[rank];
  return queue == 0 ? r->queue : r->copy_queue;
}

void kvr_exec_waits_clear(kvr_exec *exec) { exec->num_waits = 0; }

kvr_status kvr_exec_waits_add(kvr_exec *exec, cl_event event) {
  if (event == NULL) return KVR_OK;
  if (exec->num_waits == exec->cap_waits) {
    const cl_uint larger = exec->cap_waits == 0 ? 32 : 2 * exec->cap_waits;
    cl_event *moved = realloc(exec->waits, larger * sizeof(*moved));
    if (moved == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a wait list");
    exec->waits = moved;
    exec->cap_waits = larger;
  }
  exec->waits[exec->num_waits++] = event;
  return KVR_OK;
}

kvr_status kvr_exec_add_sink(kvr_exec *exec, int rank, const char *what, cl_event event) {
  if (exec->num_sinks == exec->cap_sinks) {
    const int larger = exec->cap_sinks == 0 ? 32 : 2 * exec->cap_sinks;
    kvr_sink *moved = realloc(exec->sinks, (size_t)larger * sizeof *moved);
    if (moved == NULL) {
      clReleaseEvent(event);
      return kvr_fail(KVR_E_OOM, "no host memory for events");
    }
    exec->sinks = moved;
    exec->cap_sinks = larger;
  }
  exec->sinks[exec->num_sinks++] = (kvr_sink){.event = event, .rank = rank, .what = what};
  return KVR_OK;
}

kvr_status kvr_exec_flush(kvr_exec *exec, int rank, int queue) {
  if (!exec->ranks[rank].dirty[queue]) return KVR_OK;
  KVR_CL(clFlush, (kvr_exec_queue(exec, rank, queue)));
  exec->ranks[rank].dirty[queue] = false;
  return KVR_OK;
}

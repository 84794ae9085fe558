/* The end of a step: waiting for its commands, their times and errors, and giving up on them. */
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"
#include "device/cl_error.h"
#include "device/watch.h"
#include "exec/exec.h"

kvr_status kvr_exec_fail_op(const kvr_exec *x, int i, kvr_status status) {
  const kvr_op *op = &x->schedule->ops[i];
  char step[64] = "", block[32] = "";
  if (op->step >= 0) snprintf(step, sizeof step, ", pass %d, step %d", op->pass, op->step);
  if (op->block >= 0) snprintf(block, sizeof block, ", block %d", op->block);
  return kvr_fail_at(status, "rank %d, op %d (%s%s%s)", op->rank, i, kvr_op_name(op->kind), step,
                     block);
}

static kvr_status fail_sink(const kvr_sink *sink, kvr_status status) {
  return sink->rank < 0 ? kvr_fail_at(status, "%s", sink->what)
                        : kvr_fail_at(status, "rank %d, %s", sink->rank, sink->what);
}

/* ---- commands that do not end ---- */

static int num_ended(void *data) {
  const kvr_exec *x = data;
  int num = x->num_harvested;
  for (int i = x->num_harvested; i < x->num_enqueued; i++) num += kvr_watch_has_ended(x->events[i]);
  for (int i = 0; i < x->num_sinks; i++) num += kvr_watch_has_ended(x->sinks[i].event);
  return num;
}

static const char *status_word(cl_event event) {
  cl_int status;
  if (kvr_watch_status(event, &status) != KVR_OK) return "in an unknown state";
  if (status <= CL_COMPLETE) return "complete by now";
  return status == CL_RUNNING ? "running" : status == CL_SUBMITTED ? "submitted" : "queued";
}

/* The first input that op waits for and that has not ended. All ops that it depends on have: the
 * host waits for ops in their order. */
static const kvr_sink *missing_input(const kvr_exec *x, const kvr_op *op) {
  for (int i = 0; i < x->num_inputs; i++) {
    const kvr_sink *s = &x->sinks[i];
    const bool waits = s->rank < 0 || s->rank == op->rank || s->rank == op->peer;
    if (waits && !kvr_watch_has_ended(s->event)) return s;
  }
  return NULL;
}

/* Puts into the message what the command of event waits for. */
static void explain(cl_event event, const kvr_sink *missing) {
  char reason[512], where[96] = "";
  snprintf(reason, sizeof reason, "%s", kvr_error_message());
  if (missing != NULL && missing->rank >= 0)
    snprintf(where, sizeof where, " on rank %d", missing->rank);
  if (missing != NULL)
    kvr_error_set("the command is %s and waits for %s%s, which is %s: %s", status_word(event),
                  missing->what, where, status_word(missing->event), reason);
  else
    kvr_error_set("the command is %s, and every op and input that it waits for is complete: %s",
                  status_word(event), reason);
}

static kvr_status stuck_op(kvr_exec *x, int i) {
  explain(x->events[i], missing_input(x, &x->schedule->ops[i]));
  kvr_exec_fail_op(x, i, KVR_E_TIMEOUT);
  kvr_group_explain_stuck(x->group);
  return KVR_E_TIMEOUT;
}

static kvr_status stuck_sink(kvr_exec *x, const kvr_sink *sink) {
  explain(sink->event, NULL);
  fail_sink(sink, KVR_E_TIMEOUT);
  kvr_group_explain_stuck(x->group);
  return KVR_E_TIMEOUT;
}

/* ---- commands that end ---- */

/* Times of a completed op. Clocks of some drivers report an end before the start, or nothing: such
 * a record keeps zeros. */
static void read_times(cl_event event, kvr_trace_record *record) {
  cl_ulong start = 0, end = 0;
  const cl_int a =
      clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_START, sizeof start, &start, NULL);
  const cl_int b = clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_END, sizeof end, &end, NULL);
  if (a != CL_SUCCESS || b != CL_SUCCESS || end < start || start == 0 || end > INT64_MAX) return;
  record->start_ns = (int64_t)start;
  record->end_ns = (int64_t)end;
}

/* Waits for op i, notes its times and lets go of its event. */
static kvr_status harvest(kvr_exec *x, int i) {
  const kvr_status status = kvr_watch_event(x->group, x->events[i], num_ended, x);
  if (status == KVR_E_TIMEOUT) return stuck_op(x, i);
  if (status != KVR_OK) return kvr_exec_fail_op(x, i, status); /* abandon lets go of it */
  read_times(x->events[i], &x->records[i]);
  clReleaseEvent(x->events[i]);
  x->events[i] = NULL;
  return KVR_OK;
}

/* Until nothing of the step is in flight any more, however it ends. */
static kvr_status wait_for_rest(kvr_exec *x) {
  for (int r = 0; r < x->group->num_ranks; r++)
    for (int q = 0; q < 2; q++)
      if (kvr_watch_queue(x->group, kvr_exec_queue(x, r, q), num_ended, x) == KVR_E_TIMEOUT)
        return KVR_E_TIMEOUT;
  for (int i = x->num_harvested; i < x->num_enqueued; i++)
    if (kvr_watch_event(x->group, x->events[i], num_ended, x) == KVR_E_TIMEOUT)
      return KVR_E_TIMEOUT;
  for (int i = 0; i < x->num_sinks; i++)
    if (kvr_watch_event(x->group, x->sinks[i].event, num_ended, x) == KVR_E_TIMEOUT)
      return KVR_E_TIMEOUT;
  return KVR_OK;
}

/* After the first failure the rest only has to end: ops that follow from it would say less. */
static kvr_status abandon(kvr_exec *x, kvr_status status) {
  char first[1024];
  if (status == KVR_E_TIMEOUT) return status;
  snprintf(first, sizeof first, "%s", kvr_error_message());
  if (wait_for_rest(x) == KVR_OK) {
    kvr_error_set("%s", first);
    return status;
  }
  kvr_error_set("%s; then the rest of the step did not end: %s", first, kvr_error_message());
  kvr_group_explain_stuck(x->group);
  return KVR_E_TIMEOUT;
}

static kvr_status wait_for_sinks(kvr_exec *x) {
  for (int i = 0; i < x->num_sinks; i++) {
    const kvr_status status = kvr_watch_event(x->group, x->sinks[i].event, num_ended, x);
    if (status == KVR_E_TIMEOUT) return stuck_sink(x, &x->sinks[i]);
    if (status != KVR_OK) return fail_sink(&x->sinks[i], status);
  }
  return KVR_OK;
}

static void release_events(kvr_exec *x) {
  for (int i = x->num_harvested; i < x->num_enqueued; i++) {
    clReleaseEvent(x->events[i]);
    x->records[i].bytes = x->records[i].state_bytes = 0;
  }
  for (int i = 0; i < x->num_sinks; i++) clReleaseEvent(x->sinks[i].event);
  for (int r = 0; r < x->group->num_ranks; r++) {
    if (x->ranks[r].input_ready != NULL) clReleaseEvent(x->ranks[r].input_ready);
    x->ranks[r].input_ready = NULL;
  }
}

kvr_status kvr_exec_end(kvr_exec *x, kvr_status status) {
  if (status != KVR_OK) status = abandon(x, status);
  release_events(x);
  free(x->events);
  x->events = NULL;
  x->schedule = NULL;
  x->records = NULL;
  x->num_enqueued = x->num_harvested = x->num_sinks = x->num_inputs = 0;
  return status;
}

kvr_status kvr_exec_harvest(kvr_exec *x, int end) {
  for (; x->num_harvested < end; x->num_harvested++) KVR_TRY(harvest(x, x->num_harvested));
  return KVR_OK;
}

kvr_status kvr_exec_wait(kvr_exec *x) {
  if (x->schedule == NULL) return KVR_OK;
  kvr_status status = kvr_exec_harvest(x, x->num_enqueued);
  if (status == KVR_OK) status = wait_for_sinks(x);
  return kvr_exec_end(x, status);
}

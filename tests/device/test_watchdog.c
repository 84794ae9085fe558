/* Commands that never end: the step gives up in time, says which command it is, and everything can
 * be destroyed. cl_faults.h keeps commands from starting. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "device/watch.h"
#include "fault_bed.h"

/* [s] Loaded machines make pauses too; and what may come on top of a limit. */
static const double limit = 0.4, slack = 2.0;

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- what must hold after a timeout ---- */

static void expect_timeout(kvr_status status, double start, const char *what) {
  const double took = seconds() - start;
  if (status != KVR_E_TIMEOUT)
    fail_msg("%s: %s: %s", what, kvr_status_name(status), kvr_error_message());
  if (took < limit || took > limit + limit / 8 + slack) fail_msg("%s: after %g s", what, took);
  bed_expect_message("nothing completed for 0.4 s", what);
  bed_expect_message("raise timeout", what); /* the fix */
}

/* Whatever is asked of the group now is refused at once, with the reason. */
static void expect_refused(kvr_status status, const char *reason, const char *what) {
  if (status != KVR_E_STATE) fail_msg("%s: status %s", what, kvr_status_name(status));
  bed_expect_message("cannot be used any more", what);
  bed_expect_message(reason, what);
}

static void expect_lost_group(fault_bed *b, kvr_plan *plan, const kvr_io *io, const char *reason) {
  const double start = seconds();
  kvr_session *session;
  kvr_cache *cache;
  kvr_plan *other;
  float kv[BED_NKV * BED_D] = {0};
  expect_refused(kvr_plan_run(plan, io), reason, "kvr_plan_run");
  expect_refused(kvr_plan_create(b->run.session, &b->c.problem, &b->c.options, &other), reason,
                 "kvr_plan_create");
  expect_refused(kvr_session_create(b->group, b->run.cache, &b->limits, &session), reason,
                 "kvr_session_create");
  expect_refused(kvr_cache_create(b->group, &b->c.problem.cache, &cache), reason,
                 "kvr_cache_create");
  expect_refused(kvr_cache_append(b->run.cache, b->run.ids[0], kv, kv, 1), reason,
                 "kvr_cache_append");
  expect_refused(kvr_cache_import(b->run.cache, 0, b->run.pools[0], kvr_cache_bytes(b->run.cache)),
                 reason, "kvr_cache_import");
  for (int i = 0; i < b->c.problem.num_requests; i++)
    assert_int_equal(kvr_cache_length(b->run.cache, b->run.ids[i]), b->c.requests[i].num_cached);
  assert_true(seconds() - start < slack);
}

/* Destroys everything while the command still does not end. The outputs stay: once it is let go,
 * the device writes them. */
static void destroy_stuck(fault_bed *b, kvr_plan *plan) {
  const double start = seconds();
  kvr_plan_destroy(plan);
  kvr_session_destroy(b->run.session);
  kvr_cache_destroy(b->run.cache);
  kvr_group_destroy(b->group);
  assert_true(seconds() - start < slack);
  b->run.session = NULL;
  b->run.cache = NULL;
  b->group = NULL;
}

/* Only what is documented is left: buffers, queues, the context; of events only the test's. */
static void expect_left(const cl_objects *before, int events, const char *what) {
  const cl_objects *now = &faults.live;
  if (now->events != before->events + events || now->kernels != before->kernels ||
      now->programs != before->programs)
    fail_msg("%s: events %+d, kernels %+d, programs %+d", what, now->events - before->events,
             now->kernels - before->kernels, now->programs - before->programs);
  assert_true(now->buffers > before->buffers && now->queues > before->queues);
  assert_int_equal(now->contexts, before->contexts + 1);
}

/* Lets the command go, so that the device can do the rest of a step that nobody owns any more. */
static void let_go(fault_bed *b, const cl_objects *before, cl_event gate, const char *what) {
  expect_left(before, gate != NULL, what);
  if (gate != NULL) {
    assert_int_equal(clSetUserEventStatus(gate, CL_COMPLETE), CL_SUCCESS);
    clReleaseEvent(gate);
  } else {
    assert_true(fault_let_go(CL_COMPLETE));
  }
  fault_release_left();
  assert_int_equal(faults.live.buffers, 0);
  assert_int_equal(faults.live.contexts, 0);
  bed_fini(b);
}

static void open_bed(fault_bed *b, const char *strategy, double timeout) {
  bed_init(b, &(bed_desc){.strategy = strategy, .copy_queue = 1, .timeout = timeout});
}

/* ---- ops ---- */

typedef struct gate {
  cl_event event;
  int op;
} gate;

static cl_event gate_of(void *data, int op) {
  const gate *g = data;
  return op == g->op ? g->event : NULL;
}

static cl_event new_event(const fault_bed *b) {
  cl_int code;
  const cl_event event = clCreateUserEvent(b->group->ranks[0].context, &code);
  assert_int_equal(code, CL_SUCCESS);
  return event;
}

/* The middle op of a kind, so that others end before and after it; -1: none. */
static int find_op(const kvr_schedule *s, bool (*is)(const kvr_op *)) {
  int num = 0, seen = 0;
  for (int i = 0; i < s->num_ops; i++) num += is(&s->ops[i]);
  for (int i = 0; i < s->num_ops; i++)
    if (is(&s->ops[i]) && seen++ == num / 2) return i;
  return -1;
}

static bool is_attend(const kvr_op *op) { return op->kind == KVR_OP_ATTEND && op->launch; }
static bool is_copy(const kvr_op *op) { return op->peer >= 0 && op->launch; }
static bool is_cache_write(const kvr_op *op) { return op->kind == KVR_OP_CACHE_WRITE; }

static void hang_op(const char *strategy, bool (*is)(const kvr_op *)) {
  const cl_objects before = faults.live;
  fault_bed b;
  open_bed(&b, strategy, limit);
  bed_tensors t = bed_make_tensors(&b, IO_DENSE);
  const kvr_io io = bed_io(&t);
  kvr_schedule *schedule = bed_make_schedule(&b);
  gate g = {.event = NULL, .op = find_op(schedule, is)};
  char name[64], what[96];
  assert_true(g.op >= 0);
  const kvr_op *op = &schedule->ops[g.op];
  snprintf(name, sizeof name, "rank %d, op %d (%s", op->rank, g.op, kvr_op_name(op->kind));
  snprintf(what, sizeof what, "%s: %s", strategy, name);
  g.event = new_event(&b);
  kvr_exec_set_gate(b.run.session->exec, gate_of, &g);
  kvr_plan *plan = bed_make_plan(&b);
  const double start = seconds();
  expect_timeout(kvr_plan_run(plan, &io), start, what);
  bed_expect_message(name, what);
  bed_expect_message("every op and input that it waits for is complete", what);
  expect_lost_group(&b, plan, &io, name);
  destroy_stuck(&b, plan);
  kvr_schedule_destroy(schedule);
  let_go(&b, &before, g.event, what);
  bed_free_tensors(&t);
}

static void test_ops_that_hang(void **state) {
  (void)state;
  for (int i = 0; i < kvr_num_strategies(); i++) {
    hang_op(kvr_strategy_name(i), is_attend);
    hang_op(kvr_strategy_name(i), is_copy);
  }
  hang_op("ring", is_cache_write);
}

/* ---- inputs and outputs ---- */

/* The n-th command of a call does not start. */
static void hang_transfer(const char *strategy, fault_call call, int n, const char *name,
                          const char *waits) {
  const cl_objects before = faults.live;
  fault_bed b;
  open_bed(&b, strategy, limit);
  bed_tensors t = bed_make_tensors(&b, IO_DENSE);
  const kvr_io io = bed_io(&t);
  kvr_plan *plan = bed_make_plan(&b);
  fault_stop(n, 1u << call);
  const double start = seconds();
  expect_timeout(kvr_plan_run(plan, &io), start, strategy);
  bed_expect_message(name, strategy);
  bed_expect_message(waits, strategy);
  expect_lost_group(&b, plan, &io, name);
  destroy_stuck(&b, plan);
  let_go(&b, &before, NULL, strategy);
  bed_free_tensors(&t);
}

static void test_transfers_that_hang(void **state) {
  (void)state;
  for (int i = 0; i < kvr_num_strategies(); i++) {
    const char *strategy = kvr_strategy_name(i);
    const bool cached = strcmp(strategy, "current-only") != 0;
    hang_transfer(strategy, FAULT_clEnqueueWriteBuffer, 1, "rank 0, op ",
                  cached ? "waits for upload of a block table on rank 0" : "upload of");
  }
  hang_transfer("ring", FAULT_clEnqueueReadBuffer, 1, "rank 0, download of out", "every op");
}

/* Events of the caller's that never come. */
static void test_events_of_the_caller_that_hang(void **state) {
  (void)state;
  const cl_objects before = faults.live;
  fault_bed b;
  open_bed(&b, "ring", limit);
  bed_tensors t = bed_make_tensors(&b, IO_BUFFERS);
  const kvr_io io = bed_io(&t);
  kvr_plan *plan = bed_make_plan(&b);
  const cl_event event = new_event(&b);
  device_ok(kvr_plan_enqueue(plan, &io, 1, &event, NULL), "kvr_plan_enqueue");
  const double start = seconds();
  expect_timeout(kvr_plan_wait(plan), start, "a caller's event");
  bed_expect_message("rank 0, op 0 (", "a caller's event");
  bed_expect_message("waits for an event that the caller passed", "a caller's event");
  destroy_stuck(&b, plan);
  bed_free_tensors(&t);
  let_go(&b, &before, event, "a caller's event");
}

static void test_cache_transfers_that_hang(void **state) {
  (void)state;
  const cl_objects before = faults.live;
  fault_bed b;
  float k[BED_NKV * BED_D], v[BED_NKV * BED_D];
  open_bed(&b, "ring", limit);
  bed_tensors t = bed_make_tensors(&b, IO_DENSE);
  const kvr_io io = bed_io(&t);
  kvr_plan *plan = bed_make_plan(&b);
  fault_stop(1, 1u << FAULT_clEnqueueReadBuffer);
  const double start = seconds();
  expect_timeout(kvr_cache_read(b.run.cache, b.run.ids[0], 0, 1, k, v), start, "kvr_cache_read");
  bed_expect_message("rank 0: KV cache", "kvr_cache_read");
  expect_lost_group(&b, plan, &io, "rank 0: KV cache");
  destroy_stuck(&b, plan);
  let_go(&b, &before, NULL, "kvr_cache_read");
  bed_free_tensors(&t);
}

/* ---- a failure, and then the rest does not end ---- */

static void test_failed_steps_that_hang(void **state) {
  (void)state;
  const cl_objects before = faults.live;
  fault_bed b;
  open_bed(&b, "ring", limit);
  bed_tensors t = bed_make_tensors(&b, IO_DENSE);
  const kvr_io io = bed_io(&t);
  kvr_plan *plan = bed_make_plan(&b);
  fault_stop(1, 1u << FAULT_clEnqueueWriteBuffer);
  fault_arm(1, 1u << FAULT_clEnqueueCopyBuffer, CL_INVALID_OPERATION); /* the first hop */
  const double start = seconds();
  const kvr_status status = kvr_plan_run(plan, &io);
  assert_string_equal(fault_disarm(), "clEnqueueCopyBuffer");
  expect_timeout(status, start, "a failed step");
  bed_expect_message("clEnqueueCopyBuffer: CL_INVALID_OPERATION", "a failed step");
  bed_expect_message("then the rest of the step did not end", "a failed step");
  expect_lost_group(&b, plan, &io, "clEnqueueCopyBuffer: CL_INVALID_OPERATION");
  destroy_stuck(&b, plan);
  let_go(&b, &before, NULL, "a failed step");
  bed_free_tensors(&t);
}

/* A session is destroyed while its step hangs, without anybody having waited for it. */
static void test_destroy_waits_no_longer(void **state) {
  (void)state;
  const cl_objects before = faults.live;
  fault_bed b;
  open_bed(&b, "ring", limit);
  bed_tensors t = bed_make_tensors(&b, IO_DENSE);
  const kvr_io io = bed_io(&t);
  kvr_plan *plan = bed_make_plan(&b);
  fault_stop(1, 1u << FAULT_clEnqueueNDRangeKernel);
  device_ok(kvr_plan_enqueue(plan, &io, 0, NULL, NULL), "kvr_plan_enqueue");
  destroy_stuck(&b, plan);
  let_go(&b, &before, NULL, "kvr_plan_destroy");
  bed_free_tensors(&t);
}

/* ---- controls: nothing hangs ---- */

/* The same limit is enough for steps in which nothing hangs. */
static void test_steps_within_the_limit(void **state) {
  (void)state;
  for (int i = 0; i < kvr_num_strategies(); i++) {
    fault_bed b;
    open_bed(&b, kvr_strategy_name(i), limit);
    bed_expect_right_step(&b, "nothing");
    bed_fini(&b);
  }
}

/* A step may take longer than the limit as long as something completes. */
static void test_slow_steps_within_the_limit(void **state) {
  (void)state;
  fault_bed b;
  open_bed(&b, "ring", limit);
  const double start = seconds();
  fault_delay_by(b.group->ranks[1].queue, 50000);
  bed_expect_right_step(&b, "delays");
  fault_delay_end();
  assert_true(seconds() - start > 1.5 * limit);
  assert_false(kvr_group_is_stuck(b.group));
  bed_fini(&b);
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_steps_within_the_limit),
      cmocka_unit_test(test_slow_steps_within_the_limit),
      cmocka_unit_test(test_ops_that_hang),
      cmocka_unit_test(test_transfers_that_hang),
      cmocka_unit_test(test_events_of_the_caller_that_hang),
      cmocka_unit_test(test_cache_transfers_that_hang),
      cmocka_unit_test(test_failed_steps_that_hang),
      cmocka_unit_test(test_destroy_waits_no_longer),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

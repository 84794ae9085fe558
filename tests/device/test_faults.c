/* Every OpenCL call of sessions and steps fails once: the error says which call, nothing leaks, the
 * cache is as before, and the next step is right. cl_faults.h stands between library and driver. */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "cl_faults.h"
#include "fault_bed.h"

enum {
  BUILDS = 1 << FAULT_clCreateProgramWithSource | 1 << FAULT_clCreateProgramWithBinary |
           1 << FAULT_clBuildProgram,
  LOOKS = 1 << FAULT_clGetEventInfo, /* as many as the device takes time */
  MOST_LOOKS = 40
};
static const double tolerance = 2e-5;

static char directory[] = "/tmp/kvring-faults-XXXXXX"; /* program binaries */

static void open_bed(fault_bed *b, const char *strategy) {
  bed_init(b, &(bed_desc){.strategy = strategy, .copy_queue = 1});
}

/* Odd trials fail with a code of KVR_E_CL, even ones with one of KVR_E_OOM; a build that fails is
 * always KVR_E_CL. */
static cl_int code_of(int n) { return n % 2 != 0 ? CL_INVALID_OPERATION : CL_OUT_OF_RESOURCES; }

static void expect_named(kvr_status status, const char *call, int n, const char *what) {
  char want[96];
  snprintf(want, sizeof want, "%s: %s", call,
           n % 2 != 0 ? "CL_INVALID_OPERATION" : "CL_OUT_OF_RESOURCES");
  const bool is_cl = n % 2 != 0 || strcmp(call, "clBuildProgram") == 0;
  if (status != (is_cl ? KVR_E_CL : KVR_E_OOM))
    fail_msg("%s: %s gave status %s", what, want, kvr_status_name(status));
  if (strstr(kvr_error_message(), want) == NULL)
    fail_msg("%s: message '%s' does not say '%s'", what, kvr_error_message(), want);
}

static const char *describe(const fault_bed *b, int n, const char *call) {
  static char text[160];
  snprintf(text, sizeof text, "%s, call %d (%s)", b->strategy, n, call);
  return text;
}

/* ---- sessions ---- */

/* Creates sessions in which one call of mask after another fails; tolerated: they succeed all the
 * same. Returns how many calls there are. */
static int fail_creations(fault_bed *b, unsigned mask, bool tolerated) {
  for (int n = 1;; n++) {
    const cl_objects before = faults.live;
    const size_t bytes = bed_allocated(b);
    kvr_session *session = NULL;
    fault_arm(n, mask, code_of(n));
    const kvr_status status = kvr_session_create(b->group, b->run.cache, &b->limits, &session);
    const char *call = fault_disarm(), *what = describe(b, n, call != NULL ? call : "none");
    if (call == NULL || tolerated) {
      device_ok(status, what);
      kvr_session_destroy(session);
    } else {
      expect_named(status, call, n, what);
      assert_null(session);
    }
    bed_expect_objects(&before, what);
    assert_int_equal(bed_allocated(b), bytes);
    if (call == NULL) return n - 1;
  }
}

/* A plan whose output type is new to the session builds kernels. A failure leaves the session as it
 * was, and the next plan of that type goes on. */
static void test_plans_that_cannot_be_created(void **state) {
  (void)state;
  fault_bed b;
  open_bed(&b, "ring-two-launch");
  b.c.problem.out_dtype = KVR_F16;
  b.c.options.strategy = b.strategy;
  const unsigned mask = FAULT_ALL & ~(unsigned)BUILDS;
  const char *call = "";
  for (int n = 1; call != NULL; n++) {
    kvr_session_destroy(b.run.session);
    const cl_objects before = faults.live;
    kvr_plan *plan;
    device_ok(kvr_session_create(b.group, b.run.cache, &b.limits, &b.run.session),
              "kvr_session_create");
    fault_arm(n, mask, code_of(n));
    const kvr_status status = kvr_plan_create(b.run.session, &b.c.problem, &b.c.options, &plan);
    call = fault_disarm();
    const char *what = describe(&b, n, call != NULL ? call : "none");
    if (call != NULL) {
      expect_named(status, call, n, what);
      assert_null(plan);
      device_ok(kvr_plan_create(b.run.session, &b.c.problem, &b.c.options, &plan), what);
    } else {
      device_ok(status, what);
      assert_true(n > 10);
    }
    kvr_plan_destroy(plan);
    kvr_session_destroy(b.run.session);
    b.run.session = NULL;
    bed_expect_objects(&before, what);
  }
  bed_fini(&b);
}

static void test_sessions_that_cannot_be_created(void **state) {
  (void)state;
  for (int i = 0; i < kvr_num_strategies(); i++) {
    fault_bed b;
    open_bed(&b, kvr_strategy_name(i));
    assert_true(fail_creations(&b, FAULT_ALL & ~(unsigned)BUILDS, false) > 50);
    bed_expect_cache_untouched(&b, b.strategy);
    bed_replace_session(&b);
    bed_expect_right_step(&b, "failed sessions");
    bed_fini(&b);
  }
}

/* Without stored binaries a build that fails is an error, with them it starts again from source. */
static void test_builds_that_fail(void **state) {
  (void)state;
  fault_bed b;
  open_bed(&b, "ring");
  const int loads = fail_creations(&b, BUILDS, true);
  setenv("KVRING_CACHE_DIR", "", 1);
  assert_int_equal(fail_creations(&b, BUILDS, false), loads); /* create and build, each program */
  setenv("KVRING_CACHE_DIR", directory, 1);
  bed_replace_session(&b);
  bed_expect_right_step(&b, "failed builds");
  bed_fini(&b);
}

/* ---- steps ---- */

/* Errors of ops and of commands name a rank. */
static void expect_rank(const char *call, const char *what) {
  static const char *const calls[] = {"clSetKernelArg", "clEnqueueNDRangeKernel", "clWaitForEvents",
                                      "clGetEventInfo"};
  for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
    if (strcmp(call, calls[i]) == 0 && strncmp(kvr_error_message(), "rank ", 5) != 0)
      fail_msg("%s: message '%s' names no rank", what, kvr_error_message());
}

/* With tensors in buffers the caller also passes an event, and asks for one of every rank. */
static kvr_status run_plan(const fault_bed *b, kvr_plan *plan, const kvr_io *io) {
  cl_event ranks[BED_P];
  if (io->q->mem == NULL) return kvr_plan_run(plan, io);
  const cl_event start = clCreateUserEvent(b->group->ranks[0].context, NULL);
  assert_int_equal(clSetUserEventStatus(start, CL_COMPLETE), CL_SUCCESS);
  kvr_status status = kvr_plan_enqueue(plan, io, 1, &start, ranks);
  clReleaseEvent(start);
  if (status != KVR_OK) return status;
  status = kvr_plan_wait(plan);
  for (int r = 0; r < BED_P; r++) clReleaseEvent(ranks[r]);
  return status;
}

/* Plans and runs a step in which the n-th call of mask fails; true if there are so many. */
static bool fail_step(fault_bed *b, const bed_tensors *t, int n, unsigned mask) {
  const cl_objects before = faults.live;
  const kvr_io io = bed_io(t);
  fault_arm(n, mask, code_of(n));
  kvr_plan *plan = bed_make_plan(b);
  const kvr_status status = run_plan(b, plan, &io);
  const char *call = fault_disarm(), *what = describe(b, n, call != NULL ? call : "none");
  if (call == NULL) {
    device_ok(status, what);
    device_run_rewind(&b->run, &b->c);
    bed_fetch(b, t);
    assert_true(device_run_error(&b->run, &b->c) < tolerance);
  } else {
    expect_named(status, call, n, what);
    expect_rank(call, what);
    assert_int_equal(kvr_plan_run(plan, &io), KVR_E_STATE); /* poisoned */
  }
  kvr_plan_destroy(plan);
  bed_expect_objects(&before, what);
  bed_expect_cache_untouched(b, what);
  if (call != NULL) bed_expect_right_step(b, what);
  return call != NULL;
}

/* All calls of a step in turn, but for looks at events only the first ones. */
static void fail_steps(const char *strategy, io_kind kind) {
  fault_bed b;
  open_bed(&b, strategy);
  bed_tensors t = bed_make_tensors(&b, kind);
  assert_false(fail_step(&b, &t, 0, FAULT_ALL));
  int n = 1;
  while (fail_step(&b, &t, n, FAULT_ALL & ~(unsigned)LOOKS)) n++;
  assert_true(n > 100);
  for (n = 1; n <= MOST_LOOKS && fail_step(&b, &t, n, LOOKS);) n++;
  assert_true(n > 10);
  bed_free_tensors(&t);
  bed_fini(&b);
}

static void test_steps_that_fail(void **state) {
  (void)state;
  for (int i = 0; i < kvr_num_strategies(); i++) fail_steps(kvr_strategy_name(i), IO_DENSE);
}

static void test_steps_that_fail_on_strides_and_buffers(void **state) {
  (void)state;
  fail_steps("current-only", IO_STRIDED);
  fail_steps("current-only", IO_BUFFERS);
}

/* ---- commands that fail ---- */

typedef struct gate {
  cl_event event;
  int op;
} gate;

static cl_event gate_of(void *data, int op) {
  const gate *g = data;
  return op == g->op ? g->event : NULL;
}

/* Starts a step, lets go of its gate with an error, and sees that the step fails with a message
 * that begins with the name of a rank and has `want` in it.
 *
 * Only when the device is idle: PoCL aborts the process if a command fails in one thread while
 * another thread completes something that it waits for. */
static void fail_command(fault_bed *b, const bed_tensors *t, cl_event event, const char *want,
                         const char *what) {
  const kvr_io io = bed_io(t);
  kvr_plan *plan = bed_make_plan(b);
  faults.note_events = true;
  device_ok(kvr_plan_enqueue(plan, &io, 0, NULL, NULL), "kvr_plan_enqueue");
  faults.note_events = false;
  fault_settle();
  if (event != NULL)
    assert_int_equal(clSetUserEventStatus(event, CL_OUT_OF_RESOURCES), CL_SUCCESS);
  else
    assert_true(fault_let_go(CL_OUT_OF_RESOURCES));
  const kvr_status status = kvr_plan_wait(plan);
  if (status != KVR_E_CL && status != KVR_E_OOM) fail_msg("%s: status %d", what, (int)status);
  if (strncmp(kvr_error_message(), "rank ", 5) != 0) bed_expect_message("rank first", what);
  bed_expect_message(want, what);
  assert_int_equal(kvr_plan_run(plan, &io), KVR_E_STATE);
  kvr_plan_destroy(plan);
}

static void fail_op(fault_bed *b, const bed_tensors *t, const kvr_schedule *schedule, int op) {
  const cl_objects before = faults.live;
  const char *what = describe(b, op, "its command");
  char want[64];
  cl_int code;
  gate g = {.event = clCreateUserEvent(b->group->ranks[0].context, &code), .op = op};
  assert_int_equal(code, CL_SUCCESS);
  snprintf(want, sizeof want, "rank %d, op %d (", schedule->ops[op].rank, op);
  kvr_exec_set_gate(b->run.session->exec, gate_of, &g);
  fail_command(b, t, g.event, want, what);
  kvr_exec_set_gate(b->run.session->exec, NULL, NULL);
  clReleaseEvent(g.event);
  bed_expect_objects(&before, what);
  bed_expect_cache_untouched(b, what);
  bed_expect_right_step(b, what);
}

static void test_commands_that_fail(void **state) {
  (void)state;
  for (int i = 0; i < kvr_num_strategies(); i++) {
    fault_bed b;
    open_bed(&b, kvr_strategy_name(i));
    bed_tensors t = bed_make_tensors(&b, IO_DENSE);
    kvr_schedule *schedule = bed_make_schedule(&b);
    for (int op = 0; op < schedule->num_ops; op++) fail_op(&b, &t, schedule, op);
    kvr_schedule_destroy(schedule);
    bed_free_tensors(&t);
    bed_fini(&b);
  }
}

/* Uploads and downloads. What depends on an upload says so: it fails first. */
static void fail_transfers(fault_bed *b, const bed_tensors *t, fault_call call, const char *want) {
  fault_arm(0, 0, CL_SUCCESS);
  bed_expect_right_step(b, "nothing");
  const int num = fault_count(1u << call);
  assert_true(num > 0);
  for (int n = 1; n <= num; n++) {
    const cl_objects before = faults.live;
    const char *what = describe(b, n, want);
    fault_stop(n, 1u << call);
    fail_command(b, t, NULL, want, what);
    bed_expect_objects(&before, what);
    bed_expect_cache_untouched(b, what);
    bed_expect_right_step(b, what);
  }
}

static void test_transfers_that_fail(void **state) {
  (void)state;
  fault_bed b;
  open_bed(&b, "ring");
  bed_tensors t = bed_make_tensors(&b, IO_DENSE);
  fail_transfers(&b, &t, FAULT_clEnqueueWriteBuffer, "op ");
  fail_transfers(&b, &t, FAULT_clEnqueueReadBuffer, "download");
  bed_free_tensors(&t);
  bed_fini(&b);
}

/* ---- flushes ---- */

/* Runs a step; returns the uses of events of queues that were not flushed. */
static int unflushed_uses(fault_bed *b, const bed_tensors *t, cl_event *events) {
  const kvr_io io = bed_io(t);
  kvr_plan *plan = bed_make_plan(b);
  faults.unflushed = 0;
  device_ok(kvr_plan_enqueue(plan, &io, 0, NULL, events), "kvr_plan_enqueue");
  const int uses = faults.unflushed;
  if (!faults.forget_flushes) assert_int_equal(fault_num_unflushed_commands(), 0);
  device_ok(kvr_plan_wait(plan), "kvr_plan_wait");
  kvr_plan_destroy(plan);
  device_run_rewind(&b->run, &b->c);
  return uses;
}

/* Another queue may wait for an event only once the queue of its command has been flushed. */
static void test_queues_are_flushed_before_others_wait(void **state) {
  (void)state;
  for (int i = 0; i < kvr_num_strategies(); i++) {
    fault_bed b;
    open_bed(&b, kvr_strategy_name(i));
    bed_tensors t = bed_make_tensors(&b, IO_DENSE);
    assert_int_equal(unflushed_uses(&b, &t, NULL), 0);
    cl_event events[BED_P];
    assert_int_equal(unflushed_uses(&b, &t, events), 0);
    for (int r = 0; r < BED_P; r++) clReleaseEvent(events[r]);
    faults.forget_flushes = true;
    assert_true(unflushed_uses(&b, &t, NULL) > 0); /* the check notices */
    faults.forget_flushes = false;
    assert_int_equal(unflushed_uses(&b, &t, NULL), 0);
    bed_free_tensors(&t);
    bed_fini(&b);
  }
}

/* ---- a control: calls that do nothing ---- */

static void restore_cache(fault_bed *b) {
  for (int r = 0; r < BED_P; r++)
    device_ok(kvr_cache_import(b->run.cache, r, b->run.pools[r], kvr_cache_bytes(b->run.cache)),
              "kvr_cache_import");
}

/* Steps with lost arguments succeed, but their answers are wrong: the comparison sees it. */
static void test_lost_arguments_are_noticed(void **state) {
  (void)state;
  fault_bed b;
  open_bed(&b, "ring");
  faults.lost_args = -1;
  device_ok(device_run_step(&b.run, &b.c, "ring"), "a step without arguments");
  faults.lost_args = 0;
  assert_false(device_run_error(&b.run, &b.c) < tolerance);
  int noticed = 0, lost = 0;
  for (int n = 1; faults.lost_args == 0; n++, lost++) {
    device_run_rewind(&b.run, &b.c);
    restore_cache(&b);
    faults.lost_args = n;
    device_ok(device_run_step(&b.run, &b.c, "ring"), "a step with a lost argument");
    noticed += !(device_run_error(&b.run, &b.c) < tolerance);
  }
  faults.lost_args = 0;
  assert_true(noticed > 0 && noticed <= lost); /* some were set to what they were before */
  device_run_rewind(&b.run, &b.c);
  restore_cache(&b);
  bed_expect_right_step(&b, "lost arguments");
  bed_fini(&b);
}

/* ---- */

static int open_directory(void **state) {
  (void)state;
  if (mkdtemp(directory) == NULL) return -1;
  return setenv("KVRING_CACHE_DIR", directory, 1);
}

static int remove_directory(void **state) {
  (void)state;
  char path[512];
  DIR *d = opendir(directory);
  for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
    snprintf(path, sizeof path, "%s/%s", directory, e->d_name);
    if (e->d_name[0] != '.') remove(path);
  }
  if (d != NULL) closedir(d);
  return rmdir(directory);
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_sessions_that_cannot_be_created),
      cmocka_unit_test(test_builds_that_fail),
      cmocka_unit_test(test_plans_that_cannot_be_created),
      cmocka_unit_test(test_steps_that_fail),
      cmocka_unit_test(test_steps_that_fail_on_strides_and_buffers),
      cmocka_unit_test(test_commands_that_fail),
      cmocka_unit_test(test_transfers_that_fail),
      cmocka_unit_test(test_queues_are_flushed_before_others_wait),
      cmocka_unit_test(test_lost_arguments_are_noticed),
  };
  return cmocka_run_group_tests(tests, open_directory, remove_directory);
}

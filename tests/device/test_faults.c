/* Every OpenCL call of sessions and steps fails once: the error says which call, nothing leaks, the
 * cache is as before, and the next step is right. cl_faults.h stands between library and driver. */
#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "cl_faults.h"
#include "device_case.h"
#include "strategy/strategy.h"

enum { P = 3, NQ = 4, NKV = 2, D = 16, TILE = 5, MOST_TRIALS = 400 };
enum {
  BUILDS = 1 << FAULT_clCreateProgramWithSource | 1 << FAULT_clCreateProgramWithBinary |
           1 << FAULT_clBuildProgram
};
static const double tolerance = 2e-5;

static char directory[] = "/tmp/kvring-faults-XXXXXX"; /* program binaries */

/* ---- a small step of two requests ---- */

typedef struct bed {
  pure_case c;
  kvr_group *group;
  device_run run;
  kvr_limits limits;
  const char *strategy;
} bed;

static void bed_init(bed *b, const char *strategy, const char *session_strategies) {
  const int cached = strcmp(strategy, "current-only") != 0;
  memset(b, 0, sizeof *b);
  b->strategy = strategy;
  b->c.problem = (kvr_problem){.struct_size = sizeof b->c.problem,
                               .cache = {.struct_size = sizeof b->c.problem.cache,
                                         .num_ranks = P,
                                         .num_kv_heads = NKV,
                                         .head_dim = D,
                                         .page_size = 3,
                                         .num_pages = 100,
                                         .interleave = 1},
                               .num_q_heads = NQ,
                               .causal = 1,
                               .num_requests = 2};
  b->c.requests[0] = (kvr_request){.num_new = 7, .num_cached = 20 * cached};
  b->c.requests[1] = (kvr_request){.num_new = 4, .num_cached = 5 * cached};
  b->c.options = (kvr_options){.struct_size = sizeof b->c.options, .tile = TILE, .num_slots = 2};
  device_case_fill(&b->c, 7);
  b->group = device_group(P, 1);
  device_run_init(&b->run, &b->c, b->group, session_strategies);
  b->limits = (kvr_limits){.struct_size = sizeof b->limits,
                           .num_q_heads = NQ,
                           .max_new_tokens = 11,
                           .max_context = 20,
                           .max_requests = 2,
                           .max_rows = 11,
                           .tile = TILE,
                           .num_slots = 2,
                           .strategies = session_strategies};
}

static void bed_fini(bed *b) {
  device_run_fini(&b->run, &b->c);
  kvr_group_destroy(b->group);
  case_free(&b->c);
}

static bool same_objects(const cl_objects *a, const cl_objects *b) {
  return a->events == b->events && a->buffers == b->buffers && a->kernels == b->kernels &&
         a->programs == b->programs;
}

static void expect_objects(const cl_objects *before, const char *after) {
  const cl_objects *now = &faults.live;
  if (!same_objects(now, before))
    fail_msg("%s: events %+d, buffers %+d, kernels %+d, programs %+d", after,
             now->events - before->events, now->buffers - before->buffers,
             now->kernels - before->kernels, now->programs - before->programs);
}

/* Rows above the lengths may hold anything after a failed step: they are taken as they were. */
static void forget_new_rows(const bed *b, int rank, unsigned char *now) {
  const kvr_cache_desc *d = &b->c.problem.cache;
  const size_t row_bytes = sizeof(float) * 2 * NKV * D;
  for (int i = 0; i < b->c.problem.num_requests; i++) {
    const int *table = kvr_cache_table(b->run.cache, b->run.ids[i], NULL);
    for (int t = 0; t < b->c.requests[i].num_new; t++) {
      const int g = b->c.requests[i].num_cached + t, m = kvr_map_local(d, g);
      if (kvr_map_owner(d, g) != rank) continue;
      const size_t row =
          (size_t)table[m / d->page_size] * (size_t)d->page_size + (size_t)(m % d->page_size);
      memcpy(now + row * row_bytes, b->run.pools[rank] + row * row_bytes, row_bytes);
    }
  }
}

static void expect_cache_untouched(const bed *b, const char *after) {
  const size_t bytes = kvr_cache_bytes(b->run.cache);
  unsigned char *now = malloc(bytes);
  assert_non_null(now);
  for (int i = 0; i < b->c.problem.num_requests; i++)
    if (kvr_cache_length(b->run.cache, b->run.ids[i]) != b->c.requests[i].num_cached)
      fail_msg("%s: request %d has another length", after, i);
  for (int r = 0; r < P; r++) {
    device_ok(kvr_cache_export(b->run.cache, r, now, bytes), "kvr_cache_export");
    forget_new_rows(b, r, now);
    if (memcmp(now, b->run.pools[r], bytes) != 0) fail_msg("%s: rank %d: cache bytes", after, r);
  }
  free(now);
}

static void expect_right_step(bed *b, const char *after) {
  if (device_run_step(&b->run, &b->c, b->strategy) != KVR_OK)
    fail_msg("the step after %s: %s", after, kvr_error_message());
  const double error = device_run_error(&b->run, &b->c);
  if (!(error < tolerance)) fail_msg("the step after %s: error %g", after, error);
  device_run_rewind(&b->run, &b->c);
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

static const char *describe(const bed *b, int n, const char *call) {
  static char text[160];
  snprintf(text, sizeof text, "%s, call %d (%s)", b->strategy, n, call);
  return text;
}

static size_t allocated(const bed *b) {
  size_t sum = 0, now;
  for (int r = 0; r < P; r++) {
    device_ok(kvr_group_memory(b->group, r, &now, NULL, NULL), "kvr_group_memory");
    sum += now;
  }
  return sum;
}

/* ---- sessions ---- */

/* Creates sessions in which one call of mask after another fails; tolerated: they succeed all the
 * same. Returns how many calls there are. */
static int fail_creations(bed *b, unsigned mask, bool tolerated) {
  for (int n = 1;; n++) {
    const cl_objects before = faults.live;
    const size_t bytes = allocated(b);
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
    expect_objects(&before, what);
    assert_int_equal(allocated(b), bytes);
    if (call == NULL) return n - 1;
  }
}

static void replace_session(bed *b) {
  kvr_session_destroy(b->run.session);
  b->run.session = NULL;
  device_ok(kvr_session_create(b->group, b->run.cache, &b->limits, &b->run.session),
            "kvr_session_create");
}

/* A plan whose output type is new to the session builds kernels. A failure leaves the session as it
 * was, and the next plan of that type goes on. */
static void test_plans_that_cannot_be_created(void **state) {
  (void)state;
  bed b;
  bed_init(&b, "ring-two-launch", "ring-two-launch");
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
    expect_objects(&before, what);
  }
  bed_fini(&b);
}

static void test_sessions_that_cannot_be_created(void **state) {
  (void)state;
  for (int i = 0; i < kvr_num_strategies(); i++) {
    bed b;
    bed_init(&b, kvr_strategy_name(i), kvr_strategy_name(i));
    assert_true(fail_creations(&b, FAULT_ALL & ~(unsigned)BUILDS, false) > 50);
    expect_cache_untouched(&b, b.strategy);
    replace_session(&b);
    expect_right_step(&b, "failed sessions");
    bed_fini(&b);
  }
}

/* Without stored binaries a build that fails is an error, with them it starts again from source. */
static void test_builds_that_fail(void **state) {
  (void)state;
  bed b;
  bed_init(&b, "ring", "ring");
  const int loads = fail_creations(&b, BUILDS, true);
  setenv("KVRING_CACHE_DIR", "", 1);
  assert_int_equal(fail_creations(&b, BUILDS, false), loads); /* create and build, each program */
  setenv("KVRING_CACHE_DIR", directory, 1);
  replace_session(&b);
  expect_right_step(&b, "failed builds");
  bed_fini(&b);
}

/* ---- steps ---- */

typedef enum io_kind { IO_DENSE, IO_STRIDED, IO_BUFFERS } io_kind;

/* Tensors of a step. Strided ones have a gap after every head. */
typedef struct tensors {
  kvr_tensor q, k, v, out, lse;
} tensors;

static kvr_tensor make_tensor(const bed *b, io_kind kind, const double *x, size_t heads,
                              size_t dim) {
  const size_t rows = (size_t)b->c.num_tokens * heads, stride = dim + (kind == IO_STRIDED ? 3 : 0);
  kvr_tensor t = {.host = calloc(rows * stride, sizeof(float)), .head_stride = stride};
  float *host = t.host;
  assert_non_null(host);
  for (size_t i = 0; x != NULL && i < rows * dim; i++)
    host[i / dim * stride + i % dim] = (float)x[i];
  if (kind != IO_BUFFERS) return t;
  cl_int code;
  t.mem = clCreateBuffer(b->group->ranks[0].context, CL_MEM_COPY_HOST_PTR,
                         rows * stride * sizeof(float), host, &code);
  assert_int_equal(code, CL_SUCCESS);
  free(host);
  t.host = NULL;
  return t;
}

static tensors make_tensors(const bed *b, io_kind kind) {
  return (tensors){.q = make_tensor(b, kind, b->c.q, NQ, D),
                   .k = make_tensor(b, kind, b->c.k, NKV, D),
                   .v = make_tensor(b, kind, b->c.v, NKV, D),
                   .out = make_tensor(b, kind, NULL, NQ, D),
                   .lse = make_tensor(b, kind, NULL, NQ, 1)};
}

static void free_tensor(kvr_tensor *t) {
  if (t->mem != NULL) clReleaseMemObject(t->mem);
  free(t->host);
}

static void free_tensors(tensors *t) {
  free_tensor(&t->q);
  free_tensor(&t->k);
  free_tensor(&t->v);
  free_tensor(&t->out);
  free_tensor(&t->lse);
}

static kvr_io io_of(const tensors *t) {
  return (kvr_io){.struct_size = sizeof(kvr_io),
                  .q = &t->q,
                  .k = &t->k,
                  .v = &t->v,
                  .out = &t->out,
                  .lse = &t->lse};
}

static void fetch(const bed *b, const kvr_tensor *t, size_t heads, size_t dim, float *to) {
  const size_t rows = (size_t)b->c.num_tokens * heads;
  const float *host = t->host;
  if (t->mem != NULL)
    assert_int_equal(clEnqueueReadBuffer(b->group->ranks[0].queue, t->mem, CL_TRUE, 0,
                                         rows * dim * sizeof(float), to, 0, NULL, NULL),
                     CL_SUCCESS);
  for (size_t i = 0; host != NULL && i < rows * dim; i++)
    to[i] = host[i / dim * t->head_stride + i % dim];
}

static kvr_plan *make_plan(bed *b) {
  kvr_options options = b->c.options;
  kvr_plan *plan;
  options.strategy = b->strategy;
  device_ok(kvr_plan_create(b->run.session, &b->c.problem, &options, &plan), "kvr_plan_create");
  return plan;
}

/* Errors of ops and of commands name a rank. */
static void expect_rank(const char *call, const char *what) {
  static const char *const calls[] = {"clSetKernelArg", "clEnqueueNDRangeKernel", "clWaitForEvents",
                                      "clGetEventInfo"};
  for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
    if (strcmp(call, calls[i]) == 0 && strncmp(kvr_error_message(), "rank ", 5) != 0)
      fail_msg("%s: message '%s' names no rank", what, kvr_error_message());
}

/* With tensors in buffers the caller also asks for an event of every rank. */
static kvr_status run_plan(kvr_plan *plan, const kvr_io *io) {
  cl_event events[P];
  if (io->q->mem == NULL) return kvr_plan_run(plan, io);
  kvr_status status = kvr_plan_enqueue(plan, io, 0, NULL, events);
  if (status != KVR_OK) return status;
  status = kvr_plan_wait(plan);
  for (int r = 0; r < P; r++) clReleaseEvent(events[r]);
  return status;
}

/* Plans and runs a step in which the n-th call fails; true if there are so many. */
static bool fail_step(bed *b, const tensors *t, int n) {
  const cl_objects before = faults.live;
  const kvr_io io = io_of(t);
  fault_arm(n, FAULT_ALL, code_of(n));
  kvr_plan *plan = make_plan(b);
  const kvr_status status = run_plan(plan, &io);
  const char *call = fault_disarm(), *what = describe(b, n, call != NULL ? call : "none");
  if (call == NULL) {
    device_ok(status, what);
    device_run_rewind(&b->run, &b->c);
    fetch(b, &t->out, NQ, D, b->run.out);
    fetch(b, &t->lse, NQ, 1, b->run.lse);
    assert_true(device_run_error(&b->run, &b->c) < tolerance);
  } else {
    expect_named(status, call, n, what);
    expect_rank(call, what);
    assert_int_equal(kvr_plan_run(plan, &io), KVR_E_STATE); /* poisoned */
  }
  kvr_plan_destroy(plan);
  expect_objects(&before, what);
  expect_cache_untouched(b, what);
  if (call != NULL) expect_right_step(b, what);
  return call != NULL;
}

/* All calls of a step in turn, or every few of them, from the first-th on, where there are many. */
static void fail_steps(const char *strategy, io_kind kind, int first) {
  bed b;
  bed_init(&b, strategy, strategy);
  tensors t = make_tensors(&b, kind);
  assert_false(fail_step(&b, &t, 0));
  const int stride = fault_count(FAULT_ALL) / MOST_TRIALS * 2 + 1; /* odd: both codes */
  int n = 1 + first % stride;
  while (fail_step(&b, &t, n)) n += stride;
  if (stride > 1) printf("%s: one in %d of %d calls failed\n", strategy, stride, n);

  free_tensors(&t);
  bed_fini(&b);
}

static void test_steps_that_fail(void **state) {
  (void)state;
  for (int i = 0; i < kvr_num_strategies(); i++) fail_steps(kvr_strategy_name(i), IO_DENSE, i);
}

static void test_steps_that_fail_on_strides_and_buffers(void **state) {
  (void)state;
  fail_steps("current-only", IO_STRIDED, 0);
  fail_steps("current-only", IO_BUFFERS, 0);
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

/* Op `op` waits for an event that ends with an error once everything is enqueued.
 *
 * Only when the device is idle: PoCL aborts the process if a command fails in one thread while
 * another thread completes something that it waits for. */
static void fail_op(bed *b, const tensors *t, const kvr_schedule *schedule, int op) {
  const cl_objects before = faults.live;
  const kvr_io io = io_of(t);
  cl_int code;
  gate g = {.event = clCreateUserEvent(b->group->ranks[0].context, &code), .op = op};
  assert_int_equal(code, CL_SUCCESS);
  kvr_plan *plan = make_plan(b);
  kvr_exec_set_gate(b->run.session->exec, gate_of, &g);
  faults.note_events = true;
  device_ok(kvr_plan_enqueue(plan, &io, 0, NULL, NULL), "kvr_plan_enqueue");
  faults.note_events = false;
  kvr_exec_set_gate(b->run.session->exec, NULL, NULL);
  fault_settle();
  assert_int_equal(clSetUserEventStatus(g.event, CL_OUT_OF_RESOURCES), CL_SUCCESS);
  char want[64];
  snprintf(want, sizeof want, "rank %d, op %d (", schedule->ops[op].rank, op);
  const char *what = describe(b, op, "its command");
  if (kvr_plan_wait(plan) != KVR_E_CL || strncmp(kvr_error_message(), want, strlen(want)) != 0)
    fail_msg("%s: message '%s', not '%s'", what, kvr_error_message(), want);
  assert_int_equal(kvr_plan_run(plan, &io), KVR_E_STATE);
  kvr_plan_destroy(plan);
  clReleaseEvent(g.event);
  expect_objects(&before, what);
  expect_cache_untouched(b, what);
  expect_right_step(b, what);
}

static void test_commands_that_fail(void **state) {
  (void)state;
  for (int i = 0; i < kvr_num_strategies(); i++) {
    bed b;
    bed_init(&b, kvr_strategy_name(i), kvr_strategy_name(i));
    tensors t = make_tensors(&b, IO_DENSE);
    kvr_schedule *schedule;
    device_ok(kvr_strategy_schedule(kvr_strategy_get(i), &b.c.problem, &b.c.options, &schedule),
              "kvr_strategy_schedule");
    for (int op = 0; op < schedule->num_ops; op++) fail_op(&b, &t, schedule, op);
    kvr_schedule_destroy(schedule);
    free_tensors(&t);
    bed_fini(&b);
  }
}

/* ---- flushes ---- */

/* Runs a step; returns the uses of events of queues that were not flushed. */
static int unflushed_uses(bed *b, const tensors *t, cl_event *events) {
  const kvr_io io = io_of(t);
  kvr_plan *plan = make_plan(b);
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
    bed b;
    bed_init(&b, kvr_strategy_name(i), kvr_strategy_name(i));
    tensors t = make_tensors(&b, IO_DENSE);
    assert_int_equal(unflushed_uses(&b, &t, NULL), 0);
    cl_event events[P];
    assert_int_equal(unflushed_uses(&b, &t, events), 0);
    for (int r = 0; r < P; r++) clReleaseEvent(events[r]);
    faults.forget_flushes = true;
    assert_true(unflushed_uses(&b, &t, NULL) > 0); /* the check notices */
    faults.forget_flushes = false;
    assert_int_equal(unflushed_uses(&b, &t, NULL), 0);
    free_tensors(&t);
    bed_fini(&b);
  }
}

/* ---- a control: calls that do nothing ---- */

static void restore_cache(bed *b) {
  for (int r = 0; r < P; r++)
    device_ok(kvr_cache_import(b->run.cache, r, b->run.pools[r], kvr_cache_bytes(b->run.cache)),
              "kvr_cache_import");
}

/* Steps with lost arguments succeed, but their answers are wrong: the comparison sees it. */
static void test_lost_arguments_are_noticed(void **state) {
  (void)state;
  bed b;
  bed_init(&b, "ring", "ring");
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
  expect_right_step(&b, "lost arguments");
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
      cmocka_unit_test(test_queues_are_flushed_before_others_wait),
      cmocka_unit_test(test_lost_arguments_are_noticed),
  };
  return cmocka_run_group_tests(tests, open_directory, remove_directory);
}

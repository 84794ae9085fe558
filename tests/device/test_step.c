/* Steps on the device: every strategy against dense attention in double precision. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device_case.h"

enum { NUM_CASES = 60 };
static const double tolerance = 2e-5;

static kvr_group *groups[2][CASE_MAX_RANKS + 1]; /* by copy queue and P */

static kvr_group *group_of(int P, int copy_queue) {
  if (groups[copy_queue][P] == NULL) groups[copy_queue][P] = device_group(P, copy_queue);
  return groups[copy_queue][P];
}

static bool has_cache(const pure_case *c) {
  for (int i = 0; i < c->problem.num_requests; i++)
    if (c->requests[i].num_cached > 0) return true;
  return false;
}

static int64_t bytes_of(const device_run *run) {
  int64_t sum = 0;
  for (int i = 0; i < run->num_records; i++) sum += run->records[i].bytes;
  return sum;
}

static void check_strategy(pure_case *c, int seed, int copy_queue, const char *strategy) {
  kvr_group *group = group_of(c->problem.cache.num_ranks, copy_queue);
  device_run run = {0};
  device_run_init(&run, c, group, strategy);
  if (device_run_step(&run, c, strategy) != KVR_OK)
    fail_msg("seed %d, %s: %s", seed, strategy, kvr_error_message());
  const double error = device_run_error(&run, c);
  if (!(error < tolerance)) fail_msg("seed %d, %s: error %g", seed, strategy, error);
  if (!device_pools_are_right(&run, c)) fail_msg("seed %d, %s: wrong cache bytes", seed, strategy);
  assert_int_equal(bytes_of(&run), run.bytes_formula);
  device_run_fini(&run, c);
}

static void test_every_strategy_equals_dense_attention(void **state) {
  (void)state;
  for (int seed = 1; seed <= NUM_CASES; seed++) {
    pure_case c;
    device_case_init(&c, (uint64_t)seed, (kvr_dtype)(seed % KVR_NUM_DTYPES));
    for (int i = 0; i < kvr_num_strategies(); i++) {
      const char *strategy = kvr_strategy_name(i);
      if (strcmp(strategy, "current-only") != 0 || !has_cache(&c))
        check_strategy(&c, seed, seed % 2, strategy);
    }
    case_free(&c);
  }
}

/* One session serves many steps, and strategies may change from step to step. */
static void test_sessions_are_reused(void **state) {
  (void)state;
  for (int seed = 100; seed < 110; seed++) {
    pure_case c;
    device_case_init(&c, (uint64_t)seed, KVR_F32);
    device_run run = {0};
    kvr_group *group = group_of(c.problem.cache.num_ranks, 1);
    device_run_init(&run, &c, group, "all");
    size_t before, now, peak, budget;
    device_ok(kvr_group_memory(group, 0, &before, &peak, &budget), "kvr_group_memory");
    for (int round = 0; round < 2; round++)
      for (int i = 0; i + 1 < kvr_num_strategies(); i++) {
        device_run_rewind(&run, &c);
        device_ok(device_run_step(&run, &c, kvr_strategy_name(i)), "step");
        assert_true(device_run_error(&run, &c) < tolerance);
      }
    device_ok(kvr_group_memory(group, 0, &now, &peak, &budget), "kvr_group_memory");
    assert_int_equal(now, before); /* no device allocation after the session exists */
    device_run_fini(&run, &c);
    case_free(&c);
  }
}

/* Limits far above the step: kernels are warmed up on grids wider than any rows there are. */
static void test_wide_limits(void **state) {
  (void)state;
  pure_case c;
  device_case_init(&c, 120, KVR_BF16);
  device_run run = {.spare_tokens = 20000};
  device_run_init(&run, &c, group_of(c.problem.cache.num_ranks, 0), "all");
  for (int i = 0; i + 1 < kvr_num_strategies(); i++) {
    device_run_rewind(&run, &c);
    device_ok(device_run_step(&run, &c, kvr_strategy_name(i)), "step");
    assert_true(device_run_error(&run, &c) < tolerance);
  }
  device_run_fini(&run, &c);
  case_free(&c);
}

/* ---- any order that the events allow ---- */

enum { MAX_GATES = 20000 };
typedef struct gates {
  cl_context context;
  cl_event events[MAX_GATES];
  int num;
} gates;

static cl_event add_gate(void *data, int op) {
  gates *g = data;
  cl_int code;
  (void)op;
  assert_true(g->num < MAX_GATES);
  g->events[g->num] = clCreateUserEvent(g->context, &code);
  assert_int_equal(code, CL_SUCCESS);
  return g->events[g->num++];
}

/* Opens the gates in a random order: ops start late, and in another order than they were enqueued.
 */
static void open_gates(gates *g, uint64_t seed) {
  for (int i = g->num - 1; i > 0; i--) {
    const int j = case_between(&seed, 0, i);
    const cl_event t = g->events[i];
    g->events[i] = g->events[j];
    g->events[j] = t;
  }
  for (int i = 0; i < g->num; i++) {
    clSetUserEventStatus(g->events[i], CL_COMPLETE);
    clReleaseEvent(g->events[i]);
  }
  g->num = 0;
}

typedef struct tensors {
  kvr_tensor q, k, v, out, lse;
} tensors;

static float *floats(const double *x, size_t n) {
  float *to = malloc((n + 1) * sizeof *to);
  assert_non_null(to);
  for (size_t i = 0; i < n; i++) to[i] = (float)x[i];
  return to;
}

static tensors make_tensors(const pure_case *c, device_run *run) {
  const size_t n = (size_t)c->num_tokens * (size_t)c->problem.cache.head_dim;
  const size_t NQ = (size_t)c->problem.num_q_heads, NKV = (size_t)c->problem.cache.num_kv_heads;
  return (tensors){.q = {.host = floats(c->q, n * NQ)},
                   .k = {.host = floats(c->k, n * NKV)},
                   .v = {.host = floats(c->v, n * NKV)},
                   .out = {.host = run->out},
                   .lse = {.host = run->lse}};
}

static void free_tensors(tensors *t) {
  free(t->q.host);
  free(t->k.host);
  free(t->v.host);
}

static void run_gated(pure_case *c, device_run *run, const char *strategy, uint64_t seed) {
  static gates g;
  kvr_options options = c->options;
  options.strategy = strategy;
  tensors t = make_tensors(c, run);
  const kvr_io io =
      {.struct_size = sizeof io, .q = &t.q, .k = &t.k, .v = &t.v, .out = &t.out, .lse = &t.lse};
  kvr_plan *plan;
  device_run_rewind(run, c);
  device_ok(kvr_plan_create(run->session, &c->problem, &options, &plan), "kvr_plan_create");
  device_ok(kvr_group_context(run->session->group, 0, &g.context), "kvr_group_context");
  kvr_exec_set_gate(run->session->exec, add_gate, &g);
  device_ok(kvr_plan_enqueue(plan, &io, 0, NULL, NULL), "kvr_plan_enqueue");
  kvr_exec_set_gate(run->session->exec, NULL, NULL);
  open_gates(&g, seed);
  device_ok(kvr_plan_wait(plan), "kvr_plan_wait");
  kvr_plan_destroy(plan);
  free_tensors(&t);
}

static void test_random_delays_give_the_same_bits(void **state) {
  (void)state;
  for (int seed = 200; seed < 206; seed++) {
    pure_case c;
    device_case_init(&c, (uint64_t)seed, KVR_F32);
    for (int copy_queue = 0; copy_queue < 2; copy_queue++) {
      device_run run = {0};
      device_run_init(&run, &c, group_of(c.problem.cache.num_ranks, copy_queue), "all");
      const size_t n = (size_t)c.num_tokens * (size_t)c.problem.num_q_heads *
                       (size_t)c.problem.cache.head_dim * sizeof(float);
      float *first = malloc(n + 1);
      assert_non_null(first);
      for (int i = 0; i + 1 < kvr_num_strategies(); i++) {
        device_run_rewind(&run, &c);
        device_ok(device_run_step(&run, &c, kvr_strategy_name(i)), "step");
        memcpy(first, run.out, n);
        for (uint64_t order = 1; order <= 3; order++) {
          run_gated(&c, &run, kvr_strategy_name(i), order);
          assert_memory_equal(first, run.out, n);
        }
      }
      free(first);
      device_run_fini(&run, &c);
    }
    case_free(&c);
  }
}

/* ---- events and placements ---- */

static void test_waits_and_rank_events(void **state) {
  (void)state;
  pure_case c;
  device_case_init(&c, 301, KVR_F32);
  const int P = c.problem.cache.num_ranks;
  device_run run = {0};
  device_run_init(&run, &c, group_of(P, 0), "ring");
  tensors t = make_tensors(&c, &run);
  const kvr_io io =
      {.struct_size = sizeof io, .q = &t.q, .k = &t.k, .v = &t.v, .out = &t.out, .lse = &t.lse};
  kvr_options options = c.options;
  options.strategy = "ring";
  kvr_plan *plan;
  cl_context context;
  cl_int code;
  cl_event events[CASE_MAX_RANKS];
  device_ok(kvr_group_context(run.session->group, 0, &context), "kvr_group_context");
  cl_event start = clCreateUserEvent(context, &code);
  device_ok(kvr_plan_create(run.session, &c.problem, &options, &plan), "kvr_plan_create");
  device_ok(kvr_plan_enqueue(plan, &io, 1, &start, events), "kvr_plan_enqueue");
  assert_int_equal(kvr_plan_enqueue(plan, &io, 0, NULL, NULL), KVR_E_STATE); /* busy */
  for (int r = 0; r < P; r++) {
    cl_int status;
    clGetEventInfo(events[r], CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof status, &status, NULL);
    assert_int_not_equal(status, CL_COMPLETE);
  }
  clSetUserEventStatus(start, CL_COMPLETE);
  assert_int_equal(clWaitForEvents((cl_uint)P, events), CL_SUCCESS);
  assert_true(device_run_error(&run, &c) < tolerance); /* outputs are there before the wait */
  device_ok(kvr_plan_wait(plan), "kvr_plan_wait");
  assert_int_equal(kvr_plan_wait(plan), KVR_E_STATE);
  assert_int_equal(kvr_plan_run(plan, &io), KVR_E_STATE); /* the cache has moved on */
  for (int r = 0; r < P; r++) clReleaseEvent(events[r]);
  clReleaseEvent(start);
  kvr_plan_destroy(plan);
  free_tensors(&t);
  device_run_fini(&run, &c);
  case_free(&c);
}

/* An input that fails makes the step fail; lengths stay, and the session goes on. */
static void test_failed_wait_poisons_the_plan(void **state) {
  (void)state;
  pure_case c;
  device_case_init(&c, 302, KVR_F32);
  device_run run = {0};
  device_run_init(&run, &c, group_of(c.problem.cache.num_ranks, 1), "ring");
  tensors t = make_tensors(&c, &run);
  const kvr_io io =
      {.struct_size = sizeof io, .q = &t.q, .k = &t.k, .v = &t.v, .out = &t.out, .lse = &t.lse};
  kvr_plan *plan;
  cl_context context;
  cl_int code;
  device_ok(kvr_group_context(run.session->group, 0, &context), "kvr_group_context");
  cl_event start = clCreateUserEvent(context, &code);
  device_ok(kvr_plan_create(run.session, &c.problem, &c.options, &plan), "kvr_plan_create");
  device_ok(kvr_plan_enqueue(plan, &io, 1, &start, NULL), "kvr_plan_enqueue");
  clSetUserEventStatus(start, -5);
  assert_int_not_equal(kvr_plan_wait(plan), KVR_OK);
  assert_non_null(strstr(kvr_error_message(), "rank"));
  for (int i = 0; i < c.problem.num_requests; i++)
    assert_int_equal(kvr_cache_length(run.cache, run.ids[i]), c.requests[i].num_cached);
  assert_int_equal(kvr_plan_run(plan, &io), KVR_E_STATE);
  kvr_plan_destroy(plan);
  clReleaseEvent(start);
  device_ok(device_run_step(&run, &c, "ring"), "step after a failure");
  assert_true(device_run_error(&run, &c) < tolerance);
  free_tensors(&t);
  device_run_fini(&run, &c);
  case_free(&c);
}

static void expect_io(kvr_plan *plan, const kvr_io *io, kvr_status want, const char *word) {
  assert_int_equal(kvr_plan_run(plan, io), want);
  if (strstr(kvr_error_message(), word) == NULL)
    fail_msg("message '%s' does not say '%s'", kvr_error_message(), word);
}

static void test_bad_tensors_are_refused(void **state) {
  (void)state;
  pure_case c;
  device_case_init(&c, 301, KVR_F32);
  device_run run = {0};
  device_run_init(&run, &c, group_of(c.problem.cache.num_ranks, 0), "ring");
  tensors t = make_tensors(&c, &run);
  kvr_io io =
      {.struct_size = sizeof io, .q = &t.q, .k = &t.k, .v = &t.v, .out = &t.out, .lse = &t.lse};
  kvr_plan *plan;
  device_ok(kvr_plan_create(run.session, &c.problem, &c.options, &plan), "kvr_plan_create");
  io.k = NULL;
  expect_io(plan, &io, KVR_E_NULL, "io->k");
  io.k = &t.k;
  io.struct_size = 3;
  expect_io(plan, &io, KVR_E_SHAPE, "struct_size");
  io.struct_size = sizeof io;
  io.placement = (kvr_placement)7;
  expect_io(plan, &io, KVR_E_RANGE, "placement");
  io.placement = KVR_TOKEN_ORDER;
  t.v.dtype = KVR_F16;
  expect_io(plan, &io, KVR_E_DTYPE, "v is f16");
  t.v.dtype = KVR_F32;
  t.q.token_stride = 1;
  expect_io(plan, &io, KVR_E_LAYOUT, "q: head_stride");
  t.q.token_stride = 0;
  int first, count;
  void *const q_host = t.q.host;
  t.q.mem = kvr_cache_buffer(run.cache, 0, 0, &first, &count);
  expect_io(plan, &io, KVR_E_NULL, "q must have either");
  t.q.host = NULL;
  expect_io(plan, &io, KVR_E_CONFLICT, "KV cache");
  t.q.mem = NULL;
  t.q.host = q_host;
  device_ok(kvr_plan_run(plan, &io), "kvr_plan_run");
  assert_true(device_run_error(&run, &c) < tolerance);
  kvr_plan_destroy(plan);
  free_tensors(&t);
  device_run_fini(&run, &c);
  case_free(&c);
}

static int close_groups(void **state) {
  (void)state;
  for (int q = 0; q < 2; q++)
    for (int P = 0; P <= CASE_MAX_RANKS; P++) kvr_group_destroy(groups[q][P]);
  return 0;
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_strategy_equals_dense_attention),
      cmocka_unit_test(test_sessions_are_reused),
      cmocka_unit_test(test_wide_limits),
      cmocka_unit_test(test_random_delays_give_the_same_bits),
      cmocka_unit_test(test_waits_and_rank_events),
      cmocka_unit_test(test_failed_wait_poisons_the_plan),
      cmocka_unit_test(test_bad_tensors_are_refused),
  };
  return cmocka_run_group_tests(tests, NULL, close_groups);
}

/* Named shapes: the cases that implementations of this algorithm are usually tested with. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device_case.h"

enum { MOST_RANKS = CASE_MAX_RANKS };
static const double tolerance = 2e-5;

static kvr_group *groups[MOST_RANKS + 1];

static kvr_group *group_of(int P) {
  if (groups[P] == NULL) groups[P] = device_group(P, 0);
  return groups[P];
}

typedef struct shape {
  const char *name;
  int num_requests;
  int lengths[3][2]; /* cached, new */
  int chunk;         /* of the first request; 0: default */
  int page_size;
  int tile;
  int query_tile;
  int causal;
  kvr_dtype dtype;
  int sample;
} shape;

/* 8 query heads, 2 KV heads, head dim 128. */
static const shape shapes[] = {
    {"first chunk", 1, {{0, 256}}, 0, 16, 1024, 0, 1, KVR_F32, 7},
    {"first chunk, bf16", 1, {{0, 256}}, 0, 16, 1024, 0, 1, KVR_BF16, 7},
    {"cache and chunk of one block", 1, {{512, 128}}, 0, 16, 1024, 0, 1, KVR_F32, 5},
    {"not causal, odd length", 1, {{0, 192}}, 0, 16, 64, 0, 0, KVR_F32, 7},
    {"aligned head and tail", 1, {{0, 512}}, 64, 16, 128, 0, 1, KVR_F32, 11},
    {"all-pad tail", 1, {{256, 257}}, 64, 16, 128, 0, 1, KVR_F32, 11},
    {"length not a multiple of P, several blocks and passes",
     1,
     {{1002, 600}},
     0,
     64,
     128,
     128,
     1,
     KVR_F32,
     37},
    {"the same in bf16", 1, {{1002, 600}}, 0, 64, 128, 128, 1, KVR_BF16, 37},
    {"several sequences, one without cache",
     3,
     {{1002, 300}, {0, 96}, {517, 130}},
     0,
     16,
     128,
     128,
     1,
     KVR_F32,
     31},
    {"many blocks", 1, {{4608, 128}}, 0, 16, 512, 0, 1, KVR_F32, 31},
    {"partial tail", 1, {{128, 100}}, 16, 16, 1024, 0, 1, KVR_F32, 5},
    {"three requests", 3, {{0, 96}, {64, 48}, {32, 33}}, 0, 16, 1024, 0, 1, KVR_F32, 3},
    {"two requests, f16", 2, {{32, 96}, {64, 48}}, 0, 16, 1024, 0, 1, KVR_F16, 3},
    {"ragged requests", 3, {{0, 70}, {48, 33}, {96, 16}}, 0, 16, 1024, 0, 1, KVR_F32, 3},
    {"a request without rows", 3, {{40, 32}, {61, 0}, {50, 32}}, 0, 16, 32, 0, 1, KVR_F32, 3},
    {"nothing at all", 1, {{61, 0}}, 0, 16, 32, 0, 1, KVR_F32, 1},
    {"boundary block", 1, {{1000, 488}}, 64, 16, 128, 0, 1, KVR_F32, 31},
};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

static pure_case case_of(const shape *s, int P, int interleave) {
  pure_case c = {0};
  c.problem = (kvr_problem){.struct_size = sizeof c.problem,
                            .cache = {.struct_size = sizeof c.problem.cache,
                                      .num_ranks = P,
                                      .num_kv_heads = 2,
                                      .head_dim = 128,
                                      .page_size = s->page_size,
                                      .num_pages = 1 << 20,
                                      .interleave = interleave,
                                      .dtype = s->dtype},
                            .num_q_heads = 8,
                            .causal = s->causal,
                            .num_requests = s->num_requests};
  for (int i = 0; i < s->num_requests; i++)
    c.requests[i] = (kvr_request){.num_cached = s->lengths[i][0], .num_new = s->lengths[i][1]};
  const int least = (s->lengths[0][1] + 2 * P - 1) / (2 * P);
  if (s->chunk > 0) c.requests[0].chunk = s->chunk > least ? s->chunk : least;
  c.options =
      (kvr_options){.struct_size = sizeof c.options, .tile = s->tile, .query_tile = s->query_tile};
  c.sample = s->sample;
  return c;
}

static bool has_cache(const shape *s) {
  for (int i = 0; i < s->num_requests; i++)
    if (s->lengths[i][0] > 0) return true;
  return false;
}

/* All strategies on one case: right, the same cache bytes, and close to each other. */
static void check_shape(const shape *s, int P, int interleave) {
  pure_case c = case_of(s, P, interleave);
  device_case_fill(&c, 4242);
  for (int i = 0; i < kvr_num_strategies(); i++) {
    const char *strategy = kvr_strategy_name(i);
    if (strcmp(strategy, "current-only") == 0 && has_cache(s)) continue;
    device_run run = {0};
    device_run_init(&run, &c, group_of(P), strategy);
    if (device_run_step(&run, &c, strategy) != KVR_OK)
      fail_msg("%s, P %d, %s: %s", s->name, P, strategy, kvr_error_message());
    const double error = device_run_error(&run, &c);
    if (!(error < tolerance)) fail_msg("%s, P %d, %s: error %g", s->name, P, strategy, error);
    if (!device_pools_are_right(&run, &c))
      fail_msg("%s, P %d, %s: wrong cache bytes", s->name, P, strategy);
    device_run_fini(&run, &c);
  }
  case_free(&c);
}

static void test_named_shapes(void **state) {
  (void)state;
  static const int ranks[] = {1, 2, 3, 4};
  for (int i = 0; i < NUM_SHAPES; i++)
    for (size_t p = 0; p < sizeof ranks / sizeof *ranks; p++)
      check_shape(&shapes[i], ranks[p], p % 2 == 0 ? 1 : shapes[i].page_size);
}

/* ---- a whole prefill in chunks, strategies mixed, against one dense pass ---- */

enum { TOTAL = 157 };

static void run_chunk(device_run *run, pure_case *c, const char *strategy, int begin, int end,
                      float *const arrays[4]) {
  const size_t D = (size_t)c->problem.cache.head_dim, NQ = (size_t)c->problem.num_q_heads;
  const size_t NKV = (size_t)c->problem.cache.num_kv_heads, b = (size_t)begin;
  const kvr_request request = {.num_new = end - begin,
                               .num_cached = begin,
                               .cache_id = run->ids[0]};
  kvr_problem problem = c->problem;
  problem.requests = &request;
  kvr_options options = c->options;
  options.strategy = strategy;
  const kvr_tensor q = {.host = arrays[0] + b * NQ * D}, k = {.host = arrays[1] + b * NKV * D};
  const kvr_tensor v = {.host = arrays[2] + b * NKV * D}, out = {.host = run->out + b * NQ * D};
  const kvr_tensor lse = {.host = run->lse + b * NQ};
  const kvr_io io = {.struct_size = sizeof io, .q = &q, .k = &k, .v = &v, .out = &out, .lse = &lse};
  kvr_plan *plan;
  device_ok(kvr_plan_create(run->session, &problem, &options, &plan), strategy);
  device_ok(kvr_plan_run(plan, &io), strategy);
  kvr_plan_destroy(plan);
}

static float *floats(const double *x, size_t n) {
  float *to = malloc((n + 1) * sizeof *to);
  assert_non_null(to);
  for (size_t i = 0; i < n; i++) to[i] = (float)x[i];
  return to;
}

static void test_chunks_equal_one_dense_prefill(void **state) {
  (void)state;
  static const int ends[] = {1, 40, 41, 120, TOTAL};
  static const char *const mixed[] = {"current-only", "ring", "gather-q", "rotate-all", "rotate-q"};
  for (int P = 1; P <= 5; P++) {
    const shape s = {"chunks", 1, {{0, TOTAL}}, 0, 4, 6, 5, 1, KVR_F32, 1};
    pure_case c = case_of(&s, P, P % 2 ? 1 : 4);
    c.problem.cache.head_dim = 16;
    device_case_fill(&c, 77);
    device_run run = {0};
    device_run_init(&run, &c, group_of(P), "all");
    float *arrays[4] = {floats(c.q, TOTAL * 8 * 16), floats(c.k, TOTAL * 2 * 16),
                        floats(c.v, TOTAL * 2 * 16), NULL};
    for (int i = 0; i < 5; i++)
      run_chunk(&run, &c, mixed[i], i > 0 ? ends[i - 1] : 0, ends[i], arrays);
    assert_true(device_run_error(&run, &c) < tolerance);
    assert_true(device_pools_are_right(&run, &c));
    for (int i = 0; i < 3; i++) free(arrays[i]);
    device_run_fini(&run, &c);
    case_free(&c);
  }
}

/* ---- controls ---- */

/* The comparison must notice other cache contents by far more than the strategies differ. */
static void test_other_cache_contents_are_noticed(void **state) {
  (void)state;
  const shape s = {"control", 1, {{1000, 232}}, 0, 16, 128, 0, 1, KVR_F32, 11};
  pure_case c = case_of(&s, 4, 1), other = case_of(&s, 4, 1);
  device_case_fill(&c, 1);
  device_case_fill(&other, 2);
  device_run run = {0};
  device_run_init(&run, &other, group_of(4), "ring");
  /* c's queries and new tokens over the other's cache */
  c.requests[0].cache_id = other.requests[0].cache_id;
  c.problem.cache.num_pages = other.problem.cache.num_pages;
  device_ok(device_run_step(&run, &c, "ring"), "step");
  assert_true(device_run_error(&run, &c) > 50 * tolerance);
  assert_true(device_run_error(&run, &c) > 1e-2);
  device_run_fini(&run, &other);
  case_free(&c);
  case_free(&other);
}

/* ---- nothing leaks ---- */

static void test_a_thousand_steps_leak_nothing(void **state) {
  (void)state;
  const shape s = {"leaks", 2, {{9, 3}, {4, 2}}, 0, 4, 2, 0, 1, KVR_F32, 1};
  pure_case c = case_of(&s, 3, 1);
  c.problem.cache.head_dim = 16;
  device_case_fill(&c, 5);
  kvr_group *group = device_group(3, 1);
  cl_context context;
  cl_uint before, after;
  device_run run = {0};
  device_run_init(&run, &c, group, "all");
  device_ok(kvr_group_context(group, 0, &context), "kvr_group_context");
  device_ok(device_run_step(&run, &c, "ring"), "step");
  clGetContextInfo(context, CL_CONTEXT_REFERENCE_COUNT, sizeof before, &before, NULL);
  size_t now, later, peak, budget;
  device_ok(kvr_group_memory(group, 0, &now, &peak, &budget), "kvr_group_memory");
  for (int i = 0; i < 1000; i++) {
    device_run_rewind(&run, &c);
    device_ok(device_run_step(&run, &c, kvr_strategy_name(i % (kvr_num_strategies() - 1))), "step");
  }
  assert_true(device_run_error(&run, &c) < tolerance);
  clGetContextInfo(context, CL_CONTEXT_REFERENCE_COUNT, sizeof after, &after, NULL);
  device_ok(kvr_group_memory(group, 0, &later, &peak, &budget), "kvr_group_memory");
  assert_int_equal(after, before); /* events and buffers hold their context */
  assert_int_equal(later, now);
  const size_t session = kvr_session_bytes(run.session), cache = kvr_cache_bytes(run.cache);
  assert_int_equal(now, session + cache); /* what is allocated is what was said */
  device_run_fini(&run, &c);
  device_ok(kvr_group_memory(group, 0, &later, &peak, &budget), "kvr_group_memory");
  assert_int_equal(later, 0);
  assert_int_equal(peak, session + cache);
  kvr_group_destroy(group);
  case_free(&c);
}

static int close_groups(void **state) {
  (void)state;
  for (int P = 0; P <= MOST_RANKS; P++) kvr_group_destroy(groups[P]);
  return 0;
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_named_shapes),
      cmocka_unit_test(test_chunks_equal_one_dense_prefill),
      cmocka_unit_test(test_other_cache_contents_are_noticed),
      cmocka_unit_test(test_a_thousand_steps_leak_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, close_groups);
}

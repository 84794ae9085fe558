/* Problems that are refused: the status, a message with the value, the limit and what to do, and
 * outputs that stay as they were. Rules that test_validate has are not repeated. */
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "kvring/kvring.h"

static int weights[2];
static float sinks[8];
static kvr_request requests[2];
static kvr_problem problem;
static kvr_options options;

static void reset(void) {
  weights[0] = weights[1] = 1;
  for (int h = 0; h < 8; h++) sinks[h] = 0.0f;
  requests[0] = (kvr_request){.num_new = 8, .num_cached = 5};
  requests[1] = (kvr_request){.num_new = 2, .num_cached = 0};
  problem = (kvr_problem){.struct_size = sizeof problem,
                          .cache = {.struct_size = sizeof problem.cache,
                                    .num_ranks = 2,
                                    .num_kv_heads = 2,
                                    .head_dim = 64,
                                    .page_size = 4,
                                    .num_pages = 2,
                                    .interleave = 1,
                                    .weights = weights},
                          .num_q_heads = 8,
                          .causal = 1,
                          .sinks = sinks,
                          .num_requests = 2,
                          .requests = requests};
  options = (kvr_options){.struct_size = sizeof options, .strategy = "ring"};
}

/* Words of the message; all must be there. */
typedef struct words {
  const char *list[3];
} words;

static void expect_words(const words *w) {
  for (int i = 0; i < 3 && w->list[i] != NULL; i++)
    if (strstr(kvr_error_message(), w->list[i]) == NULL)
      fail_msg("message '%s' does not say '%s'", kvr_error_message(), w->list[i]);
}

/* Every function that takes a problem refuses it alike and leaves its outputs alone. */
static void expect_refused(kvr_status want, words w) {
  kvr_plan_info info, before;
  memset(&before, 7, sizeof before);
  info = before;
  const char *name = "before";
  char reason[32] = "before";
  assert_int_equal(kvr_problem_check(&problem, &options), want);
  expect_words(&w);
  assert_int_equal(kvr_plan_estimate(&problem, &options, &info), want);
  expect_words(&w);
  assert_memory_equal(&info, &before, sizeof info);
  assert_int_equal(kvr_choose(&problem, &options, 0, &name, reason, sizeof reason), want);
  expect_words(&w);
  assert_string_equal(name, "before");
  assert_string_equal(reason, "before");
  reset();
}

/* REFUSED(change, status, value, limit, fix): words may be NULL at the end. */
#define REFUSED(change, status, ...)                                                               \
  do {                                                                                             \
    change;                                                                                        \
    expect_refused(status, (words){{__VA_ARGS__}});                                                \
  } while (0)

static void shapes_are_refused(void **state) {
  (void)state;
  reset();
  REFUSED(problem.num_q_heads = 7, KVR_E_SHAPE, "num_q_heads 7", "num_kv_heads 2", "such as 8");
  REFUSED(problem.num_q_heads = 1, KVR_E_SHAPE, "num_q_heads 1", "num_kv_heads 2", "such as 2");
  REFUSED(problem.num_q_heads = -8, KVR_E_RANGE, "num_q_heads is -8", "at least 1");
  REFUSED(problem.cache.num_kv_heads = 0, KVR_E_RANGE, "num_kv_heads is 0", "at least 1");
  REFUSED(problem.cache.head_dim = 1000, KVR_E_RANGE, "head_dim is 1000", "limit is 512",
          "narrower heads");
  REFUSED((problem.cache.num_kv_heads = 1 << 20, problem.cache.head_dim = 512), KVR_E_RANGE,
          "num_kv_heads * head_dim is 536870912", "limit is 268435455", "fewer or narrower");
  REFUSED((problem.cache.num_kv_heads = 1, problem.num_q_heads = 1 << 25), KVR_E_RANGE,
          "num_q_heads * (head_dim + 2) is 2214592512", "limit is 536870911", "fewer or narrower");
  REFUSED(problem.struct_size = 8, KVR_E_SHAPE, "kvr_problem.struct_size is 8", "expects",
          "set it to sizeof");
  REFUSED(options.struct_size = 8, KVR_E_SHAPE, "kvr_options.struct_size is 8", "expects",
          "set it to sizeof");
}

static void types_are_refused(void **state) {
  (void)state;
  reset();
  REFUSED(problem.cache.dtype = KVR_NUM_DTYPES, KVR_E_DTYPE, "cache dtype is 3",
          "KVR_F32, KVR_F16 or KVR_BF16");
  REFUSED(problem.cache.dtype = (kvr_dtype)-1, KVR_E_DTYPE, "cache dtype is -1", "KVR_BF16");
  REFUSED(problem.out_dtype = (kvr_dtype)-1, KVR_E_DTYPE, "out_dtype is -1", "KVR_BF16");
}

static void maps_are_refused(void **state) {
  (void)state;
  reset();
  REFUSED(problem.cache.num_ranks = -1, KVR_E_RANGE, "num_ranks is -1", "at least 1");
  REFUSED((problem.cache.num_ranks = 4097, problem.cache.weights = NULL), KVR_E_RANGE,
          "num_ranks is 4097", "limit is 4096", "use fewer ranks");
  REFUSED(problem.cache.interleave = -4, KVR_E_RANGE, "interleave is -4", "at least 1");
  REFUSED(weights[1] = -2, KVR_E_RANGE, "weights[1] is -2", "must not be negative", "use 0");
  REFUSED(problem.cache.page_size = -1, KVR_E_RANGE, "page_size is -1", "at least 1");
  REFUSED(problem.cache.num_pages = -1, KVR_E_RANGE, "num_pages is -1", "at least 1");
}

static void masks_are_refused(void **state) {
  (void)state;
  reset();
  REFUSED(problem.window = INT_MIN, KVR_E_RANGE, "window is -2147483648", "positive", "0 for none");
  REFUSED(problem.soft_cap = NAN, KVR_E_RANGE, "soft_cap is", "1e-30 to 1e+30", "0 for none");
  REFUSED(problem.soft_cap = INFINITY, KVR_E_RANGE, "soft_cap is inf", "1e+30", "0 for none");
  REFUSED(problem.soft_cap = -5, KVR_E_RANGE, "soft_cap is -5", "positive", "0 for none");
  REFUSED(problem.causal = -1, KVR_E_RANGE, "causal is -1", "0 or 1");
  REFUSED(sinks[7] = INFINITY, KVR_E_RANGE, "sinks[7] is inf", "at most 1e+30", "-inf for none");
  REFUSED(sinks[7] = NAN, KVR_E_RANGE, "sinks[7] is", "finite", "-inf for none");
}

static void scales_are_refused(void **state) {
  (void)state;
  reset();
  REFUSED(problem.scale = -INFINITY, KVR_E_RANGE, "scale is -inf", "finite", "0 for 1/sqrt");
  REFUSED(problem.q_scale = NAN, KVR_E_RANGE, "q_scale is", "finite", "0 for 1");
  REFUSED(problem.k_scale = NAN, KVR_E_RANGE, "k_scale is", "finite", "0 for 1");
  REFUSED(problem.v_scale = INFINITY, KVR_E_RANGE, "v_scale is inf", "finite", "0 for 1");
}

/* Finite numbers whose inverse, product or multiple of log2(e) is not: NaN would come of them. */
static void numbers_that_overflow_in_kernels_are_refused(void **state) {
  (void)state;
  reset();
  REFUSED(problem.q_scale = 1e-40f, KVR_E_RANGE, "q_scale is", "1e-30 to 1e+30", "0 for 1");
  REFUSED(problem.k_scale = 3e38f, KVR_E_RANGE, "k_scale is 3e+38", "1e+30", "0 for 1");
  REFUSED(problem.soft_cap = 3e38f, KVR_E_RANGE, "soft_cap is 3e+38", "1e+30", "0 for none");
  REFUSED(problem.soft_cap = 1e-40f, KVR_E_RANGE, "soft_cap is", "1e-30", "0 for none");
  REFUSED(sinks[0] = 3e38f, KVR_E_RANGE, "sinks[0] is 3e+38", "at most 1e+30", "-inf for none");
  REFUSED(sinks[0] = -3e38f, KVR_E_RANGE, "sinks[0] is -3e+38", "at most 1e+30", "-inf for none");
  REFUSED((problem.scale = 1e20f, problem.k_scale = 1e20f), KVR_E_RANGE,
          "scale * q_scale * k_scale is 1e+40", "must not exceed 1e+30", "scale the inputs");
  problem.q_scale = -1e-30f, problem.k_scale = 1e30f, problem.soft_cap = 1e30f, sinks[0] = 1e30f;
  assert_int_equal(kvr_problem_check(&problem, &options), KVR_OK);
}

static void lengths_are_refused(void **state) {
  (void)state;
  reset();
  REFUSED(requests[1].num_new = INT_MIN, KVR_E_RANGE, "request 1: num_new is -2147483648",
          "must not be negative");
  REFUSED(requests[0].num_cached = -1, KVR_E_RANGE, "request 0: num_cached is -1",
          "must not be negative");
  REFUSED(requests[1].chunk = -7, KVR_E_RANGE, "request 1: chunk is -7", "0 for the default");
  REFUSED((requests[0].num_new = 13, requests[0].chunk = 3), KVR_E_RANGE, "hold 12 tokens",
          "num_new is 13", "at least 4");
  REFUSED((requests[0].num_cached = INT_MAX, problem.cache.num_pages = INT_MAX), KVR_E_RANGE,
          "num_cached 2147483647 + num_new 8", "limit of 2147483647", "shorter request");
  REFUSED(requests[0].num_cached = 25, KVR_E_CAPACITY, "33 tokens need 5 pages", "the pool has 2",
          "make num_pages larger");
  REFUSED(problem.num_requests = -2, KVR_E_RANGE, "num_requests is -2", "must not be negative");
  REFUSED(problem.requests = NULL, KVR_E_NULL, "requests is NULL", "num_requests is 2",
          "pass that many");
}

/* The rank with the largest share decides, whichever it is. */
static void capacity_is_asked_of_every_rank(void **state) {
  (void)state;
  reset();
  requests[0].num_cached = 8; /* 16 tokens on two ranks of two pages of four */
  assert_int_equal(kvr_problem_check(&problem, &options), KVR_OK);
  REFUSED((requests[0].num_cached = 8, weights[0] = 0), KVR_E_CAPACITY, "16 tokens need 4 pages",
          "the pool has 2", "make num_pages larger");
  REFUSED((requests[0].num_cached = 8, weights[1] = 2), KVR_E_CAPACITY, "16 tokens need 3 pages",
          "the pool has 2", "make num_pages larger");
}

static void options_are_refused(void **state) {
  (void)state;
  reset();
  REFUSED(options.tile = INT_MIN, KVR_E_RANGE, "tile is -2147483648", "positive", "0 for 1024");
  REFUSED(options.query_tile = -1, KVR_E_RANGE, "query_tile is -1", "positive", "0 for all rows");
  REFUSED(options.num_slots = 1, KVR_E_RANGE, "num_slots is 1", "at least 2");
  REFUSED(options.num_slots = 4097, KVR_E_RANGE, "num_slots is 4097", "limit is 4096",
          "use fewer slots");
  REFUSED(options.strategy = "", KVR_E_RANGE, "unknown strategy ''", "use auto, ring");
  REFUSED(options.strategy = "Ring", KVR_E_RANGE, "unknown strategy 'Ring'", "use auto, ring");
  REFUSED(options.strategy = "current-only", KVR_E_CONFLICT, "request 0 has 5 cached tokens",
          "does not read the cache", "use ring or auto");
}

/* ---- missing arguments ---- */

static void missing_arguments_are_named(void **state) {
  (void)state;
  kvr_plan_info info;
  const char *name;
  char reason[64];
  reset();
  assert_int_equal(kvr_plan_estimate(NULL, &options, &info), KVR_E_NULL);
  assert_int_equal(kvr_plan_estimate(&problem, &options, NULL), KVR_E_NULL);
  expect_words(&(words){{"info is NULL"}});
  assert_int_equal(kvr_plan_estimate(&problem, NULL, &info), KVR_E_NULL);
  expect_words(&(words){{"options->strategy is NULL", "name one", "kvr_choose"}});
  options.strategy = "auto";
  assert_int_equal(kvr_plan_estimate(&problem, &options, &info), KVR_E_RANGE);
  expect_words(&(words){{"options->strategy is auto", "name one", "kvr_choose"}});
  assert_int_equal(kvr_choose(NULL, NULL, 0, &name, reason, sizeof reason), KVR_E_NULL);
  assert_int_equal(kvr_choose(&problem, NULL, 0, NULL, reason, sizeof reason), KVR_E_NULL);
  assert_int_equal(kvr_choose(&problem, NULL, 0, &name, NULL, 0), KVR_E_NULL);
  expect_words(&(words){{"out_name or reason is NULL"}});
}

static void a_budget_that_no_strategy_fits_is_refused(void **state) {
  (void)state;
  const char *name = "before";
  char reason[256];
  kvr_plan_info info;
  reset();
  assert_int_equal(kvr_plan_estimate(&problem, &options, &info), KVR_OK);
  options.strategy = NULL;
  assert_int_equal(kvr_choose(&problem, &options, info.peak_bytes, &name, reason, sizeof reason),
                   KVR_OK);
  name = "before";
  char need[64], limit[64];
  snprintf(need, sizeof need, "ring needs %zu bytes per rank", info.peak_bytes);
  snprintf(limit, sizeof limit, "the budget is %zu", info.peak_bytes - 1);
  assert_int_equal(kvr_choose(&problem, &options, info.peak_bytes - 1, &name, reason,
                              sizeof reason),
                   KVR_E_OOM);
  assert_string_equal(name, "before");
  expect_words(&(words){{need, limit, "raise the memory budget"}});
}

static void merges_are_refused(void **state) {
  (void)state;
  float x[2] = {1, 2}, out[2] = {77, 77}, lse[2] = {77, 77};
  assert_int_equal(kvr_merge_states(x, x, x, x, -1, 1, out, lse), KVR_E_RANGE);
  expect_words(&(words){{"rows -1 must not be negative"}});
  assert_int_equal(kvr_merge_states(x, x, x, x, 1, 0, out, lse), KVR_E_RANGE);
  expect_words(&(words){{"dim 0 must be positive"}});
  assert_int_equal(kvr_merge_states(x, x, x, x, 1, 1, out, NULL), KVR_E_NULL);
  assert_true(out[0] == 77 && lse[0] == 77);
  assert_int_equal(kvr_merge_states(x, x, x, x, 0, 1, out, lse), KVR_OK);
  assert_true(out[0] == 77 && lse[0] == 77);
}

/* ---- traces ---- */

static void traces_are_refused_and_leave_no_file(void **state) {
  (void)state;
  kvr_trace *trace = NULL;
  const kvr_trace_record record = {.launched = 1, .peer = -1, .start_ns = 1, .end_ns = 2};
  char path[5000];
  assert_int_equal(kvr_trace_create(NULL), KVR_E_NULL);
  assert_int_equal(kvr_trace_create(&trace), KVR_OK);
  assert_int_equal(kvr_trace_add(trace, NULL, &record, 1), KVR_E_NULL);
  assert_int_equal(kvr_trace_add(trace, "step", NULL, 1), KVR_E_NULL);
  assert_int_equal(kvr_trace_add(trace, "step", &record, -1), KVR_E_RANGE);
  expect_words(&(words){{"num_records is -1", "must not be negative"}});
  assert_int_equal(kvr_trace_write(trace, NULL), KVR_E_NULL);
  assert_int_equal(kvr_trace_write(trace, "no/such/folder/trace.json"), KVR_E_IO);
  expect_words(&(words){{"cannot write 'no/such/folder/trace.json", "check the folder"}});
  memset(path, 'x', sizeof path - 1);
  path[sizeof path - 1] = '\0';
  assert_int_equal(kvr_trace_write(trace, path), KVR_E_IO);
  expect_words(&(words){{"too long"}});
  assert_int_equal(kvr_trace_write(trace, "."), KVR_E_IO); /* a folder cannot be replaced */
  assert_int_not_equal(access("..partial", F_OK), 0);
  kvr_trace_destroy(trace);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(shapes_are_refused),
      cmocka_unit_test(types_are_refused),
      cmocka_unit_test(maps_are_refused),
      cmocka_unit_test(masks_are_refused),
      cmocka_unit_test(scales_are_refused),
      cmocka_unit_test(numbers_that_overflow_in_kernels_are_refused),
      cmocka_unit_test(lengths_are_refused),
      cmocka_unit_test(capacity_is_asked_of_every_rank),
      cmocka_unit_test(options_are_refused),
      cmocka_unit_test(missing_arguments_are_named),
      cmocka_unit_test(a_budget_that_no_strategy_fits_is_refused),
      cmocka_unit_test(merges_are_refused),
      cmocka_unit_test(traces_are_refused_and_leave_no_file),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

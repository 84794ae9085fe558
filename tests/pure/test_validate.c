/* Every rule on problems and options: one broken field, its status, and a message that names it. */
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "core/validate.h"
#include "kvring/plan.h"

static int weights[2];
static kvr_request requests[2];
static kvr_problem problem;
static kvr_options options;

static void reset(void) {
  weights[0] = weights[1] = 1;
  requests[0] = (kvr_request){.num_new = 8, .num_cached = 5};
  requests[1] = (kvr_request){.num_new = 0, .num_cached = 0};
  problem = (kvr_problem){.struct_size = sizeof problem,
                          .cache = {.struct_size = sizeof problem.cache,
                                    .num_ranks = 2,
                                    .num_kv_heads = 2,
                                    .head_dim = 64,
                                    .page_size = 4,
                                    .num_pages = 2,
                                    .interleave = 1,
                                    .weights = weights},
                          .num_q_heads = 4,
                          .causal = 1,
                          .num_requests = 2,
                          .requests = requests};
  options = (kvr_options){.struct_size = sizeof options, .strategy = "ring"};
}

static void expect(kvr_status want, const char *word) {
  const kvr_status got = kvr_problem_check(&problem, &options);
  if (got != want)
    fail_msg("%s: got %s, want %s", word, kvr_status_name(got), kvr_status_name(want));
  if (want != KVR_OK && strstr(kvr_error_message(), word) == NULL)
    fail_msg("message '%s' does not say '%s'", kvr_error_message(), word);
  reset();
}

static void test_a_good_problem_passes(void **state) {
  (void)state;
  reset();
  expect(KVR_OK, "");
  assert_int_equal(kvr_problem_check(&problem, NULL), KVR_OK);
  requests[1].num_new = 1; /* empty cache is fine for ring */
  expect(KVR_OK, "");
}

static void test_cache_rules(void **state) {
  (void)state;
  reset();
#define BREAK(status, word, statement)                                                             \
  statement;                                                                                       \
  expect(status, word)
  BREAK(KVR_E_SHAPE, "struct_size", problem.struct_size = 1);
  BREAK(KVR_E_SHAPE, "struct_size", problem.cache.struct_size--);
  BREAK(KVR_E_RANGE, "num_ranks is 0", problem.cache.num_ranks = 0);
  BREAK(KVR_E_RANGE, "limit is 4096", problem.cache.num_ranks = 5000);
  BREAK(KVR_E_RANGE, "num_kv_heads is -1", problem.cache.num_kv_heads = -1);
  BREAK(KVR_E_RANGE, "head_dim is 0", problem.cache.head_dim = 0);
  BREAK(KVR_E_RANGE, "head_dim is 513", problem.cache.head_dim = 513);
  BREAK(KVR_E_RANGE, "page_size is 0", problem.cache.page_size = 0);
  BREAK(KVR_E_RANGE, "num_pages is 0", problem.cache.num_pages = 0);
  BREAK(KVR_E_RANGE, "interleave is 0", problem.cache.interleave = 0);
  BREAK(KVR_E_DTYPE, "cache dtype is 9", problem.cache.dtype = (kvr_dtype)9);
  BREAK(KVR_E_RANGE, "weights[1] is -1", weights[1] = -1);
  BREAK(KVR_E_RANGE, "all 2 weights are 0", weights[0] = weights[1] = 0);
  BREAK(KVR_E_RANGE, "common factor", weights[0] = weights[1] = INT_MAX);
}

static void test_head_and_mask_rules(void **state) {
  (void)state;
  reset();
  BREAK(KVR_E_SHAPE, "5 is not a multiple of num_kv_heads 2", problem.num_q_heads = 5);
  BREAK(KVR_E_RANGE, "num_q_heads is 0", problem.num_q_heads = 0);
  BREAK(KVR_E_DTYPE, "out_dtype is 3", problem.out_dtype = (kvr_dtype)3);
  BREAK(KVR_E_RANGE, "causal is 2", problem.causal = 2);
  BREAK(KVR_E_RANGE, "scale is inf", problem.scale = INFINITY);
  BREAK(KVR_E_RANGE, "scale is", problem.scale = NAN);
  BREAK(KVR_E_RANGE, "window is -1", problem.window = -1);
  BREAK(KVR_OK, "", problem.window = 4);
  BREAK(KVR_E_RANGE, "soft_cap is -1", problem.soft_cap = -1.0f);
  BREAK(KVR_OK, "", problem.soft_cap = 5.0f);
  BREAK(KVR_E_RANGE, "k_scale is inf", problem.k_scale = INFINITY);
  static const float sinks[4] = {0.0f, -INFINITY, NAN, 1.0f};
  BREAK(KVR_E_RANGE, "sinks[2] is nan", problem.sinks = sinks);
}

static void test_request_rules(void **state) {
  (void)state;
  reset();
  BREAK(KVR_E_RANGE, "num_requests is -1", problem.num_requests = -1);
  BREAK(KVR_E_NULL, "requests is NULL", problem.requests = NULL);
  BREAK(KVR_E_RANGE, "request 0: num_new is -3", requests[0].num_new = -3);
  BREAK(KVR_E_RANGE, "request 1: num_cached is -1", requests[1].num_cached = -1);
  BREAK(KVR_E_RANGE, "chunk is -1", requests[0].chunk = -1);
  BREAK(KVR_E_RANGE, "hold 4 tokens, but num_new is 8", requests[0].chunk = 1);
  BREAK(KVR_E_RANGE, "beyond the limit", requests[0].num_cached = INT_MAX);
  BREAK(KVR_E_CAPACITY, "17 tokens need 3 pages of 4 tokens per rank, the pool has 2",
        requests[0].num_cached = 9);
  requests[0] = requests[1] = (kvr_request){.num_new = INT_MAX};
  problem.cache.num_pages = INT_MAX;
  expect(KVR_E_RANGE, "use smaller chunks");
}

static void test_option_rules(void **state) {
  (void)state;
  reset();
  BREAK(KVR_E_SHAPE, "kvr_options.struct_size", options.struct_size = 0);
  BREAK(KVR_E_RANGE, "tile is -1", options.tile = -1);
  BREAK(KVR_E_RANGE, "query_tile is -1", options.query_tile = -1);
  BREAK(KVR_E_RANGE, "at least 2", options.num_slots = 1); /* one slot would race */
  BREAK(KVR_E_RANGE, "num_slots is -2", options.num_slots = -2);
  BREAK(KVR_E_RANGE, "unknown strategy 'rign'", options.strategy = "rign");
  BREAK(KVR_E_CONFLICT, "5 cached tokens", options.strategy = "current-only");
  requests[0].num_cached = 0;
  options.strategy = "current-only";
  expect(KVR_OK, "");
}

static void test_null(void **state) {
  (void)state;
  assert_int_equal(kvr_problem_check(NULL, NULL), KVR_E_NULL);
  assert_int_equal(kvr_cache_desc_check(NULL), KVR_E_NULL);
}

/* ---- merging on the host ---- */

static void expect_merge(float a, float lse_a, float b, float lse_b, float out, float lse) {
  float got, got_lse;
  for (int swap = 0; swap < 2; swap++) {
    const kvr_status status = swap ? kvr_merge_states(&b, &lse_b, &a, &lse_a, 1, 1, &got, &got_lse)
                                   : kvr_merge_states(&a, &lse_a, &b, &lse_b, 1, 1, &got, &got_lse);
    assert_int_equal(status, KVR_OK);
    assert_float_equal(got, out, 1e-5f);
    if (isinf(lse))
      assert_true(got_lse == lse);
    else
      assert_float_equal(got_lse, lse, 1e-5f);
  }
}

static void test_merge_by_hand(void **state) {
  (void)state;
  expect_merge(7, -INFINITY, 9, -INFINITY, 0, -INFINITY);
  expect_merge(7, -INFINITY, 3, 0.5f, 3, 0.5f);
  expect_merge(NAN, -INFINITY, 3, 0.5f, 3, 0.5f);
  expect_merge(1, 0, -3, 200, -3, 200);
  expect_merge(1, -200, -3, 0, -3, 0);
  expect_merge(0, logf(2), 10, logf(8), 8, logf(10)); /* base 2 would give 7.233 */
  float x = 0, inf = INFINITY;
  assert_int_equal(kvr_merge_states(&x, &inf, &x, &x, 1, 1, &x, &x), KVR_E_RANGE);
  assert_int_equal(kvr_merge_states(&x, &x, NULL, &x, 1, 1, &x, &x), KVR_E_NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_good_problem_passes), cmocka_unit_test(test_cache_rules),
      cmocka_unit_test(test_head_and_mask_rules),   cmocka_unit_test(test_request_rules),
      cmocka_unit_test(test_option_rules),          cmocka_unit_test(test_null),
      cmocka_unit_test(test_merge_by_hand),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

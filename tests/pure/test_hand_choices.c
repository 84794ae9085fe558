/* What auto takes, exactly at its thresholds: where moving queries gets as cheap as moving KV, and
 * where the budget is one byte short. */
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "kvring/plan.h"

static kvr_request requests[2];

static kvr_problem problem_of(int NQ, int NKV, int num_requests) {
  return (kvr_problem){.struct_size = sizeof(kvr_problem),
                       .cache = {.struct_size = sizeof(kvr_cache_desc),
                                 .num_ranks = 4,
                                 .num_kv_heads = NKV,
                                 .head_dim = 64,
                                 .page_size = 16,
                                 .num_pages = INT_MAX,
                                 .interleave = 1},
                       .num_q_heads = NQ,
                       .causal = 1,
                       .num_requests = num_requests,
                       .requests = requests};
}

static const char *choice(const kvr_problem *p, size_t budget, const char *why) {
  const char *name = "";
  char reason[256];
  if (kvr_choose(p, NULL, budget, &name, reason, sizeof reason) != KVR_OK)
    return kvr_status_name(KVR_E_OOM);
  if (strstr(reason, why) == NULL) fail_msg("reason '%s' does not say '%s'", reason, why);
  return name;
}

/* context * NKV == 2 * S * NQ: padding to whole chunks does not count, since no rows are padded. */
static void queries_move_from_equal_traffic_on(void **state) {
  (void)state;
  static const int cases[][3] = {{8, 1, 10}, {8, 2, 9}, {8, 8, 64}, {32, 4, 4096}, {1, 1, 1}};
  for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
    const int NQ = cases[n][0], NKV = cases[n][1], S = cases[n][2];
    const kvr_problem p = problem_of(NQ, NKV, 1);
    requests[0] = (kvr_request){.num_new = S, .num_cached = 2 * S * NQ / NKV};
    assert_string_equal(choice(&p, 0, "queries are cheaper"), "gather-q");
    requests[0].num_cached--;
    assert_string_not_equal(choice(&p, 0, "context"), "gather-q");
  }
}

/* The longest context decides, whether it is of the first request or of the last. */
static void the_longest_context_decides(void **state) {
  (void)state;
  const kvr_problem p = problem_of(8, 2, 2);
  const kvr_request small = {.num_new = 100, .num_cached = 10};
  const kvr_request large = {.num_new = 1, .num_cached = 8};
  for (int first = 0; first < 2; first++) {
    requests[first] = (kvr_request){.num_new = 100, .num_cached = 800};
    requests[1 - first] = small;
    assert_string_equal(choice(&p, 0, "context 800"), "gather-q");
    requests[1 - first] = large;
    requests[first] = small;
    assert_string_equal(choice(&p, 0, "context 10 < 16384"), "ring");
    requests[1 - first] = (kvr_request){.num_new = 0, .num_cached = 1 << 20}; /* has no rows */
    assert_string_equal(choice(&p, 0, "context 10 < 16384"), "ring");
  }
}

static size_t bytes_of(const kvr_problem *p, const char *strategy) {
  const kvr_options options = {.struct_size = sizeof options, .strategy = strategy};
  kvr_plan_info info;
  assert_int_equal(kvr_plan_estimate(p, &options, &info), KVR_OK);
  return info.peak_bytes;
}

static void a_budget_one_byte_short_gives_the_ring(void **state) {
  (void)state;
  static const struct {
    const char *strategy;
    int cached, fresh;
  } cases[] = {{"gather-q", 100000, 512}, {"gather-kv", 20000, 4096}};
  for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
    const kvr_problem p = problem_of(8, 2, 1);
    requests[0] = (kvr_request){.num_new = cases[n].fresh, .num_cached = cases[n].cached};
    const size_t need = bytes_of(&p, cases[n].strategy), ring = bytes_of(&p, "ring");
    assert_true(ring < need);
    assert_string_equal(choice(&p, need, ""), cases[n].strategy);
    assert_string_equal(choice(&p, need - 1, "refuse"), "ring");
    assert_string_equal(choice(&p, ring, cases[n].strategy), "ring");
    assert_string_equal(choice(&p, ring - 1, ""), "KVR_E_OOM");
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(queries_move_from_equal_traffic_on),
      cmocka_unit_test(the_longest_context_decides),
      cmocka_unit_test(a_budget_one_byte_short_gives_the_ring),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

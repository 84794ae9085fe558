/* The ladder of auto at its thresholds, and the memory gate. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "kvring/plan.h"

static const char *choose(int cached, int fresh, int nq, int nkv, size_t budget) {
  const kvr_request request = {.num_new = fresh, .num_cached = cached};
  const kvr_problem p = {.struct_size = sizeof p,
                         .cache = {.struct_size = sizeof p.cache,
                                   .num_ranks = 4,
                                   .num_kv_heads = nkv,
                                   .head_dim = 64,
                                   .page_size = 16,
                                   .num_pages = 1 << 20,
                                   .interleave = 1},
                         .num_q_heads = nq,
                         .causal = 1,
                         .num_requests = 1,
                         .requests = &request};
  const char *name = "";
  char reason[256];
  if (kvr_choose(&p, NULL, budget, &name, reason, sizeof reason) != KVR_OK)
    return kvr_status_name(KVR_E_OOM);
  assert_true(strlen(reason) > 0);
  return name;
}

static void test_ladder(void **state) {
  (void)state;
  assert_string_equal(choose(0, 4096, 32, 2, 0), "current-only");
  assert_string_equal(choose(16383, 4096, 32, 2, 0), "ring");
  assert_string_equal(choose(16384, 4096, 32, 2, 0), "gather-kv");
  assert_string_equal(choose(131071, 4096, 32, 2, 0), "gather-kv");
  assert_string_equal(choose(131072, 4096, 32, 2, 0), "gather-q"); /* ctx * NKV == 2 * S * NQ */
  assert_string_equal(choose(1000, 100, 8, 8, 0), "gather-q");
}

static void test_memory_gate(void **state) {
  (void)state;
  const size_t rows = 131071, kv = 2 * 2 * 64 * 4;
  assert_string_equal(choose(131071, 4096, 32, 2, rows * kv), "ring");
  assert_string_equal(choose(131071, 4096, 32, 2, 1000), "KVR_E_OOM");
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_ladder),
                                     cmocka_unit_test(test_memory_gate)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}

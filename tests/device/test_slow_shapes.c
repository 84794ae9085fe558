/* Long shapes: a ragged pair of requests over a long cache, and a cache of a million tokens. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "device_case.h"

static const double tolerance = 2e-5;

static void check(pure_case *c, const char *const *strategies) {
  device_case_fill(c, 31);
  kvr_group *group = device_group(c->problem.cache.num_ranks, 0);
  for (; *strategies != NULL; strategies++) {
    device_run run = {0};
    device_run_init(&run, c, group, *strategies);
    if (device_run_step(&run, c, *strategies) != KVR_OK)
      fail_msg("%s: %s", *strategies, kvr_error_message());
    const double error = device_run_error(&run, c);
    printf("%s: error %.2g of max|V|\n", *strategies, error);
    if (!(error < tolerance)) fail_msg("%s: error %g", *strategies, error);
    if (!device_pools_are_right(&run, c)) fail_msg("%s: wrong cache bytes", *strategies);
    device_run_fini(&run, c);
  }
  kvr_group_destroy(group);
  case_free(c);
}

static pure_case case_of(int NQ, int NKV, int D) {
  return (pure_case){.problem = {.struct_size = sizeof(kvr_problem),
                                 .cache = {.struct_size = sizeof(kvr_cache_desc),
                                           .num_ranks = 2,
                                           .num_kv_heads = NKV,
                                           .head_dim = D,
                                           .page_size = 16,
                                           .num_pages = 1 << 20,
                                           .interleave = 1},
                                 .num_q_heads = NQ,
                                 .causal = 1,
                                 .num_requests = 2},
                     .options = {.struct_size = sizeof(kvr_options)},
                     .sample = 499};
}

static void test_long_requests(void **state) {
  (void)state;
  static const char *const strategies[] = {"ring",     "gather-kv",  "gather-q",
                                           "rotate-q", "rotate-all", NULL};
  pure_case c = case_of(8, 2, 128);
  c.requests[0] = (kvr_request){.num_new = 13037, .num_cached = 204};
  c.requests[1] = (kvr_request){.num_new = 3347, .num_cached = 16384};
  check(&c, strategies);
}

static void test_a_million_cached_tokens(void **state) {
  (void)state;
  static const char *const strategies[] = {"ring", "gather-q", "rotate-q", NULL};
  pure_case c = case_of(4, 1, 16);
  c.requests[0] = (kvr_request){.num_new = 256, .num_cached = 1000000};
  c.requests[1] = (kvr_request){.num_new = 300, .num_cached = 5000};
  c.sample = 85;
  check(&c, strategies);
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_long_requests),
      cmocka_unit_test(test_a_million_cached_tokens),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

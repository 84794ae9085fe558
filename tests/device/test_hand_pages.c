/* Page sizes, garbage in rows that hold no token, and pools in several buffers: whole steps, for
 * every strategy and several P. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device/cache.h"
#include "hand_case.h"

enum { D = 8 };

/* ---- pages ---- */

static void answers_do_not_depend_on_the_page_size(void **state) {
  (void)state;
  static const int pages[] = {1, 2, 3, 5, 16, 64, 128, 256, 512};
  for (int i = 0; i < HAND_NUM_RANKS; i++)
    for (int paged = 0; paged < 2; paged++) {
      /* Pages that also decide who stores what change the order of sums. */
      hand_outputs outputs = {.tolerance = paged ? 1e-6 * 2 : 0.0};
      for (size_t k = 0; k < sizeof pages / sizeof *pages; k++) {
        pure_case c = hand_case(hand_ranks[i], 600, 9, 2, 1, D);
        c.problem.cache.page_size = pages[k];
        c.problem.cache.interleave = paged ? pages[k] : 1;
        c.options.tile = 100;
        hand_run_formula(&c, hand_scrambled_query, hand_scrambled, hand_scrambled_value,
                         hand_expect_same, &outputs);
      }
      hand_outputs_fini(&outputs);
    }
}

/* ---- garbage ---- */

static float garbage_k, garbage_v;

/* All elements that no token has been written to: pools start as 0xff bytes, a NaN. */
static void put_garbage(device_run *run, const pure_case *c) {
  const size_t elements = kvr_cache_bytes(run->cache) / sizeof(float);
  for (int r = 0; r < c->problem.cache.num_ranks; r++) {
    size_t found = 0;
    for (size_t i = 0; i < elements; i++) {
      float x;
      memcpy(&x, run->pools[r] + i * sizeof x, sizeof x);
      if (!isnan(x)) continue;
      memcpy(run->pools[r] + i * sizeof x, i / D % 2 == 0 ? &garbage_k : &garbage_v, sizeof x);
      found++;
    }
    assert_true(found > 0);
  }
}

static void run_with_garbage(float k, float v) {
  static const int lengths[5] = {1, 5, 15, 16, 17};
  garbage_k = k, garbage_v = v;
  for (int i = 0; i < HAND_NUM_RANKS; i++)
    for (int n = 0; n < 5; n++) {
      pure_case c = hand_case(hand_ranks[i], lengths[n], 1 + (i + n) % 2 * 2, 2, 1, D);
      c.problem.cache.page_size = 16;
      c.options.tile = 8;
      hand_fill(&c, hand_scrambled_query, hand_scrambled, hand_scrambled_value);
      hand_run_on(&c, put_garbage, NULL, NULL);
      case_free(&c);
    }
}

static void nan_in_unused_rows_does_not_matter(void **state) {
  (void)state;
  run_with_garbage(NAN, NAN);
}

static void infinities_in_unused_rows_do_not_matter(void **state) {
  (void)state;
  run_with_garbage(INFINITY, INFINITY);
  run_with_garbage(-INFINITY, -INFINITY);
}

static void nan_in_unused_keys_alone_does_not_matter(void **state) {
  (void)state;
  run_with_garbage(NAN, 0.0f);
}

static void nan_in_unused_values_alone_does_not_matter(void **state) {
  (void)state;
  run_with_garbage(0.0f, NAN);
}

/* ---- pools in several buffers ---- */

static kvr_group *group_with_max_alloc(int P, size_t bytes) {
  char text[32];
  snprintf(text, sizeof text, "%zu", bytes);
  setenv("KVRING_MAX_ALLOC", text, 1);
  kvr_group *group = device_group(P, 0);
  unsetenv("KVRING_MAX_ALLOC");
  return group;
}

/* gather-kv needs the whole context in one buffer, which this device does not have. */
static void expect_context_to_be_refused(kvr_group *group, device_run *run, const pure_case *c) {
  const kvr_limits limits = {.struct_size = sizeof limits,
                             .num_q_heads = c->problem.num_q_heads,
                             .max_new_tokens = c->num_tokens,
                             .max_context = c->requests[0].num_cached,
                             .max_requests = 1,
                             .tile = c->options.tile,
                             .strategies = "gather-kv"};
  kvr_session *session = (kvr_session *)run;
  char numbers[96];
  assert_int_equal(kvr_session_create(group, run->cache, &limits, &session), KVR_E_OOM);
  assert_null(session);
  snprintf(numbers, sizeof numbers, "GATHERED buffer of %d bytes, the device allows %zu",
           limits.max_context * 64, group->ranks[0].max_alloc);
  assert_non_null(strstr(kvr_error_message(), numbers));
}

static void run_on_split_pools(pure_case *c, kvr_group *group) {
  device_run run = {0};
  device_run_init(&run, c, group, "all");
  assert_true(kvr_cache_num_buffers(run.cache) >= 4);
  for (int i = 0; i + 1 < kvr_num_strategies(); i++) {
    const char *strategy = kvr_strategy_name(i);
    device_run_rewind(&run, c);
    const kvr_status status = device_run_step(&run, c, strategy);
    if (status == KVR_E_OOM && strcmp(strategy, "gather-kv") == 0) continue;
    device_ok(status, strategy);
    assert_true(device_run_error(&run, c) < 2e-5);
    assert_true(device_pools_are_right(&run, c));
  }
  expect_context_to_be_refused(group, &run, c);
  device_run_fini(&run, c);
}

/* A fifth of the pool is the largest allocation. */
static void split_pools_give_right_answers(void **state) {
  (void)state;
  for (int i = 0; i < HAND_NUM_RANKS; i++) {
    const int P = hand_ranks[i], num_pages = 103 + 3;
    pure_case c = hand_case(P, 400 * P, 6, 2, 1, D);
    kvr_group *group = group_with_max_alloc(P, (size_t)num_pages * 4 * 64 / 5);
    c.options.tile = 60;
    hand_fill(&c, hand_scrambled_query, hand_scrambled, hand_scrambled_value);
    run_on_split_pools(&c, group);
    case_free(&c);
    kvr_group_destroy(group);
  }
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(answers_do_not_depend_on_the_page_size),
      cmocka_unit_test(nan_in_unused_rows_does_not_matter),
      cmocka_unit_test(infinities_in_unused_rows_do_not_matter),
      cmocka_unit_test(nan_in_unused_keys_alone_does_not_matter),
      cmocka_unit_test(nan_in_unused_values_alone_does_not_matter),
      cmocka_unit_test(split_pools_give_right_answers),
  };
  return cmocka_run_group_tests(tests, NULL, hand_close);
}

/* What a plan says about itself, by hand: neighbours in the ring, hops, scratch that does not grow
 * with the context, and lengths up to the largest int. */
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "core/validate.h"
#include "kvring/plan.h"
#include "pure_case.h"
#include "strategy/strategy.h"

static kvr_request request;

static kvr_problem problem_of(int P, int L, int S) {
  request = (kvr_request){.num_new = S, .num_cached = L};
  return (kvr_problem){.struct_size = sizeof(kvr_problem),
                       .cache = {.struct_size = sizeof(kvr_cache_desc),
                                 .num_ranks = P,
                                 .num_kv_heads = 2,
                                 .head_dim = 64,
                                 .page_size = 16,
                                 .num_pages = INT_MAX,
                                 .interleave = 1},
                       .num_q_heads = 8,
                       .causal = 1,
                       .num_requests = 1,
                       .requests = &request};
}

static kvr_schedule *schedule_of(const kvr_strategy *strategy, const kvr_problem *p, int tile) {
  const kvr_options options = {.struct_size = sizeof options, .tile = tile};
  kvr_schedule *s = NULL;
  if (kvr_strategy_schedule(strategy, p, &options, &s) != KVR_OK)
    fail_msg("%s: %s", strategy->name, kvr_error_message());
  return s;
}

/* ---- the ring ---- */

/* next[r]: where r's hops go, -1 if it has none; fails where they go to two places. */
static int find_neighbours(const kvr_schedule *s, int *next) {
  int hops = 0;
  for (int r = 0; r < s->layout.num_ranks; r++) next[r] = -1;
  for (int i = 0; i < s->num_ops; i++) {
    const kvr_op *op = &s->ops[i];
    if (op->kind != KVR_OP_HOP) continue;
    const int from = op->src.rank;
    assert_true(next[from] == -1 || next[from] == op->rank);
    next[from] = op->rank;
    hops++;
  }
  return hops;
}

/* A table that is right for two ranks need not be for three: every rank has one successor and one
 * predecessor, and the way through all of them comes back after P steps, not earlier. */
static void hops_go_once_round_all_ranks(void **state) {
  (void)state;
  static const char *const names[] = {"ring", "ring-two-launch", "rotate-q", "rotate-all"};
  for (size_t n = 0; n < sizeof names / sizeof *names; n++)
    for (int P = 2; P <= 8; P++) {
      const kvr_strategy *strategy = NULL;
      int next[CASE_MAX_RANKS], at = 0;
      const kvr_problem p = problem_of(P, 9 * P + 1, 4 * P);
      assert_int_equal(kvr_strategy_find(names[n], &strategy), KVR_OK);
      kvr_schedule *s = schedule_of(strategy, &p, 4);
      assert_true(find_neighbours(s, next) > 0);
      for (int step = 1; step <= P; step++) {
        assert_int_equal(next[at], (at + 1) % P);
        at = next[at];
        assert_int_equal(at == 0, step == P);
      }
      kvr_schedule_destroy(s);
    }
}

static void one_rank_has_no_neighbour(void **state) {
  (void)state;
  for (int i = 0; i < kvr_num_strategies(); i++) {
    int next[CASE_MAX_RANKS];
    const kvr_strategy *strategy = kvr_strategy_get(i);
    const kvr_problem p = problem_of(1, strategy->serves_cache ? 50 : 0, 7);
    kvr_schedule *s = schedule_of(strategy, &p, 4);
    assert_int_equal(find_neighbours(s, next), 0);
    for (int op = 0; op < s->num_ops; op++) assert_true(s->ops[op].bytes == 0);
    kvr_schedule_destroy(s);
  }
}

/* Every block of a share takes P - 1 hops. */
static void a_share_hops_once_per_block_and_rank(void **state) {
  (void)state;
  static const int contexts[] = {1, 4096, 4097, 100000};
  for (size_t n = 0; n < sizeof contexts / sizeof *contexts; n++)
    for (int P = 2; P <= 8; P++) {
      const kvr_problem p = problem_of(P, contexts[n], 64);
      kvr_schedule *s = schedule_of(&kvr_strategy_ring, &p, 1024);
      int hops = 0, want = 0;
      for (int i = 0; i < s->num_ops; i++) hops += s->ops[i].kind == KVR_OP_HOP && s->ops[i].launch;
      for (int r = 0; r < P; r++)
        want += (kvr_map_count(&p.cache, contexts[n], r) + 1023) / 1024 * (P - 1);
      assert_int_equal(hops, want);
      kvr_schedule_destroy(s);
    }
}

/* ---- scratch ---- */

static kvr_plan_info estimate(const char *strategy, int P, int L) {
  const kvr_problem p = problem_of(P, L, 512);
  const kvr_options options = {.struct_size = sizeof options, .strategy = strategy};
  kvr_plan_info info = {0};
  if (kvr_plan_estimate(&p, &options, &info) != KVR_OK)
    fail_msg("%s, P %d, %d cached: %s", strategy, P, L, kvr_error_message());
  return info;
}

static void scratch_does_not_grow_with_the_context(void **state) {
  (void)state;
  for (int i = 0; i < kvr_num_strategies(); i++)
    for (int P = 1; P <= 8; P++) {
      if (!kvr_strategy_get(i)->serves_cache) continue;
      const char *name = kvr_strategy_name(i);
      const kvr_plan_info a = estimate(name, P, 8192), b = estimate(name, P, 1 << 20);
      assert_int_equal(a.slot_bytes, b.slot_bytes);
      assert_int_equal(a.state_bytes, b.state_bytes);
      /* gather-kv is the one that holds the whole context: 2 heads of K and V of 64 floats. */
      const size_t more = strcmp(name, "gather-kv") == 0 ? ((1 << 20) - 8192) * 1024 : 0;
      assert_int_equal(b.peak_bytes, a.peak_bytes + more);
    }
}

/* ---- the largest lengths ---- */

static void check_totals(const kvr_strategy *strategy, const kvr_problem *p, int tile) {
  kvr_schedule *s = schedule_of(strategy, p, tile); /* and verified */
  const kvr_totals totals = kvr_schedule_totals(s);
  assert_true(totals.bytes_moved == strategy->bytes(s));
  assert_true(totals.state_bytes >= 0);
  if (strategy == &kvr_strategy_ring && p->window == 0 && request.num_new > 0) {
    const int64_t tokens = (int64_t)request.num_cached + request.num_new; /* of 1024 bytes */
    assert_true(totals.bytes_moved == (p->cache.num_ranks - 1) * tokens * 1024);
  }
  kvr_schedule_destroy(s);
}

static void lengths_up_to_the_largest_int_are_planned(void **state) {
  (void)state;
  static const int tiles[] = {INT_MAX, 1 << 30, 1 << 27};
  static const int lengths[][2] = {{INT_MAX - 3, 3},
                                   {INT_MAX, 0},
                                   {0, INT_MAX},
                                   {1 << 30, 1 << 29}};
  for (int i = 0; i < kvr_num_strategies(); i++)
    for (int t = 0; t < 3; t++)
      for (int n = 0; n < 4; n++)
        for (int k = 0; k < 6; k++) {
          const kvr_strategy *strategy = kvr_strategy_get(i);
          kvr_problem p = problem_of(k % 2 ? 8 : 1, lengths[n][0], lengths[n][1]);
          p.window = k % 3 == 0 ? 0 : k % 3 == 1 ? 1000 : INT_MAX;
          p.cache.interleave = k < 3 ? 1 : INT_MAX;
          if (strategy->serves_cache || lengths[n][0] == 0) check_totals(strategy, &p, tiles[t]);
        }
}

/* Refused with a status instead of a number that has wrapped. */
static void expect_uncountable(const kvr_problem *p, int tile, const char *words) {
  const kvr_options options = {.struct_size = sizeof options, .strategy = "ring", .tile = tile};
  kvr_plan_info info = {.num_ops = 77};
  assert_int_equal(kvr_plan_estimate(p, &options, &info), KVR_E_RANGE);
  assert_int_equal(info.num_ops, 77);
  if (strstr(kvr_error_message(), words) == NULL)
    fail_msg("message '%s' does not say '%s'", kvr_error_message(), words);
}

static void more_steps_or_bytes_than_can_be_counted_are_refused(void **state) {
  (void)state;
  int weights[4096] = {1}; /* one rank holds all of the cache */
  kvr_problem p = problem_of(4096, INT_MAX - 1, 1);
  p.cache.weights = weights;
  expect_uncountable(&p, 1024, "the limit is 2147483647: use a larger tile");
  p = problem_of(8, INT_MAX - 1, 1);
  p.cache.num_kv_heads = 1 << 19, p.cache.head_dim = 511, p.num_q_heads = 1 << 19;
  expect_uncountable(&p, INT_MAX, "the limit is 9e18: use fewer tokens or heads");
}

/* Two thousand million cached tokens in tiles of one would be a schedule of terabytes. */
static void more_ops_than_memory_holds_are_refused(void **state) {
  (void)state;
  const kvr_problem p = problem_of(8, 2000000000, 16);
  expect_uncountable(&p, 1, "more than 4194304 ops: use a larger tile");
}

/* Slots of 2^31 rows of 2^31 bytes: from 5 on they do not fit 64 bits. */
static void memory_beyond_64_bits_is_refused_not_wrapped(void **state) {
  (void)state;
  kvr_problem p = problem_of(2, 1000, 16);
  kvr_options options = {.struct_size = sizeof options, .tile = INT_MAX};
  const char *name = "untouched";
  char reason[256];
  p.cache.num_kv_heads = 1 << 19, p.cache.head_dim = 511, p.num_q_heads = 1 << 19;
  for (int slots = 2; slots <= 4096; slots += slots < 16 ? 1 : 371) {
    options.num_slots = slots;
    kvr_plan_info info = {0};
    assert_int_equal(kvr_choose(&p, &options, (size_t)1 << 61, &name, reason, sizeof reason),
                     KVR_E_OOM);
    assert_string_equal(name, "untouched");
    options.strategy = "ring";
    assert_int_equal(kvr_plan_estimate(&p, &options, &info), KVR_OK);
    assert_true(info.peak_bytes > (size_t)1 << 61);
    options.strategy = NULL;
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(hops_go_once_round_all_ranks),
      cmocka_unit_test(one_rank_has_no_neighbour),
      cmocka_unit_test(a_share_hops_once_per_block_and_rank),
      cmocka_unit_test(scratch_does_not_grow_with_the_context),
      cmocka_unit_test(lengths_up_to_the_largest_int_are_planned),
      cmocka_unit_test(more_steps_or_bytes_than_can_be_counted_are_refused),
      cmocka_unit_test(more_ops_than_memory_holds_are_refused),
      cmocka_unit_test(memory_beyond_64_bits_is_refused_not_wrapped),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

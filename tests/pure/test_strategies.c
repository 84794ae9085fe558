/* Every strategy on random steps, run by the reference executor against a dense oracle. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "core/validate.h"
#include "pure_case.h"
#include "schedule/verify.h"
#include "strategy/strategy.h"

enum { NUM_CASES = 600, NUM_ORDERS = 3 };

static bool has_cache(const pure_case *c) {
  for (int i = 0; i < c->problem.num_requests; i++)
    if (c->requests[i].num_cached > 0) return true;
  return false;
}

static kvr_schedule *schedule_or_die(const kvr_strategy *strategy, const pure_case *c, int seed) {
  kvr_schedule *s = NULL;
  if (kvr_strategy_schedule(strategy, &c->problem, &c->options, &s) != KVR_OK)
    fail_msg("seed %d, %s: %s", seed, strategy->name, kvr_error_message());
  return s;
}

static void check_case(const kvr_strategy *strategy, pure_case *c, int seed) {
  kvr_schedule *s = schedule_or_die(strategy, c, seed);
  for (uint64_t order = 0; order < NUM_ORDERS; order++) {
    const double error = case_run(c, s, order);
    if (!(error < 1e-11))
      fail_msg("seed %d, %s, order %d: error %g", seed, strategy->name, (int)order, error);
    if (!case_cache_is_right(c))
      fail_msg("seed %d, %s, order %d: wrong cache", seed, strategy->name, (int)order);
  }
  kvr_schedule_destroy(s);
}

static void test_every_strategy_equals_dense_attention(void **state) {
  (void)state;
  for (int seed = 1; seed <= NUM_CASES; seed++) {
    pure_case c;
    case_randomise(&c, (uint64_t)seed, 0);
    for (int i = 0; i < kvr_num_strategies(); i++) {
      const kvr_strategy *strategy = kvr_strategy_get(i);
      if (strategy->serves_cache || !has_cache(&c)) check_case(strategy, &c, seed);
    }
    case_free(&c);
  }
}

/* The schedule of a strategy with some kinds of dependency left out; not verified. */
static kvr_schedule *mutant(const kvr_strategy *strategy, const pure_case *c, unsigned drop) {
  const kvr_options options = kvr_options_resolve(&c->options);
  kvr_schedule *s = NULL;
  assert_int_equal(kvr_schedule_create(&c->problem, &options, &s), KVR_OK);
  s->strategy = strategy->name;
  s->new_kv = strategy->new_kv;
  s->drop = drop;
  assert_int_equal(strategy->build(s), KVR_OK);
  return s;
}

static pure_case big_case(int P) {
  pure_case c = {0};
  c.problem = (kvr_problem){.struct_size = sizeof c.problem,
                            .cache = {.struct_size = sizeof c.problem.cache,
                                      .num_ranks = P,
                                      .num_kv_heads = 1,
                                      .head_dim = 2,
                                      .page_size = 2,
                                      .num_pages = 100,
                                      .interleave = 1},
                            .num_q_heads = 1,
                            .causal = 1,
                            .num_requests = 2};
  c.requests[0] = (kvr_request){.num_new = 4 * P + 1, .num_cached = 11 * P + 1};
  c.requests[1] = (kvr_request){.num_new = 2 * P + 1, .num_cached = 9 * P + 1};
  c.options =
      (kvr_options){.struct_size = sizeof c.options, .tile = 4, .query_tile = 3, .num_slots = 2};
  return c;
}

/* A dropped rule must be caught by the verifier, and (but for the depth rule, which only bounds
 * what is in flight) some allowed order must give a wrong answer. */
static void check_mutant(const kvr_strategy *strategy, int P, unsigned drop, bool wrong_answers) {
  pure_case c = big_case(P);
  c.problem.requests = c.requests;
  case_fill(&c, 99);
  kvr_schedule *s = mutant(strategy, &c, drop);
  if (kvr_verify_order(s) != KVR_E_VERIFY)
    fail_msg("%s, P %d: drop %u not noticed", strategy->name, P, drop);
  int wrong = 0;
  for (uint64_t order = 1; order <= 40; order++) wrong += !(case_run(&c, s, order) < 1e-11);
  if (wrong_answers && wrong == 0)
    fail_msg("%s, P %d: drop %u has no effect", strategy->name, P, drop);
  kvr_schedule_destroy(s);
  case_free(&c);
}

static void test_dropped_dependencies_are_noticed(void **state) {
  (void)state;
  for (int i = 0; i < kvr_num_strategies(); i++) {
    const kvr_strategy *strategy = kvr_strategy_get(i);
    if (!strategy->serves_cache) continue;
    for (int P = 3; P <= 5; P += 2) {
      check_mutant(strategy, P, KVR_DROP_READ_AFTER_WRITE, true);
      check_mutant(strategy, P, KVR_DROP_WRITE_AFTER_READ, true);
      check_mutant(strategy, P, KVR_DROP_WRITE_AFTER_WRITE, strategy != &kvr_strategy_gather_kv);
      check_mutant(strategy, P, KVR_DROP_LINK, false);
    }
  }
}

/* ---- copies in flight ---- */

static bool is_ready(const kvr_schedule *s, int i, const char *done) {
  const int *deps = kvr_op_deps(s, &s->ops[i]);
  for (int d = 0; d < s->ops[i].num_deps; d++)
    if (done[deps[d]] != 2) return false;
  return true;
}

/* Starts and ends ops at random as far as dependencies allow, out of order; returns the most copies
 * that were ever in flight on one link. */
static int most_in_flight(const kvr_schedule *s, uint64_t seed) {
  const int P = s->layout.num_ranks;
  char *done = calloc((size_t)s->num_ops, 1); /* 0 waiting, 1 running, 2 done */
  int *flying = calloc((size_t)(P * P), sizeof *flying), left = s->num_ops, most = 0;
  assert_non_null(done);
  assert_non_null(flying);
  while (left > 0) {
    const int i = case_between(&seed, 0, s->num_ops - 1);
    const kvr_op *op = &s->ops[i];
    int *link = op->peer >= 0 ? &flying[op->peer * P + op->rank] : NULL;
    if (done[i] == 0 && is_ready(s, i, done)) {
      done[i] = 1;
      if (link != NULL && ++*link > most) most = *link;
    } else if (done[i] == 1 && case_between(&seed, 0, 3) == 0) { /* running ops linger */
      done[i] = 2;
      left--;
      if (link != NULL) --*link;
    }
  }
  free(done);
  free(flying);
  return most;
}

static int most_over_orders(const kvr_strategy *strategy, int P, unsigned drop) {
  pure_case c = big_case(P);
  c.problem.requests = c.requests;
  case_fill(&c, 99);
  kvr_schedule *s = mutant(strategy, &c, drop);
  int most = 0;
  for (uint64_t order = 1; order <= 20; order++) {
    const int n = most_in_flight(s, order);
    most = n > most ? n : most;
  }
  kvr_schedule_destroy(s);
  case_free(&c);
  return most;
}

static void test_one_copy_in_flight_per_link(void **state) {
  (void)state;
  for (int i = 0; i < kvr_num_strategies(); i++) {
    const kvr_strategy *strategy = kvr_strategy_get(i);
    if (!strategy->serves_cache) continue;
    for (int P = 2; P <= 5; P++)
      assert_int_equal(most_over_orders(strategy, P, KVR_DROP_NOTHING), 1);
    assert_true(most_over_orders(strategy, 4, KVR_DROP_LINK) > 1); /* the rule is what does it */
  }
}

/* One op is spoiled; the data check must notice. */
typedef bool spoil(kvr_op *op);
static bool spoil_block(kvr_op *op) {
  if (op->kind != KVR_OP_STAGE || op->local0 == 0) return false;
  op->local0 = 0;
  return true;
}
static bool spoil_keys(kvr_op *op) {
  if (op->kind != KVR_OP_ATTEND || op->attend.ring_end < 2 || !op->launch) return false;
  op->attend.ring_end--;
  op->attend.kv_end--;
  return true;
}
static bool spoil_row_token(kvr_op *op) {
  if (op->kind != KVR_OP_ATTEND || op->attend.kv_end == op->attend.ring_end ||
      op->attend.row_split == 0)
    return false;
  op->attend.row_t0++;
  return true;
}
static bool spoil_carry(kvr_op *op) {
  if (op->kind != KVR_OP_ATTEND || !op->attend.carry_in || !op->launch) return false;
  op->attend.carry_in = 0;
  return true;
}
static bool spoil_launch(kvr_op *op) {
  if (op->kind != KVR_OP_ATTEND || !op->launch || op->attend.kv_end == 0) return false;
  op->launch = false;
  return true;
}
static bool spoil_write(kvr_op *op) {
  if (op->kind != KVR_OP_CACHE_WRITE) return false;
  op->t0++;
  return true;
}

static void test_spoiled_ops_are_noticed(void **state) {
  (void)state;
  spoil *const spoils[] = {spoil_block, spoil_keys,   spoil_row_token,
                           spoil_carry, spoil_launch, spoil_write};
  for (int i = 0; i < kvr_num_strategies(); i++) {
    const kvr_strategy *strategy = kvr_strategy_get(i);
    if (!strategy->serves_cache) continue;
    for (size_t k = 0; k < sizeof spoils / sizeof *spoils; k++) {
      pure_case c = big_case(3);
      c.problem.requests = c.requests;
      case_fill(&c, 7);
      kvr_schedule *s = mutant(strategy, &c, KVR_DROP_NOTHING);
      assert_int_equal(kvr_verify_data(s), KVR_OK);
      bool done = false;
      for (int op = 0; op < s->num_ops && !done; op++) done = spoils[k](&s->ops[op]);
      if (done && kvr_verify_data(s) != KVR_E_VERIFY)
        fail_msg("%s: spoil %d not noticed", strategy->name, (int)k);
      kvr_schedule_destroy(s);
      case_free(&c);
    }
  }
}

static void test_wrong_source_rank_is_noticed(void **state) {
  (void)state;
  pure_case c = big_case(3);
  c.problem.requests = c.requests;
  case_fill(&c, 7);
  kvr_schedule *s = mutant(&kvr_strategy_ring, &c, KVR_DROP_NOTHING);
  for (int op = 0; op < s->num_ops; op++)
    if (s->ops[op].kind == KVR_OP_HOP) { /* the block comes from the downstream neighbour instead */
      s->ops[op].src.rank = (s->ops[op].rank + 1) % 3;
      break;
    }
  assert_int_equal(kvr_verify_data(s), KVR_E_VERIFY);
  assert_true(case_run(&c, s, 0) > 1e-6);
  kvr_schedule_destroy(s);
  case_free(&c);
}

/* With a window, a launch must know whose share it reads: the map of another rank gives other
 * positions. */
static void test_wrong_positions_are_noticed(void **state) {
  (void)state;
  for (int i = 0; i < kvr_num_strategies(); i++) {
    const kvr_strategy *strategy = kvr_strategy_get(i);
    if (!strategy->serves_cache) continue;
    pure_case c = big_case(3);
    c.problem.requests = c.requests;
    c.problem.window = 20;
    case_fill(&c, 7);
    kvr_schedule *s = mutant(strategy, &c, KVR_DROP_NOTHING);
    assert_int_equal(kvr_verify_data(s), KVR_OK);
    assert_true(case_run(&c, s, 0) < 1e-11);
    for (int op = 0; op < s->num_ops; op++)
      if (s->ops[op].kind == KVR_OP_ATTEND && s->ops[op].attend.ring_end > 0) {
        s->ops[op].attend.weight_before = (s->ops[op].attend.weight_before + 1) % 3;
        break;
      }
    assert_int_equal(kvr_verify_data(s), KVR_E_VERIFY);
    kvr_schedule_destroy(s);
    case_free(&c);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_strategy_equals_dense_attention),
      cmocka_unit_test(test_dropped_dependencies_are_noticed),
      cmocka_unit_test(test_one_copy_in_flight_per_link),
      cmocka_unit_test(test_spoiled_ops_are_noticed),
      cmocka_unit_test(test_wrong_source_rank_is_noticed),
      cmocka_unit_test(test_wrong_positions_are_noticed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

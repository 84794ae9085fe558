/* Lengths that are no multiple of anything, and empty requests: whole steps, for every strategy and
 * several P. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "hand_case.h"

enum { D = 8 };

/* ---- lengths ---- */

/* Four tokens of 1 and three of 2; queries, keys and values alike. */
static double ones_then_twos(int request, int position, int head, int dim) {
  (void)request, (void)head, (void)dim;
  return position < 4 ? 1.0 : 2.0;
}

static void expect_seven_keys(const hand_step *s, const void *data) {
  const int L = *(const int *)data;
  for (int t = 0; t < s->c->num_tokens; t++)
    hand_expect_out(s, t, 0, L + t < 4 ? 1.926949 : 1.995364, 2e-6);
}

/* Without the last token the rows would be 1.894285 and 1.993062. */
static void no_token_is_lost_when_p_does_not_divide_the_length(void **state) {
  (void)state;
  for (int i = 0; i < HAND_NUM_RANKS; i++)
    for (int L = 0; L < 7; L++) {
      pure_case c = hand_case(hand_ranks[i], L, 7 - L, 1, 1, D);
      c.problem.causal = 0;
      hand_run_formula(&c, ones_then_twos, ones_then_twos, ones_then_twos, expect_seven_keys, &L);
    }
}

/* S below 2 P: some chunks are empty. Every other S with cached tokens too. */
static void fewer_tokens_than_chunks_give_what_one_rank_gives(void **state) {
  (void)state;
  for (int S = 1; S <= 2 * 8 + 1; S++)
    for (int L = 0; L <= S % 2 * 5; L += 5) {
      hand_outputs one_rank = {.tolerance = 5e-6 * 2, .any_strategy = true};
      for (int i = 0; i < HAND_NUM_RANKS; i++) {
        pure_case c = hand_case(hand_ranks[i], L, S, 2, 1, D);
        if (S <= 2 * hand_ranks[i] + 1 || i == 0)
          hand_run_formula(&c, hand_scrambled_query, hand_scrambled, hand_scrambled_value,
                           hand_expect_same, &one_rank);
      }
      hand_outputs_fini(&one_rank);
    }
}

/* The first step meets memory that nobody wrote, the second what the first left there. */
static void lengths_beside_a_block_are_right_and_repeat_bits(void **state) {
  (void)state;
  static const int lengths[] = {1, 2, 31, 32, 33, 63, 64, 65, 127, 129, 1000};
  enum { NUM = sizeof lengths / sizeof *lengths };
  for (int kv = 0; kv < NUM; kv++)
    for (int q = 0; q <= kv; q++)
      for (int i = (kv + q) % 3; i < HAND_NUM_RANKS; i += 3) {
        pure_case c = hand_case(hand_ranks[i], lengths[kv] - lengths[q], lengths[q], 2, 1, D);
        c.options.tile = 32;
        c.problem.cache.page_size = 16;
        c.sample = lengths[q] > 100 ? 13 : 1;
        hand_run_formula(&c, hand_scrambled_query, hand_scrambled, hand_scrambled_value,
                         hand_expect_same_bits_again, NULL);
      }
}

/* ---- empty requests ---- */

static void expect_three_means(const hand_step *s, const void *data) {
  (void)data;
  const int last[3] = {0, 60, 49};
  assert_int_equal(s->c->num_tokens, 3);
  for (int t = 0; t < 3; t++) {
    hand_expect_out(s, t, 0, 0.5 * last[t], 1e-6 * 60);
    hand_expect_lse(s, t, 0, log(last[t] + 1), 1e-6);
  }
}

/* A request without cache, one without anything, and one without new tokens among others. */
static void empty_requests_have_no_rows_and_hang_nothing(void **state) {
  (void)state;
  for (int i = 0; i < HAND_NUM_RANKS; i++) {
    pure_case c = hand_case(hand_ranks[i], 0, 1, 1, 1, D);
    c.problem.num_requests = 4;
    c.requests[1] = (kvr_request){.num_new = 1, .num_cached = 60};
    c.requests[2] = (kvr_request){0};
    c.requests[3] = (kvr_request){.num_new = 1, .num_cached = 49};
    alarm(30);
    hand_run_formula(&c, hand_zero, hand_zero, hand_position, expect_three_means, NULL);
    c = hand_case(hand_ranks[i], 61, 0, 1, 1, D);
    c.problem.num_requests = 2;
    hand_run_formula(&c, hand_zero, hand_zero, hand_position, NULL, NULL);
    alarm(0);
  }
}

static void expect_no_requests_to_work(const hand_step *s, const void *data) {
  (void)data;
  pure_case none = *s->c;
  none.problem.num_requests = none.num_tokens = 0;
  if (s->index + 1 < kvr_num_strategies())
    device_ok(device_run_step(s->run, &none, s->strategy), s->strategy);
}

static void steps_without_requests_do_nothing(void **state) {
  (void)state;
  for (int i = 0; i < HAND_NUM_RANKS; i++) {
    pure_case c = hand_case(hand_ranks[i], 5, 1, 1, 1, D);
    alarm(30);
    hand_run_formula(&c, hand_zero, hand_zero, hand_position, expect_no_requests_to_work, NULL);
    alarm(0);
  }
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(no_token_is_lost_when_p_does_not_divide_the_length),
      cmocka_unit_test(fewer_tokens_than_chunks_give_what_one_rank_gives),
      cmocka_unit_test(lengths_beside_a_block_are_right_and_repeat_bits),
      cmocka_unit_test(empty_requests_have_no_rows_and_hang_nothing),
      cmocka_unit_test(steps_without_requests_do_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, hand_close);
}

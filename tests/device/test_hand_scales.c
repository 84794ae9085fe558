/* Windows at the edges of blocks and lengths, scales that cancel, and sinks that count once: whole
 * steps, for every strategy and several P. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "hand_case.h"

enum { D = 4 };

/* ---- windows ---- */

static void windows_at_the_edges_of_blocks_and_lengths_are_right(void **state) {
  (void)state;
  enum { L = 50, S = 13, TILE = 7 };
  static const int windows[] = {1, TILE, TILE + 1, L, L + S, 10 * L, 2147483647};
  for (size_t n = 0; n < sizeof windows / sizeof *windows; n++)
    for (int i = 0; i < HAND_NUM_RANKS; i++)
      for (int capped = 0; capped < 2; capped++) {
        pure_case c = hand_case(hand_ranks[i], L, S, 4, 2, D);
        c.problem.window = windows[n];
        c.problem.soft_cap = capped ? 5.0f : 0.0f;
        c.problem.cache.interleave = capped ? 4 : 1;
        c.options.tile = TILE;
        c.options.query_tile = i % 2 ? 3 : 0;
        hand_fill_random(&c, 5 * n + 1);
        hand_run(&c, NULL, NULL);
        case_free(&c);
      }
}

/* ---- scales ---- */

/* What q, k and v are multiplied by, and the option q_scale. */
typedef struct factors {
  double q, k, v, q_scale;
} factors;
static factors applied;

static double scaled_query(int request, int position, int head, int dim) {
  return (double)(float)(applied.q * hand_scrambled_query(request, position, head, dim));
}
static double scaled_key(int request, int position, int head, int dim) {
  return (double)(float)(applied.k * hand_scrambled(request, position, head, dim));
}
static double scaled_value(int request, int position, int head, int dim) {
  return (double)(float)(applied.v * hand_scrambled_value(request, position, head, dim));
}

/* A step whose inputs are multiplied, and whose options take that back. */
static void run_scaled(int P, factors f, int capped, const hand_outputs *outputs) {
  pure_case c = hand_case(P, 29, 9, 2, 1, D);
  applied = f;
  c.problem.scale = (float)(0.5 / f.q);
  c.problem.k_scale = (float)(1 / f.k);
  c.problem.v_scale = (float)(1 / f.v);
  c.problem.q_scale = (float)f.q_scale;
  c.problem.soft_cap = capped ? 5.0f : 0.0f;
  hand_run_formula(&c, scaled_query, scaled_key, scaled_value, hand_expect_same, outputs);
}

static void scaled_inputs_and_inverse_scales(double a, double tolerance) {
  const factors all[] = {{1, 1, 1, 0}, {1, a, 1, 0}, {1, 1, a, 0},
                         {a, 1, 1, 0}, {1, 1, 1, a}, {a, 1 / a, a, a}};
  for (int i = 0; i < HAND_NUM_RANKS; i++) {
    hand_outputs same = {.tolerance = tolerance};
    for (size_t n = 0; n < sizeof all / sizeof *all; n++)
      run_scaled(hand_ranks[i], all[n], i % 2, &same);
    hand_outputs_fini(&same);
  }
}

static void powers_of_two_that_cancel_leave_the_bits(void **state) {
  (void)state;
  scaled_inputs_and_inverse_scales(8, 0);
  scaled_inputs_and_inverse_scales(0.0625, 0);
}

static void scales_that_cancel_leave_the_answer(void **state) {
  (void)state;
  scaled_inputs_and_inverse_scales(3, 2e-5 * 2);
}

/* The comparison must notice a scale that is not taken back. */
static void a_scale_that_stays_is_noticed(void **state) {
  (void)state;
  pure_case c = hand_case(2, 29, 9, 2, 1, D), scaled = hand_case(2, 29, 9, 2, 1, D);
  scaled.problem.k_scale = 2.0f;
  hand_fill(&c, hand_scrambled_query, hand_scrambled, hand_scrambled_value);
  hand_fill(&scaled, hand_scrambled_query, hand_scrambled, hand_scrambled_value);
  double most = 0;
  for (int j = 0; j < c.num_tokens * 2 * D; j++)
    most = fmax(most, fabs(c.want_out[j] - scaled.want_out[j]));
  assert_true(most > 0.01);
  case_free(&c);
  case_free(&scaled);
}

/* ---- sinks ---- */

static double one(int request, int position, int head, int dim) {
  (void)request, (void)position, (void)head, (void)dim;
  return 1.0;
}

/* Heads without a sink, with one as heavy as a key, and with one as heavy as four. */
static void expect_sinks_once(const hand_step *s, const void *data) {
  (void)data;
  static const double weights[] = {1, 0, 4};
  for (int t = 0; t < s->c->num_tokens; t++)
    for (int h = 0; h < 3; h++) {
      const int window = s->c->problem.window, seen = s->c->requests[0].num_cached + t + 1;
      const double n = window > 0 && window < seen ? window : seen, sum = n + weights[h];
      hand_expect_out(s, t, h, n / sum, 1e-6);
      hand_expect_lse(s, t, h, log(sum), 2e-6);
    }
}

static void sinks_count_once_whatever_the_split(void **state) {
  (void)state;
  static const int tiles[] = {1, 3, 1000}, query_tiles[] = {0, 1, 4}, windows[] = {0, 6};
  for (int i = 0; i < HAND_NUM_RANKS; i++)
    for (int t = 0; t < 3; t++)
      for (int w = 0; w < 2; w++)
        for (int cached = 0; cached <= 17; cached += 17) {
          pure_case c = hand_case(hand_ranks[i], cached, 9, 3, 1, D);
          const float sinks[] = {0.0f, -HUGE_VALF, 1.38629436f};
          for (int h = 0; h < 3; h++) c.sinks[h] = sinks[h];
          c.problem.sinks = c.sinks;
          c.problem.window = windows[w];
          c.options.tile = tiles[t];
          c.options.query_tile = query_tiles[t];
          hand_fill(&c, hand_zero, hand_zero, one);
          c.problem.sinks = c.sinks;
          hand_run(&c, expect_sinks_once, NULL);
          case_free(&c);
        }
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(windows_at_the_edges_of_blocks_and_lengths_are_right),
      cmocka_unit_test(powers_of_two_that_cancel_leave_the_bits),
      cmocka_unit_test(scales_that_cancel_leave_the_answer),
      cmocka_unit_test(a_scale_that_stays_is_noticed),
      cmocka_unit_test(sinks_count_once_whatever_the_split),
  };
  return cmocka_run_group_tests(tests, NULL, hand_close);
}

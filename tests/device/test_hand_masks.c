/* Windows, causal rules, soft caps and rows that see nothing, in numbers small enough to check by
 * hand. Most tests run a whole step for every strategy and several P; what no step can express runs
 * the kernel alone. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "attend_case.h"
#include "hand_case.h"

enum { D = 4 };

/* ---- answers ---- */

/* The mean of the positions that a row sees, and the logarithm of their number. */
typedef struct mean_of {
  int first; /* of the first new token */
  int last;
  int grows; /* 1: the next token sees one key more; 0: both ends move by one */
} mean_of;

static void expect_mean(const hand_step *s, const void *data) {
  const mean_of *m = data;
  for (int t = 0; t < s->c->num_tokens; t++) {
    const int first = m->first + (m->grows ? 0 : t), last = m->last + t;
    hand_expect_out(s, t, 0, 0.5 * (first + last), 4e-6 * last);
    hand_expect_lse(s, t, 0, log(last - first + 1), 1e-6);
  }
}

static void expect_mean_of_positions(int L, int S, int window, int tile, mean_of want) {
  for (int i = 0; i < HAND_NUM_RANKS; i++) {
    pure_case c = hand_case(hand_ranks[i], L, S, 1, 1, D);
    c.problem.window = window;
    c.options.tile = tile;
    hand_run_formula(&c, hand_zero, hand_zero, hand_position, expect_mean, &want);
  }
}

/* ---- windows and causal rule ---- */

/* Position 9 sees 6, 7, 8 and 9: a window that left the row itself out would give 7.0. */
static void window_counts_the_row_itself(void **state) {
  (void)state;
  expect_mean_of_positions(9, 1, 4, 3, (mean_of){6, 9, 0});
  expect_mean_of_positions(4, 6, 4, 3, (mean_of){1, 4, 0}); /* partly among the new tokens */
}

static void window_of_one_sees_only_the_row_itself(void **state) {
  (void)state;
  expect_mean_of_positions(9, 1, 1, 3, (mean_of){9, 9, 0});
  expect_mean_of_positions(7, 5, 1, 3, (mean_of){7, 7, 0});
}

static void window_of_the_whole_context_is_no_window(void **state) {
  (void)state;
  static const int windows[] = {0, 12, 13, 100000, 2147483647};
  for (size_t i = 0; i < sizeof windows / sizeof *windows; i++)
    expect_mean_of_positions(9, 3, windows[i], 3, (mean_of){0, 9, 1});
}

/* The first blocks of keys lie outside the window of every row: nothing starts from -inf there. */
static void first_blocks_outside_the_window_leave_no_nan(void **state) {
  (void)state;
  expect_mean_of_positions(199, 1, 4, 32, (mean_of){196, 199, 0});
  expect_mean_of_positions(199, 1, 150, 32, (mean_of){50, 199, 0});
}

/* Positions above 32767 do not fit 16 bits. */
static void window_is_right_beyond_16_bit_positions(void **state) {
  (void)state;
  expect_mean_of_positions(37500, 1, 512, 1024, (mean_of){36989, 37500, 0});
}

/* A decode row sees the whole cache: aligned at the top left it would see position 0 only. */
static void causal_is_aligned_at_the_last_key(void **state) {
  (void)state;
  expect_mean_of_positions(3, 1, 0, 3, (mean_of){0, 3, 1});
  expect_mean_of_positions(3, 4, 0, 3, (mean_of){0, 3, 1});
}

/* ---- soft caps ---- */

static double ten_thousand_times(int request, int position, int head, int dim) {
  return 10000.0 * hand_position(request, position, head, dim);
}

static void expect_hidden_key_has_no_weight(const hand_step *s, const void *data) {
  (void)data;
  hand_expect_out(s, 0, 0, 0.0, 0.0);
  hand_expect_out(s, 1, 0, 5000.0, 5e-3);
}

/* A cap after the mask would give the key that row 0 does not see the weight exp(-1). */
static void soft_cap_comes_before_the_mask(void **state) {
  (void)state;
  for (int i = 0; i < HAND_NUM_RANKS; i++) {
    pure_case c = hand_case(hand_ranks[i], 0, 2, 1, 1, D);
    c.problem.soft_cap = 1.0f;
    hand_run_formula(&c, hand_zero, hand_zero, ten_thousand_times, expect_hidden_key_has_no_weight,
                     NULL);
  }
}

/* Two keys whose scaled logits are 10 and 0, at the default scale of 1 / 8, and values 1 and 0. */
static double first_dim(int request, int position, int head, int dim) {
  (void)request, (void)position, (void)head;
  return dim == 0;
}
static double eighty_then_zero(int request, int position, int head, int dim) {
  (void)request, (void)head;
  return dim == 0 && position == 0 ? 80.0 : 0.0;
}
static double one_then_zero(int request, int position, int head, int dim) {
  (void)request, (void)head, (void)dim;
  return position == 0;
}

static void expect_first_weight(const hand_step *s, const void *data) {
  hand_expect_out(s, 0, 0, *(const double *)data, 1e-6);
}

static void expect_weight_of_ten(float cap, double want) {
  for (int i = 0; i < HAND_NUM_RANKS; i++) {
    pure_case c = hand_case(hand_ranks[i], 1, 1, 1, 1, 64);
    c.problem.soft_cap = cap;
    hand_run_formula(&c, first_dim, eighty_then_zero, one_then_zero, expect_first_weight, &want);
  }
}

/* A cap of the unscaled logits would give 0.6514. */
static void soft_cap_is_applied_after_the_scale(void **state) {
  (void)state;
  expect_weight_of_ten(0.0f, 0.9999546);
  expect_weight_of_ten(5.0f, 0.9919989);
}

/* ---- rows that see nothing: the kernel alone, one head, D 1 ---- */

static const shape single = {1, 1, 1, F32, F32, 16};

/* Rows of zero queries, from token 0, over keys with values v, from token key_t0. */
static attend_case rows_over(int num_rows, int num_keys, int key_t0, const float *v) {
  kvr_attend_args a = plain_args(single, num_rows, 0, num_keys);
  a.causal = 1, a.key_t0 = key_t0;
  attend_case c = make_case(single, a, 0);
  for (int x = 0; x < num_keys; x++) {
    const void *from;
    const size_t at = key_offset(&c, &a, x, 0, &from);
    store(c.cur, at, F32, 0.0f);
    store(c.cur, at + 1, F32, v[x]);
  }
  return c;
}

static void expect_row(const attend_case *c, int row, float out, float lse) {
  assert_true(((float *)c->out)[Q_ROW + row] == out);
  if (isinf(lse))
    assert_true(c->lse[Q_ROW + row] == lse);
  else
    assert_float_equal(c->lse[Q_ROW + row], lse, 1e-6f);
}

static void rows_before_the_first_key_have_lse_minus_inf(void **state) {
  (void)state;
  attend_case c = rows_over(4, 2, 2, (const float[]){1, 1});
  run_case(&c, 1, &c.a);
  expect_row(&c, 0, 0, -INFINITY);
  expect_row(&c, 1, 0, -INFINITY);
  expect_row(&c, 2, 1, 0);
  expect_row(&c, 3, 1, 0.693147f);
  free_case(&c);
}

/* A softmax over equally masked scores would be uniform: 2. */
static void fully_masked_row_is_not_a_mean(void **state) {
  (void)state;
  attend_case c = rows_over(1, 3, 5, (const float[]){1, 2, 3});
  run_case(&c, 1, &c.a);
  expect_row(&c, 0, 0, -INFINITY);
  free_case(&c);
}

#define KERNEL_TEST(test) cmocka_unit_test_setup_teardown(test, setup_device, teardown_device)

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(window_counts_the_row_itself),
      cmocka_unit_test(window_of_one_sees_only_the_row_itself),
      cmocka_unit_test(window_of_the_whole_context_is_no_window),
      cmocka_unit_test(first_blocks_outside_the_window_leave_no_nan),
      cmocka_unit_test(window_is_right_beyond_16_bit_positions),
      cmocka_unit_test(causal_is_aligned_at_the_last_key),
      cmocka_unit_test(soft_cap_comes_before_the_mask),
      cmocka_unit_test(soft_cap_is_applied_after_the_scale),
      KERNEL_TEST(rows_before_the_first_key_have_lse_minus_inf),
      KERNEL_TEST(fully_masked_row_is_not_a_mean),
  };
  return cmocka_run_group_tests(tests, NULL, hand_close);
}

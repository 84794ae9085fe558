/* kvr_attend against a double reference that calls the same kvr_visible. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attend_case.h"
#include "device/variant.h"
#include "shared.h"

static const shape shapes[] = {
    {1, 1, 1, F32, F32, 16},     {20, 2, 3, F32, F32, 32},     {59, 7, 2, F16, F32, 128},
    {64, 4, 2, F32, F16, 128},   {64, 16, 1, BF16, BF16, 16},  {80, 2, 2, F16, F16, 32},
    {96, 7, 1, BF16, F32, 64},   {128, 16, 2, F32, F32, 128},  {128, 4, 2, F16, BF16, 16},
    {192, 1, 2, BF16, F32, 32},  {256, 16, 1, F32, BF16, 256}, {256, 2, 1, BF16, F32, 32},
    {512, 16, 1, F16, F32, 256}, {512, 2, 1, F32, F32, 16},
};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };
static const shape small = {20, 2, 2, F32, F32, 32};

static void test_shapes(void **state) {
  (void)state;
  const int step = tested.name == NULL ? 1 : 3; /* builds take long */
  for (int i = 0; i < NUM_SHAPES; i += step) {
    const kvr_attend_args a = two_run_args(shapes[i]);
    attend_case c = make_case(shapes[i], a, 3);
    expect_right(&c, 1, &a);
    free_case(&c);
  }
}

/* The axis cut by `lower` inside a block of keys, and state carried over. */
static void test_carry(void **state) {
  (void)state;
  static const int cuts[] = {0, 45, 100, 151}; /* the ring ends at 61 */
  for (int i = 0; i < NUM_SHAPES; i += 3) {
    const kvr_attend_args a = two_run_args(shapes[i]);
    kvr_attend_args parts[3];
    for (int n = 0; n < 3; n++) {
      parts[n] = a;
      parts[n].lower = cuts[n], parts[n].kv_end = cuts[n + 1];
      parts[n].carry_in = n > 0, parts[n].finish = n == 2;
    }
    attend_case c = make_case(shapes[i], a, 3);
    expect_right(&c, 3, parts);
    assert_true(compare(&c, 1, &a) <= 1);
    free_case(&c);
  }
}

static void test_long_axis_repeats_bits(void **state) {
  (void)state;
  const shape s = {64, 4, 2, F32, F32, 128};
  kvr_attend_args a = plain_args(s, 40, 300, 333);
  a.lower = 150, a.causal = 1, a.row_t0 = 293;
  attend_case c = make_case(s, a, 3);
  expect_right(&c, 1, &a);
  const size_t bytes = (size_t)c.num_q * row_width(&c) * sizeof(float);
  void *first = malloc(bytes);
  memcpy(first, c.out, bytes);
  run_case(&c, 1, &a);
  assert_memory_equal(first, c.out, bytes);
  free(first);
  free_case(&c);
}

/* Masks off by one, and a lost carry, must fail the comparison. */
static void test_comparison_sees_wrong_masks(void **state) {
  (void)state;
  const kvr_attend_args a = two_run_args(small);
  kvr_attend_args wrong[] = {a, a, a, a, a, a};
  wrong[0].lower = 1, wrong[1].kv_end -= 30, wrong[2].key_t1++;
  wrong[3].row_t0--, wrong[4].causal = 0, wrong[5].key_split--;
  attend_case c = make_case(small, a, 3);
  expect_right(&c, 1, &a);
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
    assert_true(compare(&c, 1, &wrong[i]) > 1);
  free_case(&c);
}

/* NaN and Inf in K and V of tokens that only later rows of the same tile may see. */
static void test_poison(void **state) {
  (void)state;
  for (int value = 0; value < 4; value++) {
    const shape s = {shapes[value * 2].head_dim, 2, 2, value % 3, F32, 64};
    kvr_attend_args a = two_run_args(s);
    a.lower = 7;
    attend_case c = make_case(s, a, 3);
    const float poison = (const float[]){NAN, INFINITY, -INFINITY, NAN}[value];
    c.skip_token = 50;
    for (int x = 0; x < a.kv_end; x++) {
      const int token = kvr_run_token(x - a.ring_end, a.key_split, a.key_t0, a.key_t1);
      if (x >= a.lower && (x < a.ring_end || token < c.skip_token)) continue;
      for (int h = 0; h < s.num_kv_heads; h++) {
        const void *from;
        const size_t at = key_offset(&c, &a, x, h, &from);
        void *to = x < a.ring_end ? c.ring : c.cur;
        for (int d = value == 3 ? s.head_dim : 0; d < 2 * s.head_dim; d++)
          store(to, at + (size_t)d, c.s.kv_dtype, poison);
      }
    }
    expect_right(&c, 1, &a);
    free_case(&c);
  }
}

/* Rows that see nothing have out 0, LSE -inf and the empty state, even with other rows beside. */
static void test_blind_rows(void **state) {
  (void)state;
  kvr_attend_args a = plain_args(small, 12, 0, 30);
  a.causal = 1, a.key_t0 = 5; /* rows 0..4 see nothing */
  attend_case c = make_case(small, a, 3);
  expect_right(&c, 1, &a);
  assert_true(isinf(c.lse[Q_ROW * a.num_q_heads]));
  assert_true(isfinite(c.lse[(Q_ROW + 5) * a.num_q_heads]) != 0);
  a.finish = 0;
  run_case(&c, 1, &a);
  const size_t w = row_width(&c);
  const float *row = c.state + (size_t)STATE_ROW * (w + 2 * (size_t)a.num_q_heads);
  for (size_t i = 0; i < w; i++) assert_true(row[i] == 0.0f);
  for (int i = 0; i < a.num_q_heads; i++)
    assert_true(row[w + 2 * (size_t)i] == -INFINITY && row[w + 2 * (size_t)i + 1] == 0.0f);
  free_case(&c);
}

/* kv_end 0: out 0 and LSE -inf without carry, a mere normalisation with it. */
static void test_empty_axis(void **state) {
  (void)state;
  kvr_attend_args a = plain_args(small, 12, 0, 0);
  attend_case c = make_case(small, a, 3);
  expect_right(&c, 1, &a);
  free_case(&c);

  kvr_attend_args two[2] = {plain_args(small, 12, 40, 0), plain_args(small, 12, 40, 0)};
  two[0].finish = 0;
  two[1].carry_in = 1, two[1].ring_end = two[1].kv_end = two[1].key_split = 0;
  c = make_case(small, two[0], 3);
  expect_right(&c, 2, two);
  free_case(&c);
}

static void test_huge_scores(void **state) {
  (void)state;
  const shape s = {64, 4, 1, F32, F32, 32};
  const kvr_attend_args a = two_run_args(s);
  attend_case c = make_case(s, a, 8e4f / 3); /* scores spread over about +-1e4 and more */
  c.loosen = 500;                            /* f32 scores of 1e4 are good to 1e-3 */
  expect_right(&c, 1, &a);
  free_case(&c);
}

static void test_variants(void **state) {
  (void)state;
  const kvr_cache_desc cache = {.head_dim = 80, .dtype = KVR_BF16};
  char text[128];
  size_t global[2], local[2];
  for (int i = 0; i < kvr_num_variants(); i++) {
    assert_true(kvr_variant_options(i, &cache, KVR_F16, KVR_PRODUCTS_F32, text, sizeof text));
    assert_false(kvr_variant_options(i, &cache, KVR_F16, KVR_PRODUCTS_F32, text, 10));
    clReleaseKernel(build_kernel(kvr_variant_get(i)->file, "kvr_attend", text));
    kvr_variant_sizes(i, 100, 7, 3, global, local);
    const size_t tile = (size_t)kvr_variant_get(i)->row_tile;
    const size_t groups = global[0] / local[0];
    assert_true(groups * tile >= 700 && (groups - 1) * tile < 700 && global[1] == 3);
    assert_int_equal(groups * local[0], global[0]);
    assert_int_equal(local[1], 1);
    assert_int_equal(kvr_variant_find(kvr_variant_get(i)->name), i);
  }
  assert_int_equal(kvr_variant_find("rows"), -1);
  assert_null(kvr_variant_get(kvr_num_variants()));
  assert_false(kvr_variant_options(kvr_num_variants(), &cache, KVR_F16, KVR_PRODUCTS_F32, text,
                                   sizeof text));
}

static const char *picked(const bool *usable, int num_rows, int group) {
  return kvr_variant_get(kvr_variant_pick(usable, num_rows, group))->name;
}

static void test_pick(void **state) {
  (void)state;
  bool usable[KVR_MAX_VARIANTS] = {false};
  assert_int_equal(kvr_variant_pick(usable, 1, 16), -1);
  usable[kvr_variant_find("plain")] = true;
  assert_string_equal(picked(usable, 512, 16), "plain");
  for (int i = 0; i < kvr_num_variants(); i++) usable[i] = true;
  assert_true(kvr_variant_get(kvr_variant_pick(usable, 512, 16))->bf16);
  assert_string_equal(picked(usable, 1, 4), "rows16");
  for (int i = 0; i < kvr_num_variants(); i++) usable[i] = !kvr_variant_get(i)->bf16;
  assert_string_equal(picked(usable, 1, 16), "rows16");
  assert_string_equal(picked(usable, 512, 16), "rows256");
  usable[kvr_variant_find("rows256")] = false;
  assert_string_equal(picked(usable, 512, 16), "rows64");
}

static void test_defaults(void **state) {
  (void)state;
  clReleaseKernel(build_kernel("attend.cl", "kvr_attend", ""));
}

static int run_all(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_shapes),
      cmocka_unit_test(test_carry),
      cmocka_unit_test(test_long_axis_repeats_bits),
      cmocka_unit_test(test_comparison_sees_wrong_masks),
      cmocka_unit_test(test_poison),
      cmocka_unit_test(test_blind_rows),
      cmocka_unit_test(test_empty_axis),
      cmocka_unit_test(test_huge_scores),
  };
  return cmocka_run_group_tests(tests, setup_device, teardown_device);
}

int main(void) {
  const struct CMUnitTest units[] = {cmocka_unit_test(test_variants), cmocka_unit_test(test_pick),
                                     cmocka_unit_test(test_defaults)};
  const int failed = cmocka_run_group_tests(units, setup_device, teardown_device);
  return failed + run_for_every_kind(run_all);
}

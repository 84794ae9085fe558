/* kvr_attend with sliding windows, soft caps, sinks and scales, against the double reference. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attend_case.h"

static const shape small = {20, 2, 2, F32, F32, 32};
static const shape shapes[] = {{20, 2, 2, F32, F32, 32},
                               {128, 4, 1, F16, F32, 64},
                               {59, 1, 2, BF16, BF16, 16},
                               {64, 7, 1, F32, F16, 128}};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

/* Who holds the cached keys: interleave, total weight, weight, weight before, local index of x=0.*/
static const int maps[][5] = {{0, 0, 0, 0, 0}, {1, 4, 1, 2, 0}, {16, 3, 1, 1, 5},
                              {4, 7, 3, 2, 9}, {2, 5, 5, 0, 0}, {INT_MAX, 3, 2, 0, 40}};
enum { NUM_MAPS = sizeof maps / sizeof *maps };
static const int windows[] = {1, 7, 40, 150, 100000, INT_MAX};
enum { NUM_WINDOWS = sizeof windows / sizeof *windows };

/* The smallest L under which x < ring_end are cached keys, and some more. */
static kvr_attend_args with_map(kvr_attend_args a, const int map[5], int window) {
  a.interleave = map[0], a.total_weight = map[1], a.weight = map[2], a.weight_before = map[3];
  a.key_local0 = map[4], a.window = window;
  a.num_cached = a.ring_end > 0 ? (int)kvr_ring_position(a.ring_end - 1, a) + 3 : 0;
  return a;
}

static void test_positions(void **state) {
  (void)state;
  for (int i = 1; i < NUM_MAPS; i++) {
    const int *m = maps[i];
    int local = 0;
    for (int g = 0; g < 500; g++) {
      if (kvr_local_index(g, m[0], m[1], m[2], m[3]) < 0) continue;
      assert_int_equal(kvr_key_position(local, m[0], m[1], m[2], m[3]), g);
      local++;
    }
    assert_true(local > 30);
  }
  assert_int_equal(kvr_key_position(INT_MAX, 1, 1, 1, 0), INT_MAX);
  assert_true(kvr_key_position(INT_MAX, 1 << 20, 1 << 20, 1 << 8, 7) ==
              INT64_C(7) * (1 << 20) + (INT64_C(7) << 40) + (1 << 28) - 1);
}

static void test_windows(void **state) {
  (void)state;
  for (int n = 0; n < NUM_SHAPES; n++)
    for (int m = 0; m < NUM_MAPS; m++)
      for (int w = m % 2; w < NUM_WINDOWS; w += 2 - (n == 0)) {
        kvr_attend_args a = with_map(two_run_args(shapes[n]), maps[m], windows[w]);
        a.causal = (n + w) % 3 != 2;
        attend_case c = make_case(shapes[n], a, 3);
        expect_right(&c, 1, &a);
        free_case(&c);
      }
}

/* Several blocks of keys, most of them outside. */
static void test_windows_on_long_axis(void **state) {
  (void)state;
  for (int w = 0; w < NUM_WINDOWS; w++) {
    kvr_attend_args a = with_map(plain_args(shapes[1], 70, 700, 333), maps[w], windows[w]);
    a.causal = 1, a.row_split = 30, a.row_t0 = 4, a.row_t1 = 290;
    attend_case c = make_case(shapes[1], a, 3);
    expect_right(&c, 1, &a);
    free_case(&c);
  }
}

/* The axis cut inside the ring and both runs of new keys. */
static void split_axis(kvr_attend_args a, kvr_attend_args parts[3]) {
  static const int cuts[] = {0, 45, 100, 151}; /* the ring ends at 61 */
  for (int n = 0; n < 3; n++) {
    parts[n] = a;
    parts[n].lower = cuts[n], parts[n].kv_end = cuts[n + 1];
    parts[n].carry_in = n > 0, parts[n].finish = n == 2;
  }
}

static void test_window_with_carry(void **state) {
  (void)state;
  for (int w = 0; w < NUM_WINDOWS; w++) {
    const shape s = shapes[w % NUM_SHAPES];
    const kvr_attend_args a = with_map(two_run_args(s), maps[w], windows[w]);
    kvr_attend_args parts[3];
    split_axis(a, parts);
    attend_case c = make_case(s, a, 3);
    expect_right(&c, 3, parts);
    assert_true(compare(&c, 1, &a) <= 1);
    free_case(&c);
  }
}

/* NaN outside the window, within the same groups of keys. */
static void test_window_hides_poison(void **state) {
  (void)state;
  kvr_attend_args a = plain_args(small, 12, 90, 12);
  a = with_map(a, maps[1], 33);
  a.causal = 1;
  attend_case c = make_case(small, a, 3);
  for (int x = 0; x < a.ring_end; x++) {
    if (kvr_visible(0, x, a)) continue;
    for (int h = 0; h < small.num_kv_heads; h++) {
      const void *from;
      const size_t at = key_offset(&c, &a, x, h, &from);
      for (size_t d = 0; d < 2 * (size_t)small.head_dim; d++)
        store(c.ring, at + d, c.s.kv_dtype, NAN);
    }
  }
  expect_right(&c, 1, &a);
  free_case(&c);
}

/* Rows whose window holds no key of the launch beside rows that see some. */
static void test_blind_rows(void **state) {
  (void)state;
  kvr_attend_args a = with_map(plain_args(small, 12, 30, 0), maps[0], 9);
  attend_case c = make_case(small, a, 3);
  expect_right(&c, 1, &a);
  const size_t first = Q_ROW * (size_t)a.num_q_heads;
  const size_t last = (Q_ROW + 11) * (size_t)a.num_q_heads, D = (size_t)small.head_dim;
  assert_true(isfinite(c.lse[first]) != 0);
  assert_true(c.lse[last] == -INFINITY);
  for (size_t d = 0; d < D; d++) assert_true(((float *)c.out)[last * D + d] == 0.0f);
  a.window = 1, a.causal = 1; /* nobody sees a cached key */
  expect_right(&c, 1, &a);
  assert_true(c.lse[first] == -INFINITY);
  free_case(&c);
}

static void test_comparison_sees_wrong_windows(void **state) {
  (void)state;
  const kvr_attend_args a = with_map(two_run_args(small), maps[3], 50);
  kvr_attend_args wrong[] = {a, a, a, a, a, a, a, a};
  wrong[0].window--, wrong[1].window++, wrong[2].window = 0, wrong[3].num_cached++;
  wrong[4].key_local0++, wrong[5].weight_before--, wrong[6].interleave *= 2;
  wrong[7].total_weight = 0;
  attend_case c = make_case(small, a, 3);
  expect_right(&c, 1, &a);
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
    assert_true(compare(&c, 1, &wrong[i]) > 1);
  free_case(&c);
}

static const float LOG2E = 1.44269504f;

static void test_soft_caps(void **state) {
  (void)state;
  static const float caps[] = {5, 30, 0.5f, 1e4f};
  for (int n = 0; n < NUM_SHAPES; n++)
    for (int i = 0; i < 4; i++) {
      kvr_attend_args a = two_run_args(shapes[n]);
      a.soft_cap_log2 = caps[i] * LOG2E;
      attend_case c = make_case(shapes[n], a, i == 1 ? 100 : 10);
      c.loosen *= i == 1 ? 3 : 1; /* scores about 60 before the cap */
      expect_right(&c, 1, &a);
      free_case(&c);
    }
}

static void test_comparison_sees_wrong_caps(void **state) {
  (void)state;
  kvr_attend_args a = two_run_args(small);
  a.soft_cap_log2 = LOG2E;
  attend_case c = make_case(small, a, 10);
  expect_right(&c, 1, &a);
  kvr_attend_args wrong = a;
  wrong.soft_cap_log2 = 0;
  assert_true(compare(&c, 1, &wrong) > 1);
  c.wrong = CAP_AFTER_MASK;
  assert_true(compare(&c, 1, &a) > 1);
  free_case(&c);
}

/* Three launches that carry, all told to use sinks: only the first may. */
static void test_sinks(void **state) {
  (void)state;
  for (int n = 0; n < NUM_SHAPES; n++) {
    kvr_attend_args a = two_run_args(shapes[n]), parts[3];
    a.use_sinks = 1;
    split_axis(a, parts);
    attend_case c = make_case(shapes[n], a, 3);
    for (int h = 0; h < a.num_q_heads; h++) c.sinks[h] += 3; /* beside about 100 keys */
    expect_right(&c, 3, parts);
    assert_true(compare(&c, 1, &a) <= 1);
    c.wrong = SINK_PER_LAUNCH;
    assert_true(compare(&c, 3, parts) > 1);
    c.wrong = NO_MISTAKE;
    a.use_sinks = 0;
    assert_true(compare(&c, 1, &a) > 1);
    free_case(&c);
  }
}

/* Rows that see nothing but a sink: out 0, LSE the sink. */
static void test_sinks_alone(void **state) {
  (void)state;
  kvr_attend_args a = plain_args(small, 12, 0, 30);
  a.causal = 1, a.key_t0 = 5, a.use_sinks = 1; /* rows 0..4 see nothing */
  attend_case c = make_case(small, a, 3);
  expect_right(&c, 1, &a);
  for (int h = 0; h < a.num_q_heads; h++) {
    const size_t at = (size_t)(Q_ROW * a.num_q_heads + h), D = (size_t)small.head_dim;
    assert_true(c.sinks[h] == -INFINITY ? c.lse[at] == -INFINITY
                                        : fabsf(c.lse[at] - c.sinks[h]) < 1e-6f);
    for (size_t d = 0; d < D; d++) assert_true(((float *)c.out)[at * D + d] == 0.0f);
  }
  free_case(&c);
}

static void test_scales(void **state) {
  (void)state;
  for (int n = 0; n < NUM_SHAPES; n++) {
    kvr_attend_args a = two_run_args(shapes[n]);
    a.q_inv_scale = 1 / 0.37f, a.scale_log2 *= 0.37f, a.out_scale = 0.7f;
    attend_case c = make_case(shapes[n], a, 3);
    expect_right(&c, 1, &a);
    kvr_attend_args wrong[2] = {a, a};
    wrong[0].out_scale = 1, wrong[1].q_inv_scale = 0;
    for (int i = 0; i < 2; i++) assert_true(compare(&c, 1, &wrong[i]) > 1);
    free_case(&c);
  }
}

/* Queries beyond the largest half stay finite. */
static void test_queries_are_clipped(void **state) {
  (void)state;
  kvr_attend_args a = two_run_args(shapes[1]);
  if (tested.name != NULL && strncmp(tested.name, "bf16", 4) == 0) return; /* no halves there */
  a.q_inv_scale = 1e5f, a.scale_log2 *= 1e-5f;
  attend_case c = make_case(shapes[1], a, 3);
  expect_right(&c, 1, &a);
  kvr_attend_args unclipped = a;
  unclipped.q_inv_scale = 0, unclipped.scale_log2 *= 1e5f;
  assert_true(compare(&c, 1, &unclipped) > 1);
  free_case(&c);
}

static void test_all_at_once(void **state) {
  (void)state;
  for (int n = 0; n < NUM_SHAPES; n++) {
    kvr_attend_args a = with_map(two_run_args(shapes[n]), maps[n + 1], 40), parts[3];
    a.soft_cap_log2 = 5 * LOG2E, a.use_sinks = 1;
    a.q_inv_scale = 2.5f, a.scale_log2 *= 0.4f, a.out_scale = 0.7f;
    split_axis(a, parts);
    attend_case c = make_case(shapes[n], a, 10);
    expect_right(&c, 3, parts);
    free_case(&c);
  }
}

/* ---- by hand: one head, D 1 ---- */

static const shape single = {1, 1, 1, F32, F32, 16};

static void set_key(attend_case *c, int x, float k, float v) {
  const void *from;
  const size_t at = key_offset(c, &c->a, x, 0, &from);
  void *to = x < c->a.ring_end ? c->ring : c->cur;
  store(to, at, c->s.kv_dtype, k);
  store(to, at + 1, c->s.kv_dtype, v);
}

/* Probabilities by hand are not exact in bf16; those that are 1 / n are. */
static float allowed(const attend_case *c, float exact) { return c->loosen > 1.0 ? 4e-3f : exact; }

static float result(attend_case *c, int row) {
  run_case(c, 1, &c->a);
  return ((float *)c->out)[Q_ROW + row];
}

/* Position 9 sees 6, 7, 8, 9. */
static void test_window_by_hand(void **state) {
  (void)state;
  kvr_attend_args a = plain_args(single, 2, 8, 2);
  a.causal = 1, a.num_cached = 8, a.window = 4;
  attend_case c = make_case(single, a, 3);
  for (int x = 0; x < 10; x++) set_key(&c, x, 0, (float)x);
  assert_true(fabsf(result(&c, 1) - 7.5f) < allowed(&c, 1e-6f));
  assert_true(fabsf(result(&c, 0) - 6.5f) < allowed(&c, 1e-6f));
  free_case(&c);
}

static void test_soft_cap_by_hand(void **state) {
  (void)state;
  kvr_attend_args a = plain_args(single, 1, 0, 2);
  a.soft_cap_log2 = 5 * LOG2E, a.scale_log2 = LOG2E;
  attend_case c = make_case(single, a, 3);
  store(c.q, Q_ROW, c.s.kv_dtype, 1);
  set_key(&c, 0, 10, 1);
  set_key(&c, 1, 0, 0);
  assert_true(fabsf(result(&c, 0) - 0.9919989f) < allowed(&c, 5e-7f));
  free_case(&c);
}

/* A cap after the mask would give the hidden key the weight exp(-cap). */
static void test_soft_cap_does_not_unmask(void **state) {
  (void)state;
  kvr_attend_args a = plain_args(single, 2, 0, 2);
  a.soft_cap_log2 = 5 * LOG2E, a.causal = 1;
  attend_case c = make_case(single, a, 3);
  set_key(&c, 0, 1, 0);
  set_key(&c, 1, 1, 8192);
  assert_true(result(&c, 0) == 0.0f);
  assert_true(fabsf(result(&c, 1) - 4096) < 1e-2f);
  free_case(&c);
}

static int run_all(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_positions),
      cmocka_unit_test(test_windows),
      cmocka_unit_test(test_windows_on_long_axis),
      cmocka_unit_test(test_window_with_carry),
      cmocka_unit_test(test_window_hides_poison),
      cmocka_unit_test(test_blind_rows),
      cmocka_unit_test(test_comparison_sees_wrong_windows),
      cmocka_unit_test(test_soft_caps),
      cmocka_unit_test(test_comparison_sees_wrong_caps),
      cmocka_unit_test(test_sinks),
      cmocka_unit_test(test_sinks_alone),
      cmocka_unit_test(test_scales),
      cmocka_unit_test(test_queries_are_clipped),
      cmocka_unit_test(test_all_at_once),
      cmocka_unit_test(test_window_by_hand),
      cmocka_unit_test(test_soft_cap_by_hand),
      cmocka_unit_test(test_soft_cap_does_not_unmask),
  };
  return cmocka_run_group_tests(tests, setup_device, teardown_device);
}

int main(void) { return run_for_every_kind(run_all); }

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

#include "cl_fixture.h"
#include "device/variant.h"
#include "shared.h"

/* An array whose elements outside [first, first + count) rows are NaN. */
static void *random_rows(int rows, int first, int count, int width, int dtype, float scale) {
  void *p = calloc((size_t)rows * (size_t)width, dtype_size[dtype]);
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < width; i++) {
      const int used = r >= first && r < first + count;
      store(p, (size_t)r * (size_t)width + (size_t)i, dtype, used ? scale * random_value() : NAN);
    }
  return p;
}

/* Attention: one set of buffers, any number of launches. */

enum { Q_ROW = 3, STATE_ROW = 2, RING_ROW = 1, CUR_ROW = 5, MORE = 2 }; /* rows around the used */

typedef struct shape {
  int head_dim, group, num_kv_heads, kv_dtype, out_dtype, row_tile;
} shape;

typedef struct attend_case {
  shape s;
  kvr_attend_args a;
  int num_q, num_ring, num_cur; /* rows of the buffers */
  void *q, *ring, *cur;
  float *state, *lse;
  void *out;
  int skip_token; /* rows of tokens from here on are not compared */
  double loosen;  /* tolerance factor */
} attend_case;

static size_t row_width(const attend_case *c) { return (size_t)(c->a.num_q_heads * c->s.head_dim); }

static kvr_attend_args plain_args(shape s, int num_rows, int ring_end, int num_new) {
  return (kvr_attend_args){.num_rows = num_rows,
                           .q_row = Q_ROW,
                           .state_row = STATE_ROW,
                           .row_split = num_rows,
                           .ring_row = RING_ROW,
                           .ring_end = ring_end,
                           .cur_row = CUR_ROW,
                           .kv_end = ring_end + num_new,
                           .key_split = num_new,
                           .finish = 1,
                           .num_q_heads = s.group * s.num_kv_heads,
                           .num_kv_heads = s.num_kv_heads,
                           .scale_log2 = 1.44269504f / sqrtf((float)s.head_dim)};
}

static const float SENTINEL = 77.0f;

static attend_case make_case(shape s, kvr_attend_args a, float amplitude) {
  attend_case c = {.s = s, .a = a, .skip_token = INT32_MAX, .loosen = 1.0};
  const int num_new = a.kv_end - a.ring_end, w = s.head_dim;
  c.num_q = Q_ROW + a.num_rows + MORE;
  c.num_ring = RING_ROW + a.ring_end + MORE;
  c.num_cur = CUR_ROW + num_new + MORE;
  c.q = random_rows(c.num_q, Q_ROW, a.num_rows, a.num_q_heads * w, s.kv_dtype, amplitude);
  c.ring = random_rows(c.num_ring, RING_ROW, a.ring_end, 2 * s.num_kv_heads * w, s.kv_dtype, 1);
  c.cur = random_rows(c.num_cur, CUR_ROW, num_new, 2 * s.num_kv_heads * w, s.kv_dtype, 1);
  const size_t n = (size_t)c.num_q * row_width(&c), heads = (size_t)(c.num_q * a.num_q_heads);
  c.state = calloc(n + 2 * heads, sizeof(float));
  c.lse = calloc(heads, sizeof(float));
  c.out = calloc(n, dtype_size[s.out_dtype]);
  for (size_t i = 0; i < n + 2 * heads; i++) c.state[i] = SENTINEL;
  for (size_t i = 0; i < heads; i++) c.lse[i] = SENTINEL;
  for (size_t i = 0; i < n; i++) store(c.out, i, s.out_dtype, SENTINEL);
  return c;
}

static void free_case(attend_case *c) {
  void *all[] = {c->q, c->ring, c->cur, c->state, c->lse, c->out};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void run_case(attend_case *c, int num_launches, const kvr_attend_args *launches) {
  const shape s = c->s;
  const size_t n = (size_t)c->num_q * row_width(c), heads = (size_t)(c->num_q * c->a.num_q_heads);
  const size_t cache_row = (size_t)(2 * s.num_kv_heads * s.head_dim) * dtype_size[s.kv_dtype];
  char options[128];
  snprintf(options, sizeof options, "-DHEAD_DIM=%d -DKV_DTYPE=%d -DOUT_DTYPE=%d -DROW_TILE=%d",
           s.head_dim, s.kv_dtype, s.out_dtype, s.row_tile);
  cl_kernel k = build_kernel("attend.cl", "kvr_attend", options);
  cl_mem mems[] = {upload(c->q, n * dtype_size[s.kv_dtype]),
                   upload(c->ring, (size_t)c->num_ring * cache_row),
                   upload(c->cur, (size_t)c->num_cur * cache_row),
                   upload(c->state, (n + 2 * heads) * sizeof(float)),
                   upload(c->out, n * dtype_size[s.out_dtype]),
                   upload(c->lse, heads * sizeof(float))};
  for (int i = 0; i < num_launches; i++) {
    const int packed = launches[i].num_rows * s.group;
    launch(k, 6, mems, &launches[i], sizeof launches[i],
           (size_t)((packed + s.row_tile - 1) / s.row_tile), (size_t)s.num_kv_heads);
  }
  download(mems[3], c->state, (n + 2 * heads) * sizeof(float));
  download(mems[4], c->out, n * dtype_size[s.out_dtype]);
  download(mems[5], c->lse, heads * sizeof(float));
  for (int i = 0; i < 6; i++) clReleaseMemObject(mems[i]);
  clReleaseKernel(k);
}

/* Where key x of a launch lies: element offset of its K row of KV head h in *from. */
static size_t key_offset(const attend_case *c, const kvr_attend_args *a, int x, int h,
                         const void **from) {
  *from = x < a->ring_end ? c->ring : c->cur;
  const int row = x < a->ring_end ? a->ring_row + x : a->cur_row + x - a->ring_end;
  return (size_t)((row * c->s.num_kv_heads + h) * 2 * c->s.head_dim);
}

/* Exact output of one row and head over all launches; returns its LSE. */
static double reference_row(const attend_case *c, int num_launches, const kvr_attend_args *launches,
                            int row, int head, double *out) {
  const int D = c->s.head_dim, h = head / c->s.group;
  const size_t q = (size_t)(c->a.q_row + row) * row_width(c) + (size_t)(head * D);
  double m = -HUGE_VAL, l = 0;
  for (int d = 0; d < D; d++) out[d] = 0;
  for (int n = 0; n < num_launches; n++)
    for (int x = 0; x < launches[n].kv_end; x++) {
      if (!kvr_visible(row, x, launches[n])) continue;
      const void *from;
      const size_t k = key_offset(c, &launches[n], x, h, &from), v = k + (size_t)D;
      double score = 0;
      for (int d = 0; d < D; d++)
        score += (double)load(c->q, q + (size_t)d, c->s.kv_dtype) *
                 (double)load(from, k + (size_t)d, c->s.kv_dtype);
      score *= (double)c->a.scale_log2 * 0.69314718055994531;
      const double top = fmax(m, score), keep = exp(m - top), p = exp(score - top);
      for (int d = 0; d < D; d++)
        out[d] = out[d] * keep + p * (double)load(from, v + (size_t)d, c->s.kv_dtype);
      l = l * keep + p;
      m = top;
    }
  for (int d = 0; d < D && l > 0; d++) out[d] /= l;
  return l > 0 ? m + log(l) : -HUGE_VAL;
}

/* Largest error of output and LSE relative to the tolerance: right up to 1. */
static double compare(const attend_case *c, int num_launches, const kvr_attend_args *launches) {
  static const double rounding[] = {0, 1.0 / 2048, 1.0 / 256};
  const int D = c->s.head_dim;
  double *want = calloc((size_t)D, sizeof *want), worst = 0;
  for (int row = 0; row < c->a.num_rows; row++) {
    if (kvr_run_token(row, c->a.row_split, c->a.row_t0, c->a.row_t1) >= c->skip_token) continue;
    for (int head = 0; head < c->a.num_q_heads; head++) {
      const double lse = reference_row(c, num_launches, launches, row, head, want);
      const size_t at = (size_t)((c->a.q_row + row) * c->a.num_q_heads + head);
      double rms = 0;
      for (int d = 0; d < D; d++) rms += want[d] * want[d] / D;
      const double allowed = c->loosen * fmin(2e-5, 1e-3 * sqrt(rms)) + 1e-30;
      worst = fmax(worst, excess((double)c->lse[at], lse, c->loosen * (1e-5 + 1e-6 * fabs(lse))));
      for (int d = 0; d < D; d++) {
        const double got = (double)load(c->out, at * (size_t)D + (size_t)d, c->s.out_dtype);
        const double step =
            rounding[c->s.out_dtype] * fabs(want[d]) + (c->s.out_dtype == F16 ? 6e-8 : 0);
        worst = fmax(worst, excess(got, want[d], allowed + step));
      }
    }
  }
  free(want);
  return worst;
}

static int rows_around_untouched(const attend_case *c) {
  const size_t w = row_width(c), nq = (size_t)c->a.num_q_heads;
  for (int r = 0; r < c->num_q; r++) {
    const int in_out = r >= Q_ROW && r < Q_ROW + c->a.num_rows;
    const int in_state = r >= STATE_ROW && r < STATE_ROW + c->a.num_rows;
    for (size_t i = 0; i < w && !in_out; i++)
      if (load(c->out, (size_t)r * w + i, c->s.out_dtype) != SENTINEL) return 0;
    for (size_t i = 0; i < nq && !in_out; i++)
      if (c->lse[(size_t)r * nq + i] != SENTINEL) return 0;
    for (size_t i = 0; i < w + 2 * nq && !in_state; i++)
      if (c->state[(size_t)r * (w + 2 * nq) + i] != SENTINEL) return 0;
  }
  return 1;
}

static void expect_right(attend_case *c, int num_launches, const kvr_attend_args *launches) {
  run_case(c, num_launches, launches);
  const double e = compare(c, num_launches, launches);
  if (!(e <= 1))
    fail_msg("D %d G %d dtype %d/%d tile %d rows %d: %.3g times the tolerance", c->s.head_dim,
             c->s.group, c->s.kv_dtype, c->s.out_dtype, c->s.row_tile, c->a.num_rows, e);
  assert_true(rows_around_untouched(c));
}

/* Head and tail chunks of rows and keys, cached keys before them. */
static kvr_attend_args two_run_args(shape s) {
  kvr_attend_args a = plain_args(s, 23, 61, 90);
  a.row_split = 9, a.row_t0 = 17, a.row_t1 = 60;
  a.key_split = 37, a.key_t0 = 4, a.key_t1 = 45;
  a.causal = 1;
  return a;
}

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
  for (int i = 0; i < NUM_SHAPES; i++) {
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
          store(to, at + (size_t)d, s.kv_dtype, poison);
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
    assert_true(kvr_variant_options(i, &cache, KVR_F16, text, sizeof text));
    assert_false(kvr_variant_options(i, &cache, KVR_F16, text, 10));
    clReleaseKernel(build_kernel("attend.cl", "kvr_attend", text));
    kvr_variant_sizes(i, 100, 7, 3, global, local);
    const size_t tile = (size_t)kvr_variant_get(i)->row_tile;
    assert_true(global[0] * tile >= 700 && (global[0] - 1) * tile < 700 && global[1] == 3);
    assert_true(local[0] == 1 && local[1] == 1);
  }
  assert_int_equal(kvr_variant_pick(1, 16, 128), kvr_num_variants() - 1);
  assert_null(kvr_variant_get(kvr_num_variants()));
  assert_false(kvr_variant_options(kvr_num_variants(), &cache, KVR_F16, text, sizeof text));
  assert_true(kvr_variant_get(kvr_variant_pick(1, 4, 128))->row_tile <
              kvr_variant_get(kvr_variant_pick(512, 16, 128))->row_tile);
}

static void test_defaults(void **state) {
  (void)state;
  clReleaseKernel(build_kernel("attend.cl", "kvr_attend", ""));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_shapes),
      cmocka_unit_test(test_carry),
      cmocka_unit_test(test_long_axis_repeats_bits),
      cmocka_unit_test(test_comparison_sees_wrong_masks),
      cmocka_unit_test(test_poison),
      cmocka_unit_test(test_blind_rows),
      cmocka_unit_test(test_empty_axis),
      cmocka_unit_test(test_huge_scores),
      cmocka_unit_test(test_variants),
      cmocka_unit_test(test_defaults),
  };
  return cmocka_run_group_tests(tests, setup_device, teardown_device);
}

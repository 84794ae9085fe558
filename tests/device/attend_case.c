#include "attend_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "device/cpu_products.h"
#include "device/variant.h"

kernel_kind tested;

static const kvr_variant *tested_variant(void) {
  return tested.name == NULL ? NULL : kvr_variant_get(kvr_variant_find(tested.name));
}

static bool bf16_products(void) { return tested.name != NULL && tested_variant()->bf16; }

int run_for_every_kind(int (*run)(void)) {
  static const kernel_kind kinds[] = {{NULL, 0},
                                      {"plain", 0},
                                      {"bf16x64", KVR_PRODUCTS_F32},
                                      {"bf16x64", KVR_PRODUCTS_DOT},
                                      {"bf16x256", KVR_PRODUCTS_TILES}};
  int failed = 0;
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    tested = kinds[i];
    if (!kvr_cpu_has_products((kvr_products)tested.products)) continue;
    printf("kernel: %s %d\n", tested.name != NULL ? tested.name : "attend.cl", tested.products);
    failed += run();
  }
  return failed;
}

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

size_t row_width(const attend_case *c) { return (size_t)(c->a.num_q_heads * c->s.head_dim); }

kvr_attend_args plain_args(shape s, int num_rows, int ring_end, int num_new) {
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
                           .scale_log2 = 1.44269504f / sqrtf((float)s.head_dim),
                           .out_scale = 1};
}

static const float SENTINEL = 77.0f;

attend_case make_case(shape s, kvr_attend_args a, float amplitude) {
  attend_case c = {.s = s, .a = a, .skip_token = INT32_MAX, .loosen = 1.0};
  if (bf16_products()) { /* other inputs would be rounded, which the reference does not do */
    s.kv_dtype = c.s.kv_dtype = BF16;
    c.loosen = 500.0; /* of the rounded probabilities */
  }
  const int num_new = a.kv_end - a.ring_end, w = s.head_dim;
  c.num_q = Q_ROW + a.num_rows + MORE;
  c.num_ring = RING_ROW + a.ring_end + MORE;
  c.num_cur = CUR_ROW + num_new + MORE;
  c.q = random_rows(c.num_q, Q_ROW, a.num_rows, a.num_q_heads * w, s.kv_dtype, amplitude);
  c.ring = random_rows(c.num_ring, RING_ROW, a.ring_end, 2 * s.num_kv_heads * w, s.kv_dtype, 1);
  c.cur = random_rows(c.num_cur, CUR_ROW, num_new, 2 * s.num_kv_heads * w, s.kv_dtype, 1);
  const size_t n = (size_t)c.num_q * row_width(&c), heads = (size_t)(c.num_q * a.num_q_heads);
  c.sinks = calloc((size_t)a.num_q_heads, sizeof(float));
  for (int h = 0; h < a.num_q_heads; h++)
    c.sinks[h] = h % 3 == 1 ? -INFINITY : 3 * random_value() + (float)(h % 3);
  c.state = calloc(n + 2 * heads, sizeof(float));
  c.lse = calloc(heads, sizeof(float));
  c.out = calloc(n, dtype_size[s.out_dtype]);
  for (size_t i = 0; i < n + 2 * heads; i++) c.state[i] = SENTINEL;
  for (size_t i = 0; i < heads; i++) c.lse[i] = SENTINEL;
  for (size_t i = 0; i < n; i++) store(c.out, i, s.out_dtype, SENTINEL);
  return c;
}

void free_case(attend_case *c) {
  void *all[] = {c->q, c->ring, c->cur, c->state, c->lse, c->out, c->sinks};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

void run_case(attend_case *c, int num_launches, const kvr_attend_args *launches) {
  const shape s = c->s;
  const size_t n = (size_t)c->num_q * row_width(c), heads = (size_t)(c->num_q * c->a.num_q_heads);
  const size_t cache_row = (size_t)(2 * s.num_kv_heads * s.head_dim) * dtype_size[s.kv_dtype];
  const kvr_variant *v = tested_variant();
  const int row_tile = v != NULL ? v->row_tile : s.row_tile;
  char options[128];
  snprintf(options, sizeof options,
           "-DHEAD_DIM=%d -DKV_DTYPE=%d -DOUT_DTYPE=%d -DROW_TILE=%d -DPRODUCTS=%d", s.head_dim,
           s.kv_dtype, s.out_dtype, row_tile, tested.products);
  cl_kernel k = build_kernel(v != NULL ? v->file : "attend.cl", "kvr_attend", options);
  cl_mem mems[] = {upload(c->q, n * dtype_size[s.kv_dtype]),
                   upload(c->ring, (size_t)c->num_ring * cache_row),
                   upload(c->cur, (size_t)c->num_cur * cache_row),
                   upload(c->state, (n + 2 * heads) * sizeof(float)),
                   upload(c->out, n * dtype_size[s.out_dtype]),
                   upload(c->lse, heads * sizeof(float)),
                   upload(c->sinks, (size_t)c->a.num_q_heads * sizeof(float))};
  for (int i = 0; i < num_launches; i++) {
    const int packed = launches[i].num_rows * s.group;
    launch(k, 7, mems, &launches[i], sizeof launches[i],
           (size_t)((packed + row_tile - 1) / row_tile), (size_t)s.num_kv_heads,
           v != NULL ? (size_t)v->local : 1);
  }
  download(mems[3], c->state, (n + 2 * heads) * sizeof(float));
  download(mems[4], c->out, n * dtype_size[s.out_dtype]);
  download(mems[5], c->lse, heads * sizeof(float));
  for (int i = 0; i < 7; i++) clReleaseMemObject(mems[i]);
  clReleaseKernel(k);
}

size_t key_offset(const attend_case *c, const kvr_attend_args *a, int x, int h, const void **from) {
  *from = x < a->ring_end ? c->ring : c->cur;
  const int row = x < a->ring_end ? a->ring_row + x : a->cur_row + x - a->ring_end;
  return (size_t)((row * c->s.num_kv_heads + h) * 2 * c->s.head_dim);
}

/* Element of q as a launch uses it. */
static double query(const attend_case *c, size_t at, float inv_scale) {
  static const float largest[] = {3.40282347e38f, 65504, 3.38953139e38f};
  const float q = load(c->q, at, c->s.kv_dtype);
  if (inv_scale == 0.0f || inv_scale == 1.0f) return (double)q;
  const float top = largest[c->s.kv_dtype];
  uint32_t rounded;
  store(&rounded, 0, c->s.kv_dtype, fminf(fmaxf(q * inv_scale, -top), top));
  return (double)load(&rounded, 0, c->s.kv_dtype);
}

/* Score in base e; q and k are element offsets. */
static double score_of(const attend_case *c, const kvr_attend_args *a, size_t q, const void *from,
                       size_t k) {
  const double ln2 = 0.69314718055994531, cap = (double)a->soft_cap_log2 * ln2;
  double score = 0;
  for (size_t d = 0; d < (size_t)c->s.head_dim; d++)
    score += query(c, q + d, a->q_inv_scale) * (double)load(from, k + d, c->s.kv_dtype);
  score *= (double)a->scale_log2 * ln2;
  return cap > 0 ? cap * tanh(score / cap) : score;
}

/* One more key with weight 1 at `score`. */
static void add_key(const attend_case *c, double score, const void *from, size_t v, double ml[2],
                    double *out) {
  const double top = fmax(ml[0], score), keep = exp(ml[0] - top), p = exp(score - top);
  for (int d = 0; d < c->s.head_dim; d++)
    out[d] = out[d] * keep + (from ? p * (double)load(from, v + (size_t)d, c->s.kv_dtype) : 0);
  ml[0] = top, ml[1] = ml[1] * keep + p;
}

/* Exact output of one row and head over all launches; returns its LSE. */
static double reference_row(const attend_case *c, int num_launches, const kvr_attend_args *launches,
                            int row, int head, double *out) {
  const int D = c->s.head_dim, h = head / c->s.group;
  const size_t q = (size_t)(c->a.q_row + row) * row_width(c) + (size_t)(head * D);
  double ml[2] = {-HUGE_VAL, 0};
  for (int d = 0; d < D; d++) out[d] = 0;
  for (int n = 0; n < num_launches; n++) {
    const kvr_attend_args *a = &launches[n];
    const int sink = a->use_sinks && (!a->carry_in || c->wrong == SINK_PER_LAUNCH);
    if (sink && !isinf(c->sinks[head])) add_key(c, (double)c->sinks[head], NULL, 0, ml, out);
    for (int x = 0; x < a->kv_end; x++) {
      const int visible = kvr_visible(row, x, *a);
      if (!visible && c->wrong != CAP_AFTER_MASK) continue;
      const void *from;
      const size_t k = key_offset(c, a, x, h, &from), v = k + (size_t)D;
      const double score =
          visible ? score_of(c, a, q, from, k) : -0.69314718055994531 * (double)a->soft_cap_log2;
      add_key(c, score, from, v, ml, out);
    }
  }
  const double scale = (double)launches[num_launches - 1].out_scale;
  for (int d = 0; d < D && ml[1] > 0; d++) out[d] *= scale / ml[1];
  return ml[1] > 0 ? ml[0] + log(ml[1]) : -HUGE_VAL;
}

double compare(const attend_case *c, int num_launches, const kvr_attend_args *launches) {
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
      /* Rounded probabilities err by what they weigh, however small the sum is. */
      const double part = bf16_products() ? 2e-5 : fmin(2e-5, 1e-3 * sqrt(rms));
      const double allowed = c->loosen * part + 1e-30;
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

void expect_right(attend_case *c, int num_launches, const kvr_attend_args *launches) {
  run_case(c, num_launches, launches);
  const double e = compare(c, num_launches, launches);
  if (!(e <= 1))
    fail_msg("D %d G %d dtype %d/%d tile %d rows %d: %.3g times the tolerance", c->s.head_dim,
             c->s.group, c->s.kv_dtype, c->s.out_dtype, c->s.row_tile, c->a.num_rows, e);
  assert_true(rows_around_untouched(c));
}

kvr_attend_args two_run_args(shape s) {
  kvr_attend_args a = plain_args(s, 23, 61, 90);
  a.row_split = 9, a.row_t0 = 17, a.row_t1 = 60;
  a.key_split = 37, a.key_t0 = 4, a.key_t1 = 45;
  a.causal = 1;
  return a;
}

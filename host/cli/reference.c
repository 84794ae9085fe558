/* Blocks of KEYS keys are converted to double once and used by all rows; K is transposed, so that
 * the inner loops run over constant lengths and the compiler vectorises them. */
#include "cli/reference.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "cli/convert.h"

enum { KEYS = 128, LANES = 4, MAX_DIM = 512 };

/* Probabilities below 2^-127 of the largest are 0 in f32: a sink far above all scores leaves an
 * output that f32 cannot hold, and that no tolerance relative to it allows to be 0. */
#define SMALLEST 1e-37

typedef struct work {
  double kt[KEYS / LANES][MAX_DIM][LANES]; /* keys of a block, transposed */
  double v[KEYS][MAX_DIM]; /* values of a block, zero past head_dim and past the block */
  double score[KEYS];
  float row[MAX_DIM];
} work;

/* Running softmax of one row and head. */
typedef struct running {
  double m, l;
  double q[MAX_DIM], acc[MAX_DIM];
} running;

static void load_row(const cli_reference *r, const void *src, size_t row, float *dst) {
  const size_t element = row * (size_t)r->head_dim;
  cli_to_float(r->dtype, (const char *)src + element * kvr_dtype_size(r->dtype),
               (size_t)r->head_dim, dst);
}

static void load_block(const cli_reference *r, int kv_head, int key0, int num, work *w) {
  const int D = r->head_dim;
  for (int x = 0; x < num; x++) {
    const size_t row = (size_t)(key0 + x) * (size_t)r->num_kv_heads + (size_t)kv_head;
    load_row(r, r->k, row, w->row);
    for (int d = 0; d < D; d++) w->kt[x / LANES][d][x % LANES] = (double)w->row[d];
    load_row(r, r->v, row, w->row);
    for (int d = 0; d < D; d++) w->v[x][d] = (double)w->row[d];
  }
}

static void scores(const double *restrict q, double (*restrict kt)[MAX_DIM][LANES], int D,
                   double *restrict out) {
  for (size_t piece = 0; piece < KEYS / LANES; piece++) {
    double sum[LANES] = {0};
    for (int d = 0; d < D; d++)
      for (int x = 0; x < LANES; x++) sum[x] += q[d] * kt[piece][d][x];
    memcpy(out + piece * LANES, sum, sizeof sum);
  }
}

static void add_values(const double *restrict p, double (*restrict v)[MAX_DIM], int num, int D,
                       double *restrict acc) {
  for (int d0 = 0; d0 < D; d0 += LANES) {
    double sum[LANES];
    memcpy(sum, acc + d0, sizeof sum);
    for (int x = 0; x < num; x++)
      for (int d = 0; d < LANES; d++) sum[d] += p[x] * v[x][d0 + d];
    memcpy(acc + d0, sum, sizeof sum);
  }
}

/* One block of keys into the running softmax of one row; keys below first are not seen, those past
 * num do not exist. */
static void attend_block(const cli_reference *r, const unsigned char *hidden, int first, int num,
                         work *w, running *s) {
  scores(s->q, w->kt, r->head_dim, w->score);
  for (int x = 0; x < num && r->soft_cap > 0; x++)
    w->score[x] = r->soft_cap * tanh(w->score[x] / r->soft_cap);
  double m = s->m;
  for (int x = 0; x < num; x++)
    if (x >= first && (hidden == NULL || !hidden[x]) && w->score[x] > m) m = w->score[x];
  if (m == -HUGE_VAL) return;
  const double fade = exp(s->m - m);
  s->l *= fade;
  for (int d = 0; d < r->head_dim; d++) s->acc[d] *= fade;
  for (int x = 0; x < num; x++) {
    const bool seen = x >= first && (hidden == NULL || !hidden[x]);
    w->score[x] = seen ? exp(w->score[x] - m) : 0;
    s->l += w->score[x];
  }
  s->m = m;
  add_values(w->score, w->v, num, r->head_dim, s->acc);
}

/* The kernels multiply by the f32 reciprocal, and so does this: where a quotient lies next to a
 * rounding boundary of a narrow type, a division could end on the other side. */
static void quantise(const cli_reference *r, float *row) {
  static const float largest[KVR_NUM_DTYPES] = {FLT_MAX, 65504.0f, 0x1.fep127f};
  char rounded[MAX_DIM * sizeof(float)];
  const float inverse = (float)(1 / r->q_scale), top = largest[r->dtype];
  for (int d = 0; d < r->head_dim; d++) row[d] = fmaxf(-top, fminf(top, row[d] * inverse));
  cli_from_float(r->dtype, row, (size_t)r->head_dim, rounded);
  cli_to_float(r->dtype, rounded, (size_t)r->head_dim, row);
}

static void start_row(const cli_reference *r, const cli_reference_row *row, int head, work *w,
                      running *s) {
  const bool scaled = r->q_scale != 0 && r->q_scale != 1;
  memset(s, 0, sizeof *s);
  s->m = r->sinks != NULL ? (double)r->sinks[head] : -HUGE_VAL;
  s->l = s->m > -HUGE_VAL ? 1 : 0;
  load_row(r, row->q, (size_t)head, w->row);
  if (scaled) quantise(r, w->row);
  const double scale = scaled ? r->scale * r->q_scale : r->scale;
  for (int d = 0; d < r->head_dim; d++) s->q[d] = scale * (double)w->row[d];
}

static void finish_row(const cli_reference *r, const running *s, double *out, double *lse) {
  const double scale = r->value_scale != 0 ? r->value_scale : 1;
  for (int d = 0; d < r->head_dim; d++) out[d] = s->l > 0 ? scale * s->acc[d] / s->l : 0;
  *lse = s->l > 0 ? s->m + log(s->l) : -HUGE_VAL;
}

static bool computes(const cli_reference_row *row, int head) {
  return head % row->head_step == row->head0;
}

/* All rows and query heads of one KV head. states (num_rows * group). */
static void run_kv_head(const cli_reference *r, const cli_reference_row *rows, int num_rows,
                        int kv_head, work *w, running *states) {
  const int group = r->num_q_heads / r->num_kv_heads;
  int end = 0;
  for (int i = 0; i < num_rows; i++) {
    end = kvr_max(end, rows[i].end);
    for (int g = 0; g < group; g++)
      start_row(r, &rows[i], kv_head * group + g, w, &states[i * group + g]);
  }
  for (int key0 = 0; key0 < end; key0 += KEYS) {
    load_block(r, kv_head, key0, kvr_min(KEYS, end - key0), w);
    for (int i = 0; i < num_rows; i++) {
      const int num = kvr_min(KEYS, rows[i].end - key0);
      for (int g = 0; g < group && num > 0; g++)
        if (computes(&rows[i], kv_head * group + g))
          attend_block(r, r->hidden != NULL ? r->hidden + key0 : NULL, rows[i].first - key0, num, w,
                       &states[i * group + g]);
    }
  }
}

kvr_status cli_reference_run(const cli_reference *r, const cli_reference_row *rows, int num_rows,
                             double *out, double *lse) {
  const int group = r->num_q_heads / r->num_kv_heads, D = r->head_dim, NQ = r->num_q_heads;
  work *w = calloc(1, sizeof *w);
  running *states = calloc((size_t)num_rows * (size_t)group + 1, sizeof *states);
  if (w == NULL || states == NULL) {
    free(w);
    free(states);
    return kvr_fail(KVR_E_OOM, "no host memory for %d reference rows", num_rows);
  }
  for (int kv = 0; kv < r->num_kv_heads; kv++) {
    run_kv_head(r, rows, num_rows, kv, w, states);
    for (int i = 0; i < num_rows; i++)
      for (int g = 0; g < group; g++) {
        const int head = kv * group + g;
        const size_t at = (size_t)i * (size_t)NQ + (size_t)head;
        if (computes(&rows[i], head))
          finish_row(r, &states[i * group + g], out + at * (size_t)D, lse + at);
      }
  }
  free(w);
  free(states);
  return KVR_OK;
}

double cli_max_abs(kvr_dtype dtype, const void *x, size_t num) {
  float part[256];
  double most = 0;
  for (size_t i = 0; i < num; i += 256) {
    const size_t len = num - i < 256 ? num - i : 256;
    cli_to_float(dtype, (const char *)x + i * kvr_dtype_size(dtype), len, part);
    for (size_t j = 0; j < len; j++) most = fmax(most, fabs((double)part[j]));
  }
  return most;
}

/* NaN counts as infinitely wrong. */
static double worse(double a, double b) { return isnan(b) ? HUGE_VAL : fmax(a, b); }

static double lse_error(double lse, double ref) {
  if (ref == -HUGE_VAL || lse == -HUGE_VAL) return lse == ref ? 0 : HUGE_VAL;
  return fabs(lse - ref) / fmax(1, fabs(ref));
}

double cli_loosen(bool bf16_math, kvr_dtype dtype) {
  return !bf16_math ? 1 : dtype == KVR_BF16 ? 500 : 2500;
}

void cli_compare_row(const cli_compared *c, cli_error *error) {
  enum { PIECE = 64 };
  const double loosen = c->loosen > 0 ? c->loosen : 1;
  const double lse_tolerance = 1e-5 * loosen, rounding = cli_rounding(c->out_dtype);
  double square = 0;
  for (int d = 0; d < c->head_dim; d++) square += c->ref[d] * c->ref[d];
  const double rms = sqrt(square / c->head_dim);
  /* Rounded probabilities err by what they weigh, however small the sum is. */
  double tolerance = loosen > 1 ? loosen * 2e-5 * c->max_v : fmin(2e-5 * c->max_v, 1e-3 * rms);
  if (rms > 0) tolerance = fmax(tolerance, SMALLEST);
  float part[PIECE];
  for (int d0 = 0; d0 < c->head_dim; d0 += PIECE) {
    const int num = kvr_min(PIECE, c->head_dim - d0);
    cli_to_float(c->out_dtype, (const char *)c->out + (size_t)d0 * kvr_dtype_size(c->out_dtype),
                 (size_t)num, part);
    for (int i = 0; i < num; i++) {
      const double ref = c->ref[d0 + i], off = fabs((double)part[i] - ref);
      /* 2^-25: half the spacing of the smallest halves. */
      const double extra = rounding > 0 ? fmax(0, off - rounding * fabs(ref) - 0x1p-25) : off;
      error->max_abs = worse(error->max_abs, off);
      if (!(off == 0))
        error->factor = worse(error->factor, tolerance > 0 ? extra / tolerance : HUGE_VAL);
    }
  }
  const double lse = lse_error((double)c->lse, c->ref_lse);
  error->max_lse = worse(error->max_lse, lse);
  error->factor = worse(error->factor, lse / lse_tolerance);
}

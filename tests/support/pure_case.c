#include "pure_case.h"

#include <assert.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "core/validate.h"

enum { SPARE_ROWS = 3 };

uint64_t case_random(uint64_t *state) {
  uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

int case_between(uint64_t *state, int lo, int hi) {
  return lo + (int)(case_random(state) % (uint64_t)(hi - lo + 1));
}

double case_normal(uint64_t *state) {
  const double u = ((double)(case_random(state) >> 11) + 0.5) / 9007199254740992.0;
  const double v = (double)(case_random(state) >> 11) / 9007199254740992.0;
  return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

static double *normals(size_t n, uint64_t *state) {
  double *x = malloc((n + 1) * sizeof *x);
  assert(x != NULL);
  for (size_t i = 0; i < n; i++) x[i] = case_normal(state);
  return x;
}

static size_t kv_width(const pure_case *c) {
  return 2 * (size_t)c->problem.cache.num_kv_heads * (size_t)c->problem.cache.head_dim;
}

static int share_capacity(const pure_case *c, int i, int r) {
  return kvr_map_count(&c->problem.cache, c->requests[i].num_cached + c->requests[i].num_new, r) +
         SPARE_ROWS;
}

void case_reset_cache(pure_case *c) {
  const int P = c->problem.cache.num_ranks;
  const size_t w = kv_width(c);
  for (int i = 0; i < c->problem.num_requests; i++)
    for (int r = 0; r < P; r++) {
      double *share = c->cache[i * P + r];
      for (size_t j = 0; j < (size_t)share_capacity(c, i, r) * w; j++) share[j] = (double)NAN;
      for (int m = 0; m < kvr_map_count(&c->problem.cache, c->requests[i].num_cached, r); m++)
        memcpy(share + (size_t)m * w,
               c->context[i] + (size_t)kvr_map_position(&c->problem.cache, r, m) * w,
               w * sizeof *share);
    }
}

int case_cache_is_right(const pure_case *c) {
  const int P = c->problem.cache.num_ranks;
  const size_t w = kv_width(c);
  for (int i = 0; i < c->problem.num_requests; i++)
    for (int r = 0; r < P; r++) {
      const int held = share_capacity(c, i, r) - SPARE_ROWS;
      for (int m = 0; m < held; m++)
        if (memcmp(c->cache[i * P + r] + (size_t)m * w,
                   c->context[i] + (size_t)kvr_map_position(&c->problem.cache, r, m) * w,
                   w * sizeof(double)) != 0)
          return 0;
      for (size_t j = 0; j < SPARE_ROWS * w; j++)
        if (!isnan(c->cache[i * P + r][(size_t)held * w + j])) return 0;
    }
  return 1;
}

/* Dense attention of one (row, head), two passes; independent of the executors. */
static void oracle_row(pure_case *c, int i, int t, int token, int h) {
  const kvr_problem *p = &c->problem;
  const int D = p->cache.head_dim, NQ = p->num_q_heads, kvh = h / (NQ / p->cache.num_kv_heads);
  const int L = c->requests[i].num_cached;
  const int end = p->causal ? L + t + 1 : L + c->requests[i].num_new;
  const double scale = (p->scale != 0.0f ? (double)p->scale : 1.0 / sqrt((double)D)) *
                       (p->k_scale != 0.0f ? (double)p->k_scale : 1.0);
  const double value_scale = p->v_scale != 0.0f ? (double)p->v_scale : 1.0;
  const double sink = p->sinks != NULL ? (double)p->sinks[h] : -HUGE_VAL;
  const int first = p->window > 0 && L + t - p->window + 1 > 0 ? L + t - p->window + 1 : 0;
  const double *q = c->q + ((size_t)token * (size_t)NQ + (size_t)h) * (size_t)D;
  double *out = c->want_out + ((size_t)token * (size_t)NQ + (size_t)h) * (size_t)D;
  double *scores = malloc((size_t)end * sizeof *scores), max = sink, sum;
  assert(scores != NULL);
  for (int x = first; x < end; x++) {
    const double *k = c->context[i] + (size_t)x * kv_width(c) + 2 * (size_t)kvh * (size_t)D;
    scores[x] = 0.0;
    for (int d = 0; d < D; d++) scores[x] += q[d] * k[d];
    scores[x] *= scale;
    if (p->soft_cap > 0.0f) scores[x] = (double)p->soft_cap * tanh(scores[x] / (double)p->soft_cap);
    max = fmax(max, scores[x]);
  }
  sum = exp(sink - max); /* the sink is one more key without a value */
  for (int d = 0; d < D; d++) out[d] = 0.0;
  for (int x = first; x < end; x++) {
    const double *v = c->context[i] + (size_t)x * kv_width(c) + (2 * (size_t)kvh + 1) * (size_t)D;
    const double w = exp(scores[x] - max);
    sum += w;
    for (int d = 0; d < D; d++) out[d] += w * v[d];
  }
  for (int d = 0; d < D; d++) out[d] *= value_scale / sum;
  c->want_lse[token * NQ + h] = max + log(sum);
  free(scores);
}

static void fill_new(pure_case *c) {
  const int NKV = c->problem.cache.num_kv_heads;
  const size_t D = (size_t)c->problem.cache.head_dim, w = kv_width(c);
  size_t token = 0;
  for (int i = 0; i < c->problem.num_requests; i++)
    for (int t = 0; t < c->requests[i].num_new; t++, token++)
      for (int h = 0; h < NKV; h++) {
        const double *row = c->context[i] + (size_t)(c->requests[i].num_cached + t) * w;
        const size_t at = (token * (size_t)NKV + (size_t)h) * D;
        memcpy(c->k + at, row + 2 * (size_t)h * D, D * sizeof(double));
        memcpy(c->v + at, row + (2 * (size_t)h + 1) * D, D * sizeof(double));
      }
}

/* Rows that are not sampled have no answer: NaN. */
static void answer(pure_case *c) {
  const int NQ = c->problem.num_q_heads, D = c->problem.cache.head_dim;
  const int step = c->sample > 1 ? c->sample : 1;
  for (int j = 0; j < c->num_tokens * NQ * D; j++) c->want_out[j] = (double)NAN;
  for (int j = 0; j < c->num_tokens * NQ; j++) c->want_lse[j] = (double)NAN;
  for (int i = 0, token = 0; i < c->problem.num_requests; i++)
    for (int t = 0; t < c->requests[i].num_new; t++, token++)
      for (int h = 0; h < NQ && (t % step == 0 || t + 1 == c->requests[i].num_new); h++)
        oracle_row(c, i, t, token, h);
}

void case_map(pure_case *c, double (*f)(double, kvr_dtype)) {
  const kvr_dtype dtype = c->problem.cache.dtype;
  const size_t heads = (size_t)c->num_tokens * (size_t)c->problem.num_q_heads;
  for (size_t i = 0; i < heads * (size_t)c->problem.cache.head_dim; i++)
    c->q[i] = f(c->q[i], dtype);
  for (int i = 0; i < c->problem.num_requests; i++) {
    const size_t total = (size_t)(c->requests[i].num_cached + c->requests[i].num_new);
    for (size_t j = 0; j < total * kv_width(c); j++) c->context[i][j] = f(c->context[i][j], dtype);
  }
  fill_new(c);
  case_reset_cache(c);
  answer(c);
}

void case_fill(pure_case *c, uint64_t seed) {
  const kvr_problem *p = &c->problem;
  const int P = p->cache.num_ranks, NQ = p->num_q_heads;
  const size_t D = (size_t)p->cache.head_dim, w = kv_width(c);
  c->num_tokens = 0;
  for (int i = 0; i < p->num_requests; i++) {
    const int total = c->requests[i].num_cached + c->requests[i].num_new;
    c->num_tokens += c->requests[i].num_new;
    c->context[i] = normals((size_t)total * w, &seed);
    for (int r = 0; r < P; r++)
      c->cache[i * P + r] = malloc((size_t)share_capacity(c, i, r) * w * sizeof(double));
  }
  const size_t tokens = (size_t)c->num_tokens;
  c->q = normals(tokens * (size_t)NQ * D, &seed);
  for (size_t j = 0; j < tokens * (size_t)NQ * D; j++) c->q[j] *= 3.0;
  c->k = normals(tokens * w / 2, &seed);
  c->v = normals(tokens * w / 2, &seed);
  c->out = malloc((tokens * (size_t)NQ * D + 1) * sizeof(double));
  c->want_out = malloc((tokens * (size_t)NQ * D + 1) * sizeof(double));
  c->lse = malloc((tokens * (size_t)NQ + 1) * sizeof(double));
  c->want_lse = malloc((tokens * (size_t)NQ + 1) * sizeof(double));
  fill_new(c);
  case_reset_cache(c);
  answer(c);
}

static int random_length(uint64_t *s, int unit) {
  switch (case_between(s, 0, 5)) {
  case 0: return 0;
  case 1: return case_between(s, 0, 3);
  case 2: return unit - 1 + case_between(s, 0, 2);
  case 3: return 2 * unit;
  default: return case_between(s, 0, 4 * unit);
  }
}

void case_randomise(pure_case *c, uint64_t seed, int head_dim) {
  uint64_t s = seed * 7919 + 17;
  memset(c, 0, sizeof *c);
  const int P = case_between(&s, 1, CASE_MAX_RANKS), page = case_between(&s, 1, 5);
  const int NKV = case_between(&s, 1, 2), drawn = case_between(&s, 1, 5);
  const int random_dim = head_dim > 0 ? head_dim : drawn;
  const int maps[4] = {1, page, case_between(&s, 1, 9), 1000};
  c->problem = (kvr_problem){.struct_size = sizeof c->problem,
                             .cache = {.struct_size = sizeof c->problem.cache,
                                       .num_ranks = P,
                                       .num_kv_heads = NKV,
                                       .head_dim = random_dim,
                                       .page_size = page,
                                       .num_pages = 1 << 20,
                                       .interleave = maps[case_between(&s, 0, 3)]},
                             .num_q_heads = NKV * case_between(&s, 1, 3),
                             .causal = case_between(&s, 0, 5) > 0,
                             .num_requests = case_between(&s, 1, CASE_MAX_REQUESTS),
                             .requests = c->requests};
  if (case_between(&s, 0, 3) == 0) {
    for (int r = 0; r < P; r++) c->weights[r] = case_between(&s, 0, 3);
    c->weights[case_between(&s, 0, P - 1)] = 2;
    c->problem.cache.weights = c->weights;
  }
  if (case_between(&s, 0, 1)) c->problem.window = case_between(&s, 1, 40);
  if (case_between(&s, 0, 3) == 0) c->problem.soft_cap = (float)case_between(&s, 1, 6);
  if (case_between(&s, 0, 3) == 0) {
    for (int h = 0; h < c->problem.num_q_heads; h++) c->sinks[h] = (float)case_normal(&s);
    c->sinks[0] = case_between(&s, 0, 2) == 0 ? -HUGE_VALF : c->sinks[0];
    c->problem.sinks = c->sinks;
  }
  if (case_between(&s, 0, 3) == 0) {
    c->problem.k_scale = 0.5f;
    c->problem.v_scale = 3.0f;
  }
  const int tile = case_between(&s, 1, 6);
  c->options = (kvr_options){.struct_size = sizeof c->options,
                             .tile = tile,
                             .query_tile = case_between(&s, 0, 1) ? case_between(&s, 1, 7) : 0,
                             .num_slots = case_between(&s, 2, 4)};
  for (int i = 0; i < c->problem.num_requests; i++) {
    c->requests[i] =
        (kvr_request){.num_new = random_length(&s, P), .num_cached = random_length(&s, tile * P)};
    const int least = kvr_ceil_div(c->requests[i].num_new, 2 * P);
    if (case_between(&s, 0, 2) == 0)
      c->requests[i].chunk = kvr_max(1, least + case_between(&s, 0, 2));
  }
  case_fill(c, seed);
}

void case_free(pure_case *c) {
  double *arrays[] = {c->q, c->k, c->v, c->out, c->lse, c->want_out, c->want_lse};
  for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free(arrays[i]);
  for (int i = 0; i < CASE_MAX_REQUESTS; i++) free(c->context[i]);
  for (int i = 0; i < CASE_MAX_REQUESTS * CASE_MAX_RANKS; i++) free(c->cache[i]);
}

static double distance(const double *got, const double *want, size_t n) {
  double worst = 0.0;
  for (size_t i = 0; i < n; i++) {
    const double error = fabs(got[i] - want[i]);
    if (isnan(error)) return 1e300;
    worst = fmax(worst, error);
  }
  return worst;
}

double case_run(pure_case *c, const kvr_schedule *schedule, uint64_t order_seed) {
  const size_t tokens = (size_t)c->num_tokens, NQ = (size_t)c->problem.num_q_heads;
  const size_t D = (size_t)c->problem.cache.head_dim;
  const kvr_host_io io =
      {.q = c->q, .k = c->k, .v = c->v, .out = c->out, .lse = c->lse, .cache = c->cache};
  case_reset_cache(c);
  if (kvr_exec_host_run(schedule, &io, order_seed) != KVR_OK) return 1e300;
  return fmax(distance(c->out, c->want_out, tokens * NQ * D),
              distance(c->lse, c->want_lse, tokens * NQ));
}

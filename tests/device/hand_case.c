#include "hand_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

const int hand_ranks[HAND_NUM_RANKS] = {1, 2, 3, 4, 5, 8};

static kvr_group *groups[CASE_MAX_RANKS + 1];

kvr_group *hand_group(int num_ranks) {
  if (groups[num_ranks] == NULL) groups[num_ranks] = device_group(num_ranks, 0);
  return groups[num_ranks];
}

int hand_close(void **state) {
  (void)state;
  for (int P = 0; P <= CASE_MAX_RANKS; P++) {
    kvr_group_destroy(groups[P]);
    groups[P] = NULL;
  }
  return 0;
}

/* ---- cases ---- */

pure_case hand_case(int P, int num_cached, int num_new, int NQ, int NKV, int D) {
  return (pure_case){.problem = {.struct_size = sizeof(kvr_problem),
                                 .cache = {.struct_size = sizeof(kvr_cache_desc),
                                           .num_ranks = P,
                                           .num_kv_heads = NKV,
                                           .head_dim = D,
                                           .page_size = 4,
                                           .num_pages = 1 << 20,
                                           .interleave = 1},
                                 .num_q_heads = NQ,
                                 .causal = 1,
                                 .num_requests = 1},
                     .options = {.struct_size = sizeof(kvr_options), .tile = 3},
                     .requests = {{.num_new = num_new, .num_cached = num_cached}}};
}

double hand_zero(int request, int position, int head, int dim) {
  (void)request, (void)position, (void)head, (void)dim;
  return 0.0;
}

double hand_position(int request, int position, int head, int dim) {
  (void)request, (void)head, (void)dim;
  return position;
}

static double scramble(uint64_t request, int position, int head, int dim) {
  uint64_t state = ((request * 1000003 + (uint64_t)position) * 1009 + (uint64_t)head) * 521;
  state += (uint64_t)dim;
  return (double)(case_random(&state) % 2001) / 500.0 - 2.0;
}

static double in_f32(double x) { return (double)(float)x; }

double hand_scrambled(int request, int position, int head, int dim) {
  return in_f32(scramble((uint64_t)request, position, head, dim));
}

double hand_scrambled_value(int request, int position, int head, int dim) {
  return in_f32(scramble((uint64_t)request + 100, position, head, dim));
}

double hand_scrambled_query(int request, int position, int head, int dim) {
  return in_f32(3.0 * scramble((uint64_t)request + 200, position, head, dim));
}

static void put_keys(pure_case *c, hand_value *k, hand_value *v) {
  const int NKV = c->problem.cache.num_kv_heads, D = c->problem.cache.head_dim;
  for (int i = 0; i < c->problem.num_requests; i++) {
    double *to = c->context[i];
    for (int g = 0; g < c->requests[i].num_cached + c->requests[i].num_new; g++)
      for (int h = 0; h < 2 * NKV; h++)
        for (int d = 0; d < D; d++) *to++ = (h % 2 == 0 ? k : v)(i, g, h / 2, d);
  }
}

static void put_queries(pure_case *c, hand_value *q) {
  double *to = c->q;
  for (int i = 0; i < c->problem.num_requests; i++)
    for (int t = 0; t < c->requests[i].num_new; t++)
      for (int h = 0; h < c->problem.num_q_heads; h++)
        for (int d = 0; d < c->problem.cache.head_dim; d++)
          *to++ = q(i, c->requests[i].num_cached + t, h, d);
}

static double unchanged(double x, kvr_dtype dtype) {
  (void)dtype;
  return x;
}

void hand_fill(pure_case *c, hand_value *q, hand_value *k, hand_value *v) {
  c->problem.requests = c->requests;
  case_fill(c, 1);
  put_keys(c, k, v);
  put_queries(c, q);
  case_map(c, unchanged);
}

void hand_fill_random(pure_case *c, uint64_t seed) { device_case_fill(c, seed); }

/* ---- steps ---- */

static bool has_cache(const pure_case *c) {
  for (int i = 0; i < c->problem.num_requests; i++)
    if (c->requests[i].num_cached > 0) return true;
  return false;
}

static void check_step(const hand_step *s) {
  const int P = s->c->problem.cache.num_ranks;
  const double error = device_run_error(s->run, s->c);
  if (!(error < 2e-5)) fail_msg("P %d, %s: error %g of max|V|", P, s->strategy, error);
  if (!device_pools_are_right(s->run, s->c))
    fail_msg("P %d, %s: wrong cache bytes", P, s->strategy);
}

/* The pools as they were before the step: what an earlier strategy wrote is gone. */
static void put_pools(const device_run *run, const pure_case *c, unsigned char *const *pools) {
  for (int r = 0; r < c->problem.cache.num_ranks; r++)
    device_ok(kvr_cache_import(run->cache, r, pools[r], kvr_cache_bytes(run->cache)),
              "kvr_cache_import");
}

static void copy_pools(const device_run *run, const pure_case *c, unsigned char **to) {
  const size_t bytes = kvr_cache_bytes(run->cache);
  for (int r = 0; r < c->problem.cache.num_ranks; r++) {
    to[r] = malloc(bytes);
    assert_non_null(to[r]);
    memcpy(to[r], run->pools[r], bytes);
  }
}

void hand_run_on(pure_case *c, hand_prepare *prepare, hand_check *check, const void *data) {
  const int P = c->problem.cache.num_ranks;
  unsigned char *pools[CASE_MAX_RANKS];
  device_run run = {0};
  device_run_init(&run, c, hand_group(P), "all");
  if (prepare != NULL) prepare(&run, c);
  copy_pools(&run, c, pools);
  for (int i = 0; i <= kvr_num_strategies(); i++) {
    const char *strategy = i < kvr_num_strategies() ? kvr_strategy_name(i) : "auto";
    if (strcmp(strategy, "current-only") == 0 && has_cache(c)) continue;
    const hand_step step = {c, &run, strategy, i};
    device_run_rewind(&run, c);
    put_pools(&run, c, pools);
    if (device_run_step(&run, c, strategy) != KVR_OK)
      fail_msg("P %d, %s: %s", P, strategy, kvr_error_message());
    check_step(&step);
    if (check != NULL) check(&step, data);
  }
  for (int r = 0; r < P; r++) free(pools[r]);
  device_run_fini(&run, c);
}

void hand_run(pure_case *c, hand_check *check, const void *data) {
  hand_run_on(c, NULL, check, data);
}

void hand_run_formula(pure_case *c, hand_value *q, hand_value *k, hand_value *v, hand_check *check,
                      const void *data) {
  hand_fill(c, q, k, v);
  hand_run(c, check, data);
  case_free(c);
}

/* ---- upper dims ---- */

static double upper(int request, int position, int head, int dim) {
  return dim < 128 ? 0.0 : hand_scrambled(request, position, head, dim);
}

static double upper_value(int request, int position, int head, int dim) {
  return dim < 128 ? 0.0 : hand_scrambled_value(request, position, head, dim);
}

static void expect_only_upper_dims(const hand_step *s, const void *data) {
  (void)data;
  const int D = s->c->problem.cache.head_dim;
  double sum = 0;
  for (int i = 0; i < s->c->num_tokens * D; i++) {
    const double x = fabs((double)s->run->out[i]);
    if (i % D < 128) assert_true(x == 0.0);
    sum += x;
  }
  assert_true(sum > 0.0);
}

void hand_run_upper_dims(int P, int head_dim) {
  pure_case c = hand_case(P, 9, 4, 1, 1, head_dim);
  hand_run_formula(&c, upper, upper, upper_value, expect_only_upper_dims, NULL);
}

/* ---- answers ---- */

static void expect(const hand_step *s, const char *what, int token, int head, double got,
                   double want, double tolerance) {
  if (got == want || fabs(got - want) <= tolerance) return;
  fail_msg("P %d, %s: %s of token %d, head %d is %.9g instead of %.9g",
           s->c->problem.cache.num_ranks, s->strategy, what, token, head, got, want);
}

void hand_expect_out(const hand_step *s, int token, int head, double want, double tolerance) {
  const int D = s->c->problem.cache.head_dim, NQ = s->c->problem.num_q_heads;
  for (int d = 0; d < D; d++)
    expect(s, "output", token, head, (double)s->run->out[(token * NQ + head) * D + d], want,
           tolerance);
}

void hand_expect_lse(const hand_step *s, int token, int head, double want, double tolerance) {
  expect(s, "LSE", token, head, (double)s->run->lse[token * s->c->problem.num_q_heads + head], want,
         tolerance);
}

void hand_expect_same_bits_again(const hand_step *s, const void *data) {
  (void)data;
  const size_t bytes = (size_t)s->c->num_tokens * (size_t)s->c->problem.num_q_heads *
                       (size_t)s->c->problem.cache.head_dim * sizeof(float);
  float *first = malloc(bytes + 1);
  assert_non_null(first);
  memcpy(first, s->run->out, bytes);
  device_run_rewind(s->run, s->c);
  device_ok(device_run_step(s->run, s->c, s->strategy), s->strategy);
  assert_memory_equal(s->run->out, first, bytes);
  free(first);
}

void hand_expect_same(const hand_step *s, const void *data) {
  const hand_outputs *o = data;
  const size_t n = (size_t)s->c->num_tokens * (size_t)s->c->problem.num_q_heads *
                   (size_t)s->c->problem.cache.head_dim;
  float **first = ((hand_outputs *)data)->first + (o->any_strategy ? 0 : s->index);
  assert_true(s->index < HAND_MAX_STRATEGIES);
  if (*first == NULL) {
    *first = malloc((n + 1) * sizeof **first);
    assert_non_null(*first);
    memcpy(*first, s->run->out, n * sizeof **first);
  }
  for (size_t i = 0; i < n; i++)
    if (!(fabs((double)s->run->out[i] - (double)(*first)[i]) <= o->tolerance))
      fail_msg("P %d, %s: element %zu is %.9g, was %.9g", s->c->problem.cache.num_ranks,
               s->strategy, i, (double)s->run->out[i], (double)(*first)[i]);
}

void hand_outputs_fini(hand_outputs *o) {
  for (int i = 0; i < HAND_MAX_STRATEGIES; i++) free(o->first[i]);
  *o = (hand_outputs){.tolerance = o->tolerance};
}

#include "device_case.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"

void device_require(void) {
  kvr_device_info *infos = NULL;
  int num = 0, usable = 0;
  if (kvr_device_list(&infos, &num) == KVR_OK)
    for (int i = 0; i < num; i++) usable += infos[i].why_not[0] == '\0';
  free(infos);
  if (usable > 0) return;
  printf("SKIPPED: no usable OpenCL device\n");
  exit(77);
}

void device_ok(kvr_status status, const char *what) {
  if (status == KVR_OK) return;
  fprintf(stderr, "%s: %s: %s\n", what, kvr_status_name(status), kvr_error_message());
  abort();
}

kvr_group *device_group(int num_ranks, int copy_queue) {
  kvr_group *group;
  const kvr_group_desc desc = {.struct_size = sizeof desc,
                               .num_ranks = num_ranks,
                               .devices = getenv("KVRING_TEST_DEVICES"),
                               .copy_queue = copy_queue};
  device_ok(kvr_group_create(&desc, &group), "kvr_group_create");
  return group;
}

/* ---- rounding ---- */

static uint16_t to_half(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint32_t sign = u >> 16 & 0x8000;
  const float a = fabsf(x);
  if (a < 6.103515625e-05f) return (uint16_t)(sign | (uint32_t)lrintf(a * 16777216.0f));
  u = (u & 0x7fffffff) + 0xfff + (u >> 13 & 1);
  return (uint16_t)(sign | ((u >> 13) - (112u << 10)));
}

static float from_half(uint16_t h) {
  const int e = h >> 10 & 31, f = h & 1023;
  const float m = e == 0 ? ldexpf((float)f, -24) : ldexpf((float)(f + 1024), e - 25);
  return h & 0x8000 ? -m : m;
}

static uint16_t to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t b) {
  const uint32_t u = (uint32_t)b << 16;
  float x;
  memcpy(&x, &u, 4);
  return x;
}

static void put(void *to, size_t i, double x, kvr_dtype dtype) {
  if (dtype == KVR_F32)
    ((float *)to)[i] = (float)x;
  else
    ((uint16_t *)to)[i] = dtype == KVR_F16 ? to_half((float)x) : to_bf16((float)x);
}

static double rounded(double x, kvr_dtype dtype) {
  if (dtype == KVR_F32) return (double)(float)x;
  return (double)(dtype == KVR_F16 ? from_half(to_half((float)x)) : from_bf16(to_bf16((float)x)));
}

void device_case_init(pure_case *c, uint64_t seed, kvr_dtype dtype) {
  /* One head dim per type: kernels are built for each. */
  case_randomise(c, seed, dtype == KVR_F32 ? 5 : 4);
  c->problem.cache.dtype = dtype;
  case_map(c, rounded);
}

void device_case_fill(pure_case *c, uint64_t seed) {
  c->problem.requests = c->requests;
  case_fill(c, seed);
  case_map(c, rounded);
}

/* ---- cache ---- */

static size_t row_elements(const pure_case *c) {
  return 2 * (size_t)c->problem.cache.num_kv_heads * (size_t)c->problem.cache.head_dim;
}

static size_t pool_bytes(const pure_case *c) {
  const kvr_cache_desc *d = &c->problem.cache;
  return (size_t)d->num_pages * (size_t)d->page_size * row_elements(c) * kvr_dtype_size(d->dtype);
}

/* A shuffled table for each request, all pages distinct. */
static void make_tables(device_run *run, pure_case *c) {
  const int n = c->problem.cache.num_pages;
  int *order = malloc((size_t)n * sizeof *order), next = 0;
  uint64_t random = 5;
  assert(order != NULL);
  for (int i = 0; i < n; i++) order[i] = i;
  for (int i = n - 1; i > 0; i--) {
    const int j = case_between(&random, 0, i), t = order[i];
    order[i] = order[j];
    order[j] = t;
  }
  for (int i = 0; i < c->problem.num_requests; i++) {
    const int need =
        kvr_map_num_pages(&c->problem.cache, c->requests[i].num_cached + c->requests[i].num_new);
    device_ok(kvr_cache_add(run->cache, &run->ids[i]), "kvr_cache_add");
    device_ok(kvr_cache_set_table(run->cache, run->ids[i], order + next, need),
              "kvr_cache_set_table");
    next += need;
    c->requests[i].cache_id = run->ids[i];
  }
  free(order);
}

static void append_cached(device_run *run, pure_case *c) {
  const kvr_dtype dtype = c->problem.cache.dtype;
  const size_t D = (size_t)c->problem.cache.head_dim, w = row_elements(c);
  for (int i = 0; i < c->problem.num_requests; i++) {
    const size_t L = (size_t)c->requests[i].num_cached;
    void *k = malloc(L * w * 2 + 1), *v = malloc(L * w * 2 + 1);
    assert(k != NULL && v != NULL);
    for (size_t x = 0; x < L; x++)
      for (size_t e = 0; e < w; e++) {
        const size_t head = e / D / 2, at = (x * (w / D / 2) + head) * D + e % D;
        put(e / D % 2 == 0 ? k : v, at, c->context[i][x * w + e], dtype);
      }
    device_ok(kvr_cache_append(run->cache, run->ids[i], k, v, (int)L), "kvr_cache_append");
    free(k);
    free(v);
  }
}

/* Pools start as NaN everywhere (bytes 0xff), then the cached tokens are appended. */
static void fill_pools(device_run *run, pure_case *c) {
  const size_t bytes = pool_bytes(c);
  for (int r = 0; r < c->problem.cache.num_ranks; r++) {
    run->pools[r] = malloc(bytes);
    assert(run->pools[r] != NULL);
    memset(run->pools[r], 0xff, bytes);
    device_ok(kvr_cache_import(run->cache, r, run->pools[r], bytes), "kvr_cache_import");
  }
  append_cached(run, c);
  for (int r = 0; r < c->problem.cache.num_ranks; r++)
    device_ok(kvr_cache_export(run->cache, r, run->pools[r], bytes), "kvr_cache_export");
}

/* ---- runs ---- */

void device_run_init(device_run *run, pure_case *c, kvr_group *group, const char *strategies) {
  *run = (device_run){.spare_tokens = run->spare_tokens, .auto_math = run->auto_math};
  int pages = 3, context = 0, rows = 0;
  for (int i = 0; i < c->problem.num_requests; i++) {
    pages +=
        kvr_map_num_pages(&c->problem.cache, c->requests[i].num_cached + c->requests[i].num_new);
    context = kvr_max(context, c->requests[i].num_cached);
    rows += c->requests[i].num_new;
  }
  c->problem.cache.num_pages = pages;
  device_ok(kvr_cache_create(group, &c->problem.cache, &run->cache), "kvr_cache_create");
  make_tables(run, c);
  fill_pools(run, c);
  const kvr_limits limits = {.struct_size = sizeof limits,
                             .num_q_heads = c->problem.num_q_heads,
                             .max_new_tokens = kvr_max(1, rows) + run->spare_tokens,
                             .max_context = context + run->spare_tokens,
                             .max_requests = c->problem.num_requests,
                             .max_rows = kvr_max(1, rows) + run->spare_tokens,
                             .tile = c->options.tile,
                             .query_tile = c->options.query_tile,
                             .num_slots = c->options.num_slots,
                             .out_dtype = c->problem.out_dtype,
                             .math = run->auto_math ? KVR_MATH_AUTO : KVR_MATH_F32,
                             .strategies = strategies};
  device_ok(kvr_session_create(group, run->cache, &limits, &run->session), "kvr_session_create");
  const size_t heads = (size_t)c->num_tokens * (size_t)c->problem.num_q_heads;
  run->out = malloc((heads * (size_t)c->problem.cache.head_dim + 1) * sizeof *run->out);
  run->lse = malloc((heads + 1) * sizeof *run->lse);
}

void device_run_rewind(device_run *run, pure_case *c) {
  for (int i = 0; i < c->problem.num_requests; i++)
    device_ok(kvr_cache_truncate(run->cache, run->ids[i], c->requests[i].num_cached),
              "kvr_cache_truncate");
}

static void *packed(const double *x, size_t n, kvr_dtype dtype) {
  void *to = malloc(n * sizeof(float) + 1);
  assert(to != NULL);
  for (size_t i = 0; i < n; i++) put(to, i, x[i], dtype);
  return to;
}

static kvr_status run_plan(device_run *run, kvr_plan *plan, const kvr_io *io) {
  kvr_plan_info info;
  const kvr_trace_record *records;
  KVR_TRY(kvr_plan_describe(plan, &info));
  KVR_TRY(kvr_plan_run(plan, io));
  KVR_TRY(kvr_plan_trace(plan, &records, &run->num_records));
  free(run->records);
  run->records = malloc(((size_t)run->num_records + 1) * sizeof *run->records);
  assert(run->records != NULL);
  memcpy(run->records, records, (size_t)run->num_records * sizeof *run->records);
  run->bytes_formula = info.bytes_formula;
  return KVR_OK;
}

kvr_status device_run_step(device_run *run, pure_case *c, const char *strategy) {
  const kvr_dtype dtype = c->problem.cache.dtype;
  const size_t tokens = (size_t)c->num_tokens, D = (size_t)c->problem.cache.head_dim;
  const size_t NQ = (size_t)c->problem.num_q_heads, NKV = (size_t)c->problem.cache.num_kv_heads;
  void *q = packed(c->q, tokens * NQ * D, dtype), *k = packed(c->k, tokens * NKV * D, dtype);
  void *v = packed(c->v, tokens * NKV * D, dtype);
  const kvr_tensor tq = {.host = q, .dtype = dtype}, tk = {.host = k, .dtype = dtype};
  const kvr_tensor tv = {.host = v, .dtype = dtype};
  const kvr_tensor out = {.host = run->out}, lse = {.host = run->lse};
  const kvr_io io =
      {.struct_size = sizeof io, .q = &tq, .k = &tk, .v = &tv, .out = &out, .lse = &lse};
  kvr_options options = c->options;
  options.strategy = strategy;
  kvr_plan *plan = NULL;
  for (size_t i = 0; i < tokens * NQ * D; i++) run->out[i] = NAN;
  kvr_status status = kvr_plan_create(run->session, &c->problem, &options, &plan);
  if (status == KVR_OK) status = run_plan(run, plan, &io);
  kvr_plan_destroy(plan);
  free(q);
  free(k);
  free(v);
  return status;
}

void device_run_fini(device_run *run, pure_case *c) {
  kvr_session_destroy(run->session);
  kvr_cache_destroy(run->cache);
  for (int r = 0; r < c->problem.cache.num_ranks; r++) free(run->pools[r]);
  free(run->out);
  free(run->lse);
  free(run->records);
}

/* ---- answers ---- */

double device_run_error(const device_run *run, const pure_case *c) {
  const size_t heads = (size_t)c->num_tokens * (size_t)c->problem.num_q_heads;
  const size_t D = (size_t)c->problem.cache.head_dim;
  double worst = 0.0, scale = 1e-30;
  for (int i = 0; i < c->problem.num_requests; i++) {
    const size_t n = (size_t)(c->requests[i].num_cached + c->requests[i].num_new) * row_elements(c);
    for (size_t j = 0; j < n; j++)
      if (j / D % 2 == 1) scale = fmax(scale, fabs(c->context[i][j]));
  }
  for (size_t i = 0; i < heads * D; i++) {
    if (!isfinite(run->out[i])) return 1e300;
    if (!isnan(c->want_out[i]))
      worst = fmax(worst, fabs((double)run->out[i] - c->want_out[i]) / scale);
  }
  for (size_t i = 0; i < heads; i++) {
    if (isnan(run->lse[i])) return 1e300;
    if (!isnan(c->want_lse[i]))
      worst =
          fmax(worst, fabs((double)run->lse[i] - c->want_lse[i]) / fmax(1.0, fabs(c->want_lse[i])));
  }
  return worst;
}

/* Writes the rows of the new tokens into the remembered pools. */
static void expect_new_rows(const device_run *run, const pure_case *c) {
  const kvr_cache_desc *d = &c->problem.cache;
  const size_t w = row_elements(c);
  for (int i = 0; i < c->problem.num_requests; i++) {
    int entries;
    const int *table = kvr_cache_table(run->cache, run->ids[i], &entries);
    for (int t = 0; t < c->requests[i].num_new; t++) {
      const int g = c->requests[i].num_cached + t, m = kvr_map_local(d, g);
      const size_t row =
          (size_t)table[m / d->page_size] * (size_t)d->page_size + (size_t)(m % d->page_size);
      for (size_t e = 0; e < w; e++)
        put(run->pools[kvr_map_owner(d, g)], row * w + e, c->context[i][(size_t)g * w + e],
            d->dtype);
    }
  }
}

int device_pools_are_right(const device_run *run, const pure_case *c) {
  const size_t bytes = pool_bytes(c);
  unsigned char *now = malloc(bytes);
  int right = 1;
  assert(now != NULL);
  expect_new_rows(run, c);
  for (int r = 0; r < c->problem.cache.num_ranks && right; r++) {
    device_ok(kvr_cache_export(run->cache, r, now, bytes), "kvr_cache_export");
    right = memcmp(now, run->pools[r], bytes) == 0;
  }
  free(now);
  return right;
}

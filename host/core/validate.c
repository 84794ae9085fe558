#include "core/validate.h"

#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "core/layout.h"

static kvr_status check_positive(const char *name, int value) {
  if (value >= 1) return KVR_OK;
  return kvr_fail(KVR_E_RANGE, "%s is %d; it must be at least 1", name, value);
}

static kvr_status check_size(const char *name, size_t size, size_t want) {
  if (size == want) return KVR_OK;
  return kvr_fail(KVR_E_SHAPE, "%s.struct_size is %zu, this library expects %zu: set it to sizeof",
                  name, size, want);
}

static kvr_status check_dtype(const char *name, kvr_dtype dtype) {
  if (kvr_dtype_size(dtype) != 0) return KVR_OK;
  return kvr_fail(KVR_E_DTYPE, "%s is %d; use KVR_F32, KVR_F16 or KVR_BF16", name, (int)dtype);
}

static kvr_status check_weights(const kvr_cache_desc *cache) {
  if (cache->weights == NULL) return KVR_OK;
  int64_t total = 0;
  for (int r = 0; r < cache->num_ranks; r++) {
    if (cache->weights[r] < 0)
      return kvr_fail(KVR_E_RANGE,
                      "weights[%d] is %d; weights must not be negative: use 0 for a rank that "
                      "stores nothing",
                      r, cache->weights[r]);
    total += cache->weights[r];
  }
  if (total == 0)
    return kvr_fail(KVR_E_RANGE,
                    "all %d weights are 0: no rank could store a token; make one positive",
                    cache->num_ranks);
  if (total > INT_MAX)
    return kvr_fail(KVR_E_RANGE,
                    "weights add up to %lld, the limit is %d: divide them by a common factor",
                    (long long)total, INT_MAX);
  return KVR_OK;
}

kvr_status kvr_cache_desc_check(const kvr_cache_desc *cache) {
  if (cache == NULL) return kvr_fail(KVR_E_NULL, "the cache description is NULL");
  KVR_TRY(check_size("kvr_cache_desc", cache->struct_size, sizeof *cache));
  KVR_TRY(check_positive("num_ranks", cache->num_ranks));
  if (cache->num_ranks > KVR_MAX_RANKS)
    return kvr_fail(KVR_E_RANGE, "num_ranks is %d, the limit is %d: use fewer ranks",
                    cache->num_ranks, KVR_MAX_RANKS);
  KVR_TRY(check_positive("num_kv_heads", cache->num_kv_heads));
  KVR_TRY(check_positive("head_dim", cache->head_dim));
  if (cache->head_dim > KVR_MAX_HEAD_DIM)
    return kvr_fail(KVR_E_RANGE, "head_dim is %d, the limit is %d: use narrower heads",
                    cache->head_dim, KVR_MAX_HEAD_DIM);
  if ((int64_t)cache->num_kv_heads * cache->head_dim > INT_MAX / 8)
    return kvr_fail(KVR_E_RANGE,
                    "num_kv_heads * head_dim is %lld, the limit is %d: use fewer or narrower heads",
                    (long long)cache->num_kv_heads * cache->head_dim, INT_MAX / 8);
  KVR_TRY(check_positive("page_size", cache->page_size));
  KVR_TRY(check_positive("num_pages", cache->num_pages));
  KVR_TRY(check_positive("interleave", cache->interleave));
  KVR_TRY(check_dtype("cache dtype", cache->dtype));
  return check_weights(cache);
}

static kvr_status check_lengths(const kvr_problem *p, int i) {
  const kvr_request *q = &p->requests[i];
  if (q->num_new < 0)
    return kvr_fail(KVR_E_RANGE, "request %d: num_new is %d; it must not be negative", i,
                    q->num_new);
  if (q->num_cached < 0)
    return kvr_fail(KVR_E_RANGE, "request %d: num_cached is %d; it must not be negative", i,
                    q->num_cached);
  if (q->chunk < 0)
    return kvr_fail(KVR_E_RANGE, "request %d: chunk is %d; use 0 for the default", i, q->chunk);
  if (q->num_cached > INT_MAX - q->num_new)
    return kvr_fail(
        KVR_E_RANGE,
        "request %d: num_cached %d + num_new %d is beyond the limit of %d tokens: use a "
        "shorter request",
        i, q->num_cached, q->num_new, INT_MAX);
  const int64_t room = 2 * (int64_t)p->cache.num_ranks * kvr_request_chunk(q, p->cache.num_ranks);
  if (room < q->num_new)
    return kvr_fail(KVR_E_RANGE,
                    "request %d: 2 * %d ranks * chunk %d hold %lld tokens, but num_new is %d; use "
                    "chunk 0 or at least %lld",
                    i, p->cache.num_ranks, q->chunk, (long long)room, q->num_new,
                    (q->num_new + 2LL * p->cache.num_ranks - 1) / (2LL * p->cache.num_ranks));
  return KVR_OK;
}

static kvr_status check_capacity(const kvr_problem *p, int i) {
  const kvr_request *q = &p->requests[i];
  const int need = kvr_map_num_pages(&p->cache, q->num_cached + q->num_new);
  if (need <= p->cache.num_pages) return KVR_OK;
  return kvr_fail(
      KVR_E_CAPACITY,
      "request %d: %d tokens need %d pages of %d tokens per rank, the pool has %d; make "
      "num_pages larger",
      i, q->num_cached + q->num_new, need, p->cache.page_size, p->cache.num_pages);
}

static kvr_status check_requests(const kvr_problem *p) {
  if (p->num_requests < 0)
    return kvr_fail(KVR_E_RANGE, "num_requests is %d; it must not be negative", p->num_requests);
  if (p->num_requests > 0 && p->requests == NULL)
    return kvr_fail(KVR_E_NULL, "requests is NULL, but num_requests is %d: pass that many",
                    p->num_requests);
  int64_t total = 0;
  for (int i = 0; i < p->num_requests; i++) {
    KVR_TRY(check_lengths(p, i));
    KVR_TRY(check_capacity(p, i));
    total += p->requests[i].num_new;
  }
  if (total > INT_MAX)
    return kvr_fail(KVR_E_RANGE,
                    "the step has %lld new tokens, the limit is %d: use smaller chunks",
                    (long long)total, INT_MAX);
  return KVR_OK;
}

/* Kernels count in f32 and in base 2: a factor outside of these loses a product or an inverse to
 * infinity or 0, and infinity times 0 is NaN. */
static const float SMALLEST = 1e-30f, LARGEST = 1e30f;

static bool is_usable(float x) { return fabsf(x) >= SMALLEST && fabsf(x) <= LARGEST; }

static kvr_status check_scales(const kvr_problem *p) {
  const float scales[3] = {p->q_scale, p->k_scale, p->v_scale};
  if (!isfinite(p->scale))
    return kvr_fail(KVR_E_RANGE, "scale is %g; it must be finite, or 0 for 1/sqrt(head_dim)",
                    (double)p->scale);
  for (int i = 0; i < 3; i++)
    if (scales[i] != 0.0f && !is_usable(scales[i]))
      return kvr_fail(KVR_E_RANGE, "%c_scale is %g; it must be finite, %g to %g, or 0 for 1",
                      "qkv"[i], (double)scales[i], (double)SMALLEST, (double)LARGEST);
  const double all = kvr_problem_score_scale(p) * (p->q_scale != 0.0f ? (double)p->q_scale : 1.0);
  if (fabs(all) > (double)LARGEST)
    return kvr_fail(KVR_E_RANGE,
                    "scale * q_scale * k_scale is %g; it must not exceed %g: scale the "
                    "inputs instead",
                    all, (double)LARGEST);
  return KVR_OK;
}

static kvr_status check_masks(const kvr_problem *p) {
  if (p->window < 0)
    return kvr_fail(KVR_E_RANGE, "window is %d; it must be positive, or 0 for none", p->window);
  if (p->soft_cap != 0.0f && !(p->soft_cap > 0.0f && is_usable(p->soft_cap)))
    return kvr_fail(KVR_E_RANGE, "soft_cap is %g; it must be positive, %g to %g, or 0 for none",
                    (double)p->soft_cap, (double)SMALLEST, (double)LARGEST);
  for (int h = 0; p->sinks != NULL && h < p->num_q_heads; h++)
    if (p->sinks[h] != -HUGE_VALF && !(fabsf(p->sinks[h]) <= LARGEST))
      return kvr_fail(KVR_E_RANGE,
                      "sinks[%d] is %g; it must be finite, at most %g, or -inf for none", h,
                      (double)p->sinks[h], (double)LARGEST);
  return KVR_OK;
}

/* The first multiple of the KV heads above the query heads. */
static long long next_multiple(const kvr_problem *p) {
  return ((long long)p->num_q_heads / p->cache.num_kv_heads + 1) * p->cache.num_kv_heads;
}

kvr_status kvr_problem_validate(const kvr_problem *p) {
  if (p == NULL) return kvr_fail(KVR_E_NULL, "the problem is NULL");
  KVR_TRY(check_size("kvr_problem", p->struct_size, sizeof *p));
  KVR_TRY(kvr_cache_desc_check(&p->cache));
  KVR_TRY(check_positive("num_q_heads", p->num_q_heads));
  if (p->num_q_heads % p->cache.num_kv_heads != 0)
    return kvr_fail(KVR_E_SHAPE,
                    "num_q_heads %d is not a multiple of num_kv_heads %d: use a multiple, such as "
                    "%lld",
                    p->num_q_heads, p->cache.num_kv_heads, next_multiple(p));
  if ((int64_t)p->num_q_heads * (p->cache.head_dim + 2) > INT_MAX / 4)
    return kvr_fail(
        KVR_E_RANGE,
        "num_q_heads * (head_dim + 2) is %lld, the limit is %d: use fewer or narrower heads",
        (long long)p->num_q_heads * (p->cache.head_dim + 2), INT_MAX / 4);
  KVR_TRY(check_dtype("out_dtype", p->out_dtype));
  if (p->causal != 0 && p->causal != 1)
    return kvr_fail(KVR_E_RANGE, "causal is %d; it must be 0 or 1", p->causal);
  KVR_TRY(check_scales(p));
  KVR_TRY(check_masks(p));
  return check_requests(p);
}

kvr_status kvr_options_validate(const kvr_options *o) {
  if (o == NULL) return KVR_OK;
  KVR_TRY(check_size("kvr_options", o->struct_size, sizeof *o));
  if (o->tile < 0)
    return kvr_fail(KVR_E_RANGE, "tile is %d; it must be positive, or 0 for %d", o->tile,
                    KVR_DEFAULT_TILE);
  if (o->query_tile < 0)
    return kvr_fail(KVR_E_RANGE, "query_tile is %d; it must be positive, or 0 for all rows",
                    o->query_tile);
  if (o->num_slots < 0 || o->num_slots == 1)
    return kvr_fail(KVR_E_RANGE,
                    "num_slots is %d; a ring needs at least 2, since with one slot a rank would "
                    "overwrite the block it still reads",
                    o->num_slots);
  if (o->num_slots > KVR_MAX_RANKS)
    return kvr_fail(KVR_E_RANGE, "num_slots is %d, the limit is %d: use fewer slots", o->num_slots,
                    KVR_MAX_RANKS);
  return KVR_OK;
}

double kvr_problem_score_scale(const kvr_problem *p) {
  const double scale = p->scale != 0.0f ? (double)p->scale : 1.0 / sqrt((double)p->cache.head_dim);
  return p->k_scale != 0.0f ? scale * (double)p->k_scale : scale;
}

double kvr_problem_value_scale(const kvr_problem *p) {
  return p->v_scale != 0.0f ? (double)p->v_scale : 1.0;
}

kvr_options kvr_options_resolve(const kvr_options *options) {
  kvr_options o = {.struct_size = sizeof o};
  if (options != NULL) o = *options;
  if (o.tile == 0) o.tile = KVR_DEFAULT_TILE;
  if (o.query_tile == 0) o.query_tile = INT_MAX;
  if (o.num_slots == 0) o.num_slots = KVR_DEFAULT_SLOTS;
  return o;
}

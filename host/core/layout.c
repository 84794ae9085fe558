#include "core/layout.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"

size_t kvr_dtype_size(kvr_dtype dtype) {
  switch (dtype) {
  case KVR_F32: return 4;
  case KVR_F16:
  case KVR_BF16: return 2;
  default: return 0;
  }
}

const char *kvr_dtype_name(kvr_dtype dtype) {
  static const char *const names[KVR_NUM_DTYPES] = {"f32", "f16", "bf16"};
  return (unsigned)dtype < KVR_NUM_DTYPES ? names[dtype] : "?";
}

const char *kvr_math_name(kvr_math math) {
  static const char *const names[KVR_NUM_MATHS] = {"auto", "f32", "bf16"};
  return (unsigned)math < KVR_NUM_MATHS ? names[math] : "?";
}

/* ---- the map ---- */

int kvr_map_weight(const kvr_cache_desc *cache, int rank) {
  return cache->weights != NULL ? cache->weights[rank] : 1;
}

int kvr_map_weight_before(const kvr_cache_desc *cache, int rank) {
  if (cache->weights == NULL) return rank;
  int before = 0;
  for (int r = 0; r < rank; r++) before += cache->weights[r];
  return before;
}

int kvr_map_total_weight(const kvr_cache_desc *cache) {
  return kvr_map_weight_before(cache, cache->num_ranks);
}

/* The rank whose run of a cycle covers offset o [tokens], and the start of that run. */
static int rank_at(const kvr_cache_desc *cache, int64_t o, int64_t *run_start) {
  int64_t start = 0;
  int rank = 0;
  for (; rank + 1 < cache->num_ranks; rank++) {
    const int64_t len = (int64_t)cache->interleave * kvr_map_weight(cache, rank);
    if (o < start + len) break;
    start += len;
  }
  *run_start = start;
  return rank;
}

int kvr_map_owner(const kvr_cache_desc *cache, int position) {
  const int64_t cycle_len = (int64_t)cache->interleave * kvr_map_total_weight(cache);
  int64_t run_start;
  return rank_at(cache, position % cycle_len, &run_start);
}

int kvr_map_local(const kvr_cache_desc *cache, int position) {
  const int64_t cycle_len = (int64_t)cache->interleave * kvr_map_total_weight(cache);
  const int64_t o = position % cycle_len;
  int64_t run_start;
  const int rank = rank_at(cache, o, &run_start);
  const int64_t run = (int64_t)cache->interleave * kvr_map_weight(cache, rank);
  return (int)(position / cycle_len * run + o - run_start);
}

int kvr_map_position(const kvr_cache_desc *cache, int rank, int local) {
  const int64_t run = (int64_t)cache->interleave * kvr_map_weight(cache, rank);
  const int64_t cycle_len = (int64_t)cache->interleave * kvr_map_total_weight(cache);
  const int64_t start = (int64_t)cache->interleave * kvr_map_weight_before(cache, rank);
  return (int)(local / run * cycle_len + start + local % run);
}

int kvr_map_count(const kvr_cache_desc *cache, int num_tokens, int rank) {
  const int64_t run = (int64_t)cache->interleave * kvr_map_weight(cache, rank);
  const int64_t cycle_len = (int64_t)cache->interleave * kvr_map_total_weight(cache);
  const int64_t start = (int64_t)cache->interleave * kvr_map_weight_before(cache, rank);
  int64_t rest = num_tokens % cycle_len - start;
  if (rest < 0) rest = 0;
  if (rest > run) rest = run;
  return (int)(num_tokens / cycle_len * run + rest);
}

int kvr_map_num_pages(const kvr_cache_desc *cache, int num_tokens) {
  int most = 0;
  for (int r = 0; r < cache->num_ranks; r++)
    most = kvr_max(most, kvr_ceil_div(kvr_map_count(cache, num_tokens, r), cache->page_size));
  return most;
}

/* ---- head and tail rows ---- */

int kvr_request_chunk(const kvr_request *request, int num_ranks) {
  if (request->chunk > 0) return request->chunk;
  const int64_t parts = 2 * (int64_t)num_ranks;
  return kvr_max(1, (int)((request->num_new + parts - 1) / parts));
}

/* Real tokens of chunk c, which starts at c * C. */
static int chunk_len(const kvr_request *request, int64_t c, int chunk) {
  const int64_t left = request->num_new - c * chunk;
  return left <= 0 ? 0 : left < chunk ? (int)left : chunk;
}

static kvr_rows rank_rows(const kvr_request *request, int num_ranks, int rank, int first) {
  const int chunk = kvr_request_chunk(request, num_ranks);
  const int64_t tail = 2 * (int64_t)num_ranks - 1 - rank;
  const int head_len = chunk_len(request, rank, chunk);
  const int tail_len = chunk_len(request, tail, chunk);
  return (kvr_rows){.first = first,
                    .num = head_len + tail_len,
                    .split = head_len,
                    .t0 = head_len > 0 ? rank * chunk : 0,
                    .t1 = tail_len > 0 ? (int)(tail * chunk) : 0};
}

kvr_status kvr_layout_init(const kvr_problem *problem, kvr_layout *layout) {
  const int R = problem->num_requests, P = problem->cache.num_ranks;
  memset(layout, 0, sizeof *layout);
  layout->num_ranks = P;
  layout->num_requests = R;
  const size_t pairs = (size_t)R * (size_t)P + 1; /* + 1: a step may have no request */
  layout->token0 = calloc((size_t)R + 1, sizeof *layout->token0);
  layout->rows = calloc(pairs, sizeof *layout->rows);
  layout->share = calloc(pairs, sizeof *layout->share);
  layout->rank_rows = calloc((size_t)P, sizeof *layout->rank_rows);
  if (!layout->token0 || !layout->rows || !layout->share || !layout->rank_rows) {
    kvr_layout_fini(layout);
    return kvr_fail(KVR_E_OOM, "no host memory for the layout of %d requests on %d ranks", R, P);
  }
  for (int i = 0; i < R; i++) {
    const kvr_request *request = &problem->requests[i];
    layout->token0[i] = layout->num_tokens;
    layout->num_tokens += request->num_new;
    for (int r = 0; r < P; r++) {
      layout->rows[i * P + r] = rank_rows(request, P, r, layout->rank_rows[r]);
      layout->rank_rows[r] += layout->rows[i * P + r].num;
      layout->share[i * P + r] = kvr_map_count(&problem->cache, request->num_cached, r);
    }
  }
  return KVR_OK;
}

void kvr_layout_fini(kvr_layout *layout) {
  free(layout->token0);
  free(layout->rows);
  free(layout->share);
  free(layout->rank_rows);
  memset(layout, 0, sizeof *layout);
}

int kvr_layout_longest_share(const kvr_layout *layout, int request) {
  int longest = 0;
  for (int r = 0; r < layout->num_ranks; r++)
    longest = kvr_max(longest, kvr_layout_share(layout, request, r));
  return longest;
}

int kvr_layout_most_rows(const kvr_layout *layout, int request) {
  int most = 0;
  for (int r = 0; r < layout->num_ranks; r++)
    most = kvr_max(most, kvr_layout_rows(layout, request, r)->num);
  return most;
}

kvr_rows kvr_rows_slice(kvr_rows rows, int begin, int end) {
  begin = kvr_clip(begin, 0, rows.num);
  end = kvr_clip(end, begin, rows.num);
  return (kvr_rows){.first = rows.first + begin,
                    .num = end - begin,
                    .split = kvr_clip(rows.split - begin, 0, end - begin),
                    .t0 = rows.t0 + begin,
                    .t1 = rows.t1 + kvr_max(0, begin - rows.split)};
}

int kvr_rows_token(kvr_rows rows, int i) {
  return i < rows.split ? rows.t0 + i : rows.t1 + (i - rows.split);
}

int kvr_rows_token_end(kvr_rows rows) {
  /* Tail chunks come after head chunks, so the last row has the largest token. */
  return rows.num == 0 ? 0 : kvr_rows_token(rows, rows.num - 1) + 1;
}

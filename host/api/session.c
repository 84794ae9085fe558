#include "api/session.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "core/validate.h"
#include "device/driver_lock.h"

static kvr_status check_limits(const kvr_limits *l, const kvr_cache_desc *cache) {
  if (l->struct_size != sizeof *l)
    return kvr_fail(KVR_E_SHAPE, "kvr_limits.struct_size is %zu, this library expects %zu",
                    l->struct_size, sizeof *l);
  if (l->num_q_heads < 1 || l->num_q_heads % cache->num_kv_heads != 0)
    return kvr_fail(KVR_E_SHAPE, "num_q_heads %d is not a positive multiple of num_kv_heads %d",
                    l->num_q_heads, cache->num_kv_heads);
  if (l->max_new_tokens < 1 || l->max_context < 0 || l->max_requests < 1 || l->max_rows < 0)
    return kvr_fail(
        KVR_E_RANGE,
        "limits must allow a new token and a request: max_new_tokens %d, max_requests %d, "
        "max_context %d, max_rows %d",
        l->max_new_tokens, l->max_requests, l->max_context, l->max_rows);
  if (l->max_context > INT_MAX - l->max_new_tokens)
    return kvr_fail(KVR_E_RANGE, "max_context %d + max_new_tokens %d is beyond %d tokens",
                    l->max_context, l->max_new_tokens, INT_MAX);
  if (kvr_dtype_size(l->out_dtype) == 0)
    return kvr_fail(KVR_E_DTYPE, "out_dtype is %d; use KVR_F32, KVR_F16 or KVR_BF16",
                    (int)l->out_dtype);
  if ((unsigned)l->math >= KVR_NUM_MATHS)
    return kvr_fail(KVR_E_RANGE, "math is %d; use KVR_MATH_AUTO, KVR_MATH_F32 or KVR_MATH_BF16",
                    (int)l->math);
  const kvr_options options = {.struct_size = sizeof options,
                               .tile = l->tile,
                               .query_tile = l->query_tile,
                               .num_slots = l->num_slots};
  return kvr_options_validate(&options);
}

static kvr_bounds bounds_of(const kvr_limits *l, int num_ranks) {
  const int rows = l->max_rows > 0
                       ? l->max_rows
                       : kvr_bounds_default_rows(num_ranks, l->max_new_tokens, l->max_requests);
  const int pass_rows = l->query_tile > 0 ? kvr_min(l->query_tile, rows) : rows;
  return (kvr_bounds){.num_ranks = num_ranks,
                      .new_tokens = l->max_new_tokens,
                      .context = l->max_context,
                      .rows = rows,
                      .pass_rows = pass_rows,
                      .lane_rows = pass_rows,
                      .tile = l->tile > 0 ? l->tile : KVR_DEFAULT_TILE,
                      .slots = l->num_slots > 0 ? l->num_slots : KVR_DEFAULT_SLOTS};
}

/* ---- which strategies ---- */

static bool wants_all(const kvr_limits *l) {
  return l->strategies == NULL || strcmp(l->strategies, "all") == 0;
}

/* True if a comma separated list has the name. */
static bool list_has(const char *list, const char *name) {
  const size_t len = strlen(name);
  for (const char *at = list; at != NULL; at = strchr(at, ',')) {
    if (*at == ',') at++;
    if (strncmp(at, name, len) == 0 && (at[len] == ',' || at[len] == '\0')) return true;
  }
  return false;
}

/* Every name of the list must be known. */
static kvr_status check_names(const char *list) {
  char name[64];
  for (const char *at = list; at != NULL;) {
    const char *end = strchr(at, ',');
    const size_t len = end != NULL ? (size_t)(end - at) : strlen(at);
    snprintf(name, sizeof name, "%.*s", (int)(len < sizeof name ? len : sizeof name - 1), at);
    const kvr_strategy *strategy;
    KVR_TRY(kvr_strategy_find(name, &strategy));
    at = end != NULL ? end + 1 : NULL;
  }
  return KVR_OK;
}

static size_t room_of(const kvr_group *group) {
  size_t room = SIZE_MAX;
  for (int r = 0; r < group->num_ranks; r++) {
    const size_t left = group->ranks[r].budget - group->ranks[r].allocated;
    room = left < room ? left : room;
  }
  return room;
}

/* What a session needs whatever its strategies are: block tables and sinks. */
static size_t fixed_bytes(const kvr_session *s) {
  const size_t table = (size_t)kvr_max(1, s->max_table_entries) * sizeof(int);
  return kvr_add_sat(kvr_mul_sat((size_t)s->max_requests, table),
                     (size_t)s->num_q_heads * sizeof(float));
}

/* KVR_OK if the footprint fits the budget and every memory of it the largest allocation. */
static kvr_status check_fit(const kvr_session *s, const kvr_footprint *f, const kvr_row_bytes *b,
                            const char *strategy) {
  const size_t bytes = kvr_add_sat(kvr_footprint_bytes(f, b), fixed_bytes(s));
  const size_t room = room_of(s->group);
  if (bytes > room)
    return kvr_fail(
        KVR_E_OOM,
        "strategy %s needs %zu bytes per rank, the memory budget leaves %zu; raise it, or "
        "use a smaller chunk, tile or context",
        strategy, bytes, room);
  for (int i = 0; i < KVR_NUM_BUFFERS; i++) {
    const size_t one = (size_t)f->rows[i] * kvr_buffer_row_bytes(b, (kvr_buffer)i);
    for (int r = 0; f->memories[i] > 0 && r < s->group->num_ranks; r++)
      if (one > s->group->ranks[r].max_alloc)
        return kvr_fail(KVR_E_OOM,
                        "strategy %s needs a %s buffer of %zu bytes, the device allows %zu in one "
                        "allocation; use ring or a smaller chunk",
                        strategy, kvr_buffer_name((kvr_buffer)i), one,
                        s->group->ranks[r].max_alloc);
  }
  return KVR_OK;
}

/* Takes the strategies in order: all that were named must fit together; of "all", those that do. */
static kvr_status select_strategies(kvr_session *s, const kvr_limits *l, const kvr_bounds *bounds,
                                    const kvr_row_bytes *row_bytes) {
  if (!wants_all(l)) KVR_TRY(check_names(l->strategies));
  for (int i = 0; i < kvr_num_strategies(); i++) {
    const kvr_strategy *strategy = kvr_strategy_get(i);
    if (!wants_all(l) && !list_has(l->strategies, strategy->name)) continue;
    const kvr_footprint own = kvr_footprint_of(kvr_strategy_buffers(strategy), bounds);
    kvr_footprint both = s->footprint;
    kvr_footprint_merge(&both, &own);
    const kvr_status status = check_fit(s, &both, row_bytes, strategy->name);
    if (status != KVR_OK) {
      if (wants_all(l) && strategy != &kvr_strategy_ring) continue;
      return status;
    }
    s->footprint = both;
    s->strategies |= 1u << i;
  }
  return KVR_OK;
}

/* ---- lifetime ---- */

static kvr_status init(kvr_session *s, const kvr_limits *l) {
  const kvr_cache_desc *cache = kvr_cache_describe(s->cache);
  if (cache->num_ranks != s->group->num_ranks)
    return kvr_fail(KVR_E_LAYOUT, "the cache has %d ranks, the group %d", cache->num_ranks,
                    s->group->num_ranks);
  KVR_TRY(check_limits(l, cache));
  const kvr_problem shape = {.cache = *cache,
                             .num_q_heads = l->num_q_heads,
                             .out_dtype = l->out_dtype};
  const kvr_row_bytes row_bytes = kvr_problem_row_bytes(&shape);
  const kvr_bounds bounds = bounds_of(l, s->group->num_ranks);
  s->num_q_heads = l->num_q_heads;
  s->max_requests = l->max_requests;
  s->out_dtype = l->out_dtype;
  s->max_table_entries = kvr_map_num_pages(cache, l->max_context + l->max_new_tokens);
  KVR_TRY(select_strategies(s, l, &bounds, &row_bytes));
  const kvr_exec_desc desc = {.num_q_heads = l->num_q_heads,
                              .out_dtype = l->out_dtype,
                              .math = l->math,
                              .footprint = s->footprint,
                              .max_requests = l->max_requests,
                              .max_table_entries = s->max_table_entries};
  kvr_driver_lock();
  const kvr_status status = kvr_exec_create(s->group, s->cache, &desc, &s->exec);
  kvr_driver_unlock();
  s->built = 1u << l->out_dtype;
  return status;
}

kvr_status kvr_session_create(kvr_group *group, kvr_cache *cache, const kvr_limits *limits,
                              kvr_session **out) {
  if (group == NULL || cache == NULL || limits == NULL || out == NULL)
    return kvr_fail(KVR_E_NULL, "group, cache, limits or out is NULL");
  *out = NULL;
  kvr_session *s = calloc(1, sizeof *s);
  if (s == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a session");
  s->group = group;
  s->cache = cache;
  const kvr_status status = init(s, limits);
  if (status != KVR_OK) {
    kvr_session_destroy(s);
    return status;
  }
  *out = s;
  return KVR_OK;
}

kvr_status kvr_session_build(kvr_session *s, kvr_dtype out_dtype) {
  if (s->built >> out_dtype & 1u) return KVR_OK;
  kvr_driver_lock();
  const kvr_status status = kvr_exec_build(s->exec, out_dtype);
  kvr_driver_unlock();
  if (status == KVR_OK) s->built |= 1u << out_dtype;
  return status;
}

void kvr_session_destroy(kvr_session *s) {
  if (s == NULL) return;
  if (s->exec != NULL) kvr_exec_wait(s->exec);
  kvr_exec_destroy(s->exec);
  free(s);
}

size_t kvr_session_bytes(const kvr_session *s) { return s != NULL ? kvr_exec_bytes(s->exec) : 0; }

kvr_math kvr_session_math(const kvr_session *session, int rank) {
  if (session == NULL || kvr_group_check_rank(session->group, rank) != KVR_OK) return KVR_MATH_AUTO;
  return kvr_exec_math(session->exec, rank);
}

#include "choose/choose.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "core/validate.h"
#include "kvring/plan.h"

enum { GATHER_KV_CONTEXT = 16384 };

/* The request with the longest context decides: it costs most. */
static kvr_request largest_request(const kvr_problem *p) {
  kvr_request largest = {0};
  for (int i = 0; i < p->num_requests; i++)
    if (p->requests[i].num_new > 0 && p->requests[i].num_cached >= largest.num_cached)
      largest = p->requests[i];
  return largest;
}

static bool has_cached(const kvr_problem *p) {
  for (int i = 0; i < p->num_requests; i++)
    if (p->requests[i].num_cached > 0) return true;
  return false;
}

static const kvr_strategy *first_choice(const kvr_problem *p, char *reason, size_t size) {
  const kvr_request q = largest_request(p);
  const long long move_kv = (long long)q.num_cached * p->cache.num_kv_heads;
  const long long move_q = 2LL * q.num_new * p->num_q_heads;
  if (!has_cached(p)) {
    snprintf(reason, size, "no cached tokens");
    return &kvr_strategy_current_only;
  }
  if (q.num_cached > 0 && move_kv >= move_q) {
    snprintf(reason, size,
             "context %d * %d KV heads = %lld >= 2 * %d new tokens * %d heads = %lld: queries are "
             "cheaper to move",
             q.num_cached, p->cache.num_kv_heads, move_kv, q.num_new, p->num_q_heads, move_q);
    return &kvr_strategy_gather_q;
  }
  if (q.num_cached >= GATHER_KV_CONTEXT) {
    snprintf(reason, size, "context %d >= %d: one launch over gathered KV", q.num_cached,
             GATHER_KV_CONTEXT);
    return &kvr_strategy_gather_kv;
  }
  snprintf(reason, size, "context %d < %d: the ring hides its hops", q.num_cached,
           GATHER_KV_CONTEXT);
  return &kvr_strategy_ring;
}

kvr_status kvr_choose_strategy(const kvr_problem *p, kvr_may_use *may_use, void *data,
                               const kvr_strategy **out, char *reason, size_t reason_size) {
  char why[256];
  const kvr_strategy *choice = first_choice(p, why, sizeof why);
  if (may_use(choice, data)) {
    snprintf(reason, reason_size, "%s (uncalibrated ladder)", why);
    *out = choice;
    return KVR_OK;
  }
  if (!may_use(&kvr_strategy_ring, data))
    return kvr_fail(KVR_E_OOM,
                    "memory or limits refuse both %s and ring; raise the memory budget or "
                    "the limits, or use a smaller chunk or tile",
                    choice->name);
  snprintf(reason, reason_size, "%s, but memory or limits refuse %s (uncalibrated ladder)", why,
           choice->name);
  *out = &kvr_strategy_ring;
  return KVR_OK;
}

/* ---- the memory gate of the public, device-free question ---- */

typedef struct gate {
  kvr_bounds bounds;
  kvr_row_bytes row_bytes;
  size_t budget;
} gate;

static size_t bytes_needed(const gate *g, const kvr_strategy *strategy) {
  const kvr_footprint f = kvr_footprint_of(kvr_strategy_buffers(strategy), &g->bounds);
  return kvr_footprint_bytes(&f, &g->row_bytes);
}

static bool fits(const kvr_strategy *strategy, void *data) {
  const gate *g = data;
  return g->budget == 0 || bytes_needed(g, strategy) <= g->budget;
}

kvr_status kvr_choose(const kvr_problem *problem, const kvr_options *options, size_t budget,
                      const char **out_name, char *reason, size_t reason_size) {
  if (out_name == NULL || reason == NULL) return kvr_fail(KVR_E_NULL, "out_name or reason is NULL");
  KVR_TRY(kvr_problem_check(problem, options));
  const kvr_options resolved = kvr_options_resolve(options);
  kvr_layout layout;
  KVR_TRY(kvr_layout_init(problem, &layout));
  gate g = {kvr_bounds_of(problem, &layout, &resolved), kvr_problem_row_bytes(problem), budget};
  kvr_layout_fini(&layout);
  const kvr_strategy *strategy = NULL;
  const kvr_status status = kvr_choose_strategy(problem, fits, &g, &strategy, reason, reason_size);
  if (status != KVR_OK)
    return kvr_fail_at(status, "ring needs %zu bytes per rank, the budget is %zu",
                       bytes_needed(&g, &kvr_strategy_ring), budget);
  *out_name = strategy->name;
  return KVR_OK;
}

kvr_status kvr_plan_estimate(const kvr_problem *problem, const kvr_options *options,
                             kvr_plan_info *info) {
  if (info == NULL) return kvr_fail(KVR_E_NULL, "info is NULL");
  if (options == NULL || options->strategy == NULL)
    return kvr_fail(KVR_E_NULL, "options->strategy is NULL; name one, or ask kvr_choose first");
  if (strcmp(options->strategy, "auto") == 0)
    return kvr_fail(KVR_E_RANGE, "options->strategy is auto; name one, or ask kvr_choose first");
  KVR_TRY(kvr_problem_check(problem, options));
  const kvr_strategy *strategy = NULL;
  KVR_TRY(kvr_strategy_find(options->strategy, &strategy));
  kvr_schedule *s;
  KVR_TRY(kvr_strategy_schedule(strategy, problem, options, &s));
  const kvr_bounds bounds = kvr_bounds_of(problem, &s->layout, &s->options);
  const kvr_footprint f = kvr_footprint_of(kvr_strategy_buffers(strategy), &bounds);
  const kvr_totals totals = kvr_schedule_totals(s);
  *info = (kvr_plan_info){.strategy = strategy->name,
                          .num_ops = s->num_ops,
                          .launches = totals.launches,
                          .bytes_moved = totals.bytes_moved,
                          .bytes_formula = strategy->bytes(s),
                          .state_traffic_bytes = totals.state_bytes,
                          .slot_bytes = kvr_footprint_slot_bytes(&f, &s->row_bytes),
                          .state_bytes = kvr_footprint_state_bytes(&f, &s->row_bytes),
                          .peak_bytes = kvr_footprint_bytes(&f, &s->row_bytes)};
  kvr_schedule_destroy(s);
  return KVR_OK;
}

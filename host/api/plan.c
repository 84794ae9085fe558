#include <stdlib.h>
#include <string.h>

#include "api/session.h"
#include "base/arith.h"
#include "base/error.h"
#include "choose/choose.h"
#include "core/validate.h"
#include "device/watch.h"

typedef enum plan_state { PLAN_READY, PLAN_IN_FLIGHT, PLAN_DONE, PLAN_POISONED } plan_state;

struct kvr_plan {
  kvr_session *session; /* borrowed */
  const kvr_strategy *strategy;
  kvr_schedule *schedule;
  kvr_bounds bounds;
  kvr_trace_record *records; /* (schedule->num_ops) */
  plan_state state;
  char reason[320];
};

/* ---- checks against the session ---- */

static bool same_weights(const kvr_cache_desc *a, const kvr_cache_desc *b) {
  for (int r = 0; r < a->num_ranks; r++)
    if (kvr_map_weight(a, r) != kvr_map_weight(b, r)) return false;
  return true;
}

static kvr_status check_layout(const kvr_session *s, const kvr_problem *p) {
  const kvr_cache_desc *a = kvr_cache_describe(s->cache), *b = &p->cache;
  const struct {
    const char *name;
    int cache, problem;
  } fields[] = {{"num_ranks", a->num_ranks, b->num_ranks},
                {"num_kv_heads", a->num_kv_heads, b->num_kv_heads},
                {"head_dim", a->head_dim, b->head_dim},
                {"page_size", a->page_size, b->page_size},
                {"num_pages", a->num_pages, b->num_pages},
                {"interleave", a->interleave, b->interleave},
                {"dtype", (int)a->dtype, (int)b->dtype}};
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
    if (fields[i].cache != fields[i].problem)
      return kvr_fail(
          KVR_E_LAYOUT,
          "the problem's cache has %s %d, the session's has %d: describe the same cache",
          fields[i].name, fields[i].problem, fields[i].cache);
  if (!same_weights(a, b))
    return kvr_fail(
        KVR_E_LAYOUT,
        "the problem's cache has other weights than the session's: describe the same cache");
  if (p->num_q_heads != s->num_q_heads)
    return kvr_fail(KVR_E_SHAPE,
                    "num_q_heads is %d, the session was made for %d: create another one",
                    p->num_q_heads, s->num_q_heads);
  if (kvr_dtype_size(p->out_dtype) > kvr_dtype_size(s->out_dtype))
    return kvr_fail(KVR_E_CAPACITY, "out_dtype %s is wider than the session's limit %s; raise it",
                    kvr_dtype_name(p->out_dtype), kvr_dtype_name(s->out_dtype));
  return KVR_OK;
}

/* A block table may have changed since the plan was made. */
static kvr_status check_table(const kvr_session *s, const kvr_problem *p, int i) {
  const kvr_request *q = &p->requests[i];
  const int need = kvr_map_num_pages(&p->cache, q->num_cached + q->num_new);
  int entries;
  kvr_cache_table(s->cache, q->cache_id, &entries);
  if (entries >= need) return KVR_OK;
  return kvr_fail(KVR_E_CAPACITY,
                  "request %d: %d tokens need %d entries in its block table, it has %d; reserve "
                  "more",
                  i, q->num_cached + q->num_new, need, entries);
}

static kvr_status check_request(const kvr_session *s, const kvr_problem *p, int i) {
  const kvr_request *q = &p->requests[i];
  for (int j = 0; j < i; j++)
    if (p->requests[j].cache_id == q->cache_id)
      return kvr_fail(
          KVR_E_CONFLICT,
          "requests %d and %d of the step are both cache request %d: a step has each once", j, i,
          q->cache_id);
  KVR_TRY(kvr_cache_check(s->cache, q->cache_id));
  const int length = kvr_cache_length(s->cache, q->cache_id);
  if (length != q->num_cached)
    return kvr_fail(KVR_E_STATE,
                    "request %d: num_cached is %d, but the cache holds %d tokens of it: use that",
                    i, q->num_cached, length);
  KVR_TRY(check_table(s, p, i));
  const int need = kvr_map_num_pages(&p->cache, q->num_cached + q->num_new);
  if (need > s->max_table_entries)
    return kvr_fail(KVR_E_CAPACITY,
                    "request %d needs %d block table entries, the session's limits allow %d; raise "
                    "max_context",
                    i, need, s->max_table_entries);
  return KVR_OK;
}

static kvr_status check_requests(const kvr_session *s, const kvr_problem *p) {
  if (p->num_requests > s->max_requests)
    return kvr_fail(KVR_E_CAPACITY,
                    "the step has %d requests, the session's limit is %d; raise max_requests",
                    p->num_requests, s->max_requests);
  for (int i = 0; i < p->num_requests; i++) KVR_TRY(check_request(s, p, i));
  return KVR_OK;
}

static bool is_available(const kvr_session *s, const kvr_strategy *strategy) {
  for (int i = 0; i < kvr_num_strategies(); i++)
    if (kvr_strategy_get(i) == strategy) return (s->strategies & (1u << i)) != 0;
  return false;
}

/* The step's buffers must fit those of the session. */
static kvr_status check_footprint(const kvr_session *s, const kvr_strategy *strategy,
                                  const kvr_bounds *bounds) {
  const kvr_footprint need = kvr_footprint_of(kvr_strategy_buffers(strategy), bounds);
  for (int b = 0; b < KVR_NUM_BUFFERS; b++)
    if (need.rows[b] > s->footprint.rows[b] || need.memories[b] > s->footprint.memories[b])
      return kvr_fail(
          KVR_E_CAPACITY,
          "strategy %s needs %d rows in each of %d %s buffers, the session's limits allow "
          "%d rows in %d; raise the limits",
          strategy->name, need.rows[b], need.memories[b], kvr_buffer_name((kvr_buffer)b),
          s->footprint.rows[b], s->footprint.memories[b]);
  return KVR_OK;
}

/* ---- choosing ---- */

typedef struct gate {
  const kvr_session *session;
  const kvr_bounds *bounds;
} gate;

static bool may_use(const kvr_strategy *strategy, void *data) {
  const gate *g = data;
  return is_available(g->session, strategy) &&
         check_footprint(g->session, strategy, g->bounds) == KVR_OK;
}

static kvr_status pick_strategy(kvr_plan *plan, const kvr_problem *p, const kvr_options *options) {
  const bool is_auto =
      options == NULL || options->strategy == NULL || strcmp(options->strategy, "auto") == 0;
  if (is_auto) {
    gate g = {plan->session, &plan->bounds};
    return kvr_choose_strategy(p, may_use, &g, &plan->strategy, plan->reason, sizeof plan->reason);
  }
  KVR_TRY(kvr_strategy_find(options->strategy, &plan->strategy));
  strcpy(plan->reason, "asked for");
  if (!is_available(plan->session, plan->strategy))
    return kvr_fail(
        KVR_E_OOM,
        "strategy %s was not given buffers in this session: it is not among the limits' "
        "strategies, or does not fit the memory budget",
        plan->strategy->name);
  return check_footprint(plan->session, plan->strategy, &plan->bounds);
}

/* ---- lifetime ---- */

static kvr_status measure(kvr_plan *plan, const kvr_problem *p, const kvr_options *options) {
  const kvr_options resolved = kvr_options_resolve(options);
  kvr_layout layout;
  KVR_TRY(kvr_layout_init(p, &layout));
  plan->bounds = kvr_bounds_of(p, &layout, &resolved);
  kvr_layout_fini(&layout);
  return KVR_OK;
}

static kvr_status init(kvr_plan *plan, const kvr_problem *p, const kvr_options *options) {
  kvr_session *s = plan->session;
  KVR_TRY(kvr_group_check_moving(s->group));
  KVR_TRY(kvr_problem_check(p, options));
  KVR_TRY(check_layout(s, p));
  KVR_TRY(check_requests(s, p));
  KVR_TRY(measure(plan, p, options));
  KVR_TRY(pick_strategy(plan, p, options));
  KVR_TRY(kvr_strategy_schedule(plan->strategy, p, options, &plan->schedule));
  plan->records = calloc((size_t)plan->schedule->num_ops + 1, sizeof *plan->records);
  if (plan->records == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a plan");
  return kvr_session_build(s, p->out_dtype);
}

kvr_status kvr_plan_create(kvr_session *session, const kvr_problem *problem,
                           const kvr_options *options, kvr_plan **out) {
  if (session == NULL || problem == NULL || out == NULL)
    return kvr_fail(KVR_E_NULL, "session, problem or out is NULL");
  *out = NULL;
  kvr_plan *plan = calloc(1, sizeof *plan);
  if (plan == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a plan");
  plan->session = session;
  const kvr_status status = init(plan, problem, options);
  if (status != KVR_OK) {
    kvr_plan_destroy(plan);
    return status;
  }
  *out = plan;
  return KVR_OK;
}

void kvr_plan_destroy(kvr_plan *plan) {
  if (plan == NULL) return;
  if (plan->state == PLAN_IN_FLIGHT) kvr_plan_wait(plan);
  kvr_schedule_destroy(plan->schedule);
  free(plan->records);
  free(plan);
}

/* ---- running ---- */

static kvr_status check_runnable(const kvr_plan *plan) {
  const kvr_problem *p = &plan->schedule->problem;
  KVR_TRY(kvr_group_check_moving(plan->session->group));
  if (plan->state == PLAN_POISONED)
    return kvr_fail(KVR_E_STATE, "the plan failed before; create a new one");
  if (plan->session->in_flight != NULL)
    return kvr_fail(KVR_E_STATE, "the session has a step in flight; wait for it first");
  for (int i = 0; i < p->num_requests; i++) {
    KVR_TRY(kvr_cache_check(plan->session->cache, p->requests[i].cache_id));
    const int length = kvr_cache_length(plan->session->cache, p->requests[i].cache_id);
    if (length != p->requests[i].num_cached)
      return kvr_fail(
          KVR_E_STATE,
          "request %d: the plan was made for %d cached tokens, there are %d now; create a "
          "new plan",
          i, p->requests[i].num_cached, length);
    KVR_TRY(check_table(plan->session, p, i));
  }
  return KVR_OK;
}

static void begin_flight(kvr_plan *plan) {
  const kvr_problem *p = &plan->schedule->problem;
  plan->session->in_flight = plan;
  for (int i = 0; i < p->num_requests; i++)
    kvr_cache_hold(plan->session->cache, p->requests[i].cache_id);
}

static void end_flight(kvr_plan *plan) {
  const kvr_problem *p = &plan->schedule->problem;
  plan->session->in_flight = NULL;
  for (int i = 0; i < p->num_requests; i++)
    kvr_cache_let_go(plan->session->cache, p->requests[i].cache_id);
}

kvr_status kvr_plan_enqueue(kvr_plan *plan, const kvr_io *io, cl_uint num_waits,
                            const cl_event *waits, cl_event *events) {
  if (plan == NULL || io == NULL) return kvr_fail(KVR_E_NULL, "plan or io is NULL");
  if (num_waits > 0 && waits == NULL)
    return kvr_fail(KVR_E_NULL, "waits is NULL, but num_waits is %u", (unsigned)num_waits);
  KVR_TRY(check_runnable(plan));
  KVR_TRY(kvr_exec_check_io(plan->session->exec, plan->schedule, io));
  const kvr_status status = kvr_exec_enqueue(plan->session->exec, plan->schedule, io, num_waits,
                                             waits, events, plan->records);
  plan->state = status == KVR_OK ? PLAN_IN_FLIGHT : PLAN_POISONED;
  if (status == KVR_OK) begin_flight(plan);
  return status;
}

kvr_status kvr_plan_wait(kvr_plan *plan) {
  if (plan == NULL) return kvr_fail(KVR_E_NULL, "plan is NULL");
  if (plan->state != PLAN_IN_FLIGHT)
    return kvr_fail(KVR_E_STATE, "the plan is not in flight; enqueue it first");
  const kvr_status status = kvr_exec_wait(plan->session->exec);
  end_flight(plan);
  plan->state = status == KVR_OK ? PLAN_DONE : PLAN_POISONED;
  const kvr_problem *p = &plan->schedule->problem;
  for (int i = 0; status == KVR_OK && i < p->num_requests; i++)
    kvr_cache_commit(plan->session->cache, p->requests[i].cache_id,
                     p->requests[i].num_cached + p->requests[i].num_new);
  return status;
}

kvr_status kvr_plan_run(kvr_plan *plan, const kvr_io *io) {
  KVR_TRY(kvr_plan_enqueue(plan, io, 0, NULL, NULL));
  return kvr_plan_wait(plan);
}

/* ---- questions ---- */

kvr_status kvr_plan_describe(const kvr_plan *plan, kvr_plan_info *out) {
  if (plan == NULL || out == NULL) return kvr_fail(KVR_E_NULL, "plan or out is NULL");
  const kvr_schedule *s = plan->schedule;
  const kvr_footprint f = kvr_footprint_of(kvr_strategy_buffers(plan->strategy), &plan->bounds);
  const kvr_totals totals = kvr_schedule_totals(s);
  *out = (kvr_plan_info){.strategy = plan->strategy->name,
                         .reason = plan->reason,
                         .num_ops = s->num_ops,
                         .launches = totals.launches,
                         .bytes_moved = totals.bytes_moved,
                         .bytes_formula = plan->strategy->bytes(s),
                         .state_traffic_bytes = totals.state_bytes,
                         .slot_bytes = kvr_footprint_slot_bytes(&f, &s->row_bytes),
                         .state_bytes = kvr_footprint_state_bytes(&f, &s->row_bytes),
                         .peak_bytes = kvr_session_bytes(plan->session)};
  return KVR_OK;
}

int kvr_plan_num_rows(const kvr_plan *plan, int rank) {
  if (plan == NULL || rank < 0 || rank >= plan->schedule->layout.num_ranks) return 0;
  return plan->schedule->layout.rank_rows[rank];
}

kvr_status kvr_plan_row_token(const kvr_plan *plan, int rank, int row, int *request, int *token) {
  if (plan == NULL || request == NULL || token == NULL)
    return kvr_fail(KVR_E_NULL, "plan, request or token is NULL");
  const kvr_layout *l = &plan->schedule->layout;
  if (row < 0 || row >= kvr_plan_num_rows(plan, rank))
    return kvr_fail(KVR_E_RANGE, "row %d of rank %d; the rank has %d rows", row, rank,
                    kvr_plan_num_rows(plan, rank));
  for (int i = 0; i < l->num_requests; i++) {
    const kvr_rows rows = *kvr_layout_rows(l, i, rank);
    if (row >= rows.first + rows.num) continue;
    *request = i;
    *token = kvr_rows_token(rows, row - rows.first);
    break;
  }
  return KVR_OK;
}

kvr_status kvr_plan_trace(const kvr_plan *plan, const kvr_trace_record **out, int *num) {
  if (plan == NULL || out == NULL || num == NULL)
    return kvr_fail(KVR_E_NULL, "plan, out or num is NULL");
  if (plan->state != PLAN_DONE) return kvr_fail(KVR_E_STATE, "the plan has not run to its end yet");
  *out = plan->records;
  *num = plan->schedule->num_ops;
  return KVR_OK;
}

/* One configuration: output, LSE, cache bytes and bytes moved against what they must be. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "cli/check.h"

static double scale_or_one(float scale) { return scale != 0 ? (double)scale : 1; }

static cli_reference reference_of(const check_trial *t, int request, const check_mistake *m,
                                  const float *sinks) {
  const check_case *c = &t->c;
  return (cli_reference){.num_q_heads = c->num_q_heads,
                         .num_kv_heads = c->num_kv_heads,
                         .head_dim = c->head_dim,
                         .scale = scale_or_one(c->k_scale) / sqrt(c->head_dim),
                         .q_scale = m->no_q_scale ? 0 : (double)c->q_scale,
                         .soft_cap = m->no_soft_cap ? 0 : (double)c->soft_cap,
                         .sinks = sinks,
                         .value_scale = m->no_v_scale ? 1 : scale_or_one(c->v_scale),
                         .dtype = c->dtype,
                         .k = t->k[request],
                         .v = t->v[request],
                         .hidden = m->hidden != NULL ? m->hidden[request] : NULL};
}

/* What new token k of a request sees. Without a causal mask a row sees all of its own step. */
static cli_reference_row row_of(const check_trial *t, int request, int k, const check_mistake *m) {
  const check_case *c = &t->c;
  const kvr_request *q = &c->requests[request];
  const int position = q->num_cached + k, all = q->num_cached + q->num_new;
  int step = 0;
  while (c->ends[step][request] <= k) step++;
  const int end = c->causal ? position + 1 : q->num_cached + c->ends[step][request];
  const int first = c->window > 0 ? position + 1 - (c->window + m->window_shift) : 0;
  const size_t row = (size_t)check_first_row(c, request) + (size_t)k;
  return (cli_reference_row){.q = (const char *)t->q + row * check_q_row_bytes(c, c->dtype),
                             .first = kvr_max(0, first),
                             .end = kvr_clip(end + m->end_shift, 0, all),
                             .head_step = 1};
}

static kvr_status run_reference(const check_trial *t, const check_mistake *m, const float *sinks,
                                double *out, double *lse) {
  const check_case *c = &t->c;
  cli_reference_row *rows = calloc((size_t)t->num_tokens + 1, sizeof *rows);
  kvr_status status = rows != NULL ? KVR_OK : kvr_fail(KVR_E_OOM, "no host memory for a case");
  for (int i = 0; i < c->num_requests && status == KVR_OK; i++) {
    const cli_reference reference = reference_of(t, i, m, sinks);
    const int num = c->requests[i].num_new;
    const size_t at = (size_t)check_first_row(c, i) * (size_t)c->num_q_heads;
    for (int k = 0; k < num; k++) rows[k] = row_of(t, i, k, m);
    status = cli_reference_run(&reference, rows, num, out + at * (size_t)c->head_dim, lse + at);
  }
  free(rows);
  return status;
}

kvr_status check_reference(const check_trial *t, const check_mistake *mistake, double *out,
                           double *lse) {
  static const check_mistake none = {0};
  const check_mistake *m = mistake != NULL ? mistake : &none;
  const size_t num = (size_t)t->c.num_q_heads;
  if (t->sinks == NULL) return run_reference(t, m, NULL, out, lse);
  float *sinks = malloc(num * sizeof *sinks);
  if (sinks == NULL) return kvr_fail(KVR_E_OOM, "no host memory for sinks");
  for (size_t h = 0; h < num; h++) sinks[h] = (float)((double)t->sinks[h] + m->sink_shift);
  const kvr_status status = run_reference(t, m, sinks, out, lse);
  free(sinks);
  return status;
}

static bool uses_bf16(const check_trial *t) {
  bool bf16 = false;
  for (int r = 0; r < t->c.ranks; r++) bf16 |= kvr_session_math(t->session, r) == KVR_MATH_BF16;
  return bf16;
}

double check_output_factor(const check_trial *t, const double *ref_out, const double *ref_lse) {
  const check_case *c = &t->c;
  cli_error error = {0};
  const size_t D = (size_t)c->head_dim, num = (size_t)t->num_tokens * (size_t)c->num_q_heads;
  for (size_t i = 0; i < num; i++) {
    const cli_compared compared = {.out =
                                       (const char *)t->out + i * D * kvr_dtype_size(c->out_dtype),
                                   .out_dtype = c->out_dtype,
                                   .lse = t->lse[i],
                                   .ref = ref_out + i * D,
                                   .ref_lse = ref_lse[i],
                                   .head_dim = c->head_dim,
                                   .max_v = t->max_v,
                                   .loosen = cli_loosen(uses_bf16(t), c->dtype)};
    cli_compare_row(&compared, &error);
  }
  return error.factor;
}

/* Fails a verdict with a text (printf style). */
#define FAIL(v, ...)                                                                               \
  ((v)->outcome = CHECK_FAILED, (void)snprintf((v)->text, sizeof(v)->text, __VA_ARGS__))

/* The pools as they were before the step, and every output byte NaN. */
static kvr_status reset(check_trial *t) {
  const check_case *c = &t->c;
  for (int i = 0; i < c->num_requests; i++)
    if (kvr_cache_length(t->cache, t->ids[i]) > c->requests[i].num_cached)
      KVR_TRY(kvr_cache_truncate(t->cache, t->ids[i], c->requests[i].num_cached));
  for (int r = 0; r < c->ranks; r++)
    KVR_TRY(kvr_cache_import(t->cache, r, t->before[r], t->pool_bytes));
  memset(t->out, 0xff, (size_t)t->num_tokens * check_q_row_bytes(c, c->out_dtype));
  memset(t->lse, 0xff, (size_t)t->num_tokens * (size_t)c->num_q_heads * sizeof *t->lse);
  return KVR_OK;
}

static bool moves_bytes(int kind) {
#define MOVES(name, text, moves) moves,
  static const bool moving[KVR_NUM_OPS] = {KVR_OP_LIST(MOVES)};
#undef MOVES
  return kind >= 0 && kind < KVR_NUM_OPS && moving[kind];
}

/* Bytes moved in a step, by what completed, by the schedule and by its formula. */
static void check_records(const check_case *step, const kvr_plan *plan, check_verdict *v) {
  const kvr_trace_record *records;
  kvr_plan_info info = {0};
  int num;
  int64_t moved = 0;
  if (kvr_plan_trace(plan, &records, &num) != KVR_OK || kvr_plan_describe(plan, &info) != KVR_OK) {
    FAIL(v, "no trace: %.200s", kvr_error_message());
    return;
  }
  for (int i = 0; i < num; i++) {
    if (records[i].launched && moves_bytes(records[i].kind)) moved += records[i].bytes;
    if (records[i].step > v->last_step) v->last_step = records[i].step;
  }
  const int64_t want = check_bytes(step, info.strategy);
  if (moved != want || info.bytes_formula != want || info.bytes_moved != want)
    FAIL(v, "%s moved %lld bytes (schedule %lld, its formula %lld), expected %lld", info.strategy,
         (long long)moved, (long long)info.bytes_moved, (long long)info.bytes_formula,
         (long long)want);
}

void check_verdict_error(check_verdict *v, kvr_status status, const char *where) {
  FAIL(v, "%s: %.200s", where, kvr_error_message());
  v->last_step = -1;
  v->status = status;
  if (status == KVR_E_UNSUPPORTED || status == KVR_E_OOM) v->outcome = CHECK_SKIPPED;
}

static void check_cache(check_trial *t, check_verdict *v) {
  const size_t row = 2 * check_kv_row_bytes(&t->c);
  for (int r = 0; r < t->c.ranks; r++) {
    const kvr_status status = kvr_cache_export(t->cache, r, t->now, t->pool_bytes);
    if (status != KVR_OK) {
      check_verdict_error(v, status, "after the step");
      return;
    }
    size_t at = 0;
    while (at < t->pool_bytes && ((char *)t->now)[at] == ((char *)t->after[r])[at]) at++;
    if (at == t->pool_bytes) continue;
    const size_t token = at / row, page = (size_t)t->c.page_size;
    FAIL(v, "cache of rank %d differs in page %zu, token %zu", r, token / page, token % page);
    return;
  }
  for (int i = 0; i < t->c.num_requests; i++) {
    const kvr_request *q = &t->c.requests[i];
    if (kvr_cache_length(t->cache, t->ids[i]) != q->num_cached + q->num_new)
      FAIL(v, "the cache holds %d tokens of request %d, expected %d",
           kvr_cache_length(t->cache, t->ids[i]), i, q->num_cached + q->num_new);
  }
}

static kvr_status run_step(check_trial *t, int step, const char *strategy, check_verdict *v) {
  const check_case now = check_step_case(&t->c, step);
  const kvr_problem problem = {.struct_size = sizeof problem,
                               .cache = t->desc,
                               .num_q_heads = now.num_q_heads,
                               .out_dtype = now.out_dtype,
                               .causal = now.causal,
                               .window = now.window,
                               .soft_cap = now.soft_cap,
                               .sinks = t->sinks,
                               .q_scale = now.q_scale,
                               .k_scale = now.k_scale,
                               .v_scale = now.v_scale,
                               .num_requests = now.num_requests,
                               .requests = now.requests};
  const kvr_options options = {.struct_size = sizeof options,
                               .strategy = strategy,
                               .tile = now.tile,
                               .query_tile = now.query_tile,
                               .num_slots = now.slots};
  kvr_plan *plan = NULL;
  kvr_status status = kvr_plan_create(t->session, &problem, &options, &plan);
  if (status == KVR_OK) status = check_execute(t, step, plan);
  if (status == KVR_OK) check_records(&now, plan, v);
  kvr_plan_destroy(plan);
  return status;
}

void check_trial_run(check_trial *t, const char *strategy, check_verdict *v) {
  *v = (check_verdict){.outcome = CHECK_PASSED, .last_step = -1};
  kvr_status status = reset(t);
  const char *name = strategy;
  for (int step = 0; step < t->c.num_steps && status == KVR_OK; step++) {
    name = check_step_strategy(&t->c, strategy, step);
    status = run_step(t, step, name, v);
  }
  if (status != KVR_OK) {
    check_verdict_error(v, status, name);
    return;
  }
  v->factor = check_output_factor(t, t->ref_out, t->ref_lse);
  if (v->outcome == CHECK_PASSED) check_cache(t, v);
  if (!(v->factor <= 1)) FAIL(v, "output is off by %.3g times the tolerance", v->factor);
}

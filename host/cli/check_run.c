/* One configuration: output, LSE, cache bytes and bytes moved against what they must be. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "cli/check.h"

kvr_status check_reference(const check_trial *t, unsigned char *const *hidden, int end_shift,
                           double *out, double *lse) {
  const check_case *c = &t->c;
  cli_reference_row *rows = calloc((size_t)t->num_tokens + 1, sizeof *rows);
  kvr_status status = rows != NULL ? KVR_OK : kvr_fail(KVR_E_OOM, "no host memory for a case");
  for (int i = 0; i < c->num_requests && status == KVR_OK; i++) {
    const kvr_request *q = &c->requests[i];
    const cli_reference reference = {.num_q_heads = c->num_q_heads,
                                     .num_kv_heads = c->num_kv_heads,
                                     .head_dim = c->head_dim,
                                     .scale = 1 / sqrt(c->head_dim),
                                     .dtype = c->dtype,
                                     .k = t->k[i],
                                     .v = t->v[i],
                                     .hidden = hidden != NULL ? hidden[i] : NULL};
    const size_t first = (size_t)check_first_row(c, i), all = (size_t)(q->num_cached + q->num_new);
    for (int k = 0; k < q->num_new; k++) {
      const int end = q->num_cached + (c->causal ? k + 1 : q->num_new) + end_shift;
      rows[k] = (cli_reference_row){.q = (const char *)t->q +
                                         (first + (size_t)k) * check_q_row_bytes(c, c->dtype),
                                    .end = kvr_clip(end, 0, (int)all),
                                    .head_step = 1};
    }
    const size_t at = first * (size_t)c->num_q_heads;
    status =
        cli_reference_run(&reference, rows, q->num_new, out + at * (size_t)c->head_dim, lse + at);
  }
  free(rows);
  return status;
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
                                   .max_v = t->max_v};
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

static void check_records(const check_trial *t, const kvr_plan *plan, const char *strategy,
                          check_verdict *v) {
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
  const int64_t want = check_bytes(&t->c, strategy);
  if (moved != want || info.bytes_formula != want || info.bytes_moved != want)
    FAIL(v, "moved %lld bytes (schedule %lld, its formula %lld), expected %lld", (long long)moved,
         (long long)info.bytes_moved, (long long)info.bytes_formula, (long long)want);
}

static void check_cache(check_trial *t, check_verdict *v) {
  const size_t row = 2 * check_kv_row_bytes(&t->c);
  for (int r = 0; r < t->c.ranks; r++) {
    if (kvr_cache_export(t->cache, r, t->now, t->pool_bytes) != KVR_OK) {
      FAIL(v, "cannot read the cache: %.200s", kvr_error_message());
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

static void judge(check_trial *t, const kvr_plan *plan, const char *strategy, check_verdict *v) {
  v->factor = check_output_factor(t, t->ref_out, t->ref_lse);
  check_records(t, plan, strategy, v);
  if (v->outcome == CHECK_PASSED) check_cache(t, v);
  if (!(v->factor <= 1)) FAIL(v, "output is off by %.3g times the tolerance", v->factor);
}

void check_trial_run(check_trial *t, const char *strategy, check_verdict *v) {
  const check_case *c = &t->c;
  const kvr_problem problem = {.struct_size = sizeof problem,
                               .cache = t->desc,
                               .num_q_heads = c->num_q_heads,
                               .out_dtype = c->out_dtype,
                               .causal = c->causal,
                               .num_requests = c->num_requests,
                               .requests = c->requests};
  const kvr_options options = {.struct_size = sizeof options,
                               .strategy = strategy,
                               .tile = c->tile,
                               .query_tile = c->query_tile,
                               .num_slots = c->slots};
  kvr_plan *plan = NULL;
  *v = (check_verdict){.outcome = CHECK_PASSED, .last_step = -1};
  kvr_status status = reset(t);
  if (status == KVR_OK) status = kvr_plan_create(t->session, &problem, &options, &plan);
  if (status == KVR_OK) status = check_execute(t, plan);
  if (status == KVR_OK)
    judge(t, plan, strategy, v);
  else
    FAIL(v, "%.230s", kvr_error_message());
  if (status == KVR_E_UNSUPPORTED || status == KVR_E_OOM) v->outcome = CHECK_SKIPPED;
  kvr_plan_destroy(plan);
}

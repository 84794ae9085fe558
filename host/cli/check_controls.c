/* Negative controls: each brings in a mistake that the comparison must notice. */
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "cli/check.h"

/* Three ranks, shares of unequal length, several blocks, one request. */
static check_case control_case(void) {
  return (check_case){.index = 1 << 20,
                      .ranks = 3,
                      .map = "striped",
                      .interleave = 1,
                      .weights = {1, 1, 1},
                      .dtype = KVR_F32,
                      .out_dtype = KVR_F32,
                      .num_q_heads = 4,
                      .num_kv_heads = 2,
                      .head_dim = 64,
                      .page_size = 4,
                      .spare_pages = 2,
                      .tile = 8,
                      .slots = 2,
                      .causal = 1,
                      .num_requests = 1,
                      .requests = {{.num_new = 17, .num_cached = 61}}};
}

static kvr_status run_ring(check_trial *t) {
  check_verdict verdict;
  check_trial_run(t, "ring", &verdict);
  if (verdict.outcome == CHECK_PASSED) return KVR_OK;
  return kvr_fail(KVR_E_VERIFY, "a small ring over three ranks: %s", verdict.text);
}

/* Cached positions that hide(t, g) names are seen by nobody in the reference. */
typedef bool hide_position(const check_trial *t, int position);

/* All that rank 1 stores. */
static bool on_dropped_rank(const check_trial *t, int g) { return t->owner[0][g] == 1; }

/* What is past the share of the next rank: a reader that takes a rank's length for another's. */
static bool past_next_share(const check_trial *t, int g) {
  const int next = (t->owner[0][g] + 1) % t->c.ranks;
  return t->local[0][g] >= check_share(&t->c, t->c.requests[0].num_cached, next);
}

/* The trial's output against a reference that makes a mistake. */
static kvr_status against_mistake(check_trial *t, hide_position *hide, int end_shift,
                                  double *factor) {
  const size_t rows = (size_t)t->num_tokens * (size_t)t->c.num_q_heads;
  const int cached = t->c.requests[0].num_cached, all = cached + t->num_tokens;
  double *out = calloc(rows * (size_t)t->c.head_dim, sizeof *out), *lse = calloc(rows, sizeof *lse);
  unsigned char *hidden[CHECK_REQUESTS] = {calloc((size_t)all, 1)};
  kvr_status status = KVR_OK;
  if (out == NULL || lse == NULL || hidden[0] == NULL)
    status = kvr_fail(KVR_E_OOM, "no host memory for a control");
  for (int g = 0; g < cached && hide != NULL && status == KVR_OK; g++) hidden[0][g] = hide(t, g);
  if (status == KVR_OK) status = check_reference(t, hidden, end_shift, out, lse);
  if (status == KVR_OK) *factor = check_output_factor(t, out, lse);
  free(out);
  free(lse);
  free(hidden[0]);
  return status;
}

/* Runs again on a cache filled with other data and compares with the reference of the first. */
static kvr_status other_contents(check_groups *groups, uint64_t seed, const check_trial *right,
                                 double *factor) {
  check_trial other;
  kvr_status status = check_trial_open(groups, &right->c, seed, &other);
  const int cached = right->c.requests[0].num_cached;
  const size_t row = check_kv_row_bytes(&right->c);
  /* Its cached tokens swapped in pairs: other contents at every position but the last. */
  for (int g = 0; g + 1 < cached && status == KVR_OK; g += 2) {
    memcpy((char *)other.k[0] + (size_t)g * row, (char *)right->k[0] + (size_t)(g + 1) * row, row);
    memcpy((char *)other.v[0] + (size_t)(g + 1) * row, (char *)right->v[0] + (size_t)g * row, row);
  }
  if (status == KVR_OK) status = kvr_cache_truncate(other.cache, other.ids[0], 0);
  if (status == KVR_OK)
    status = kvr_cache_append(other.cache, other.ids[0], other.k[0], other.v[0], cached);
  for (int r = 0; r < right->c.ranks && status == KVR_OK; r++)
    status = kvr_cache_export(other.cache, r, other.before[r], other.pool_bytes);
  check_verdict verdict = {.outcome = CHECK_PASSED};
  if (status == KVR_OK) check_trial_run(&other, "ring", &verdict);
  if (status == KVR_OK && verdict.factor == 0) /* did not run: no output to compare */
    status = kvr_fail(KVR_E_VERIFY, "the control with other cache contents: %s", verdict.text);
  if (status == KVR_OK) *factor = check_output_factor(&other, right->ref_out, right->ref_lse);
  check_trial_close(&other);
  return status;
}

static kvr_status run_controls(check_groups *groups, uint64_t seed, check_trial *t,
                               check_control *controls) {
  controls[0] = (check_control){"other_cache_contents", 0, 50};
  controls[1] = (check_control){"zero_output", 0, 1};
  controls[2] = (check_control){"one_share_dropped", 0, 1};
  controls[3] = (check_control){"shifted_mask", 0, 1};
  controls[4] = (check_control){"wrong_source_rank", 0, 1};
  KVR_TRY(other_contents(groups, seed, t, &controls[0].factor));
  KVR_TRY(run_ring(t));
  KVR_TRY(against_mistake(t, on_dropped_rank, 0, &controls[2].factor));
  KVR_TRY(against_mistake(t, NULL, -1, &controls[3].factor));
  KVR_TRY(against_mistake(t, past_next_share, 0, &controls[4].factor));
  memset(t->out, 0, (size_t)t->num_tokens * check_q_row_bytes(&t->c, KVR_F32));
  for (int i = 0; i < t->num_tokens * t->c.num_q_heads; i++) t->lse[i] = (float)t->ref_lse[i];
  controls[1].factor = check_output_factor(t, t->ref_out, t->ref_lse);
  return KVR_OK;
}

kvr_status check_controls_run(check_groups *groups, uint64_t seed,
                              check_control controls[CHECK_CONTROLS]) {
  const check_case c = control_case();
  check_trial trial;
  kvr_status status = check_trial_open(groups, &c, seed, &trial);
  if (status == KVR_OK) status = run_controls(groups, seed, &trial, controls);
  check_trial_close(&trial);
  return status;
}

kvr_status check_smoke(const char *devices) {
  const check_case c = control_case();
  check_groups groups = {.devices = devices};
  check_trial trial;
  kvr_status status = check_trial_open(&groups, &c, 1, &trial);
  if (status == KVR_OK) status = run_ring(&trial);
  check_trial_close(&trial);
  check_groups_fini(&groups);
  return status;
}

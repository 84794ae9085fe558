/* Negative controls: each brings in a mistake that the comparison must notice. */
#include <math.h>
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
                      .requests = {{.num_new = 17, .num_cached = 61}},
                      .num_steps = 1,
                      .ends = {{17}}};
}

/* The same with all masks and scales, and queries that quantisation changes. */
static check_case masked_case(void) {
  check_case c = control_case();
  c.index++;
  c.dtype = KVR_F16;
  c.head_dim = 20;
  c.window = 23;
  c.sinks = true;
  c.soft_cap = 5;
  c.q_scale = 0.3f;
  c.k_scale = 0.5f;
  c.v_scale = -2;
  return c;
}

static kvr_status run_ring(check_trial *t) {
  check_verdict verdict;
  check_trial_run(t, "ring", &verdict);
  if (verdict.outcome == CHECK_PASSED) return KVR_OK;
  if (verdict.status != KVR_OK) return kvr_fail(verdict.status, "%s", verdict.text);
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
static kvr_status against(const check_trial *t, const check_mistake *mistake, double *factor) {
  const size_t rows = (size_t)t->num_tokens * (size_t)t->c.num_q_heads;
  double *out = calloc(rows * (size_t)t->c.head_dim, sizeof *out), *lse = calloc(rows, sizeof *lse);
  kvr_status status = KVR_OK;
  if (out == NULL || lse == NULL) status = kvr_fail(KVR_E_OOM, "no host memory for a control");
  if (status == KVR_OK) status = check_reference(t, mistake, out, lse);
  if (status == KVR_OK) *factor = check_output_factor(t, out, lse);
  free(out);
  free(lse);
  return status;
}

static kvr_status against_hidden(const check_trial *t, hide_position *hide, double *factor) {
  const int cached = t->c.requests[0].num_cached;
  unsigned char *hidden[CHECK_REQUESTS] = {calloc((size_t)(cached + t->num_tokens), 1)};
  if (hidden[0] == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a control");
  for (int g = 0; g < cached; g++) hidden[0][g] = hide(t, g);
  const check_mistake mistake = {.hidden = hidden};
  const kvr_status status = against(t, &mistake, factor);
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
  if (status == KVR_OK && verdict.status != KVR_OK)
    status = kvr_fail(verdict.status, "the control with other cache contents: %s", verdict.text);
  if (status == KVR_OK && verdict.factor == 0) /* did not run: no output to compare */
    status = kvr_fail(KVR_E_VERIFY, "the control with other cache contents: %s", verdict.text);
  if (status == KVR_OK) *factor = check_output_factor(&other, right->ref_out, right->ref_lse);
  if (!cli_is_stuck(status)) check_trial_close(&other);
  return status;
}

/* Mistakes of a reference with all masks and scales. */
static const struct {
  const char *name;
  double needed;
  check_mistake mistake;
} mask_controls[] = {
    {"window_off_by_one", 50, {.window_shift = 1}},
    {"sink_dropped", 50, {.sink_shift = -HUGE_VAL}},
    {"sink_counted_twice", 50, {.sink_shift = 0.6931471805599453}},
    {"soft_cap_dropped", 50, {.no_soft_cap = true}},
    {"queries_not_quantised", 1, {.no_q_scale = true}},
    {"value_scale_dropped", 50, {.no_v_scale = true}},
};

enum { NUM_MASK_CONTROLS = sizeof mask_controls / sizeof mask_controls[0], NUM_PLAIN_CONTROLS = 5 };
_Static_assert((int)CHECK_CONTROLS == (int)NUM_PLAIN_CONTROLS + (int)NUM_MASK_CONTROLS,
               "CHECK_CONTROLS counts the controls");

static kvr_status run_plain(check_groups *groups, uint64_t seed, check_trial *t,
                            check_control *controls) {
  const check_mistake shifted = {.end_shift = -1};
  KVR_TRY(other_contents(groups, seed, t, &controls[0].factor));
  KVR_TRY(run_ring(t));
  KVR_TRY(against_hidden(t, on_dropped_rank, &controls[2].factor));
  KVR_TRY(against(t, &shifted, &controls[3].factor));
  KVR_TRY(against_hidden(t, past_next_share, &controls[4].factor));
  memset(t->out, 0, (size_t)t->num_tokens * check_q_row_bytes(&t->c, KVR_F32));
  for (int i = 0; i < t->num_tokens * t->c.num_q_heads; i++) t->lse[i] = (float)t->ref_lse[i];
  controls[1].factor = check_output_factor(t, t->ref_out, t->ref_lse);
  return KVR_OK;
}

static kvr_status run_masked(check_trial *t, check_control *controls) {
  KVR_TRY(run_ring(t));
  for (int i = 0; i < NUM_MASK_CONTROLS; i++)
    KVR_TRY(against(t, &mask_controls[i].mistake, &controls[i].factor));
  return KVR_OK;
}

/* All of them by name, so that one that cannot run is missed, not forgotten. */
static void list_controls(check_control *controls) {
  controls[0] = (check_control){"other_cache_contents", 0, 50};
  controls[1] = (check_control){"zero_output", 0, 1};
  controls[2] = (check_control){"one_share_dropped", 0, 1};
  controls[3] = (check_control){"shifted_mask", 0, 1};
  controls[4] = (check_control){"wrong_source_rank", 0, 1};
  for (int i = 0; i < NUM_MASK_CONTROLS; i++)
    controls[NUM_PLAIN_CONTROLS + i] =
        (check_control){mask_controls[i].name, 0, mask_controls[i].needed};
}

kvr_status check_controls_run(check_groups *groups, uint64_t seed,
                              check_control controls[CHECK_CONTROLS]) {
  const check_case plain = control_case(), masked = masked_case();
  check_trial trial;
  list_controls(controls);
  kvr_status status = check_trial_open(groups, &plain, seed, &trial);
  if (status == KVR_OK) status = run_plain(groups, seed, &trial, controls);
  if (!cli_is_stuck(status)) check_trial_close(&trial);
  KVR_TRY(status);
  status = check_trial_open(groups, &masked, seed, &trial);
  if (status == KVR_OK) status = run_masked(&trial, controls + NUM_PLAIN_CONTROLS);
  if (!cli_is_stuck(status)) check_trial_close(&trial);
  return status;
}

kvr_status check_smoke(const char *devices) {
  const check_case c = control_case();
  check_groups groups = {.devices = devices};
  check_trial trial;
  kvr_status status = check_trial_open(&groups, &c, 1, &trial);
  if (status == KVR_OK) status = run_ring(&trial);
  if (!cli_is_stuck(status)) check_trial_close(&trial);
  if (!cli_is_stuck(status)) check_groups_fini(&groups);
  return status;
}

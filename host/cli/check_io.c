/* Runs a plan with inputs and outputs in token order, or with one array per rank. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/check.h"

/* Arrays of one tensor each, and the trial's row of each of their rows. */
struct check_arrays {
  int num;
  int *row;
  char *q, *k, *v, *out;
  float *lse;
};
typedef struct check_arrays arrays;

typedef struct sizes {
  size_t q, kv, out, lse; /* bytes of a row */
} sizes;

static sizes row_sizes(const check_case *c) {
  return (sizes){check_q_row_bytes(c, c->dtype), check_kv_row_bytes(c),
                 check_q_row_bytes(c, c->out_dtype), (size_t)c->num_q_heads * sizeof(float)};
}

static kvr_status allocate(const check_trial *t, arrays *a, int num) {
  const sizes s = row_sizes(&t->c);
  const size_t n = (size_t)num;
  a->row = calloc(n + 1, sizeof *a->row);
  a->q = malloc(n * s.q + 1);
  a->k = malloc(n * s.kv + 1);
  a->v = malloc(n * s.kv + 1);
  a->out = malloc(n * s.out + 1);
  a->lse = malloc(n * s.lse + 1);
  if (!a->row || !a->q || !a->k || !a->v || !a->out || !a->lse)
    return kvr_fail(KVR_E_OOM, "no host memory for %d rows", num);
  a->num = num;
  /* What a step leaves out must not look like the row of another one. */
  memset(a->out, 0xff, n * s.out);
  memset(a->lse, 0xff, n * s.lse);
  return KVR_OK;
}

static void load_row(const check_trial *t, arrays *a, int i, int row) {
  const sizes s = row_sizes(&t->c);
  const size_t to = (size_t)i, from = (size_t)row;
  a->row[i] = row;
  memcpy(a->q + to * s.q, (char *)t->q + from * s.q, s.q);
  memcpy(a->k + to * s.kv, (char *)t->new_k + from * s.kv, s.kv);
  memcpy(a->v + to * s.kv, (char *)t->new_v + from * s.kv, s.kv);
}

static void store_rows(check_trial *t, const arrays *a) {
  const sizes s = row_sizes(&t->c);
  for (int i = 0; i < a->num; i++) {
    const size_t row = (size_t)a->row[i];
    memcpy((char *)t->out + row * s.out, a->out + (size_t)i * s.out, s.out);
    memcpy((char *)t->lse + row * s.lse, (char *)a->lse + (size_t)i * s.lse, s.lse);
  }
}

static void release(arrays *a) {
  free(a->row);
  free(a->q);
  free(a->k);
  free(a->v);
  free(a->out);
  free(a->lse);
}

static kvr_status run_plan(const check_case *c, kvr_plan *plan, kvr_placement placement,
                           const arrays *a, int num) {
  kvr_tensor q[CHECK_RANKS], k[CHECK_RANKS], v[CHECK_RANKS], out[CHECK_RANKS], lse[CHECK_RANKS];
  for (int r = 0; r < num; r++) {
    q[r] = (kvr_tensor){.host = a[r].q, .dtype = c->dtype};
    k[r] = (kvr_tensor){.host = a[r].k, .dtype = c->dtype};
    v[r] = (kvr_tensor){.host = a[r].v, .dtype = c->dtype};
    out[r] = (kvr_tensor){.host = a[r].out, .dtype = c->out_dtype};
    lse[r] = (kvr_tensor){.host = a[r].lse, .dtype = KVR_F32};
  }
  const kvr_io io = {.struct_size = sizeof io,
                     .placement = placement,
                     .q = q,
                     .k = k,
                     .v = v,
                     .out = out,
                     .lse = lse};
  return kvr_plan_run(plan, &io);
}

/* Row of the trial that is a new token of a step. */
static int trial_row(const check_trial *t, int step, int request, int token) {
  return check_first_row(&t->c, request) + check_step_done(&t->c, request, step) + token;
}

/* Tokens of request 0, then of request 1, ... */
static kvr_status load_token_order(const check_trial *t, int step, arrays *a) {
  const check_case now = check_step_case(&t->c, step);
  int num = 0, at = 0;
  for (int i = 0; i < now.num_requests; i++) num += now.requests[i].num_new;
  KVR_TRY(allocate(t, a, num));
  for (int i = 0; i < now.num_requests; i++)
    for (int k = 0; k < now.requests[i].num_new; k++)
      load_row(t, a, at++, trial_row(t, step, i, k));
  return KVR_OK;
}

/* The rows that the plan says; no token may come twice, and none may be of another step. */
static kvr_status load_rank(const check_trial *t, int step, kvr_plan *plan, int rank, arrays *a,
                            unsigned char *seen) {
  const check_case now = check_step_case(&t->c, step);
  KVR_TRY(allocate(t, a, kvr_plan_num_rows(plan, rank)));
  for (int i = 0; i < a->num; i++) {
    int request, token;
    KVR_TRY(kvr_plan_row_token(plan, rank, i, &request, &token));
    if (request < 0 || request >= now.num_requests || token < 0 ||
        token >= now.requests[request].num_new || seen[trial_row(t, step, request, token)]++)
      return kvr_fail(KVR_E_VERIFY,
                      "row %d of rank %d is token %d of request %d, which is taken or no token", i,
                      rank, token, request);
    load_row(t, a, i, trial_row(t, step, request, token));
  }
  return KVR_OK;
}

static kvr_status load_rank_order(const check_trial *t, int step, kvr_plan *plan, arrays *a) {
  const check_case now = check_step_case(&t->c, step);
  unsigned char *seen = calloc((size_t)t->num_tokens + 1, 1);
  kvr_status status = seen != NULL ? KVR_OK : kvr_fail(KVR_E_OOM, "no host memory for a case");
  int rows = 0, tokens = 0;
  for (int i = 0; i < now.num_requests; i++) tokens += now.requests[i].num_new;
  for (int r = 0; r < now.ranks && status == KVR_OK; r++) {
    status = load_rank(t, step, plan, r, &a[r], seen);
    rows += a[r].num;
  }
  free(seen);
  if (status == KVR_OK && rows != tokens)
    status = kvr_fail(KVR_E_VERIFY, "the ranks have %d rows, the step %d tokens", rows, tokens);
  return status;
}

static kvr_status execute(check_trial *t, int step, kvr_plan *plan) {
  if (!t->c.rank_order) {
    KVR_TRY(load_token_order(t, step, t->io));
    return run_plan(&t->c, plan, KVR_TOKEN_ORDER, t->io, 1);
  }
  KVR_TRY(load_rank_order(t, step, plan, t->io));
  return run_plan(&t->c, plan, KVR_RANK_ORDER, t->io, t->c.ranks);
}

void check_io_fini(check_trial *t) {
  for (int r = 0; r < CHECK_RANKS && t->io != NULL; r++) release(&t->io[r]);
  free(t->io);
  t->io = NULL;
}

/* The trial owns the arrays: when a device is stuck they stay, as all that it has. */
kvr_status check_execute(check_trial *t, int step, kvr_plan *plan) {
  t->io = calloc(CHECK_RANKS, sizeof *t->io);
  if (t->io == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a case");
  const kvr_status status = execute(t, step, plan);
  if (cli_is_stuck(status)) return status;
  for (int r = 0; r < CHECK_RANKS && status == KVR_OK; r++) store_rows(t, &t->io[r]);
  check_io_fini(t);
  return status;
}

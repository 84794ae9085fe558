/* Runs a plan with inputs and outputs in token order, or with one array per rank. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/check.h"

/* Arrays of one rank, and the token-order row of each of its rows. */
typedef struct rank_arrays {
  int num;
  int *row;
  char *q, *k, *v, *out;
  float *lse;
} rank_arrays;

typedef struct sizes {
  size_t q, kv, out, lse; /* bytes of a row */
} sizes;

static sizes row_sizes(const check_case *c) {
  return (sizes){check_q_row_bytes(c, c->dtype), check_kv_row_bytes(c),
                 check_q_row_bytes(c, c->out_dtype), (size_t)c->num_q_heads * sizeof(float)};
}

static kvr_status run_token_order(check_trial *t, kvr_plan *plan) {
  const kvr_tensor q = {.host = t->q, .dtype = t->c.dtype},
                   k = {.host = t->new_k, .dtype = t->c.dtype};
  const kvr_tensor v = {.host = t->new_v, .dtype = t->c.dtype};
  const kvr_tensor out = {.host = t->out, .dtype = t->c.out_dtype};
  const kvr_tensor lse = {.host = t->lse, .dtype = KVR_F32};
  const kvr_io io = {.struct_size = sizeof io,
                     .placement = KVR_TOKEN_ORDER,
                     .q = &q,
                     .k = &k,
                     .v = &v,
                     .out = &out,
                     .lse = &lse};
  return kvr_plan_run(plan, &io);
}

static kvr_status load_rank(const check_trial *t, kvr_plan *plan, int rank, rank_arrays *a,
                            unsigned char *seen) {
  const sizes s = row_sizes(&t->c);
  a->num = kvr_plan_num_rows(plan, rank);
  const size_t num = (size_t)a->num;
  a->row = calloc(num + 1, sizeof *a->row);
  a->q = malloc(num * s.q + 1);
  a->k = malloc(num * s.kv + 1);
  a->v = malloc(num * s.kv + 1);
  a->out = malloc(num * s.out + 1);
  a->lse = malloc(num * s.lse + 1);
  if (!a->row || !a->q || !a->k || !a->v || !a->out || !a->lse)
    return kvr_fail(KVR_E_OOM, "no host memory for the rows of a rank");
  for (int i = 0; i < a->num; i++) {
    int request, token;
    KVR_TRY(kvr_plan_row_token(plan, rank, i, &request, &token));
    const int row = check_first_row(&t->c, request) + token;
    if (row < 0 || row >= t->num_tokens || seen[row]++)
      return kvr_fail(KVR_E_VERIFY, "row %d of rank %d is token %d of request %d, which is taken",
                      i, rank, token, request);
    a->row[i] = row;
    memcpy(a->q + (size_t)i * s.q, (char *)t->q + (size_t)row * s.q, s.q);
    memcpy(a->k + (size_t)i * s.kv, (char *)t->new_k + (size_t)row * s.kv, s.kv);
    memcpy(a->v + (size_t)i * s.kv, (char *)t->new_v + (size_t)row * s.kv, s.kv);
  }
  return KVR_OK;
}

static void store_rank(check_trial *t, const rank_arrays *a) {
  const sizes s = row_sizes(&t->c);
  for (int i = 0; i < a->num; i++) {
    const size_t row = (size_t)a->row[i];
    memcpy((char *)t->out + row * s.out, a->out + (size_t)i * s.out, s.out);
    memcpy((char *)t->lse + row * s.lse, (char *)a->lse + (size_t)i * s.lse, s.lse);
  }
}

static kvr_status run_arrays(check_trial *t, kvr_plan *plan, const rank_arrays *arrays) {
  kvr_tensor q[CHECK_RANKS], k[CHECK_RANKS], v[CHECK_RANKS], out[CHECK_RANKS], lse[CHECK_RANKS];
  for (int r = 0; r < t->c.ranks; r++) {
    q[r] = (kvr_tensor){.host = arrays[r].q, .dtype = t->c.dtype};
    k[r] = (kvr_tensor){.host = arrays[r].k, .dtype = t->c.dtype};
    v[r] = (kvr_tensor){.host = arrays[r].v, .dtype = t->c.dtype};
    out[r] = (kvr_tensor){.host = arrays[r].out, .dtype = t->c.out_dtype};
    lse[r] = (kvr_tensor){.host = arrays[r].lse, .dtype = KVR_F32};
  }
  const kvr_io io = {.struct_size = sizeof io,
                     .placement = KVR_RANK_ORDER,
                     .q = q,
                     .k = k,
                     .v = v,
                     .out = out,
                     .lse = lse};
  return kvr_plan_run(plan, &io);
}

static kvr_status run_rank_order(check_trial *t, kvr_plan *plan) {
  rank_arrays arrays[CHECK_RANKS] = {{0}};
  unsigned char *seen = calloc((size_t)t->num_tokens + 1, 1);
  kvr_status status = seen != NULL ? KVR_OK : kvr_fail(KVR_E_OOM, "no host memory for a case");
  int rows = 0;
  for (int r = 0; r < t->c.ranks && status == KVR_OK; r++) {
    status = load_rank(t, plan, r, &arrays[r], seen);
    rows += arrays[r].num;
  }
  if (status == KVR_OK && rows != t->num_tokens)
    status =
        kvr_fail(KVR_E_VERIFY, "the ranks have %d rows, the step %d tokens", rows, t->num_tokens);
  if (status == KVR_OK) status = run_arrays(t, plan, arrays);
  for (int r = 0; r < t->c.ranks; r++) {
    if (status == KVR_OK) store_rank(t, &arrays[r]);
    free(arrays[r].row);
    free(arrays[r].q);
    free(arrays[r].k);
    free(arrays[r].v);
    free(arrays[r].out);
    free(arrays[r].lse);
  }
  free(seen);
  return status;
}

kvr_status check_execute(check_trial *trial, kvr_plan *plan) {
  return trial->c.rank_order ? run_rank_order(trial, plan) : run_token_order(trial, plan);
}

/* A case made ready: data, a pool full of NaN with shuffled pages, a session and the reference. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "cli/check.h"
#include "cli/data.h"

/* ---- groups ---- */

kvr_status check_groups_get(check_groups *groups, int ranks, bool copy_queue, kvr_group **out) {
  kvr_group **group = &groups->list[ranks][copy_queue];
  const kvr_group_desc desc = {.struct_size = sizeof desc,
                               .num_ranks = ranks,
                               .devices = groups->devices,
                               .copy_queue = copy_queue,
                               .timeout = groups->timeout};
  if (*group == NULL) KVR_TRY(kvr_group_create(&desc, group));
  *out = *group;
  return KVR_OK;
}

void check_groups_drop(check_groups *groups, int ranks, bool copy_queue) {
  kvr_group_destroy(groups->list[ranks][copy_queue]);
  groups->list[ranks][copy_queue] = NULL;
}

void check_groups_fini(check_groups *groups) {
  for (int r = 0; r <= CHECK_RANKS; r++)
    for (int k = 0; k < 2; k++) check_groups_drop(groups, r, k);
}

/* ---- sizes ---- */

int check_first_row(const check_case *c, int request) {
  int row = 0;
  for (int i = 0; i < request; i++) row += c->requests[i].num_new;
  return row;
}

size_t check_kv_row_bytes(const check_case *c) {
  return (size_t)c->num_kv_heads * (size_t)c->head_dim * kvr_dtype_size(c->dtype);
}

size_t check_q_row_bytes(const check_case *c, kvr_dtype dtype) {
  return (size_t)c->num_q_heads * (size_t)c->head_dim * kvr_dtype_size(dtype);
}

static int length(const check_case *c, int i) {
  return c->requests[i].num_cached + c->requests[i].num_new;
}

/* Pages that a request needs: those of its longest share. */
static int num_pages(const check_case *c, int i) {
  int most = 0;
  for (int r = 0; r < c->ranks; r++)
    most = kvr_max(most, kvr_ceil_div(check_share(c, length(c, i), r), c->page_size));
  return most;
}

/* ---- data ---- */

/* Some heads have no sink. */
static bool make_sinks(check_trial *t, const cli_synthetic *s) {
  const int num = t->c.num_q_heads;
  const cli_rows_at at = {.tensor = CLI_SINKS, .num_tokens = num, .heads = 1, .head_dim = 1};
  if (!t->c.sinks) return true;
  t->sinks = malloc((size_t)num * sizeof *t->sinks);
  if (t->sinks == NULL) return false;
  cli_synthetic_fill(s, at, CLI_QUERY_SCALE, KVR_F32, t->sinks);
  for (int h = 5; h < num; h += 6) t->sinks[h] = -HUGE_VALF;
  return true;
}

static kvr_status make_data(check_trial *t, uint64_t seed) {
  const check_case *c = &t->c;
  cli_synthetic *s = malloc(sizeof *s);
  bool ok = s != NULL;
  if (ok) cli_synthetic_init(s, seed + (uint64_t)c->index);
  ok = ok && make_sinks(t, s);
  for (int i = 0; i < c->num_requests && ok; i++) {
    const size_t bytes = (size_t)length(c, i) * check_kv_row_bytes(c) + 1;
    const size_t places = ((size_t)length(c, i) + 1) * sizeof(int);
    ok = (t->k[i] = malloc(bytes)) && (t->v[i] = malloc(bytes)) && (t->owner[i] = malloc(places)) &&
         (t->local[i] = malloc(places));
    cli_rows_at at = {CLI_K, i, 0, length(c, i), c->num_kv_heads, c->head_dim};
    if (!ok) break;
    cli_synthetic_fill(s, at, 1.0f, c->dtype, t->k[i]);
    at.tensor = CLI_V;
    cli_synthetic_fill(s, at, 1.0f, c->dtype, t->v[i]);
    check_walk_map(c, length(c, i), t->owner[i], t->local[i]);
    const double v = cli_max_abs(c->dtype, t->v[i],
                                 (size_t)(length(c, i) * c->num_kv_heads) * (size_t)c->head_dim);
    t->max_v = fmax(t->max_v, v);
    at = (cli_rows_at){CLI_Q, i, 0, c->requests[i].num_new, c->num_q_heads, c->head_dim};
    cli_synthetic_fill(s, at, CLI_QUERY_SCALE, c->dtype,
                       (char *)t->q +
                           (size_t)check_first_row(c, i) * check_q_row_bytes(c, c->dtype));
  }
  free(s);
  if (c->v_scale != 0) t->max_v *= fabs((double)c->v_scale);
  return ok ? KVR_OK : kvr_fail(KVR_E_OOM, "no host memory for a case");
}

/* New K and V of all requests in token order. */
static void gather_new(check_trial *t) {
  const check_case *c = &t->c;
  const size_t row = check_kv_row_bytes(c);
  for (int i = 0; i < c->num_requests; i++) {
    const size_t from = (size_t)c->requests[i].num_cached * row;
    const size_t to = (size_t)check_first_row(c, i) * row;
    const size_t bytes = (size_t)c->requests[i].num_new * row;
    memcpy((char *)t->new_k + to, (char *)t->k[i] + from, bytes);
    memcpy((char *)t->new_v + to, (char *)t->v[i] + from, bytes);
  }
}

/* ---- pools ---- */

/* Writes the cache row of a position into a pool image: heads K0 V0 K1 V1 ... */
static void put_row(const check_trial *t, void *const *pools, int i, int g) {
  const check_case *c = &t->c;
  const size_t head = (size_t)c->head_dim * kvr_dtype_size(c->dtype);
  const int local = t->local[i][g];
  const int row = t->tables[i][local / c->page_size] * c->page_size + local % c->page_size;
  char *to = (char *)pools[t->owner[i][g]] + (size_t)row * 2 * (size_t)c->num_kv_heads * head;
  for (int h = 0; h < c->num_kv_heads; h++) {
    const size_t from = (size_t)(g * c->num_kv_heads + h) * head;
    memcpy(to + (size_t)(2 * h) * head, (char *)t->k[i] + from, head);
    memcpy(to + (size_t)(2 * h + 1) * head, (char *)t->v[i] + from, head);
  }
}

/* Pools before and after the step; every byte that holds no token is NaN. */
static kvr_status make_pools(check_trial *t) {
  const check_case *c = &t->c;
  t->pool_bytes = (size_t)t->desc.num_pages * (size_t)c->page_size * 2 * check_kv_row_bytes(c);
  t->now = malloc(t->pool_bytes);
  bool ok = t->now != NULL;
  for (int r = 0; r < c->ranks && ok; r++) {
    ok = (t->before[r] = malloc(t->pool_bytes)) && (t->after[r] = malloc(t->pool_bytes));
    if (ok) memset(t->before[r], 0xff, t->pool_bytes);
  }
  if (!ok) return kvr_fail(KVR_E_OOM, "no host memory for the pools of a case");
  for (int i = 0; i < c->num_requests; i++)
    for (int g = 0; g < c->requests[i].num_cached; g++) put_row(t, t->before, i, g);
  for (int r = 0; r < c->ranks; r++) memcpy(t->after[r], t->before[r], t->pool_bytes);
  for (int i = 0; i < c->num_requests; i++)
    for (int g = c->requests[i].num_cached; g < length(c, i); g++) put_row(t, t->after, i, g);
  return KVR_OK;
}

/* Tables of shuffled pages; pages of different requests are mixed. */
static kvr_status make_tables(check_trial *t, uint64_t seed) {
  const check_case *c = &t->c;
  const int num = t->desc.num_pages;
  int *pages = malloc((size_t)num * sizeof *pages);
  if (pages == NULL) return kvr_fail(KVR_E_OOM, "no host memory for %d pages", num);
  for (int p = 0; p < num; p++) pages[p] = p;
  for (int p = num - 1; p > 0; p--) {
    const uint64_t bits = cli_hash(seed + cli_hash((uint64_t)c->index << 32 | (uint64_t)p));
    const int other = (int)(bits % (uint64_t)(p + 1));
    const int page = pages[p];
    pages[p] = pages[other];
    pages[other] = page;
  }
  bool ok = true;
  for (int i = 0, next = 0; i < c->num_requests && ok; next += num_pages(c, i++)) {
    const size_t bytes = (size_t)num_pages(c, i) * sizeof *pages;
    ok = (t->tables[i] = malloc(bytes + 1)) != NULL;
    if (ok) memcpy(t->tables[i], pages + next, bytes);
  }
  free(pages);
  return ok ? KVR_OK : kvr_fail(KVR_E_OOM, "no host memory for tables");
}

/* ---- on the device ---- */

static kvr_status open_cache(check_trial *t, kvr_group *group) {
  const check_case *c = &t->c;
  KVR_TRY(kvr_cache_create(group, &t->desc, &t->cache));
  if (kvr_cache_bytes(t->cache) != t->pool_bytes)
    return kvr_fail(KVR_E_VERIFY, "the pool of a rank has %zu bytes, expected %zu",
                    kvr_cache_bytes(t->cache), t->pool_bytes);
  memset(t->now, 0xff, t->pool_bytes);
  for (int r = 0; r < c->ranks; r++) KVR_TRY(kvr_cache_import(t->cache, r, t->now, t->pool_bytes));
  for (int i = 0; i < c->num_requests; i++) {
    KVR_TRY(kvr_cache_add(t->cache, &t->ids[i]));
    t->c.requests[i].cache_id = t->ids[i];
    KVR_TRY(kvr_cache_set_table(t->cache, t->ids[i], t->tables[i], num_pages(c, i)));
    if (c->requests[i].num_cached > 0)
      KVR_TRY(kvr_cache_append(t->cache, t->ids[i], t->k[i], t->v[i], c->requests[i].num_cached));
  }
  for (int r = 0; r < c->ranks; r++) {
    KVR_TRY(kvr_cache_export(t->cache, r, t->now, t->pool_bytes));
    if (memcmp(t->now, t->before[r], t->pool_bytes) != 0)
      return kvr_fail(KVR_E_VERIFY, "kvr_cache_append wrote other bytes than expected on rank %d",
                      r);
  }
  return KVR_OK;
}

static kvr_status open_session(check_trial *t, kvr_group *group) {
  const check_case *c = &t->c;
  kvr_limits limits = {.struct_size = sizeof limits,
                       .num_q_heads = c->num_q_heads,
                       .max_new_tokens = kvr_max(1, t->num_tokens),
                       .max_requests = c->num_requests,
                       .tile = c->tile,
                       .query_tile = c->query_tile,
                       .num_slots = c->slots,
                       .out_dtype = c->out_dtype,
                       .math = c->bf16_math ? KVR_MATH_AUTO : KVR_MATH_F32};
  for (int step = 0; step < c->num_steps; step++) {
    const check_case now = check_step_case(c, step);
    int rows = 0;
    for (int i = 0; i < now.num_requests; i++) {
      limits.max_context = kvr_max(limits.max_context, now.requests[i].num_cached);
      rows += check_most_rows(&now, i);
    }
    limits.max_rows = kvr_max(limits.max_rows, rows);
  }
  return kvr_session_create(group, t->cache, &limits, &t->session);
}

static kvr_status open_trial(check_groups *groups, uint64_t seed, check_trial *t) {
  const check_case *c = &t->c;
  const size_t lse_bytes = (size_t)t->num_tokens * (size_t)c->num_q_heads + 1;
  const size_t rows = (size_t)t->num_tokens;
  kvr_group *group;
  t->q = malloc(rows * check_q_row_bytes(c, c->dtype) + 1);
  t->out = malloc(rows * check_q_row_bytes(c, c->out_dtype) + 1);
  t->lse = malloc(lse_bytes * sizeof *t->lse);
  t->new_k = malloc(rows * check_kv_row_bytes(c) + 1);
  t->new_v = malloc(rows * check_kv_row_bytes(c) + 1);
  t->ref_out = malloc(lse_bytes * (size_t)c->head_dim * sizeof *t->ref_out);
  t->ref_lse = malloc(lse_bytes * sizeof *t->ref_lse);
  if (!t->q || !t->out || !t->lse || !t->new_k || !t->new_v || !t->ref_out || !t->ref_lse)
    return kvr_fail(KVR_E_OOM, "no host memory for a case");
  KVR_TRY(make_data(t, seed));
  gather_new(t);
  KVR_TRY(make_tables(t, seed));
  KVR_TRY(make_pools(t));
  KVR_TRY(check_reference(t, NULL, t->ref_out, t->ref_lse));
  KVR_TRY(check_groups_get(groups, c->ranks, c->copy_queue, &group));
  KVR_TRY(open_cache(t, group));
  return open_session(t, group);
}

kvr_status check_trial_open(check_groups *groups, const check_case *c, uint64_t seed,
                            check_trial *trial) {
  memset(trial, 0, sizeof *trial);
  trial->c = *c;
  int pages = c->spare_pages;
  for (int i = 0; i < c->num_requests; i++) {
    trial->num_tokens += c->requests[i].num_new;
    pages += num_pages(c, i);
  }
  trial->desc = (kvr_cache_desc){.struct_size = sizeof trial->desc,
                                 .num_ranks = c->ranks,
                                 .num_kv_heads = c->num_kv_heads,
                                 .head_dim = c->head_dim,
                                 .page_size = c->page_size,
                                 .num_pages = kvr_max(1, pages),
                                 .interleave = c->interleave,
                                 .weights = trial->c.weights,
                                 .dtype = c->dtype};
  return open_trial(groups, seed, trial);
}

void check_trial_close(check_trial *t) {
  check_io_fini(t);
  kvr_session_destroy(t->session);
  kvr_cache_destroy(t->cache);
  for (int i = 0; i < CHECK_REQUESTS; i++) {
    free(t->tables[i]);
    free(t->k[i]);
    free(t->v[i]);
    free(t->owner[i]);
    free(t->local[i]);
  }
  for (int r = 0; r < CHECK_RANKS; r++) {
    free(t->before[r]);
    free(t->after[r]);
  }
  free(t->now);
  free(t->sinks);
  free(t->q);
  free(t->out);
  free(t->lse);
  free(t->new_k);
  free(t->new_v);
  free(t->ref_out);
  free(t->ref_lse);
  memset(t, 0, sizeof *t);
}

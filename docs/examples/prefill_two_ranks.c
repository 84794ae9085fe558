/* Chunked prefill of one request over two ranks, from host arrays: 96 tokens in chunks of 32. */
#include <kvring/kvring.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 2, HEADS = 4, KV_HEADS = 2, DIM = 64, TOKENS = 96, CHUNK = 32, PAGE = 16 };

static float q[TOKENS][HEADS][DIM], k[TOKENS][KV_HEADS][DIM], v[TOKENS][KV_HEADS][DIM];
static float out[TOKENS][HEADS][DIM], lse[TOKENS][HEADS];

static void check(kvr_status status) {
  if (status == KVR_OK) return;
  fprintf(stderr, "%s: %s\n", kvr_status_name(status), kvr_error_message());
  exit(1);
}

/* All keys equal: every output is the plain mean of the visible values, and V[t] = t. */
static void fill(void) {
  for (int t = 0; t < TOKENS; t++)
    for (int d = 0; d < DIM; d++) {
      for (int h = 0; h < HEADS; h++) q[t][h][d] = 1.0f;
      for (int h = 0; h < KV_HEADS; h++) v[t][h][d] = (float)t;
    }
}

static void run_chunk(kvr_session *session, const kvr_cache_desc *desc, int id, int first) {
  const kvr_request request = {.num_new = CHUNK, .num_cached = first, .cache_id = id};
  const kvr_problem problem = {.struct_size = sizeof problem,
                               .cache = *desc,
                               .num_q_heads = HEADS,
                               .causal = 1,
                               .num_requests = 1,
                               .requests = &request};
  const kvr_tensor tq = {.host = q[first]}, tk = {.host = k[first]}, tv = {.host = v[first]};
  const kvr_tensor to = {.host = out[first]}, tl = {.host = lse[first]};
  const kvr_io io =
      {.struct_size = sizeof io, .q = &tq, .k = &tk, .v = &tv, .out = &to, .lse = &tl};
  kvr_plan *plan;
  kvr_plan_info info;
  check(kvr_plan_create(session, &problem, NULL, &plan));
  check(kvr_plan_describe(plan, &info));
  check(kvr_plan_run(plan, &io));
  printf("tokens %d-%d: %s (%s), %lld bytes between ranks\n", first, first + CHUNK - 1,
         info.strategy, info.reason, (long long)info.bytes_moved);
  kvr_plan_destroy(plan);
}

int main(void) {
  kvr_group *group;
  kvr_cache *cache;
  kvr_session *session;
  int id;
  fill();
  check(
      kvr_group_create(&(kvr_group_desc){.struct_size = sizeof(kvr_group_desc), .num_ranks = RANKS},
                       &group));
  const kvr_cache_desc desc = {.struct_size = sizeof desc,
                               .num_ranks = RANKS,
                               .num_kv_heads = KV_HEADS,
                               .head_dim = DIM,
                               .page_size = PAGE,
                               .num_pages = 8,
                               .interleave = 1};
  check(kvr_cache_create(group, &desc, &cache));
  check(kvr_cache_add(cache, &id));
  check(kvr_cache_reserve(cache, id, TOKENS));
  const kvr_limits limits = {.struct_size = sizeof limits,
                             .num_q_heads = HEADS,
                             .max_new_tokens = CHUNK,
                             .max_context = TOKENS,
                             .max_requests = 1};
  check(kvr_session_create(group, cache, &limits, &session));
  for (int first = 0; first < TOKENS; first += CHUNK) run_chunk(session, &desc, id, first);

  const float mean = (TOKENS - 1) / 2.0f, want_lse = logf((float)TOKENS);
  printf("last row: %g (mean of 0..%d is %g), LSE %g (ln %d is %g)\n",
         (double)out[TOKENS - 1][0][0], TOKENS - 1, (double)mean, (double)lse[TOKENS - 1][0],
         TOKENS, (double)want_lse);
  const int ok =
      fabsf(out[TOKENS - 1][0][0] - mean) < 1e-3f && fabsf(lse[TOKENS - 1][0] - want_lse) < 1e-4f;
  kvr_session_destroy(session);
  kvr_cache_destroy(cache);
  kvr_group_destroy(group);
  return ok ? 0 : 1;
}

/* Gather KV: every rank receives all cached KV of a request, L - loc(L, r) tokens, and attends it
 * and the new tokens in one launch. Fewest launches, but memory grows with the context. */
#include "base/error.h"
#include "strategy/strategy.h"

/* Shares lie one after another, by rank. */
static kvr_ref share_ref(const kvr_schedule *s, int request, int on, int of) {
  int row = 0;
  for (int r = 0; r < of; r++) row += kvr_layout_share(&s->layout, request, r);
  return kvr_make_ref(KVR_BUF_GATHERED, on, of, row, kvr_layout_share(&s->layout, request, of));
}

static kvr_status gather(kvr_schedule *s, int request) {
  const int P = s->layout.num_ranks;
  const kvr_at at = {request, 0, -1, -1};
  for (int r = 0; r < P; r++) KVR_TRY(kvr_build_stage(s, at, share_ref(s, request, r, r), 0));
  for (int k = 1; k < P; k++)
    for (int to = 0; to < P; to++) {
      const int from = (to + P - k) % P;
      KVR_TRY(kvr_build_copy(s, KVR_OP_GATHER, at, share_ref(s, request, from, from),
                             share_ref(s, request, to, from)));
    }
  return KVR_OK;
}

static kvr_status attend(kvr_schedule *s, kvr_at at) {
  for (int r = 0; r < s->layout.num_ranks; r++) {
    kvr_attend a = kvr_attend_own(s, at, r);
    a.ring =
        kvr_make_ref(KVR_BUF_GATHERED, r, KVR_ALL, 0, s->problem.requests[at.request].num_cached);
    kvr_attend_current(s, r, &a);
    a.finish = true;
    a.dst = kvr_out_ref(s, at.request, at.pass, r);
    KVR_TRY(kvr_build_attend(s, &a));
  }
  return KVR_OK;
}

static kvr_status build(kvr_schedule *s) {
  KVR_TRY(kvr_build_gather_current(s));
  for (int i = 0; i < s->layout.num_requests; i++) {
    if (s->problem.requests[i].num_new == 0) continue;
    if (s->problem.requests[i].num_cached > 0) KVR_TRY(gather(s, i));
    for (int pass = 0; pass < kvr_schedule_num_passes(s, i); pass++)
      KVR_TRY(attend(s, (kvr_at){i, pass, -1, -1}));
  }
  return kvr_build_cache_writes(s);
}

static int64_t bytes(const kvr_schedule *s) {
  int64_t cached = 0;
  for (int i = 0; i < s->layout.num_requests; i++)
    if (s->problem.requests[i].num_new > 0) cached += s->problem.requests[i].num_cached;
  return kvr_bytes_gather_current(s) +
         (int64_t)(s->layout.num_ranks - 1) * cached * (int64_t)s->row_bytes.kv;
}

const kvr_strategy kvr_strategy_gather_kv = {.name = "gather-kv",
                                             .serves_cache = true,
                                             .new_kv = KVR_BUF_CURRENT,
                                             .uses = KVR_USES(GATHERED),
                                             .build = build,
                                             .bytes = bytes};

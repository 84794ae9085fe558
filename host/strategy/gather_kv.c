/* Gather KV: every rank receives all cached KV of a request, L - loc(L, r) tokens, and attends it
 * and the new tokens in one launch. Fewest launches, but memory grows with the context. */
#include "base/arith.h"
#include "base/error.h"
#include "strategy/strategy.h"

/* First local token that is gathered: blocks below everybody's window stay where they are. */
static int first_local(const kvr_schedule *s, int request) {
  return kvr_schedule_first_block(s, request) * s->options.tile;
}

static int share_len(const kvr_schedule *s, int request, int rank) {
  return kvr_max(0, kvr_layout_share(&s->layout, request, rank) - first_local(s, request));
}

/* Shares lie one after another, by rank. */
static kvr_ref share_ref(const kvr_schedule *s, int request, int on, int of) {
  int row = 0;
  for (int r = 0; r < of; r++) row += share_len(s, request, r);
  return kvr_make_ref(KVR_BUF_GATHERED, on, of, row, share_len(s, request, of));
}

static kvr_status gather(kvr_schedule *s, int request) {
  const int P = s->layout.num_ranks;
  const kvr_at at = {request, 0, -1, -1};
  for (int r = 0; r < P && s->problem.window > 0; r++)
    KVR_TRY(kvr_build_fence(s, at, KVR_BUF_GATHERED, r));
  for (int r = 0; r < P; r++)
    KVR_TRY(kvr_build_stage(s, at, share_ref(s, request, r, r), first_local(s, request)));
  for (int k = 1; k < P; k++)
    for (int to = 0; to < P; to++) {
      const int from = (to + P - k) % P;
      KVR_TRY(kvr_build_copy(s, KVR_OP_GATHER, at, share_ref(s, request, from, from),
                             share_ref(s, request, to, from)));
    }
  return KVR_OK;
}

static void finish_with_current(const kvr_schedule *s, int rank, kvr_attend *a) {
  kvr_attend_current(s, rank, a);
  a->finish = true;
  a->dst = kvr_out_ref(s, a->at.request, a->at.pass, rank);
}

/* One launch over all shares and the new tokens. */
static kvr_status attend_at_once(kvr_schedule *s, kvr_at at, int r) {
  kvr_attend a = kvr_attend_own(s, at, r);
  a.ring =
      kvr_make_ref(KVR_BUF_GATHERED, r, KVR_ALL, 0, s->problem.requests[at.request].num_cached);
  finish_with_current(s, r, &a);
  return kvr_build_attend(s, &a);
}

/* A window asks for positions, and their map differs from share to share: one launch each. */
static kvr_status attend_by_share(kvr_schedule *s, kvr_at at, int r) {
  const int P = s->layout.num_ranks;
  for (int shard = 0; shard < P; shard++) {
    kvr_attend a = kvr_attend_own(s, at, r);
    a.ring = share_ref(s, at.request, r, shard);
    a.shard = shard;
    a.local0 = first_local(s, at.request);
    a.carry_in = shard > 0;
    if (shard + 1 == P) finish_with_current(s, r, &a);
    KVR_TRY(kvr_build_attend(s, &a));
  }
  return KVR_OK;
}

static kvr_status attend(kvr_schedule *s, kvr_at at) {
  for (int r = 0; r < s->layout.num_ranks; r++)
    KVR_TRY(s->problem.window > 0 ? attend_by_share(s, at, r) : attend_at_once(s, at, r));
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
    if (s->problem.requests[i].num_new > 0) cached += kvr_visible_cached(s, i);
  return kvr_bytes_gather_current(s) +
         (int64_t)(s->layout.num_ranks - 1) * cached * (int64_t)s->row_bytes.kv;
}

const kvr_strategy kvr_strategy_gather_kv = {.name = "gather-kv",
                                             .serves_cache = true,
                                             .new_kv = KVR_BUF_CURRENT,
                                             .uses = KVR_USES(GATHERED) | KVR_USES(STATE),
                                             .build = build,
                                             .bytes = bytes};

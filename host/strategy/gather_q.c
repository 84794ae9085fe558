/* Gather Q: every rank receives all queries of a pass, attends them to its own share, and sends
 * each owner its rows' partial (m, l, acc) in f32; the owner merges them with its launch over the
 * new tokens. Traffic does not depend on the context. */
#include "base/arith.h"
#include "base/error.h"
#include "strategy/share_stage.h"

/* Row of owner's slice inside the gathered rows of a pass. */
static int slice_row(const kvr_schedule *s, kvr_at at, int owner) {
  int row = 0;
  for (int r = 0; r < owner; r++) row += kvr_schedule_pass_rows(s, at.request, at.pass, r).num;
  return row;
}

static int slice_len(const kvr_schedule *s, kvr_at at, int owner) {
  return kvr_schedule_pass_rows(s, at.request, at.pass, owner).num;
}

static kvr_status gather_queries(kvr_schedule *s, kvr_at at) {
  const int P = s->layout.num_ranks;
  for (int k = 0; k < P; k++)
    for (int to = 0; to < P; to++) {
      const int from = (to + P - k) % P;
      const kvr_rows rows = kvr_schedule_pass_rows(s, at.request, at.pass, from);
      KVR_TRY(
          kvr_build_copy(s, k == 0 ? KVR_OP_COPY : KVR_OP_GATHER, at,
                         kvr_make_ref(KVR_BUF_Q, from, 0, rows.first, rows.num),
                         kvr_make_ref(KVR_BUF_Q_ALL, to, from, slice_row(s, at, from), rows.num)));
    }
  return KVR_OK;
}

/* Rows of one owner (or of all: KVR_ALL) in a pass against rank r's share. An empty share still
 * writes the empty state. */
static kvr_status attend_rows(kvr_schedule *s, kvr_stager *stager, kvr_at at, int r, int owner) {
  const bool all = owner == KVR_ALL;
  const int row = all ? 0 : slice_row(s, at, owner);
  const int num = all ? slice_row(s, at, s->layout.num_ranks) : slice_len(s, at, owner);
  const int first = kvr_stager_first_block(s, at.request, r);
  const int end = kvr_stager_end_block(s, at.request, r);
  for (int b = first; b < kvr_max(end, first + 1); b++) {
    at.block = b;
    kvr_attend a = {.at = at,
                    .rows = {.num = num, .split = num},
                    .q = kvr_make_ref(KVR_BUF_Q_ALL, r, owner, row, num),
                    .state = kvr_make_ref(KVR_BUF_PARTIAL, r, owner, row, num),
                    .shard = r,
                    .local0 = b * s->options.tile,
                    .carry_in = b > first};
    if (!all) a.rows = kvr_schedule_pass_rows(s, at.request, at.pass, owner);
    if (first < end) KVR_TRY(kvr_stager_get(s, stager, at, r, &a.ring));
    KVR_TRY(kvr_build_attend(s, &a));
  }
  return KVR_OK;
}

/* All rows at once, since cached keys all lie in the past; a window asks for the rows' tokens,
 * which are known owner by owner. */
static kvr_status attend_share(kvr_schedule *s, kvr_stager *stager, kvr_at at, int r) {
  if (s->problem.window == 0) return attend_rows(s, stager, at, r, KVR_ALL);
  for (int owner = 0; owner < s->layout.num_ranks; owner++)
    KVR_TRY(attend_rows(s, stager, at, r, owner));
  return KVR_OK;
}

static kvr_status attend_current(kvr_schedule *s, kvr_at at, int r) {
  kvr_attend a = kvr_attend_own(s, at, r);
  kvr_attend_current(s, r, &a);
  return kvr_build_attend(s, &a);
}

static kvr_status send_partials(kvr_schedule *s, kvr_at at) {
  const int P = s->layout.num_ranks;
  for (int k = 0; k < P; k++)
    for (int to = 0; to < P; to++) {
      const int from = (to + P - k) % P, len = slice_len(s, at, to);
      KVR_TRY(kvr_build_copy(s, k == 0 ? KVR_OP_COPY : KVR_OP_SEND_STATE, at,
                             kvr_make_ref(KVR_BUF_PARTIAL, from, to, slice_row(s, at, to), len),
                             kvr_make_ref(KVR_BUF_RECEIVED, to, from, from * len, len)));
    }
  return KVR_OK;
}

static kvr_status merge(kvr_schedule *s, kvr_at at, int r) {
  const int num = slice_len(s, at, r);
  return kvr_build_merge(s, KVR_OP_MERGE_STATES, at, r,
                         kvr_make_ref(KVR_BUF_RECEIVED, r, KVR_ALL, 0, num),
                         kvr_make_ref(KVR_BUF_STATE, r, KVR_ALL, 0, num));
}

static kvr_status build_pass(kvr_schedule *s, kvr_stager *stager, kvr_at at) {
  const int P = s->layout.num_ranks;
  for (int r = 0; r < P && s->problem.window > 0; r++) {
    KVR_TRY(kvr_build_fence(s, at, KVR_BUF_Q_ALL, r));
    KVR_TRY(kvr_build_fence(s, at, KVR_BUF_PARTIAL, r));
  }
  KVR_TRY(gather_queries(s, at));
  for (int r = 0; r < P; r++) KVR_TRY(attend_share(s, stager, at, r));
  KVR_TRY(send_partials(s, at));
  for (int r = 0; r < P; r++) KVR_TRY(attend_current(s, at, r));
  for (int r = 0; r < P; r++) KVR_TRY(merge(s, at, r));
  return KVR_OK;
}

static kvr_status build(kvr_schedule *s) { return kvr_build_over_shares(s, build_pass); }

static int64_t bytes(const kvr_schedule *s) {
  int64_t rows = 0;
  for (int i = 0; i < s->layout.num_requests; i++)
    if (s->problem.requests[i].num_cached > 0) rows += s->problem.requests[i].num_new;
  return kvr_bytes_gather_current(s) +
         (int64_t)(s->layout.num_ranks - 1) * rows * (int64_t)(s->row_bytes.q + s->row_bytes.state);
}

const kvr_strategy kvr_strategy_gather_q = {.name = "gather-q",
                                            .serves_cache = true,
                                            .new_kv = KVR_BUF_CURRENT,
                                            .uses = KVR_USES(SLOT) | KVR_USES(Q_ALL) |
                                                    KVR_USES(PARTIAL) | KVR_USES(RECEIVED) |
                                                    KVR_USES(STATE),
                                            .build = build,
                                            .bytes = bytes};

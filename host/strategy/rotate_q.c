/* Rotate Q: queries and their carry (m, l, acc) travel, the cache stays (pass-Q of Yang et al.
 * 2024, arXiv:2411.01783; here the carry travels along, so that nothing is merged).
 *
 * Home phase: every rank attends its rows to the new tokens. Then P rounds: in round k rank j holds
 * the rows of rank (j + P - k) % P and attends them to its own share. After the last round the
 * carry hops home and is normalised. Head rows and tail rows are two lanes: one travels while the
 * other is attended. */
#include "base/error.h"
#include "strategy/share_stage.h"

enum { NUM_LANES = 2 };

/* Rows of a lane of a pass: lane 0 the head run, lane 1 the tail run. */
static kvr_rows lane_rows(const kvr_schedule *s, kvr_at at, int owner, int lane) {
  const kvr_rows rows = kvr_schedule_pass_rows(s, at.request, at.pass, owner);
  return lane == 0 ? kvr_rows_slice(rows, 0, rows.split)
                   : kvr_rows_slice(rows, rows.split, rows.num);
}

/* First state row of a lane at home: the tail's rows follow the head's. */
static int home_state_row(const kvr_schedule *s, kvr_at at, int owner, int lane) {
  return lane == 0 ? 0 : lane_rows(s, at, owner, 0).num;
}

/* Where the queries and the carry of a lane are on rank j in round k. */
static kvr_ref q_at(const kvr_schedule *s, kvr_at at, int j, int lane, int k) {
  const int P = s->layout.num_ranks;
  const kvr_rows rows = lane_rows(s, at, (j + P - k) % P, lane);
  if (k == 0) return kvr_make_ref(KVR_BUF_Q, j, 0, rows.first, rows.num);
  return kvr_make_ref(KVR_BUF_LANE_Q, j, 2 * lane + k % 2, 0, rows.num);
}

static kvr_ref state_at(const kvr_schedule *s, kvr_at at, int j, int lane, int k) {
  const int P = s->layout.num_ranks;
  const int owner = (j + P - k % P) % P;
  const int num = lane_rows(s, at, owner, lane).num;
  if (k == 0 || k == P) /* before leaving and after coming home */
    return kvr_make_ref(KVR_BUF_STATE, j, lane, home_state_row(s, at, j, lane), num);
  return kvr_make_ref(KVR_BUF_LANE_STATE, j, 2 * lane + k % 2, 0, num);
}

static kvr_status attend_home(kvr_schedule *s, kvr_at at, int r, int lane) {
  kvr_attend a = {.at = at,
                  .rows = lane_rows(s, at, r, lane),
                  .q = q_at(s, at, r, lane, 0),
                  .state = state_at(s, at, r, lane, 0),
                  .sinks = true};
  kvr_attend_current(s, r, &a);
  return kvr_build_attend(s, &a);
}

/* The lane's rows on rank j in round k against j's share. */
static kvr_status attend_share(kvr_schedule *s, kvr_stager *stager, kvr_at at, int j, int lane,
                               int k) {
  const int P = s->layout.num_ranks;
  at.step = k;
  const int end = kvr_stager_end_block(s, at.request, j);
  for (int b = kvr_stager_first_block(s, at.request, j); b < end; b++) {
    at.block = b;
    kvr_attend a = {.at = at,
                    .rows = lane_rows(s, at, (j + P - k) % P, lane),
                    .q = q_at(s, at, j, lane, k),
                    .state = state_at(s, at, j, lane, k),
                    .shard = j,
                    .local0 = b * s->options.tile,
                    .carry_in = true};
    KVR_TRY(kvr_stager_get(s, stager, at, j, &a.ring));
    KVR_TRY(kvr_build_attend(s, &a));
  }
  return KVR_OK;
}

/* Every rank's lane moves on, to where round k expects it; round P is the way home. */
static kvr_status hop(kvr_schedule *s, kvr_at at, int lane, int k) {
  const int P = s->layout.num_ranks;
  at.step = k;
  for (int j = 0; j < P; j++) {
    const int prev = (j + P - 1) % P;
    if (k < P)
      KVR_TRY(kvr_build_copy(s, KVR_OP_HOP, at, q_at(s, at, prev, lane, k - 1),
                             q_at(s, at, j, lane, k)));
    KVR_TRY(kvr_build_copy(s, KVR_OP_HOP, at, state_at(s, at, prev, lane, k - 1),
                           state_at(s, at, j, lane, k)));
  }
  return KVR_OK;
}

static kvr_status normalise(kvr_schedule *s, kvr_at at, int r) {
  const int num = kvr_schedule_pass_rows(s, at.request, at.pass, r).num;
  return kvr_build_merge(s, KVR_OP_MERGE_STATES, at, r, kvr_no_ref(),
                         kvr_make_ref(KVR_BUF_STATE, r, KVR_ALL, 0, num));
}

static kvr_status build_pass(kvr_schedule *s, kvr_stager *stager, kvr_at at) {
  const int P = s->layout.num_ranks;
  for (int lane = 0; lane < NUM_LANES; lane++)
    for (int r = 0; r < P; r++) KVR_TRY(attend_home(s, at, r, lane));
  for (int k = 0; k < P; k++)
    for (int lane = 0; lane < NUM_LANES; lane++) {
      for (int j = 0; j < P; j++) KVR_TRY(attend_share(s, stager, at, j, lane, k));
      if (P > 1) KVR_TRY(hop(s, at, lane, k + 1));
    }
  for (int r = 0; r < P; r++) KVR_TRY(normalise(s, at, r));
  return KVR_OK;
}

static kvr_status build(kvr_schedule *s) { return kvr_build_over_shares(s, build_pass); }

/* Every row's queries make P - 1 hops, its carry P. */
static int64_t bytes(const kvr_schedule *s) {
  const int64_t P = s->layout.num_ranks;
  const int64_t per_row = (P - 1) * (int64_t)s->row_bytes.q + P * (int64_t)s->row_bytes.state;
  int64_t rows = 0;
  for (int i = 0; i < s->layout.num_requests; i++)
    if (s->problem.requests[i].num_cached > 0) rows += s->problem.requests[i].num_new;
  return kvr_bytes_gather_current(s) + (P > 1 ? rows * per_row : 0);
}

const kvr_strategy kvr_strategy_rotate_q = {.name = "rotate-q",
                                            .serves_cache = true,
                                            .new_kv = KVR_BUF_CURRENT,
                                            .uses = KVR_USES(SLOT) | KVR_USES(STATE) |
                                                    KVR_USES(LANE_Q) | KVR_USES(LANE_STATE),
                                            .build = build,
                                            .bytes = bytes};

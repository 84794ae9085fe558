/* Follows data through a schedule, symbolically: what every slot, gathered buffer and state holds.
 *
 * It believes only where data starts (a rank's own pages, its own new rows and queries) and how
 * copies move it; what a launch was meant to read does not count. */
#include <stdlib.h>

#include "base/arith.h"
#include "base/error.h"
#include "schedule/coverage.h"
#include "schedule/verify.h"

/* KV rows in a slot or in one rank's part of the gathered buffer. */
typedef struct kv_content {
  int request; /* -1: nothing */
  int shard;
  int row; /* first row in the buffer */
  int local0;
  int num_cached;
  kvr_rows fresh; /* tokens of the new rows behind the cached ones */
} kv_content;

/* Whose query rows a buffer holds: num rows of owner from row first; owner = EVERY: the pass's rows
 * of all ranks, one rank after another. */
enum { EVERY = -1, NOBODY = -2 };
typedef struct row_set {
  int owner, request, pass, first, num;
} row_set;

typedef struct state_content {
  row_set rows;
  int seen; /* list of keys, see coverage.h */
} state_content;

typedef struct tracker {
  const kvr_schedule *s;
  int op;
  kv_content *kv;        /* (num_resources) */
  row_set *queries;      /* (num_resources) */
  state_content *states; /* (num_resources) */
  bool *present;         /* (P to, P from, R, 2) run of new rows has arrived */
  int *stored;           /* (R, P) new tokens stored by a rank */
  int *written;          /* (P) output rows written */
  kvr_coverage keys;
} tracker;

static kvr_status fail(const tracker *t, const char *what) {
  return kvr_verify_fail(t->s, t->op, what);
}

static kvr_status no_memory(void) {
  return kvr_fail(KVR_E_OOM, "no host memory to verify the schedule");
}

static int resource_of(const kvr_schedule *s, kvr_buffer buffer, int rank, int index) {
  return s->resource0[buffer] + rank * s->pieces[buffer] + index;
}

static int piece_of(const kvr_schedule *s, kvr_ref ref) {
  return resource_of(s, ref.buffer, ref.rank, ref.index == KVR_ALL ? 0 : ref.index);
}

static bool *present_at(tracker *t, int to, int from, int request, int run) {
  const size_t P = (size_t)t->s->layout.num_ranks, R = (size_t)t->s->layout.num_requests;
  return &t->present[((((size_t)to * P + (size_t)from) * R + (size_t)request) * 2) + (size_t)run];
}

/* ---- new rows ---- */

/* A gather of new rows must be one whole run of the sender's own rows, and it must have it. */
static kvr_status gather_current(tracker *t, const kvr_op *op) {
  const kvr_layout *l = &t->s->layout;
  const kvr_rows rows = *kvr_layout_rows(l, op->request, op->src.index);
  const int token = op->src.row - l->token0[op->request];
  const bool head = token == rows.t0 && op->src.rows == rows.split && rows.split > 0;
  const bool tail = token == rows.t1 && op->src.rows == rows.num - rows.split;
  if (!head && !tail) return fail(t, "gathers new rows that are not one of the sender's runs");
  if (op->src.row != op->dst.row || op->src.rows != op->dst.rows)
    return fail(t, "gathers new rows to another place than token order");
  if (op->src.rank != op->src.index &&
      !*present_at(t, op->src.rank, op->src.index, op->request, tail && !head))
    return fail(t, "gathers new rows that have not arrived at the sender");
  *present_at(t, op->dst.rank, op->src.index, op->request, tail && !head) = true;
  return KVR_OK;
}

/* All new tokens [0, end) of a request must be on the rank. */
static kvr_status need_tokens(tracker *t, int rank, int request, int end) {
  for (int from = 0; from < t->s->layout.num_ranks; from++) {
    if (from == rank) continue;
    const kvr_rows rows = *kvr_layout_rows(&t->s->layout, request, from);
    if ((rows.split > 0 && rows.t0 < end && !*present_at(t, rank, from, request, 0)) ||
        (rows.num > rows.split && rows.t1 < end && !*present_at(t, rank, from, request, 1)))
      return fail(t, "reads new rows that have not arrived");
  }
  return KVR_OK;
}

/* ---- copies ---- */

static kvr_status stage(tracker *t, const kvr_op *op) {
  if (op->dst.rows > 0 &&
      op->local0 + op->dst.rows > kvr_layout_share(&t->s->layout, op->request, op->rank))
    return fail(t, "stages rows past the rank's share");
  t->kv[piece_of(t->s, op->dst)] = (kv_content){.request = op->request,
                                                .shard = op->rank,
                                                .row = op->dst.row,
                                                .local0 = op->local0,
                                                .num_cached = op->dst.rows};
  return KVR_OK;
}

static kvr_status stage_new(tracker *t, const kvr_op *op) {
  kv_content *c = &t->kv[piece_of(t->s, op->dst)];
  const kvr_rows own = *kvr_layout_rows(&t->s->layout, op->request, op->rank);
  const int begin = op->src.row - own.first;
  if (c->request != op->request || op->dst.row != c->num_cached)
    return fail(t, "stages new rows not right behind the cached ones");
  if (begin < 0 || begin + op->src.rows > own.num || op->src.rows != op->dst.rows)
    return fail(t, "stages rows that are not the rank's own");
  c->fresh = kvr_rows_slice(own, begin, begin + op->src.rows);
  return KVR_OK;
}

static kvr_status copy_kv(tracker *t, const kvr_op *op) {
  const kv_content c = t->kv[piece_of(t->s, op->src)];
  if (c.request != op->request || c.row != op->src.row ||
      c.num_cached + c.fresh.num != op->src.rows || op->src.rows != op->dst.rows)
    return fail(t, "copies KV rows that are not what the source holds");
  t->kv[piece_of(t->s, op->dst)] = c;
  t->kv[piece_of(t->s, op->dst)].row = op->dst.row;
  return KVR_OK;
}

/* Query rows that a reference names, from what the buffer holds. */
static row_set queries_of(const tracker *t, kvr_ref ref, const kvr_op *op) {
  if (ref.buffer == KVR_BUF_Q) {
    const kvr_rows own = *kvr_layout_rows(&t->s->layout, op->request, ref.rank);
    return (row_set){ref.rank, op->request, op->pass, ref.row - own.first, ref.rows};
  }
  const row_set set = t->queries[piece_of(t->s, ref)];
  if (ref.buffer == KVR_BUF_Q_ALL && ref.index == KVR_ALL) {
    int row = 0; /* every rank's slice must be there, in order and for this pass */
    for (int r = 0; r < t->s->layout.num_ranks; r++) {
      const row_set part = t->queries[resource_of(t->s, KVR_BUF_Q_ALL, ref.rank, r)];
      const kvr_rows want = kvr_schedule_pass_rows(t->s, op->request, op->pass, r);
      const kvr_rows own = *kvr_layout_rows(&t->s->layout, op->request, r);
      if (part.owner != r || part.request != op->request || part.num != want.num ||
          part.first != want.first - own.first)
        return (row_set){.owner = NOBODY};
      row += part.num;
    }
    return (row_set){EVERY, op->request, op->pass, 0, row};
  }
  return set;
}

static kvr_status copy_queries(tracker *t, const kvr_op *op) {
  const row_set set = queries_of(t, op->src, op);
  if (set.num != op->src.rows || op->src.rows != op->dst.rows)
    return fail(t, "copies query rows that are not what the source holds");
  if (op->dst.buffer == KVR_BUF_Q_ALL) {
    int row = 0;
    for (int r = 0; r < set.owner; r++)
      row += kvr_schedule_pass_rows(t->s, op->request, op->pass, r).num;
    if (row != op->dst.row || set.owner != op->dst.index)
      return fail(t, "puts query rows at another rank's place");
  }
  t->queries[piece_of(t->s, op->dst)] = set;
  return KVR_OK;
}

/* The slice of a rank inside the gathered rows of a pass. */
static kvr_status slice_of_every(tracker *t, const kvr_op *op, row_set *set) {
  const int owner = op->dst.rank;
  int row = 0;
  for (int r = 0; r < owner; r++) row += kvr_schedule_pass_rows(t->s, op->request, op->pass, r).num;
  const kvr_rows want = kvr_schedule_pass_rows(t->s, op->request, op->pass, owner);
  if (row != op->src.row || want.num != op->src.rows)
    return fail(t, "sends a partial state to a rank that does not own its rows");
  set->owner = owner;
  set->first = want.first - kvr_layout_rows(&t->s->layout, op->request, owner)->first;
  set->num = want.num;
  return KVR_OK;
}

static kvr_status copy_state(tracker *t, const kvr_op *op) {
  state_content c = t->states[piece_of(t->s, op->src)];
  if (c.rows.owner == EVERY) KVR_TRY(slice_of_every(t, op, &c.rows));
  if (c.rows.num != op->src.rows || op->src.rows != op->dst.rows)
    return fail(t, "copies state rows that are not what the source holds");
  t->states[piece_of(t->s, op->dst)] = c;
  return KVR_OK;
}

static kvr_status copy(tracker *t, const kvr_op *op) {
  if (op->src.buffer == KVR_BUF_NONE) /* a fence */
    return op->launch ? fail(t, "copies nothing") : KVR_OK;
  switch (op->dst.buffer) {
  case KVR_BUF_CURRENT: return gather_current(t, op);
  case KVR_BUF_SLOT:
  case KVR_BUF_GATHERED: return copy_kv(t, op);
  case KVR_BUF_Q_ALL:
  case KVR_BUF_LANE_Q: return copy_queries(t, op);
  default: return copy_state(t, op);
  }
}

/* ---- launches ---- */

static kvr_status see(tracker *t, state_content *state, int shard, int begin, int end) {
  return kvr_coverage_add(&t->keys, &state->seen, shard, begin, end);
}

/* A window needs the positions of cached keys: the launch's map must be that of their share. */
static bool has_position(const tracker *t, const kvr_op *op, const kv_content *c) {
  const kvr_cache_desc *cache = &t->s->problem.cache;
  const kvr_attend_args *a = &op->attend;
  return a->key_local0 == c->local0 && a->weight == kvr_map_weight(cache, c->shard) &&
         a->weight_before == kvr_map_weight_before(cache, c->shard) &&
         a->total_weight == kvr_map_total_weight(cache) && a->interleave == cache->interleave;
}

static kvr_status see_cached(tracker *t, const kvr_op *op, state_content *state) {
  const kvr_schedule *s = t->s;
  if (op->attend.ring_end == 0) return KVR_OK;
  const int begin = op->src.index == KVR_ALL ? 0 : op->src.index;
  const int end = op->src.index == KVR_ALL ? s->pieces[op->src.buffer] : begin + 1;
  int row = op->attend.ring_row;
  for (int i = begin; i < end; i++) {
    const kv_content c = t->kv[resource_of(s, op->src.buffer, op->src.rank, i)];
    if (c.request != op->request) return fail(t, "attends KV of another request");
    if (c.num_cached > 0 && c.row != row) return fail(t, "attends KV rows at the wrong place");
    row += c.num_cached;
    if (s->problem.window > 0 && c.num_cached > 0 && !has_position(t, op, &c))
      return fail(t, "attends KV under wrong positions");
    KVR_TRY(see(t, state, c.shard, c.local0, c.local0 + c.num_cached));
  }
  if (row - op->attend.ring_row != op->attend.ring_end)
    return fail(t, "attends another number of cached rows than the buffer holds");
  return KVR_OK;
}

static kvr_status see_new(tracker *t, const kvr_op *op, state_content *state) {
  const kvr_attend_args *a = &op->attend;
  const int num = a->kv_end - a->ring_end;
  if (num == 0) return KVR_OK;
  if (op->cur.buffer == KVR_BUF_CURRENT) {
    if (a->cur_row != t->s->layout.token0[op->request] || a->key_t0 != 0 || a->key_split < num)
      return fail(t, "attends new rows under wrong tokens");
    KVR_TRY(need_tokens(t, op->rank, op->request, num));
    return see(t, state, -1, 0, num);
  }
  const kv_content c = t->kv[piece_of(t->s, op->cur)];
  if (c.request != op->request || a->cur_row != c.num_cached || num > c.fresh.num ||
      a->key_split != c.fresh.split || a->key_t0 != c.fresh.t0 || a->key_t1 != c.fresh.t1)
    return fail(t, "attends new rows under wrong tokens");
  const int head = kvr_min(num, c.fresh.split);
  KVR_TRY(see(t, state, -1, c.fresh.t0, c.fresh.t0 + head));
  return see(t, state, -1, c.fresh.t1, c.fresh.t1 + (num - head));
}

static bool same_rows(row_set a, row_set b) {
  return a.owner == b.owner && a.request == b.request && a.first == b.first && a.num == b.num;
}

/* Rows that see new tokens, or have a window, must carry their own token numbers. */
static kvr_status check_row_tokens(tracker *t, const kvr_op *op, row_set set) {
  if (op->attend.kv_end == op->attend.ring_end && t->s->problem.window == 0) return KVR_OK;
  if (set.owner < 0) return fail(t, "needs the tokens of rows of several ranks");
  const kvr_rows rows = kvr_rows_slice(*kvr_layout_rows(&t->s->layout, op->request, set.owner),
                                       set.first, set.first + set.num);
  const kvr_attend_args *a = &op->attend;
  const bool ok = a->row_split == rows.split && (rows.split == 0 || a->row_t0 == rows.t0) &&
                  (rows.split == rows.num || a->row_t1 == rows.t1);
  return ok ? KVR_OK : fail(t, "attends rows under wrong tokens");
}

/* The collected keys must tile what the rows can see: of each share, and of the new tokens. */
static kvr_status check_tiling(tracker *t, row_set rows) {
  const kvr_layout *l = &t->s->layout;
  const kvr_rows own = kvr_rows_slice(*kvr_layout_rows(l, rows.request, rows.owner), rows.first,
                                      rows.first + rows.num);
  const int cached = t->s->problem.requests[rows.request].num_cached;
  const int first = kvr_schedule_first_position(t->s, rows.request, kvr_rows_token(own, 0));
  const int end =
      t->s->problem.causal ? kvr_rows_token_end(own) : t->s->problem.requests[rows.request].num_new;
  const char *wrong = kvr_coverage_check(&t->keys, -1, kvr_max(0, first - cached), end);
  for (int shard = 0; shard < l->num_ranks && wrong == NULL; shard++)
    wrong = kvr_coverage_check(&t->keys, shard, kvr_map_count(&t->s->problem.cache, first, shard),
                               kvr_layout_share(l, rows.request, shard));
  return wrong == NULL ? KVR_OK : fail(t, wrong);
}

/* A finished state goes to OUT, or to a part that a merge reads later. */
static kvr_status finish(tracker *t, const kvr_op *op, const state_content *state, int num) {
  const kvr_schedule *s = t->s;
  if (op->dst.buffer == KVR_BUF_PART_OUT) {
    t->states[piece_of(s, op->dst)] = state[0];
    return KVR_OK;
  }
  const kvr_rows own = *kvr_layout_rows(&s->layout, op->request, op->rank);
  int row = op->dst.row - own.first;
  for (int i = 0; i < num; i++) {
    if (state[i].rows.num == 0) continue;
    if (state[i].rows.owner != op->rank)
      return fail(t, "finishes rows that belong to another rank");
    if (state[i].rows.first != row) return fail(t, "writes output rows at the wrong place");
    row += state[i].rows.num;
  }
  t->written[op->rank] += op->dst.rows;
  return KVR_OK;
}

static void hold(tracker *t, kvr_ref ref, state_content state) {
  const int pieces = ref.index == KVR_ALL ? t->s->pieces[ref.buffer] : 1;
  for (int i = 0; i < pieces; i++) t->states[piece_of(t->s, ref) + i] = state;
}

static kvr_status attend(tracker *t, const kvr_op *op) {
  const kvr_schedule *s = t->s;
  if (op->attend.num_rows == 0) { /* a lane or tile without rows: nothing is held */
    hold(t, op->state, (state_content){{.owner = NOBODY}, KVR_SEEN_NOTHING});
    return KVR_OK;
  }
  if (!op->launch) return op->attend.kv_end == 0 ? KVR_OK : fail(t, "a marker has keys to attend");
  const row_set set = queries_of(t, op->q, op);
  if (set.owner == NOBODY || set.num != op->attend.num_rows || op->q.row != op->attend.q_row)
    return fail(t, "attends query rows that are not there");
  KVR_TRY(check_row_tokens(t, op, set));
  const state_content *held = &t->states[piece_of(s, op->state)];
  state_content state = {set, KVR_SEEN_NOTHING};
  if (op->attend.carry_in) {
    if (!same_rows(held->rows, set)) return fail(t, "carries the state of other rows");
    state = *held;
  }
  KVR_TRY(see_cached(t, op, &state));
  KVR_TRY(see_new(t, op, &state));
  hold(t, op->state, state);
  if (!op->attend.finish) return KVR_OK;
  if (op->dst.buffer == KVR_BUF_OUT) {
    kvr_coverage_clear(&t->keys);
    KVR_TRY(kvr_coverage_collect(&t->keys, state.seen));
    KVR_TRY(check_tiling(t, set));
  }
  return finish(t, op, &state, 1);
}

/* Own state (if any) and parts together must have seen everything. Two lanes are checked apart. */
static kvr_status merge(tracker *t, const kvr_op *op) {
  const kvr_schedule *s = t->s;
  if (!op->launch) return KVR_OK;
  const int parts = op->src.buffer == KVR_BUF_NONE ? 0 : s->pieces[op->src.buffer];
  const state_content *part = parts > 0 ? &t->states[piece_of(s, op->src)] : NULL;
  const bool has_state = op->state.buffer != KVR_BUF_NONE;
  if (!has_state && part == NULL) return fail(t, "merges nothing");
  const state_content *lanes = has_state ? &t->states[piece_of(s, op->state)] : part;
  const int num_lanes = has_state && !same_rows(lanes[0].rows, lanes[1].rows) ? 2 : 1;
  int rows = 0;
  for (int lane = 0; lane < num_lanes; lane++) {
    kvr_coverage_clear(&t->keys);
    if (has_state) KVR_TRY(kvr_coverage_collect(&t->keys, lanes[lane].seen));
    for (int i = 0; i < parts; i++) {
      if (!same_rows(part[i].rows, lanes[0].rows)) return fail(t, "merges states of other rows");
      KVR_TRY(kvr_coverage_collect(&t->keys, part[i].seen));
    }
    rows += lanes[lane].rows.num;
    if (lanes[lane].rows.num > 0) KVR_TRY(check_tiling(t, lanes[lane].rows));
  }
  if (rows != op->dst.rows) return fail(t, "merges another number of rows than it writes");
  return finish(t, op, lanes, num_lanes);
}

static int owned_between(const kvr_schedule *s, int request, int rank, int begin, int end) {
  const int cached = s->problem.requests[request].num_cached;
  return begin >= end ? 0
                      : kvr_map_count(&s->problem.cache, cached + end, rank) -
                            kvr_map_count(&s->problem.cache, cached + begin, rank);
}

static kvr_status cache_write(tracker *t, const kvr_op *op) {
  const int num = op->src.rows;
  if (op->src.buffer == KVR_BUF_CURRENT) {
    if (op->src.row != t->s->layout.token0[op->request] || op->t0 != 0 || op->split != num)
      return fail(t, "stores new rows under wrong tokens");
    KVR_TRY(need_tokens(t, op->rank, op->request, num));
  } else {
    const kv_content c = t->kv[piece_of(t->s, op->src)];
    if (c.request != op->request || op->src.row != c.num_cached || num != c.fresh.num ||
        op->split != c.fresh.split || op->t0 != c.fresh.t0 || op->t1 != c.fresh.t1)
      return fail(t, "stores new rows under wrong tokens");
  }
  const int head = kvr_min(op->split, num);
  t->stored[op->request * t->s->layout.num_ranks + op->rank] +=
      owned_between(t->s, op->request, op->rank, op->t0, op->t0 + head) +
      owned_between(t->s, op->request, op->rank, op->t1, op->t1 + (num - head));
  return KVR_OK;
}

static kvr_status follow(tracker *t, const kvr_op *op) {
  switch (op->kind) {
  case KVR_OP_STAGE: return stage(t, op);
  case KVR_OP_STAGE_NEW: return stage_new(t, op);
  case KVR_OP_HOP:
  case KVR_OP_GATHER:
  case KVR_OP_SEND_STATE:
  case KVR_OP_COPY: return copy(t, op);
  case KVR_OP_ATTEND: return attend(t, op);
  case KVR_OP_MERGE_STATES:
  case KVR_OP_MERGE_OUTPUTS: return merge(t, op);
  case KVR_OP_CACHE_WRITE: return cache_write(t, op);
  case KVR_NUM_OPS: break;
  }
  return fail(t, "is of no known kind");
}

/* Counts suffice: every op was checked to write only rows and tokens that are its rank's, and a row
 * that is finished twice or a token that is stored twice makes its count too large. */
static kvr_status check_totals(const tracker *t) {
  const kvr_schedule *s = t->s;
  for (int r = 0; r < s->layout.num_ranks; r++) {
    if (t->written[r] != s->layout.rank_rows[r])
      return kvr_fail(KVR_E_VERIFY, "schedule %s: rank %d writes %d output rows, it has %d",
                      s->strategy, r, t->written[r], s->layout.rank_rows[r]);
    for (int i = 0; i < s->layout.num_requests; i++) {
      const int want = owned_between(s, i, r, 0, s->problem.requests[i].num_new);
      const int got = t->stored[i * s->layout.num_ranks + r];
      if (got != want)
        return kvr_fail(KVR_E_VERIFY,
                        "schedule %s: rank %d stores %d tokens of request %d, it owns %d",
                        s->strategy, r, got, i, want);
    }
  }
  return KVR_OK;
}

static kvr_status allocate(tracker *t) {
  const size_t n = (size_t)t->s->num_resources + 1;
  const size_t P = (size_t)t->s->layout.num_ranks, R = (size_t)t->s->layout.num_requests;
  t->kv = malloc(n * sizeof *t->kv);
  t->queries = malloc(n * sizeof *t->queries);
  t->states = malloc(n * sizeof *t->states);
  t->present = calloc(P * P * R * 2 + 1, sizeof *t->present);
  t->stored = calloc(R * P + 1, sizeof *t->stored);
  t->written = calloc(P, sizeof *t->written);
  if (!t->kv || !t->queries || !t->states || !t->present || !t->stored || !t->written)
    return no_memory();
  for (size_t i = 0; i < n; i++) {
    t->kv[i] = (kv_content){.request = -1};
    t->queries[i] = (row_set){.owner = NOBODY};
    t->states[i] = (state_content){{.owner = NOBODY}, KVR_SEEN_NOTHING};
  }
  return KVR_OK;
}

static kvr_status walk(tracker *t) {
  for (t->op = 0; t->op < t->s->num_ops; t->op++) KVR_TRY(follow(t, &t->s->ops[t->op]));
  return check_totals(t);
}

kvr_status kvr_verify_data(const kvr_schedule *s) {
  tracker t = {.s = s};
  kvr_status status = allocate(&t);
  if (status == KVR_OK) status = walk(&t);
  free(t.kv);
  free(t.queries);
  free(t.states);
  free(t.present);
  free(t.stored);
  free(t.written);
  kvr_coverage_fini(&t.keys);
  return status;
}

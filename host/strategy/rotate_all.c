/* Rotate all: a rank's stream is its cache share followed by its own new KV, and the stream travels
 * round the ring; nothing is gathered. Every rank stores the new tokens it owns as they pass.
 * Blocks that a rank's rows cannot see are forwarded, not attended. */
#include "base/arith.h"
#include "base/error.h"
#include "strategy/ring_pass.h"

/* One block of a rank's stream: cached rows, then new rows (two runs of tokens). */
typedef struct piece {
  int num_cached; /* rows [0, num_cached) of the slot */
  int num_new;    /* the rows after them */
  kvr_rows rows;  /* tokens of the new rows */
} piece;

static int clip_row(int64_t row, int num) { return row < 0 ? 0 : row < num ? (int)row : num; }

static piece piece_of(const kvr_schedule *s, int request, int source, int block) {
  const kvr_rows rows = *kvr_layout_rows(&s->layout, request, source);
  const int share = kvr_layout_share(&s->layout, request, source);
  const int64_t begin = (int64_t)block * s->options.tile, end = begin + s->options.tile;
  const kvr_rows slice =
      kvr_rows_slice(rows, clip_row(begin - share, rows.num), clip_row(end - share, rows.num));
  return (piece){.num_cached = kvr_schedule_block_len(s, request, source, block),
                 .num_new = slice.num,
                 .rows = slice};
}

static int num_blocks(const kvr_schedule *s, int request) {
  int64_t longest = 0;
  for (int r = 0; r < s->layout.num_ranks; r++) {
    const int64_t len = (int64_t)kvr_layout_share(&s->layout, request, r) +
                        kvr_layout_rows(&s->layout, request, r)->num;
    longest = longest > len ? longest : len;
  }
  return (int)((longest + s->options.tile - 1) / s->options.tile);
}

/* First block that travels: those before hold only tokens below everybody's window. */
static int first_block(const kvr_schedule *s, int request) {
  int first = kvr_schedule_first_block(s, request);
  for (int r = 0; r < s->layout.num_ranks; r++) /* a block with new rows is needed by somebody */
    if (kvr_layout_rows(&s->layout, request, r)->num > 0)
      first = kvr_min(first, kvr_layout_share(&s->layout, request, r) / s->options.tile);
  return first;
}

static int block_at(const kvr_schedule *s, int request, int v) {
  return first_block(s, request) + v / s->layout.num_ranks;
}

static piece piece_at(const kvr_schedule *s, int request, int r, int v) {
  return piece_of(s, request, kvr_ring_source(s, r, v), block_at(s, request, v));
}

static kvr_ref slot_at(const kvr_schedule *s, int request, int r, int v) {
  const piece p = piece_at(s, request, r, v);
  return kvr_make_ref(KVR_BUF_SLOT, r, v % s->options.num_slots, 0, p.num_cached + p.num_new);
}

static kvr_status stage(kvr_schedule *s, kvr_at at, int r) {
  const piece p = piece_of(s, at.request, r, at.block);
  const kvr_ref slot = slot_at(s, at.request, r, at.step);
  kvr_ref cached = slot, fresh = slot;
  cached.rows = p.num_cached;
  KVR_TRY(kvr_build_stage(s, at, cached, at.block * s->options.tile));
  if (p.num_new == 0) return KVR_OK;
  fresh.row = p.num_cached;
  fresh.rows = p.num_new;
  return kvr_build_copy(s, KVR_OP_STAGE_NEW, at,
                        kvr_make_ref(KVR_BUF_NEW, r, 0, p.rows.first, p.num_new), fresh);
}

static kvr_status fill(kvr_schedule *s, kvr_at at, int v) {
  const int P = s->layout.num_ranks;
  at.block = block_at(s, at.request, v);
  at.step = v;
  for (int r = 0; r < P; r++) {
    if (v % P == 0)
      KVR_TRY(stage(s, at, r));
    else
      KVR_TRY(kvr_build_copy(s, KVR_OP_HOP, at, slot_at(s, at.request, (r + P - 1) % P, v - 1),
                             slot_at(s, at.request, r, v)));
  }
  return KVR_OK;
}

/* New rows of a piece that some of the rows may see; new rows are in token order. */
static int num_visible_new(const kvr_schedule *s, piece p, kvr_rows rows) {
  if (!s->problem.causal) return p.num_new;
  const int end = kvr_rows_token_end(rows);
  int n = p.num_new;
  while (n > 0 && kvr_rows_token(p.rows, n - 1) >= end) {
    const int run_begin = n > p.rows.split ? p.rows.split : 0;
    n = kvr_rows_token(p.rows, run_begin) >= end
            ? run_begin
            : run_begin + (end - kvr_rows_token(p.rows, run_begin));
  }
  return n;
}

/* Keys of step v that rank r's rows may see; 0: the block is only forwarded. */
static int num_visible(const kvr_schedule *s, kvr_at at, int r, int v) {
  const piece p = piece_at(s, at.request, r, v);
  const kvr_rows rows = kvr_schedule_pass_rows(s, at.request, at.pass, r);
  return rows.num == 0 ? 0 : p.num_cached + num_visible_new(s, p, rows);
}

/* First and last step of the pass with something to attend for rank r; last is -1 if there is none.
 */
static void visible_steps(const kvr_schedule *s, kvr_at at, int r, int num_steps, int *first,
                          int *last) {
  *first = 0;
  *last = num_steps - 1;
  while (*last >= 0 && num_visible(s, at, r, *last) == 0) (*last)--;
  while (*first < *last && num_visible(s, at, r, *first) == 0) (*first)++;
}

static kvr_status attend(kvr_schedule *s, kvr_at at, int r, int first, int last) {
  const piece p = piece_at(s, at.request, r, at.step);
  const kvr_ref slot = slot_at(s, at.request, r, at.step);
  const int visible = num_visible(s, at, r, at.step);
  kvr_attend a = kvr_attend_own(s, at, r);
  a.ring = slot;
  a.shard = kvr_ring_source(s, r, at.step);
  a.local0 = at.block * s->options.tile;
  a.ring.rows = kvr_min(p.num_cached, visible);
  a.cur = kvr_make_ref(KVR_BUF_SLOT, r, slot.index, p.num_cached, visible - a.ring.rows);
  a.key_split = p.rows.split;
  a.key_t0 = p.rows.t0;
  a.key_t1 = p.rows.t1;
  a.carry_in = at.step != first;
  a.finish = at.step == last;
  a.dst = kvr_out_ref(s, at.request, at.pass, r);
  if (visible == 0) a.carry_in = true; /* forwarded only: a marker */
  return kvr_build_attend(s, &a);
}

/* How many of num new tokens from `token` on rank r owns; an empty run may start anywhere. */
static int num_owned(const kvr_schedule *s, int request, int r, int token, int num) {
  const int begin = s->problem.requests[request].num_cached;
  if (num == 0) return 0;
  return kvr_map_count(&s->problem.cache, begin + token + num, r) -
         kvr_map_count(&s->problem.cache, begin + token, r);
}

/* Rank r stores those new tokens of the block that it owns. */
static kvr_status write_passing(kvr_schedule *s, kvr_at at, int r) {
  const piece p = piece_at(s, at.request, r, at.step);
  const int owned = num_owned(s, at.request, r, p.rows.t0, p.rows.split) +
                    num_owned(s, at.request, r, p.rows.t1, p.num_new - p.rows.split);
  if (owned == 0) return KVR_OK;
  return kvr_build_cache_write(s, at,
                               kvr_make_ref(KVR_BUF_SLOT, r, at.step % s->options.num_slots,
                                            p.num_cached, p.num_new),
                               p.rows, owned);
}

static kvr_status trip(kvr_schedule *s, kvr_at at) {
  const int P = s->layout.num_ranks;
  const int blocks = num_blocks(s, at.request) - first_block(s, at.request);
  const int num_steps = blocks * P, ahead = s->options.num_slots - 1;
  for (int v = 0; v < kvr_min(ahead, num_steps); v++) KVR_TRY(fill(s, at, v));
  for (int v = 0; v < num_steps; v++) {
    if (v + ahead < num_steps) KVR_TRY(fill(s, at, v + ahead));
    at.block = block_at(s, at.request, v);
    at.step = v;
    for (int r = 0; r < P; r++) {
      int first, last;
      visible_steps(s, at, r, num_steps, &first, &last);
      KVR_TRY(attend(s, at, r, first, last));
      if (at.pass == 0) KVR_TRY(write_passing(s, at, r));
    }
  }
  return KVR_OK;
}

static kvr_status build(kvr_schedule *s) {
  for (int i = 0; i < s->layout.num_requests; i++)
    for (int pass = 0; pass < kvr_schedule_num_passes(s, i); pass++)
      KVR_TRY(trip(s, (kvr_at){i, pass, -1, -1}));
  return KVR_OK;
}

static int64_t bytes(const kvr_schedule *s) {
  int64_t tokens = 0;
  for (int i = 0; i < s->layout.num_requests; i++)
    for (int r = 0; r < s->layout.num_ranks; r++) {
      const int64_t stream =
          (int64_t)kvr_layout_share(&s->layout, i, r) + kvr_layout_rows(&s->layout, i, r)->num;
      const int64_t skipped = (int64_t)first_block(s, i) * s->options.tile;
      if (stream > skipped) tokens += kvr_schedule_num_passes(s, i) * (stream - skipped);
    }
  return (s->layout.num_ranks - 1) * tokens * (int64_t)s->row_bytes.kv;
}

const kvr_strategy kvr_strategy_rotate_all = {.name = "rotate-all",
                                              .serves_cache = true,
                                              .new_kv = KVR_BUF_NEW,
                                              .uses = KVR_USES(SLOT) | KVR_USES(STATE),
                                              .build = build,
                                              .bytes = bytes};

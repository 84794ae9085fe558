/* Ring: cached KV travels, queries stay (Liu et al. 2023, arXiv:2310.01889).
 *
 * Virtual step v reads block v / P of the share that started v % P ranks upstream, from slot v % K.
 * Block outside, hop inside: every block visits all ranks before the next one starts, so that K = 2
 * slots per rank suffice at any context length. Fills run K - 1 steps ahead of the launches. */
#include "strategy/ring_pass.h"

#include "base/arith.h"
#include "base/error.h"

int kvr_ring_source(const kvr_schedule *s, int r, int v) {
  const int P = s->layout.num_ranks;
  return (r + P - v % P) % P;
}

/* Blocks below everybody's window do not travel. */
static int block_at(const kvr_schedule *s, int request, int v) {
  return kvr_schedule_first_block(s, request) + v / s->layout.num_ranks;
}

/* The slot that rank r reads at step v, holding exactly the valid tokens of its block. */
static kvr_ref slot_at(const kvr_schedule *s, int request, int r, int v) {
  const int len =
      kvr_schedule_block_len(s, request, kvr_ring_source(s, r, v), block_at(s, request, v));
  return kvr_make_ref(KVR_BUF_SLOT, r, v % s->options.num_slots, 0, len);
}

/* Fills every rank's slot for step v: from its own pages, or from its upstream neighbour. */
static kvr_status fill(kvr_schedule *s, kvr_at at, int v) {
  const int P = s->layout.num_ranks;
  at.block = block_at(s, at.request, v);
  at.step = v;
  for (int r = 0; r < P; r++) {
    const kvr_ref slot = slot_at(s, at.request, r, v);
    if (v % P == 0)
      KVR_TRY(kvr_build_stage(s, at, slot, at.block * s->options.tile));
    else
      KVR_TRY(
          kvr_build_copy(s, KVR_OP_HOP, at, slot_at(s, at.request, (r + P - 1) % P, v - 1), slot));
  }
  return KVR_OK;
}

/* True if an earlier step of the pass has launched for rank r, so that there is a state to carry:
 * the first block holds a token unless the source's share is empty. */
static bool has_carry(const kvr_schedule *s, int request, int r, int v) {
  for (int u = 0; u < v && u < s->layout.num_ranks; u++)
    if (slot_at(s, request, r, u).rows > 0) return true;
  return false;
}

static kvr_status attend(kvr_schedule *s, kvr_at at, int v, bool sinks, kvr_last_launch *last) {
  at.block = block_at(s, at.request, v);
  at.step = v;
  for (int r = 0; r < s->layout.num_ranks; r++) {
    kvr_attend a = kvr_attend_own(s, at, r);
    a.sinks = sinks;
    a.ring = slot_at(s, at.request, r, v);
    a.shard = kvr_ring_source(s, r, v);
    a.local0 = at.block * s->options.tile;
    a.carry_in = has_carry(s, at.request, r, v);
    if (last != NULL)
      last(s, r, &a);
    else if (a.ring.rows == 0)
      a.carry_in = true; /* nothing to attend and nothing to start: a marker */
    KVR_TRY(kvr_build_attend(s, &a));
  }
  return KVR_OK;
}

static int num_steps(const kvr_schedule *s, int request) {
  const int blocks = kvr_schedule_num_blocks(s, request) - kvr_schedule_first_block(s, request);
  return blocks * s->layout.num_ranks;
}

bool kvr_ring_exists(const kvr_schedule *s, int request) { return num_steps(s, request) > 0; }

kvr_status kvr_ring_pass(kvr_schedule *s, int request, int pass, bool sinks,
                         kvr_last_launch *last) {
  const kvr_at at = {request, pass, -1, -1};
  const int steps = num_steps(s, request), ahead = s->options.num_slots - 1;
  for (int v = 0; v < kvr_min(ahead, steps); v++) KVR_TRY(fill(s, at, v));
  for (int v = 0; v < steps; v++) {
    if (v + ahead < steps) KVR_TRY(fill(s, at, v + ahead));
    KVR_TRY(attend(s, at, v, sinks, v + 1 == steps ? last : NULL));
  }
  return KVR_OK;
}

int64_t kvr_ring_bytes(const kvr_schedule *s) {
  int64_t tokens = 0;
  for (int i = 0; i < s->layout.num_requests; i++)
    tokens += kvr_schedule_num_passes(s, i) * kvr_visible_cached(s, i);
  return (s->layout.num_ranks - 1) * tokens * (int64_t)s->row_bytes.kv;
}

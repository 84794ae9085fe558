/* Ring: cached KV travels, queries stay (Liu et al. 2023, arXiv:2310.01889).
 *
 * Virtual step v reads block v / P of the share that started v % P ranks upstream, from slot v % K.
 * Block outside, hop inside: every block visits all ranks before the next one starts, so that K = 2
 * slots per rank suffice at any context length. Fills run K - 1 steps ahead of the launches. */
#include "strategy/ring_pass.h"

#include "base/arith.h"
#include "base/error.h"

/* Rank whose share r reads at step v. */
static int source_at(const kvr_schedule *s, int r, int v) {
  const int P = s->layout.num_ranks;
  return (r + P - v % P) % P;
}

/* The slot that rank r reads at step v, holding exactly the valid tokens of its block. */
static kvr_ref slot_at(const kvr_schedule *s, int request, int r, int v) {
  const int len = kvr_schedule_block_len(s, request, source_at(s, r, v), v / s->layout.num_ranks);
  return kvr_make_ref(KVR_BUF_SLOT, r, v % s->options.num_slots, 0, len);
}

/* Fills every rank's slot for step v: from its own pages, or from its upstream neighbour. */
static kvr_status fill(kvr_schedule *s, kvr_at at, int v) {
  const int P = s->layout.num_ranks;
  at.block = v / P;
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
    if (kvr_layout_share(&s->layout, request, source_at(s, r, u)) > 0) return true;
  return false;
}

static kvr_status attend(kvr_schedule *s, kvr_at at, int v, kvr_last_launch *last) {
  const int P = s->layout.num_ranks;
  at.block = v / P;
  at.step = v;
  for (int r = 0; r < P; r++) {
    kvr_attend a = kvr_attend_own(s, at, r);
    a.ring = slot_at(s, at.request, r, v);
    a.carry_in = has_carry(s, at.request, r, v);
    if (last != NULL)
      last(s, r, &a);
    else if (a.ring.rows == 0)
      a.carry_in = true; /* nothing to attend and nothing to start: a marker */
    KVR_TRY(kvr_build_attend(s, &a));
  }
  return KVR_OK;
}

kvr_status kvr_ring_pass(kvr_schedule *s, int request, int pass, kvr_last_launch *last) {
  const kvr_at at = {request, pass, -1, -1};
  const int num_steps = kvr_schedule_num_blocks(s, request) * s->layout.num_ranks;
  const int ahead = s->options.num_slots - 1;
  for (int v = 0; v < kvr_min(ahead, num_steps); v++) KVR_TRY(fill(s, at, v));
  for (int v = 0; v < num_steps; v++) {
    if (v + ahead < num_steps) KVR_TRY(fill(s, at, v + ahead));
    KVR_TRY(attend(s, at, v, v + 1 == num_steps ? last : NULL));
  }
  return KVR_OK;
}

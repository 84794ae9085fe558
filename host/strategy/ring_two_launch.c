/* The ring that the fused one replaces, kept as a comparator: the cached tokens first, to a
 * normalised output of their own; then the new tokens and the attention sinks, likewise; then a
 * merge by LSE. */
#include "base/error.h"
#include "strategy/ring_pass.h"

/* Parts use the rows of the output. */
static kvr_ref part_ref(int rank, int part, const kvr_attend *a) {
  return kvr_make_ref(KVR_BUF_PART_OUT, rank, part, a->q.row, a->q.rows);
}

static void finish_ring(const kvr_schedule *s, int rank, kvr_attend *a) {
  (void)s;
  a->finish = true;
  a->dst = part_ref(rank, 0, a);
}

static kvr_status attend_current_and_merge(kvr_schedule *s, kvr_at at, int r) {
  kvr_attend a = kvr_attend_own(s, at, r);
  kvr_attend_current(s, r, &a);
  a.finish = true;
  a.dst = part_ref(r, 1, &a);
  KVR_TRY(kvr_build_attend(s, &a));
  return kvr_build_merge(s, KVR_OP_MERGE_OUTPUTS, at, r, part_ref(r, KVR_ALL, &a), kvr_no_ref());
}

static kvr_status build(kvr_schedule *s) {
  KVR_TRY(kvr_build_gather_current(s));
  for (int i = 0; i < s->layout.num_requests; i++)
    for (int pass = 0; pass < kvr_schedule_num_passes(s, i); pass++) {
      const kvr_at at = {i, pass, -1, -1};
      if (!kvr_ring_exists(s, i)) {
        KVR_TRY(kvr_build_attend_current(s, at)); /* nothing to merge with */
        continue;
      }
      KVR_TRY(kvr_ring_pass(s, i, pass, false, finish_ring));
      for (int r = 0; r < s->layout.num_ranks; r++) KVR_TRY(attend_current_and_merge(s, at, r));
    }
  return kvr_build_cache_writes(s);
}

static int64_t bytes(const kvr_schedule *s) { return kvr_strategy_ring.bytes(s); }

const kvr_strategy kvr_strategy_ring_two_launch = {.name = "ring-two-launch",
                                                   .serves_cache = true,
                                                   .new_kv = KVR_BUF_CURRENT,
                                                   .uses = KVR_USES(SLOT) | KVR_USES(STATE) |
                                                           KVR_USES(PART_OUT) | KVR_USES(PART_LSE),
                                                   .build = build,
                                                   .bytes = bytes};

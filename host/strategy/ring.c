/* The fused ring: ring region and current region in one list of launches of one kernel, sharing one
 * (m, l, acc). The last ring launch crosses into the current region, so there is no second pass
 * over the rows and no merge. */
#include "base/error.h"
#include "strategy/ring_pass.h"

static void cross_into_current(const kvr_schedule *s, int rank, kvr_attend *a) {
  kvr_attend_current(s, rank, a);
  a->finish = true;
  a->dst = kvr_out_ref(s, a->at.request, a->at.pass, rank);
}

static kvr_status build(kvr_schedule *s) {
  KVR_TRY(kvr_build_gather_current(s)); /* first, so that the ring hides it */
  for (int i = 0; i < s->layout.num_requests; i++)
    for (int pass = 0; pass < kvr_schedule_num_passes(s, i); pass++) {
      if (kvr_ring_exists(s, i))
        KVR_TRY(kvr_ring_pass(s, i, pass, true, cross_into_current));
      else
        KVR_TRY(kvr_build_attend_current(s, (kvr_at){i, pass, -1, -1}));
    }
  return kvr_build_cache_writes(s);
}

static int64_t bytes(const kvr_schedule *s) {
  return kvr_bytes_gather_current(s) + kvr_ring_bytes(s);
}

const kvr_strategy kvr_strategy_ring = {.name = "ring",
                                        .serves_cache = true,
                                        .new_kv = KVR_BUF_CURRENT,
                                        .uses = KVR_USES(SLOT) | KVR_USES(STATE),
                                        .build = build,
                                        .bytes = bytes};

/* Current only: no cached tokens, so every rank attends its rows to the gathered new KV at once. */
#include "base/error.h"
#include "strategy/strategy.h"

static kvr_status build(kvr_schedule *s) {
  KVR_TRY(kvr_build_gather_current(s));
  for (int i = 0; i < s->layout.num_requests; i++)
    for (int pass = 0; pass < kvr_schedule_num_passes(s, i); pass++)
      KVR_TRY(kvr_build_attend_current(s, (kvr_at){i, pass, -1, -1}));
  return kvr_build_cache_writes(s);
}

const kvr_strategy kvr_strategy_current_only = {.name = "current-only",
                                                .serves_cache = false,
                                                .new_kv = KVR_BUF_CURRENT,
                                                .build = build,
                                                .bytes = kvr_bytes_gather_current};

/* Strategies: pure functions that fill a schedule. One file each, one row in the registry. */
#ifndef KVR_STRATEGY_STRATEGY_H
#define KVR_STRATEGY_STRATEGY_H

#include "schedule/build.h"
#include "schedule/footprint.h"

#define KVR_USES(buffer) (1u << KVR_BUF_##buffer)

typedef struct kvr_strategy {
  const char *name;
  bool serves_cache; /* false: only for requests without cached tokens */
  kvr_buffer new_kv; /* CURRENT: new KV is gathered in token order; NEW: it travels */
  unsigned uses;     /* buffers besides those of every strategy (new KV, Q, OUT, LSE) */
  kvr_status (*build)(kvr_schedule *schedule);
  /* Bytes that all ranks together send, by the closed formula. */
  int64_t (*bytes)(const kvr_schedule *schedule);
} kvr_strategy;

/* Every buffer that a step under the strategy uses, as a mask for kvr_footprint_of. */
unsigned kvr_strategy_buffers(const kvr_strategy *strategy);

/* Finds by name. Errors: KVR_E_RANGE naming the nearest known name. */
kvr_status kvr_strategy_find(const char *name, const kvr_strategy **out);
const kvr_strategy *kvr_strategy_get(int index); /* NULL past the end */

/* Builds and verifies the schedule of a valid problem under one strategy (borrowed, static).
 * Errors: KVR_E_CONFLICT if the strategy cannot serve cached tokens; KVR_E_VERIFY; KVR_E_OOM. */
kvr_status kvr_strategy_schedule(const kvr_strategy *strategy, const kvr_problem *problem,
                                 const kvr_options *options, kvr_schedule **out);

/* Bytes of the all-gather of new KV: every new row goes to P - 1 ranks. */
int64_t kvr_bytes_gather_current(const kvr_schedule *schedule);
/* Cached tokens of a request from the first block on that somebody can see. */
int64_t kvr_visible_cached(const kvr_schedule *schedule, int request);

extern const kvr_strategy kvr_strategy_current_only, kvr_strategy_ring,
    kvr_strategy_ring_two_launch, kvr_strategy_gather_kv, kvr_strategy_gather_q,
    kvr_strategy_rotate_q, kvr_strategy_rotate_all;

#endif

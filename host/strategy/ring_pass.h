/* The trip of one request's cached KV round the ring, shared by ring and ring-two-launch. */
#ifndef KVR_STRATEGY_RING_PASS_H
#define KVR_STRATEGY_RING_PASS_H

#include "strategy/strategy.h"

/* Adds to the last launch of a rank in a pass whatever the strategy wants there. */
typedef void kvr_last_launch(const kvr_schedule *s, int rank, kvr_attend *attend);

/* Appends one trip for the rows of one pass: num_blocks * P virtual steps. The request must have
 * cached tokens. */
kvr_status kvr_ring_pass(kvr_schedule *s, int request, int pass, kvr_last_launch *last);

#endif

/* The trip of one request's cached KV round the ring, shared by ring and ring-two-launch. */
#ifndef KVR_STRATEGY_RING_PASS_H
#define KVR_STRATEGY_RING_PASS_H

#include "strategy/strategy.h"

/* Adds to the last launch of a rank in a pass whatever the strategy wants there. */
typedef void kvr_last_launch(const kvr_schedule *s, int rank, kvr_attend *attend);

/* Appends one trip for the rows of one pass: P virtual steps per block that somebody can see. There
 * must be such a block. sinks: the state counts attention sinks. */
kvr_status kvr_ring_pass(kvr_schedule *s, int request, int pass, bool sinks, kvr_last_launch *last);
/* Rank whose share (or stream) rank r reads at virtual step v. */
int kvr_ring_source(const kvr_schedule *s, int r, int v);
/* True if some block travels. */
bool kvr_ring_exists(const kvr_schedule *s, int request);
/* Bytes that the trips of all requests send, all ranks together. */
int64_t kvr_ring_bytes(const kvr_schedule *s);

#endif

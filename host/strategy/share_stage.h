/* Staging the blocks of a rank's own share, for strategies in which the cache stays where it is. */
#ifndef KVR_STRATEGY_SHARE_STAGE_H
#define KVR_STRATEGY_SHARE_STAGE_H

#include "strategy/strategy.h"

/* What the slots of all ranks hold, so that a block that is still there is not staged again. */
typedef struct kvr_stager {
  int num_slots;
  int *held; /* (num_ranks, num_slots) block held, or -1 */
  int *next; /* (num_ranks) slot to fill next */
} kvr_stager;

/* Builds a whole step: new KV is gathered, passes with cached tokens are the strategy's, the others
 * attend the new tokens alone, and the new tokens are stored. */
typedef kvr_status kvr_share_pass(kvr_schedule *s, kvr_stager *stager, kvr_at at);
kvr_status kvr_build_over_shares(kvr_schedule *s, kvr_share_pass *build_pass);

/* The slot that holds block at.block of the rank's share, staging it if needed. */
kvr_status kvr_stager_get(kvr_schedule *s, kvr_stager *stager, kvr_at at, int rank, kvr_ref *out);
/* Blocks of a rank's own share: [first, end), without those below everybody's window. */
int kvr_stager_first_block(const kvr_schedule *s, int request, int rank);
int kvr_stager_end_block(const kvr_schedule *s, int request, int rank);

#endif

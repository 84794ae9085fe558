/* auto: which strategy a step takes, and why. */
#ifndef KVR_CHOOSE_CHOOSE_H
#define KVR_CHOOSE_CHOOSE_H

#include "strategy/strategy.h"

/* True if a strategy may be used; asked before a choice is made. */
typedef bool kvr_may_use(const kvr_strategy *strategy, void *data);

/* The documented ladder, until a machine is calibrated:
 *   no cached tokens                      current-only
 *   context * NKV >= 2 * new tokens * NQ  gather-q   (Q is cheaper to move than KV)
 *   context >= 16384                      gather-kv
 *   else                                  ring
 * and ring whenever may_use refuses the first choice. context and new tokens are those of the
 * largest request. reason receives a sentence. Errors: KVR_E_OOM if ring is refused as well. */
kvr_status kvr_choose_strategy(const kvr_problem *problem, kvr_may_use *may_use, void *data,
                               const kvr_strategy **out, char *reason, size_t reason_size);

#endif

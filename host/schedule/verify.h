/* The verifier: every schedule passes it before it runs. */
#ifndef KVR_SCHEDULE_VERIFY_H
#define KVR_SCHEDULE_VERIFY_H

#include "schedule/schedule.h"

/* Checks that
 *   - dependencies point back, and join only ops that share a rank;
 *   - every two ops that use the same rows, one of them writing, are ordered by a dependency, and
 * so are two copies on one link;
 *   - what each launch reads is what it should read: data is followed from pages and inputs through
 *     slots, gathers and hops, and every query row meets every visible key exactly once;
 *   - every output row is written once, and every new token is stored once, by its owner;
 *   - the bytes moved equal bytes_formula.
 * Errors: KVR_E_VERIFY naming op, rank and rule; KVR_E_OOM. */
kvr_status kvr_schedule_verify(const kvr_schedule *schedule, int64_t bytes_formula);

/* The parts of it. */
kvr_status kvr_verify_order(const kvr_schedule *schedule);
kvr_status kvr_verify_data(const kvr_schedule *schedule);

/* Fails with KVR_E_VERIFY for an op: "op 17 (hop, rank 2): ...". */
kvr_status kvr_verify_fail(const kvr_schedule *schedule, int op, const char *what);

#endif

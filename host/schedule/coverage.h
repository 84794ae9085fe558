/* Which keys a softmax state has seen, as intervals. Lists are persistent: a copy of a state is a
 * copy of its list's head. */
#ifndef KVR_SCHEDULE_COVERAGE_H
#define KVR_SCHEDULE_COVERAGE_H

#include "kvring/status.h"

enum { KVR_SEEN_NOTHING = -1 };

/* Local tokens [begin, end) of a shard; shard -1: new tokens. */
typedef struct kvr_seen {
  int shard, begin, end;
  int next;
} kvr_seen;

typedef struct kvr_coverage {
  kvr_seen *nodes; /* of all lists */
  int num_nodes, cap_nodes;
  kvr_seen *sorted; /* what was collected */
  int num_sorted, cap_sorted;
  int checked; /* sorted[0 .. checked) have been checked */
} kvr_coverage;

/* Adds an interval to a list. Errors: KVR_E_OOM. */
kvr_status kvr_coverage_add(kvr_coverage *coverage, int *list, int shard, int begin, int end);

/* Starts a collection; adds a list to it. Errors: KVR_E_OOM. */
void kvr_coverage_clear(kvr_coverage *coverage);
kvr_status kvr_coverage_collect(kvr_coverage *coverage, int list);
/* Checks that the collection holds tokens [begin, end) of a shard, and none twice. Shards must be
 * asked in rising order. NULL, or what is wrong (static storage). */
const char *kvr_coverage_check(kvr_coverage *coverage, int shard, int begin, int end);

void kvr_coverage_fini(kvr_coverage *coverage);

#endif

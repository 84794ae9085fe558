#include "schedule/coverage.h"

#include <stdlib.h>

#include "base/error.h"

static kvr_status append(kvr_seen **items, int *num, int *capacity, kvr_seen item) {
  if (*num == *capacity) {
    const int larger = *capacity < 64 ? 64 : 2 * *capacity;
    kvr_seen *moved = realloc(*items, (size_t)larger * sizeof *moved);
    if (moved == NULL) return kvr_fail(KVR_E_OOM, "no host memory to verify the schedule");
    *items = moved;
    *capacity = larger;
  }
  (*items)[(*num)++] = item;
  return KVR_OK;
}

kvr_status kvr_coverage_add(kvr_coverage *c, int *list, int shard, int begin, int end) {
  if (begin >= end) return KVR_OK;
  KVR_TRY(append(&c->nodes, &c->num_nodes, &c->cap_nodes, (kvr_seen){shard, begin, end, *list}));
  *list = c->num_nodes - 1;
  return KVR_OK;
}

void kvr_coverage_clear(kvr_coverage *c) { c->num_sorted = c->checked = 0; }

kvr_status kvr_coverage_collect(kvr_coverage *c, int list) {
  for (int i = list; i >= 0; i = c->nodes[i].next)
    KVR_TRY(append(&c->sorted, &c->num_sorted, &c->cap_sorted, c->nodes[i]));
  return KVR_OK;
}

static int by_begin(const void *x, const void *y) {
  const kvr_seen *a = x, *b = y;
  if (a->shard != b->shard) return a->shard < b->shard ? -1 : 1;
  return a->begin < b->begin ? -1 : a->begin > b->begin;
}

const char *kvr_coverage_check(kvr_coverage *c, int shard, int begin, int end) {
  if (c->checked == 0 && c->num_sorted > 0)
    qsort(c->sorted, (size_t)c->num_sorted, sizeof *c->sorted, by_begin);
  int at = 0; /* tokens below have been seen, or are not needed */
  for (; c->checked < c->num_sorted && c->sorted[c->checked].shard == shard; c->checked++) {
    const kvr_seen *s = &c->sorted[c->checked];
    if (s->begin < at) return "a row meets a key twice";
    if (s->begin > at && s->begin > begin && at < end) return "a row misses a visible key";
    at = s->end;
  }
  return at < end && begin < end ? "a row misses a visible key" : NULL;
}

void kvr_coverage_fini(kvr_coverage *c) {
  free(c->nodes);
  free(c->sorted);
}

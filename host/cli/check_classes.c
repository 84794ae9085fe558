/* Coverage classes of configurations. */
#include <stdio.h>
#include <string.h>

#include "base/arith.h"
#include "cli/check.h"

static void add(check_classes *classes, const char *name, int count) {
  int i = 0;
  while (i < classes->num && strcmp(classes->list[i].name, name) != 0) i++;
  if (i == CHECK_CLASSES) return;
  if (i == classes->num) {
    snprintf(classes->list[i].name, sizeof classes->list[i].name, "%s", name);
    classes->list[i].count = 0;
    classes->num++;
  }
  classes->list[i].count += count;
}

/* Current blocks that a rank's rows see, in blocks of the ring's size. */
static int current_steps(const check_case *c, int request, int rank) {
  const int chunk = check_chunk(c, request), S = c->requests[request].num_new;
  const int end = c->causal ? kvr_min(S, (2 * c->ranks - rank) * chunk) : S;
  return kvr_max(1, kvr_ceil_div(end, c->tile));
}

static bool unequal_steps(const check_case *c, int i) {
  for (int r = 1; r < c->ranks; r++)
    if (current_steps(c, i, r) != current_steps(c, i, 0)) return true;
  return false;
}

typedef bool share_test(const check_case *c, int share);
static bool is_long(const check_case *c, int share) { return share > c->tile; }
static bool is_odd(const check_case *c, int share) { return share % c->tile != 0; }
static bool is_empty(const check_case *c, int share) { return c->ranks > 0 && share == 0; }

/* Does a request that has cached tokens have a rank whose share is so? */
static bool some_share(const check_case *c, int i, share_test *test) {
  const int L = c->requests[i].num_cached;
  for (int r = 0; r < c->ranks && L > 0; r++)
    if (test(c, check_share(c, L, r))) return true;
  return false;
}
static bool several_blocks(const check_case *c, int i) { return some_share(c, i, is_long); }
static bool odd_share(const check_case *c, int i) { return some_share(c, i, is_odd); }
static bool empty_share(const check_case *c, int i) { return some_share(c, i, is_empty); }

static bool empty_tail(const check_case *c, int i) {
  for (int r = 0; r < c->ranks; r++)
    if (check_half_rows(c, i, r, 1) == 0) return true;
  return false;
}

static bool short_head(const check_case *c, int i) {
  for (int r = 0; r < c->ranks; r++)
    if (check_half_rows(c, i, r, 0) < check_chunk(c, i)) return true;
  return false;
}

/* Classes that hold as soon as one request with new tokens is so. */
static const struct {
  const char *name;
  bool (*holds)(const check_case *c, int request);
} classes_of_requests[] = {
    {"several_blocks_per_share", several_blocks},
    {"unequal_current_steps", unequal_steps},
    {"share_not_multiple_of_block", odd_share},
    {"empty_share", empty_share},
    {"all_pad_tail", empty_tail},
    {"heads_partly_pad", short_head},
};

enum { NUM_OF_REQUESTS = sizeof classes_of_requests / sizeof classes_of_requests[0] };

static const char *const others[] = {"last_step_even",      "last_step_odd", "several_requests",
                                     "zero_length_request", "copy_queue",    "query_tile",
                                     "more_slots",          "not_causal",    "rank_order"};

static void add_named(check_classes *classes, const char *kind, const char *which, int count) {
  char name[40];
  snprintf(name, sizeof name, "%s_%s", kind, which);
  add(classes, name, count);
}

/* All classes are listed from the start, so that one that is never hit shows. */
void check_classes_init(check_classes *classes) {
  static const char *const ranks[] = {"1", "2", "3", "4", "5", "7", "8"};
  static const char *const maps[] = {"striped", "paged", "contiguous", "weighted", "blocks"};
  classes->num = 0;
  for (int k = 0; k < NUM_OF_REQUESTS; k++) add(classes, classes_of_requests[k].name, 0);
  for (size_t k = 0; k < sizeof others / sizeof others[0]; k++) add(classes, others[k], 0);
  for (int i = 0; i < kvr_num_strategies(); i++)
    add_named(classes, "strategy", kvr_strategy_name(i), 0);
  for (size_t k = 0; k < sizeof ranks / sizeof ranks[0]; k++)
    add_named(classes, "ranks", ranks[k], 0);
  for (size_t k = 0; k < sizeof maps / sizeof maps[0]; k++) add_named(classes, "map", maps[k], 0);
  for (int i = 0; i < KVR_NUM_DTYPES; i++)
    add_named(classes, "dtype", kvr_dtype_name((kvr_dtype)i), 0);
}

void check_classes_count(check_classes *classes, const check_case *c, const char *strategy,
                         int last_step) {
  char ranks[16];
  int active = 0;
  for (int i = 0; i < c->num_requests; i++) active += c->requests[i].num_new > 0;
  for (int k = 0; k < NUM_OF_REQUESTS; k++) {
    bool holds = false;
    for (int i = 0; i < c->num_requests; i++)
      holds |= c->requests[i].num_new > 0 && classes_of_requests[k].holds(c, i);
    add(classes, classes_of_requests[k].name, holds);
  }
  add(classes, "last_step_even", last_step >= 0 && last_step % 2 == 0);
  add(classes, "last_step_odd", last_step >= 0 && last_step % 2 == 1);
  add(classes, "several_requests", active > 1);
  add(classes, "zero_length_request", active < c->num_requests);
  add(classes, "copy_queue", c->copy_queue);
  add(classes, "query_tile", c->query_tile > 0);
  add(classes, "more_slots", c->slots > 2);
  add(classes, "not_causal", !c->causal);
  add(classes, "rank_order", c->rank_order);
  snprintf(ranks, sizeof ranks, "%d", c->ranks);
  add_named(classes, "strategy", strategy, 1);
  add_named(classes, "ranks", ranks, 1);
  add_named(classes, "map", c->map, 1);
  add_named(classes, "dtype", kvr_dtype_name(c->dtype), 1);
}

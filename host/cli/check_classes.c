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

/* Classes that hold as soon as one request with new tokens is so, in one of the steps. */
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
    {"window_skips_blocks", check_skips_blocks},
};

enum { NUM_OF_REQUESTS = sizeof classes_of_requests / sizeof classes_of_requests[0] };

/* ---- classes of whole cases ---- */

static int num_active(const check_case *c) {
  int num = 0;
  for (int i = 0; i < c->num_requests; i++) num += c->requests[i].num_new > 0;
  return num;
}
static bool several_requests(const check_case *c) { return num_active(c) > 1; }
static bool zero_length(const check_case *c) { return num_active(c) < c->num_requests; }
static bool copy_queue(const check_case *c) { return c->copy_queue; }
static bool query_tile(const check_case *c) { return c->query_tile > 0; }
static bool more_slots(const check_case *c) { return c->slots > 2; }
static bool not_causal(const check_case *c) { return !c->causal; }
static bool rank_order(const check_case *c) { return c->rank_order; }
static bool large(const check_case *c) { return c->large; }
static bool chunked(const check_case *c) { return c->num_steps > 1; }

static bool near(int a, int b) { return a - b <= 1 && b - a <= 1; }
static bool window(const check_case *c) { return c->window > 0; }
static bool window_one(const check_case *c) { return c->window == 1; }
static bool window_block(const check_case *c) {
  return c->window > 0 && (near(c->window, c->tile) || near(c->window, c->tile * c->ranks));
}
static bool window_request(const check_case *c) {
  bool found = false;
  for (int i = 0; i < c->num_requests; i++) {
    const kvr_request *q = &c->requests[i];
    found |= near(c->window, q->num_cached) || near(c->window, q->num_cached + q->num_new);
  }
  return c->window > 0 && found;
}
static bool window_larger(const check_case *c) {
  int longest = 0;
  for (int i = 0; i < c->num_requests; i++)
    longest = kvr_max(longest, c->requests[i].num_cached + c->requests[i].num_new);
  return c->window > longest;
}
static bool soft_cap(const check_case *c) { return c->soft_cap > 0; }
static bool sinks(const check_case *c) { return c->sinks; }
static bool q_scale(const check_case *c) { return c->q_scale != 0; }
static bool k_scale(const check_case *c) { return c->k_scale != 0; }
static bool v_scale(const check_case *c) { return c->v_scale != 0; }
static bool several_masks(const check_case *c) {
  return window(c) + soft_cap(c) + sinks(c) + (q_scale(c) || k_scale(c) || v_scale(c)) > 1;
}

static const struct {
  const char *name;
  bool (*holds)(const check_case *c);
} classes_of_cases[] = {
    {"several_requests", several_requests},
    {"zero_length_request", zero_length},
    {"copy_queue", copy_queue},
    {"query_tile", query_tile},
    {"more_slots", more_slots},
    {"not_causal", not_causal},
    {"rank_order", rank_order},
    {"chunked_prefill", chunked},
    {"large", large},
    {"window", window},
    {"window_one", window_one},
    {"window_near_block", window_block},
    {"window_near_request", window_request},
    {"window_beyond_all", window_larger},
    {"soft_cap", soft_cap},
    {"sinks", sinks},
    {"q_scale", q_scale},
    {"k_scale", k_scale},
    {"v_scale", v_scale},
    {"several_masks", several_masks},
};

enum { NUM_OF_CASES = sizeof classes_of_cases / sizeof classes_of_cases[0] };

/* ---- counting ---- */

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
  add(classes, "last_step_even", 0);
  add(classes, "last_step_odd", 0);
  for (int k = 0; k < NUM_OF_CASES; k++) add(classes, classes_of_cases[k].name, 0);
  for (int i = 0; i < kvr_num_strategies(); i++)
    add_named(classes, "strategy", kvr_strategy_name(i), 0);
  add(classes, "strategy_auto", 0);
  for (size_t k = 0; k < sizeof ranks / sizeof ranks[0]; k++)
    add_named(classes, "ranks", ranks[k], 0);
  for (size_t k = 0; k < sizeof maps / sizeof maps[0]; k++) add_named(classes, "map", maps[k], 0);
  for (int i = 0; i < KVR_NUM_DTYPES; i++)
    add_named(classes, "dtype", kvr_dtype_name((kvr_dtype)i), 0);
  for (int i = 0; i < KVR_NUM_DTYPES; i++)
    add_named(classes, "out", kvr_dtype_name((kvr_dtype)i), 0);
}

static bool holds_in_a_step(const check_case *c, int class) {
  bool holds = false;
  for (int step = 0; step < c->num_steps; step++) {
    const check_case now = check_step_case(c, step);
    for (int i = 0; i < now.num_requests; i++)
      holds |= now.requests[i].num_new > 0 && classes_of_requests[class].holds(&now, i);
  }
  return holds;
}

/* A strategy counts once, however many steps it serves. */
static void count_strategies(check_classes *classes, const check_case *c, const char *last) {
  const char *names[CHECK_STEPS];
  for (int step = 0; step < c->num_steps; step++) {
    bool counted = false;
    names[step] = check_step_strategy(c, last, step);
    for (int k = 0; k < step; k++) counted |= strcmp(names[k], names[step]) == 0;
    if (!counted) add_named(classes, "strategy", names[step], 1);
  }
}

void check_classes_count(check_classes *classes, const check_case *c, const char *strategy,
                         int last_step) {
  char ranks[16];
  for (int k = 0; k < NUM_OF_REQUESTS; k++)
    add(classes, classes_of_requests[k].name, holds_in_a_step(c, k));
  add(classes, "last_step_even", last_step >= 0 && last_step % 2 == 0);
  add(classes, "last_step_odd", last_step >= 0 && last_step % 2 == 1);
  for (int k = 0; k < NUM_OF_CASES; k++)
    add(classes, classes_of_cases[k].name, classes_of_cases[k].holds(c));
  snprintf(ranks, sizeof ranks, "%d", c->ranks);
  count_strategies(classes, c, strategy);
  add_named(classes, "ranks", ranks, 1);
  add_named(classes, "map", c->map, 1);
  add_named(classes, "math", c->bf16_math ? "auto" : "f32", 1);
  add_named(classes, "dtype", kvr_dtype_name(c->dtype), 1);
  add_named(classes, "out", kvr_dtype_name(c->out_dtype), 1);
}

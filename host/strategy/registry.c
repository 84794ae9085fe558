/* The table of strategies. A new one is a file and a row here. */
#include <limits.h>
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "core/validate.h"
#include "schedule/verify.h"
#include "strategy/strategy.h"

static const kvr_strategy *const strategies[] = {
    &kvr_strategy_ring,         &kvr_strategy_ring_two_launch, &kvr_strategy_gather_kv,
    &kvr_strategy_gather_q,     &kvr_strategy_rotate_q,        &kvr_strategy_rotate_all,
    &kvr_strategy_current_only,
};

enum { NUM_STRATEGIES = sizeof strategies / sizeof strategies[0] };

int kvr_num_strategies(void) { return NUM_STRATEGIES; }

const kvr_strategy *kvr_strategy_get(int index) {
  return index >= 0 && index < NUM_STRATEGIES ? strategies[index] : NULL;
}

const char *kvr_strategy_name(int index) {
  const kvr_strategy *strategy = kvr_strategy_get(index);
  return strategy != NULL ? strategy->name : NULL;
}

kvr_status kvr_strategy_find(const char *name, const kvr_strategy **out) {
  for (int i = 0; i < NUM_STRATEGIES; i++)
    if (strcmp(strategies[i]->name, name) == 0) {
      *out = strategies[i];
      return KVR_OK;
    }
  return kvr_fail(KVR_E_RANGE,
                  "unknown strategy '%.40s'; use auto, ring, ring-two-launch, gather-kv, gather-q, "
                  "rotate-q, rotate-all or current-only",
                  name);
}

unsigned kvr_strategy_buffers(const kvr_strategy *strategy) {
  return strategy->uses | (1u << strategy->new_kv) | KVR_USES(Q) | KVR_USES(OUT) | KVR_USES(LSE);
}

static kvr_status check_applicable(const kvr_strategy *strategy, const kvr_problem *problem) {
  if (strategy->serves_cache) return KVR_OK;
  for (int i = 0; i < problem->num_requests; i++)
    if (problem->requests[i].num_cached > 0)
      return kvr_fail(
          KVR_E_CONFLICT,
          "strategy %s does not read the cache, but request %d has %d cached tokens; use "
          "ring or auto",
          strategy->name, i, problem->requests[i].num_cached);
  return KVR_OK;
}

kvr_status kvr_problem_check(const kvr_problem *problem, const kvr_options *options) {
  KVR_TRY(kvr_problem_validate(problem));
  KVR_TRY(kvr_options_validate(options));
  if (options == NULL || options->strategy == NULL || strcmp(options->strategy, "auto") == 0)
    return KVR_OK;
  const kvr_strategy *strategy = NULL;
  KVR_TRY(kvr_strategy_find(options->strategy, &strategy));
  return check_applicable(strategy, problem);
}

/* Bounds from above of what schedules count in an int (steps of a trip) and in 64 bits (bytes that
 * move or that launches carry). Only lengths and shapes near their limits get there. */
static kvr_status check_counts(const kvr_schedule *s) {
  const kvr_row_bytes *b = &s->row_bytes;
  const double P = s->layout.num_ranks;
  double steps = 0.0, bytes = 0.0;
  for (int i = 0; i < s->layout.num_requests; i++) {
    const double S = s->problem.requests[i].num_new, L = s->problem.requests[i].num_cached;
    const double passes = kvr_schedule_num_passes(s, i);
    const double blocks = kvr_schedule_num_blocks(s, i) + S / s->options.tile + 2.0;
    const double state = 2.0 * (double)b->state + (double)b->f32_out + (double)b->q;
    steps = fmax(steps, P * blocks);
    bytes += P * (passes * (L + S) * (double)b->kv + S * (blocks + 1.0) * 2.0 * state);
  }
  if (steps > INT_MAX)
    return kvr_fail(KVR_E_RANGE,
                    "the step takes %.3g hops round %d ranks, the limit is %d: use a larger tile",
                    steps, s->layout.num_ranks, INT_MAX);
  if (bytes > 9e18)
    return kvr_fail(KVR_E_RANGE,
                    "the step moves %.3g bytes, the limit is 9e18: use fewer tokens or heads",
                    bytes);
  return KVR_OK;
}

static kvr_status build(const kvr_strategy *strategy, kvr_schedule *s) {
  KVR_TRY(check_counts(s));
  s->strategy = strategy->name;
  s->new_kv = strategy->new_kv;
  KVR_TRY(strategy->build(s));
  return kvr_schedule_verify(s, strategy->bytes(s));
}

kvr_status kvr_strategy_schedule(const kvr_strategy *strategy, const kvr_problem *problem,
                                 const kvr_options *options, kvr_schedule **out) {
  KVR_TRY(check_applicable(strategy, problem));
  const kvr_options resolved = kvr_options_resolve(options);
  kvr_schedule *s;
  KVR_TRY(kvr_schedule_create(problem, &resolved, &s));
  const kvr_status status = build(strategy, s);
  if (status != KVR_OK) {
    kvr_schedule_destroy(s);
    return status;
  }
  *out = s;
  return KVR_OK;
}

int64_t kvr_bytes_gather_current(const kvr_schedule *s) {
  return (int64_t)(s->layout.num_ranks - 1) * s->layout.num_tokens * (int64_t)s->row_bytes.kv;
}

int64_t kvr_visible_cached(const kvr_schedule *s, int request) {
  const int64_t skipped = (int64_t)kvr_schedule_first_block(s, request) * s->options.tile;
  int64_t sum = 0;
  for (int r = 0; r < s->layout.num_ranks; r++) {
    const int64_t left = kvr_layout_share(&s->layout, request, r) - skipped;
    sum += left > 0 ? left : 0;
  }
  return sum;
}

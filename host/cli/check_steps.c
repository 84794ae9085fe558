/* A case as steps: one, or the chunks of a prefill with a strategy for each. */
#include <string.h>

#include "cli/check.h"

int check_step_done(const check_case *c, int request, int step) {
  return step > 0 ? c->ends[step - 1][request] : 0;
}

check_case check_step_case(const check_case *c, int step) {
  check_case one = *c;
  one.num_steps = 1;
  for (int i = 0; i < c->num_requests; i++) {
    const int done = check_step_done(c, i, step);
    one.requests[i].num_cached = c->requests[i].num_cached + done;
    one.requests[i].num_new = c->ends[step][i] - done;
    one.ends[0][i] = one.requests[i].num_new;
  }
  return one;
}

bool check_serves(const check_case *step, const char *strategy) {
  if (strcmp(strategy, "current-only") != 0) return true;
  for (int i = 0; i < step->num_requests; i++)
    if (step->requests[i].num_cached > 0) return false;
  return true;
}

const char *check_step_strategy(const check_case *c, const char *last, int step) {
  if (step + 1 == c->num_steps) return last;
  const check_case one = check_step_case(c, step);
  uint64_t bits = cli_hash(c->seed + cli_hash((uint64_t)c->index << 8 | (uint64_t)step));
  for (const char *p = last; *p != '\0'; p++) bits = cli_hash(bits + (uint64_t)*p);
  const int num = kvr_num_strategies() + 1;
  for (;; bits = cli_hash(bits + 1)) {
    const int i = (int)(bits % (uint64_t)num);
    const char *name = i < kvr_num_strategies() ? kvr_strategy_name(i) : "auto";
    if (check_serves(&one, name)) return name;
  }
}

/* Random small steps without a device: data, caches and a dense oracle for tests of schedules. */
#ifndef KVR_TESTS_PURE_CASE_H
#define KVR_TESTS_PURE_CASE_H

#include "ref/exec_host.h"

enum { CASE_MAX_REQUESTS = 4, CASE_MAX_RANKS = 8, CASE_MAX_HEADS = 8 };

typedef struct pure_case {
  kvr_problem problem;
  kvr_options options;
  kvr_request requests[CASE_MAX_REQUESTS];
  int weights[CASE_MAX_RANKS];
  float sinks[CASE_MAX_HEADS];
  int sample; /* the answer is computed for every sample-th token and the last; 0: for all */
  int num_tokens;
  double *q, *k, *v; /* new tokens */
  double *out, *lse;
  double *want_out, *want_lse;
  double *context[CASE_MAX_REQUESTS];                /* (L + S, 2 NKV, D) by position */
  double *cache[CASE_MAX_REQUESTS * CASE_MAX_RANKS]; /* shares; NaN where nothing is stored yet */
} pure_case;

/* Deterministic pseudo-random numbers. */
uint64_t case_random(uint64_t *state);
int case_between(uint64_t *state, int lo, int hi); /* inclusive */
double case_normal(uint64_t *state);

/* Fills data, caches and the dense answer for c->problem (requests, weights and options are set).
 */
void case_fill(pure_case *c, uint64_t seed);
/* A random problem: P in 1..8, all maps, several requests, odd lengths. head_dim 0: random too. */
void case_randomise(pure_case *c, uint64_t seed, int head_dim);
/* Replaces every input x by f(x, storage type) and computes the answer anew. */
void case_map(pure_case *c, double (*f)(double, kvr_dtype));
void case_free(pure_case *c);
/* Puts the shares back to what they were before the step. */
void case_reset_cache(pure_case *c);

/* Runs the schedule and returns the largest error of output and LSE; NaN counts as 1e300. */
double case_run(pure_case *c, const kvr_schedule *schedule, uint64_t order_seed);
/* 1 if every share holds exactly the tokens it owns, bit for bit, and NaN elsewhere. */
int case_cache_is_right(const pure_case *c);

#endif

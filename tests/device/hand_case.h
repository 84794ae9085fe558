/* Steps whose answers are known by hand: data by formula, run under every strategy. */
#ifndef KVR_TESTS_DEVICE_HAND_CASE_H
#define KVR_TESTS_DEVICE_HAND_CASE_H

#include "device_case.h"

/* Numbers of ranks that a case is run with. */
enum { HAND_NUM_RANKS = 6 };
extern const int hand_ranks[HAND_NUM_RANKS];

/* The group of P ranks, kept until hand_close, which is a teardown of cmocka. */
kvr_group *hand_group(int num_ranks);
int hand_close(void **state);

/* One causal request on P ranks: striped cache, pages of 4, ring blocks of 3, f32. Fields may be
 * changed until the case is filled; num_requests and requests too. */
pure_case hand_case(int P, int num_cached, int num_new, int NQ, int NKV, int D);

/* Element of q, k or v: of a token of a request by its position, exact in the cache's type. */
typedef double hand_value(int request, int position, int head, int dim);
/* All 0: with such keys the scores are equal, and the output is the mean of the visible values. */
hand_value hand_zero;
/* The position: V[t] = t. */
hand_value hand_position;
/* Different everywhere, between -2 and 2; queries are three times as large. */
hand_value hand_scrambled, hand_scrambled_value, hand_scrambled_query;

/* Data by formula and the dense answer in double precision. Release with case_free. */
void hand_fill(pure_case *c, hand_value *q, hand_value *k, hand_value *v);
/* Random data instead, rounded to the cache's type. */
void hand_fill_random(pure_case *c, uint64_t seed);

/* A step that was run. */
typedef struct hand_step {
  pure_case *c;
  device_run *run;
  const char *strategy;
  int index; /* of the strategy; auto comes last */
} hand_step;
enum { HAND_MAX_STRATEGIES = 16 }; /* auto included */
typedef void hand_check(const hand_step *step, const void *data);

/* Runs the step under every strategy that can serve it, and auto, each time on the same pools;
 * compares output and LSE with the dense answer (2e-5 of max|V|) and all cache bytes, then calls
 * check (unless NULL). */
void hand_run(pure_case *c, hand_check *check, const void *data);
/* The same on pools that prepare has changed; they are run->pools. */
typedef void hand_prepare(device_run *run, const pure_case *c);
void hand_run_on(pure_case *c, hand_prepare *prepare, hand_check *check, const void *data);
/* Fills by formula, runs, checks and releases. */
void hand_run_formula(pure_case *c, hand_value *q, hand_value *k, hand_value *v, hand_check *check,
                      const void *data);

/* A step whose queries, keys and values are zero in dims below 128 and not from there on. */
void hand_run_upper_dims(int P, int head_dim);

/* Every dim of a new token (in token order) and head is `want`, up to tolerance; prints where not.
 */
void hand_expect_out(const hand_step *step, int token, int head, double want, double tolerance);
void hand_expect_lse(const hand_step *step, int token, int head, double want, double tolerance);
/* Runs the step again and expects the same bits of output; data is unused. */
void hand_expect_same_bits_again(const hand_step *step, const void *data);
/* Output of all tokens against `want`, which the first step of an index fills (zeros before). */
typedef struct hand_outputs {
  float *first[HAND_MAX_STRATEGIES]; /* owned; NULL before */
  double tolerance;                  /* 0: the bits are the same */
  bool any_strategy;                 /* the first step of all instead */
} hand_outputs;
void hand_expect_same(const hand_step *step, const void *outputs);
void hand_outputs_fini(hand_outputs *outputs);

#endif

/* kvring check: random configurations against the double-precision reference. Shared by check*.c.
 *
 * A case is a set of shapes; each strategy that it is run with makes a configuration. Everything
 * that results are compared with is worked out here again, from the definitions: maps by walking
 * over the positions, head and tail rows by walking over the tokens, bytes by formula. */
#ifndef KVR_CLI_CHECK_H
#define KVR_CLI_CHECK_H

#include "cli/cli.h"
#include "cli/progress.h"
#include "cli/reference.h"
#include "cli/synthetic.h"

enum { CHECK_RANKS = 8, CHECK_REQUESTS = 3, CHECK_STEPS = 4, CHECK_TEXT = 240, CHECK_CLASSES = 96 };

typedef struct check_case {
  uint64_t seed;
  int index;
  int ranks;
  bool copy_queue, rank_order;
  const char *map; /* "striped", "paged", "contiguous", "weighted" or "blocks" */
  int interleave;
  int weights[CHECK_RANKS];
  kvr_dtype dtype, out_dtype;
  int num_q_heads, num_kv_heads, head_dim;
  int page_size, spare_pages;
  int tile, query_tile, slots;
  int causal;
  int window; /* 0: none */
  bool sinks;
  float soft_cap, q_scale, k_scale, v_scale; /* 0: none */
  int num_requests;
  kvr_request requests[CHECK_REQUESTS]; /* chunk as given to the library, 0: default */
  bool large;
  bool bf16_math; /* products of bf16 numbers where the device prefers them */
  int num_steps;  /* 1; more: a prefill in chunks, a strategy for each */
  int ends[CHECK_STEPS][CHECK_REQUESTS]; /* new tokens of a request that are done after a step */
} check_case;

/* check_case.c: case number index of a seed. quick: small ones, fewer distinct kernels. */
void check_case_generate(uint64_t seed, int index, bool quick, check_case *out);
void check_case_describe(const check_case *c, char *text, size_t size);

/* check_steps.c: a case as one or several steps. */
/* The case of one step alone: what was new in earlier steps is cached. */
check_case check_step_case(const check_case *c, int step);
/* New tokens of a request that earlier steps have done. */
int check_step_done(const check_case *c, int request, int step);
/* The strategy of a step when `last` serves the last one: drawn for the others, maybe "auto". */
const char *check_step_strategy(const check_case *c, const char *last, int step);
/* Can the strategy serve this step (current-only: no cached tokens)? */
bool check_serves(const check_case *step, const char *strategy);

/* Coverage: how many configurations belong to each class. */
typedef struct check_classes {
  int num;
  struct {
    char name[40];
    int count;
  } list[CHECK_CLASSES];
} check_classes;
/* check_classes.c: last_step is the highest virtual step of the ring that the trace shows, -1 if
 * none. */
void check_classes_init(check_classes *classes);
void check_classes_count(check_classes *classes, const check_case *c, const char *strategy,
                         int last_step);

/* check_expect.c: what must come out. */
int check_chunk(const check_case *c, int request);
/* Rows of a rank's head or tail (half 0, 1) that hold a token. */
int check_half_rows(const check_case *c, int request, int rank, int half);
int check_most_rows(const check_case *c, int request);
/* Owner and local index of positions [0, num), by walking over them. Weight of rank r: weights[r].
 */
void check_walk_map(const check_case *c, int num, int *owner, int *local);
int check_share(const check_case *c, int num_tokens, int rank);
/* Does the window of every new row end above some whole block of the cache? */
bool check_skips_blocks(const check_case *c, int request);
int64_t check_bytes(const check_case *c, const char *strategy);

/* Groups are expensive and shared by cases: one per number of ranks and queue mode. */
typedef struct check_groups {
  const char *devices;
  double timeout; /* [seconds] 0: default */
  kvr_group *list[CHECK_RANKS + 1][2];
} check_groups;
kvr_status check_groups_get(check_groups *groups, int ranks, bool copy_queue, kvr_group **out);
/* Destroys one, so that what broke in it does not break later cases as well. */
void check_groups_drop(check_groups *groups, int ranks, bool copy_queue);
void check_groups_fini(check_groups *groups);

/* A case ready to run: cache, session, data, reference. */
typedef struct check_trial {
  check_case c;
  kvr_cache_desc desc;
  kvr_cache *cache;
  kvr_session *session;
  int ids[CHECK_REQUESTS];
  int *tables[CHECK_REQUESTS];                 /* shuffled pages */
  void *k[CHECK_REQUESTS], *v[CHECK_REQUESTS]; /* (L + S, NKV, D) */
  int *owner[CHECK_REQUESTS], *local[CHECK_REQUESTS];
  int num_tokens; /* new ones of all steps */
  float *sinks;   /* (num_q_heads), or NULL */
  void *q, *out;  /* token order */
  float *lse;
  void *new_k, *new_v;
  double *ref_out, *ref_lse, max_v;
  void *before[CHECK_RANKS], *after[CHECK_RANKS], *now; /* pools */
  size_t pool_bytes;
  struct check_arrays *io; /* of the step that runs (check_io.c) */
} check_trial;

/* check_trial.c */
kvr_status check_trial_open(check_groups *groups, const check_case *c, uint64_t seed,
                            check_trial *trial);
void check_trial_close(check_trial *trial);
/* First row of a request in token order. */
int check_first_row(const check_case *c, int request);
size_t check_kv_row_bytes(const check_case *c);
size_t check_q_row_bytes(const check_case *c, kvr_dtype dtype);
/* What a reference gets wrong on purpose; all zero: nothing. */
typedef struct check_mistake {
  unsigned char *const *hidden; /* (num_requests) as in cli_reference; NULL: none */
  int end_shift;                /* added to the end of what a row sees */
  int window_shift;             /* added to the window */
  double sink_shift;            /* added to every sink */
  bool no_soft_cap, no_q_scale, no_v_scale;
} check_mistake;
/* Reference of every row; mistake: NULL for none. */
kvr_status check_reference(const check_trial *trial, const check_mistake *mistake, double *out,
                           double *lse);

/* check_io.c: runs a plan of one step in token or rank order. */
kvr_status check_execute(check_trial *trial, int step, kvr_plan *plan);
void check_io_fini(check_trial *trial);

typedef enum check_outcome { CHECK_PASSED, CHECK_FAILED, CHECK_SKIPPED } check_outcome;
typedef struct check_verdict {
  check_outcome outcome;
  double factor; /* error of the output over the tolerance */
  int last_step;
  kvr_status status;     /* of the library, KVR_OK where it ran to its end */
  char text[CHECK_TEXT]; /* what is wrong, or why it was skipped */
} check_verdict;

/* check_run.c: one configuration; strategy serves the last step. */
void check_trial_run(check_trial *trial, const char *strategy, check_verdict *verdict);
/* The verdict on what failed with the last error: skipped where the device cannot do it. */
void check_verdict_error(check_verdict *verdict, kvr_status status, const char *where);
/* Error of the trial's output against a reference, over the tolerance. */
double check_output_factor(const check_trial *trial, const double *ref_out, const double *ref_lse);

/* check_controls.c: mistakes that the comparison must notice. */
enum { CHECK_CONTROLS = 11 };
typedef struct check_control {
  const char *name;
  double factor, needed;
} check_control;
kvr_status check_controls_run(check_groups *groups, uint64_t seed,
                              check_control controls[CHECK_CONTROLS]);
/* Builds the kernels and runs one small verified step on three ranks. */
kvr_status check_smoke(const char *devices);

#endif

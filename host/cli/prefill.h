/* kvring prefill: a prompt in chunks, every strategy on the same cache. Shared by prefill*.c. */
#ifndef KVR_CLI_PREFILL_H
#define KVR_CLI_PREFILL_H

#include "cli/cli.h"
#include "cli/data.h"
#include "cli/json.h"
#include "cli/progress.h"
#include "cli/reference.h"

enum { CLI_REASON = 256 };

/* One strategy, and what was measured of it. */
typedef struct cli_run {
  const char *name; /* borrowed */
  kvr_session *session;
  bool bf16_math;           /* some rank multiplies bf16 numbers */
  double *ms;               /* (repeat, num_steps) planning + device time of a step */
  const char **chosen;      /* (num_steps) strategy that served a step */
  char reason[CLI_REASON];  /* of the last choice of auto */
  char refused[CLI_REASON]; /* why it could not run; empty: it ran */
  int64_t bytes_moved, bytes_formula, state_traffic;
  int64_t launches;
  size_t slot_bytes, state_bytes, peak_bytes;
  cli_error error;     /* against the reference */
  double gather_error; /* largest difference from gather-kv */
  bool compared;       /* gather_error is known */
} cli_run;

/* Rows to verify in one step, with their reference. */
typedef struct cli_sample {
  int num, cap;
  int *request, *token; /* token: index among the step's new tokens of the request */
  int *head0;
  int head_step;
  double *out, *lse; /* (num, num_q_heads, head_dim), (num, num_q_heads) */
} cli_sample;

/* One step, as host arrays in token order. */
typedef struct cli_step {
  int index;
  kvr_request *requests; /* (num_requests) */
  int *first;            /* (num_requests) first row of a request */
  int num_tokens;
  void *q, *k, *v, *out;
  float *lse;
  void *gather_out; /* output of gather-kv, when it runs */
} cli_step;

typedef struct cli_prefill_job {
  const cli_options *options;
  cli_shape shape;
  cli_data data;
  kvr_group *group;
  kvr_cache *cache;
  int *ids; /* (num_requests) */
  int num_runs;
  cli_run *runs; /* gather-kv first if it is one of them */
  cli_step step;
  cli_sample sample;
  double max_v; /* max|V| of all requests */
  int64_t verified_rows;
  bool keep_sessions; /* one session per strategy for the whole job; else one at a time */
  void *all_out;      /* output of the first run, for --output */
  float *all_lse;
  kvr_trace *trace;
  cli_file op_log;
  cli_progress progress;
} cli_prefill_job;

/* prefill_setup.c: from options to a group, a filled cache and the list of runs. */
kvr_status cli_prefill_shapes(cli_prefill_job *job);
kvr_status cli_prefill_start(cli_prefill_job *job);
void cli_prefill_fini(cli_prefill_job *job);

/* prefill_step.c */
kvr_status cli_prefill_open_session(cli_prefill_job *job, cli_run *run);
kvr_status cli_prefill_warm_up(cli_prefill_job *job);
kvr_status cli_prefill_run_step(cli_prefill_job *job, int index);

/* prefill_verify.c */
kvr_status cli_sample_choose(cli_prefill_job *job);
void cli_sample_compare(const cli_prefill_job *job, cli_run *run);
/* Largest difference of the step's output from gather-kv's. */
void cli_gather_compare(const cli_prefill_job *job, cli_run *run);
/* Are the keys and values in the cache those of the data, bit for bit? Errors: KVR_E_VERIFY. */
kvr_status cli_cache_compare(const cli_prefill_job *job);

/* prefill_report.c */
/* Error of run over the tolerance; right if <= 1. gather: against gather-kv. */
double cli_run_gather_factor(const cli_prefill_job *job, const cli_run *run);
bool cli_run_is_right(const cli_prefill_job *job, const cli_run *run);
void cli_prefill_print(const cli_prefill_job *job);
kvr_status cli_prefill_json(const cli_prefill_job *job, const char *path);

#endif

/* Options of all sub-commands: one table, one struct. */
#ifndef KVR_CLI_OPTIONS_H
#define KVR_CLI_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "kvring/problem.h"

enum {
  CLI_CMD_DEVICES = 1,
  CLI_CMD_DOCTOR = 2,
  CLI_CMD_CHECK = 4,
  CLI_CMD_PLAN = 8,
  CLI_CMD_PREFILL = 16,
  CLI_MAX_OPTIONS = 64
};

/* Values of the options, defaults filled in. Strings are borrowed from argv. */
typedef struct cli_options {
  int ranks;
  const char *devices;
  bool copy_queue;
  size_t memory_budget;
  const char *strategy;
  int tokens, chunk, cached_tokens;
  const char *requests;
  int page_size;
  const char *map, *weights;
  int heads, kv_heads, head_dim;
  kvr_dtype dtype, out_dtype;
  int causal;
  int tile, query_tile, slots;
  int repeat;
  int verify; /* random rows to verify beside the ones at edges; 0: do not verify */
  uint64_t seed;
  const char *input, *output, *json, *trace, *op_log;
  bool quick, full;
  int soak; /* [seconds] 0: no soak */
  int only;
  int window;
  double soft_cap, q_scale, k_scale, v_scale;
  const char *sinks; /* a file, "random", or NULL */
  kvr_math math;
  double timeout; /* [seconds] */
  bool help;
  bool given[CLI_MAX_OPTIONS]; /* by row of the table */
} cli_options;

/* Parses the arguments after the sub-command's name; command is its CLI_CMD_*.
 * Errors: KVR_E_RANGE naming the option, its value, the limit and what to use instead;
 * KVR_E_UNSUPPORTED for what later versions may do. */
kvr_status cli_options_parse(int argc, char **argv, unsigned command, cli_options *out);

/* Was this option on the command line? Name without dashes. */
bool cli_options_given(const cli_options *options, const char *name);

/* Prints the options of a command, one a line. */
void cli_options_help(FILE *out, unsigned command);

#endif

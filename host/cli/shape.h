/* The work that options describe: requests, heads and the sharded cache. */
#ifndef KVR_CLI_SHAPE_H
#define KVR_CLI_SHAPE_H

#include <cjson/cJSON.h>

#include "cli/options.h"
#include "kvring/problem.h"

typedef struct cli_length {
  int num_new, num_cached;
} cli_length;

typedef struct cli_shape {
  kvr_cache_desc cache; /* weights are owned by this struct */
  int *weights;
  int num_q_heads;
  kvr_dtype out_dtype;
  int causal;
  int window;
  float soft_cap, q_scale, k_scale, v_scale;
  float *sinks; /* (num_q_heads) owned; NULL: none */
  int chunk;
  int num_requests;
  cli_length *requests; /* owned */
  int num_steps;        /* until the longest request is done */
} cli_shape;

/* Shapes that an input file brings along; 0 tokens: no file. */
typedef struct cli_given_shape {
  int num_tokens, num_q_heads, num_kv_heads, head_dim;
  kvr_dtype dtype;
} cli_given_shape;

/* Errors: KVR_E_RANGE, KVR_E_SHAPE, KVR_E_DTYPE, KVR_E_CONFLICT naming the options that do not fit,
 * KVR_E_IO (the file of the sinks), KVR_E_OOM. */
kvr_status cli_shape_init(const cli_options *options, const cli_given_shape *file, cli_shape *out);
void cli_shape_fini(cli_shape *shape);

/* New and cached tokens of a request in the step that starts after `done` of its new tokens. */
kvr_request cli_shape_request(const cli_shape *shape, int request, int done, int most);

/* The step's problem; requests (shape->num_requests) are borrowed. */
kvr_problem cli_shape_problem(const cli_shape *shape, const kvr_request *requests);

/* Adds all that results depend on, as `settings`. */
void cli_shape_json(const cli_options *options, const cli_shape *shape, cJSON *root);

/* Options of the library for one strategy (borrowed; NULL or "auto": chosen). */
kvr_options cli_shape_options(const cli_options *options, const char *strategy);

#endif

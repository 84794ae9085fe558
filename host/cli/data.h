/* Queries, keys and values of a prefill: from a file, or synthetic. */
#ifndef KVR_CLI_DATA_H
#define KVR_CLI_DATA_H

#include "cli/safetensors.h"
#include "cli/shape.h"
#include "cli/synthetic.h"

/* Synthetic queries are scaled so that logits have a standard deviation of about 3: flat attention
 * would hide errors. */
#define CLI_QUERY_SCALE 3.0f

typedef struct cli_data {
  const cli_shape *shape;            /* borrowed */
  cli_safetensors *file;             /* NULL: synthetic */
  cli_synthetic *synthetic;          /* NULL: from a file */
  cli_tensor q, k, v;                /* of the file */
  void *aligned[3];                  /* copies of q, k, v where the file is not aligned */
  void **synthetic_k, **synthetic_v; /* (num_requests), of each (L + S, num_kv_heads, head_dim) */
} cli_data;

/* Opens an input file and checks the shapes of q, k and v against each other. */
kvr_status cli_data_open(const char *path, cli_data *data, cli_given_shape *given);
/* Are all numbers of an opened file finite? Errors: KVR_E_RANGE naming the first that is not. */
kvr_status cli_data_check_finite(const char *path, const cli_data *data);
/* Makes the data of a shape ready. The shape is borrowed. Errors: KVR_E_OOM. */
kvr_status cli_data_prepare(cli_data *data, const cli_shape *shape, uint64_t seed);
void cli_data_fini(cli_data *data);

/* Rows of K and V of a request, cached tokens first (borrowed). */
const void *cli_data_k(const cli_data *data, int request, int row);
const void *cli_data_v(const cli_data *data, int request, int row);
/* Queries of new tokens [first, first + num) of a request, into dst. */
void cli_data_q(const cli_data *data, int request, int first, int num, void *dst);

#endif

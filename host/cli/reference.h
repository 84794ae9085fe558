/* Dense attention in double precision over concatenated K and V: what every strategy must give.
 * Knows nothing of ranks, maps, tiles or kernels. */
#ifndef KVR_CLI_REFERENCE_H
#define KVR_CLI_REFERENCE_H

#include <stdbool.h>

#include "kvring/problem.h"

/* K and V of one request, (tokens, num_kv_heads, head_dim) each, as rounded to dtype. */
typedef struct cli_reference {
  int num_q_heads, num_kv_heads, head_dim;
  double scale;       /* of scores, that of stored keys included, that of queries not */
  double q_scale;     /* queries are divided by it and rounded to dtype, scores multiplied; 0: 1 */
  double soft_cap;    /* 0: none */
  const float *sinks; /* (num_q_heads) logits of one more key without a value; NULL: none */
  double value_scale; /* 0: 1 */
  kvr_dtype dtype;
  const void *k, *v;
  const unsigned char *hidden; /* (tokens) keys with 1 are seen by nobody; NULL: none */
} cli_reference;

/* One query row: it sees keys [first, end). Only heads h with h % head_step == head0 are computed.
 */
typedef struct cli_reference_row {
  const void *q; /* (num_q_heads, head_dim) in dtype */
  int first, end;
  int head0, head_step;
} cli_reference_row;

/* out (num_rows, num_q_heads, head_dim), lse (num_rows, num_q_heads); heads that are not computed
 * stay as they are. Errors: KVR_E_OOM. */
kvr_status cli_reference_run(const cli_reference *reference, const cli_reference_row *rows,
                             int num_rows, double *out, double *lse);

/* max |x| over num elements. */
double cli_max_abs(kvr_dtype dtype, const void *x, size_t num);

/* How far outputs are from the reference. The tolerances are those of f32 accumulation: an element
 * may be off by 2e-5 max|V| and by 1e-3 of the RMS of its reference row, plus the rounding of the
 * output's dtype and what f32 cannot hold; an LSE by 1e-5 relative to max(1, |LSE|). */
typedef struct cli_error {
  double max_abs; /* largest |out - reference| */
  double max_lse; /* largest LSE error, relative to max(1, |LSE|) */
  double factor;  /* largest error / tolerance; the result is right if <= 1 */
} cli_error;

/* What the tolerances are multiplied with for bf16 products: probabilities have 8 bits, and inputs
 * that are not bf16 are rounded on top of that, which moves scores. */
double cli_loosen(bool bf16_math, kvr_dtype dtype);

/* One row and head: out (head_dim) in out_dtype with lse, against ref (head_dim) with ref_lse. */
typedef struct cli_compared {
  const void *out;
  kvr_dtype out_dtype;
  float lse;
  const double *ref;
  double ref_lse;
  int head_dim;
  double max_v;
  double loosen; /* factor on the tolerances; 0: 1 */
} cli_compared;
void cli_compare_row(const cli_compared *c, cli_error *error);

#endif

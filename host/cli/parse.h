/* Strict parsing of numbers and names. what names the value in messages, e.g. "--tile" (borrowed).
 * Errors: KVR_E_RANGE naming value, limits and what to write instead. */
#ifndef KVR_CLI_PARSE_H
#define KVR_CLI_PARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvring/problem.h"

kvr_status cli_parse_int(const char *what, const char *text, int min, int max, int *out);
kvr_status cli_parse_seed(const char *what, const char *text, uint64_t *out);
/* Bytes with an optional K, M, G or T (powers of 1024). */
kvr_status cli_parse_bytes(const char *what, const char *text, size_t *out);
/* A soft cap: 0 for none, or positive. A scale: not 0. Both must be numbers of f32 that leave room
 * for products. */
kvr_status cli_parse_cap(const char *what, const char *text, double *out);
kvr_status cli_parse_scale(const char *what, const char *text, double *out);
/* More than 0, and at most KVR_MAX_TIMEOUT. */
kvr_status cli_parse_seconds(const char *what, const char *text, double *out);
kvr_status cli_parse_dtype(const char *what, const char *text, kvr_dtype *out);
/* "auto" or "f32" (borrowed). Errors: KVR_E_UNSUPPORTED for "bf16". */
kvr_status cli_parse_math(const char *what, const char *text, kvr_math *out);

/* The candidate with the smallest edit distance to word, or NULL when none is near. */
const char *cli_nearest(const char *word, const char *const *candidates, int num);

#endif

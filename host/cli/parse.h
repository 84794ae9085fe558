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
kvr_status cli_parse_real(const char *what, const char *text, double *out);
kvr_status cli_parse_dtype(const char *what, const char *text, kvr_dtype *out);

/* The candidate with the smallest edit distance to word, or NULL when none is near. */
const char *cli_nearest(const char *word, const char *const *candidates, int num);

#endif

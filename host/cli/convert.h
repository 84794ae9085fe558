/* Rows of f32, f16 and bf16 to and from float, rounding to nearest even. */
#ifndef KVR_CLI_CONVERT_H
#define KVR_CLI_CONVERT_H

#include <stddef.h>
#include <stdint.h>

#include "kvring/problem.h"

uint16_t cli_float_to_half(float value);
float cli_half_to_float(uint16_t bits);
uint16_t cli_float_to_bfloat(float value);
float cli_bfloat_to_float(uint16_t bits);

/* num elements from src to dst, which must not overlap. */
void cli_to_float(kvr_dtype dtype, const void *src, size_t num, float *dst);
void cli_from_float(kvr_dtype dtype, const float *src, size_t num, void *dst);

/* Largest relative error of rounding to a dtype; 0 for f32. */
double cli_rounding(kvr_dtype dtype);

#endif

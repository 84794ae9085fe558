#include "cli/convert.h"

#include <math.h>
#include <string.h>

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Below 2^-14 halves are spaced 2^-24 apart, so adding 0.5 lets the float adder do the rounding:
 * one ulp of 0.5 is 2^-24. */
static uint16_t subnormal_half(float magnitude) {
  return (uint16_t)(bits_of(magnitude + 0.5f) - bits_of(0.5f));
}

uint16_t cli_float_to_half(float value) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds past 65504 */
  if (rest < 0x38800000u) return (uint16_t)(sign | subnormal_half(float_of(rest)));
  const uint32_t rounded = rest + 0xfffu + (rest >> 13 & 1u);
  return (uint16_t)(sign | (rounded - 0x38000000u) >> 13);
}

float cli_half_to_float(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest >= 0x0400u) return float_of(sign | ((rest << 13) + 0x38000000u));
  const float magnitude = (float)rest * 0x1p-24f;
  return float_of(sign | bits_of(magnitude));
}

uint16_t cli_float_to_bfloat(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float cli_bfloat_to_float(uint16_t bits) { return float_of((uint32_t)bits << 16); }

void cli_to_float(kvr_dtype dtype, const void *src, size_t num, float *dst) {
  const uint16_t *halves = src;
  if (dtype == KVR_F32)
    memcpy(dst, src, num * sizeof *dst);
  else if (dtype == KVR_F16)
    for (size_t i = 0; i < num; i++) dst[i] = cli_half_to_float(halves[i]);
  else
    for (size_t i = 0; i < num; i++) dst[i] = cli_bfloat_to_float(halves[i]);
}

void cli_from_float(kvr_dtype dtype, const float *src, size_t num, void *dst) {
  uint16_t *halves = dst;
  if (dtype == KVR_F32)
    memcpy(dst, src, num * sizeof *src);
  else if (dtype == KVR_F16)
    for (size_t i = 0; i < num; i++) halves[i] = cli_float_to_half(src[i]);
  else
    for (size_t i = 0; i < num; i++) halves[i] = cli_float_to_bfloat(src[i]);
}

double cli_rounding(kvr_dtype dtype) {
  return dtype == KVR_F32 ? 0 : dtype == KVR_F16 ? 0x1p-11 : 0x1p-8;
}

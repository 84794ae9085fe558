#include "cli/synthetic.h"

#include <math.h>

#include "base/arith.h"
#include "cli/convert.h"

/* Quantile of the standard normal by Newton's method on its distribution function. */
static double normal_quantile(double p) {
  double x = 0;
  for (int i = 0; i < 60; i++) {
    const double error = 0.5 * erfc(-x / sqrt(2.0)) - p;
    const double density = 0.3989422804014327 * exp(-0.5 * x * x);
    const double step = error / density;
    x -= fmax(-0.5, fmin(0.5, step)); /* damped: far out the density is tiny */
    if (fabs(step) < 1e-12) break;
  }
  return x;
}

void cli_synthetic_init(cli_synthetic *s, uint64_t seed) {
  s->seed = seed;
  /* The outermost bins end where a further half bin would be: about 3.8 standard deviations. */
  for (int i = 0; i <= CLI_NORMAL_BINS; i++) {
    const double p = fmax(0.3, fmin((double)i, CLI_NORMAL_BINS - 0.3)) / CLI_NORMAL_BINS;
    s->quantile[i] = (float)normal_quantile(p);
  }
}

/* 24 random bits choose a bin and a place in it. */
static inline float normal_of(const float *quantile, uint32_t bits) {
  const uint32_t bin = bits >> 20, place = bits >> 8 & 0xfffu;
  const float low = quantile[bin];
  return low + (quantile[bin + 1] - low) * ((float)place * (1.0f / 4096));
}

static void fill_head(const float *quantile, uint64_t key, float scale, int num, float *dst) {
  int i = 0;
  for (; i + 2 <= num; i += 2) {
    const uint64_t bits = cli_hash(key + (uint64_t)i * UINT64_C(0x9e3779b97f4a7c15));
    dst[i] = scale * normal_of(quantile, (uint32_t)bits);
    dst[i + 1] = scale * normal_of(quantile, (uint32_t)(bits >> 32));
  }
  if (i < num)
    dst[i] =
        scale *
        normal_of(quantile, (uint32_t)cli_hash(key + (uint64_t)i * UINT64_C(0x9e3779b97f4a7c15)));
}

void cli_synthetic_fill(const cli_synthetic *s, cli_rows_at at, float scale, kvr_dtype dtype,
                        void *dst) {
  float row[512];
  const uint64_t stream =
      cli_hash(s->seed ^ cli_hash((uint64_t)at.sequence * 4 + (uint64_t)at.tensor + 1));
  const size_t step = (size_t)at.head_dim * kvr_dtype_size(dtype);
  char *out = dst;
  for (int t = 0; t < at.num_tokens; t++)
    for (int h = 0; h < at.heads; h++, out += step) {
      const uint64_t place = (uint64_t)(at.first_token + t) << 20 | (uint64_t)h;
      const uint64_t key = cli_hash(stream + cli_hash(place));
      float *target = dtype == KVR_F32 ? (float *)(void *)out : row;
      fill_head(s->quantile, key, scale, kvr_min(at.head_dim, 512), target);
      if (dtype != KVR_F32) cli_from_float(dtype, row, (size_t)at.head_dim, out);
    }
}

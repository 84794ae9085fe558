/* Merging partial results on the host: the same guards as the kernels have. */
#include <math.h>

#include "base/error.h"
#include "kvring/plan.h"

static void merge_row(const float *a, float lse_a, const float *b, float lse_b, int dim, float *out,
                      float *lse) {
  const float max = lse_a > lse_b ? lse_a : lse_b;
  const float shift = isinf(max) ? 0.0f : max;
  /* A weight of 0 means that the partial saw nothing; it may hold NaN and is not read. */
  const float wa = expf(lse_a - shift), wb = expf(lse_b - shift), sum = wa + wb;
  for (int d = 0; d < dim; d++) {
    const float x = (wa != 0.0f ? wa * a[d] : 0.0f) + (wb != 0.0f ? wb * b[d] : 0.0f);
    out[d] = sum != 0.0f ? x / sum : 0.0f;
  }
  *lse = sum != 0.0f ? shift + logf(sum) : -HUGE_VALF;
}

kvr_status kvr_merge_states(const float *out_a, const float *lse_a, const float *out_b,
                            const float *lse_b, int rows, int dim, float *out, float *lse) {
  if (!out_a || !lse_a || !out_b || !lse_b || !out || !lse)
    return kvr_fail(KVR_E_NULL, "an array of kvr_merge_states is NULL");
  if (rows < 0 || dim < 1)
    return kvr_fail(KVR_E_RANGE, "rows %d must not be negative and dim %d must be positive", rows,
                    dim);
  for (size_t i = 0; i < (size_t)rows; i++)
    if (isnan(lse_a[i]) || isnan(lse_b[i]) || lse_a[i] == HUGE_VALF || lse_b[i] == HUGE_VALF)
      return kvr_fail(KVR_E_RANGE, "row %zu: an LSE is NaN or +inf", i);
  for (size_t i = 0; i < (size_t)rows; i++) {
    const size_t at = i * (size_t)dim;
    merge_row(out_a + at, lse_a[i], out_b + at, lse_b[i], dim, out + at, &lse[i]);
  }
  return KVR_OK;
}

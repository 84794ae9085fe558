/* Small integer helpers and size arithmetic that cannot overflow silently. */
#ifndef KVR_BASE_ARITH_H
#define KVR_BASE_ARITH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline int kvr_min(int a, int b) { return a < b ? a : b; }
static inline int kvr_max(int a, int b) { return a > b ? a : b; }
static inline int kvr_clip(int x, int lo, int hi) { return kvr_min(kvr_max(x, lo), hi); }
/* ceil(a / b) for a >= 0, b > 0. */
static inline int kvr_ceil_div(int a, int b) { return a / b + (a % b != 0); }
/* Sum and product of sizes that stay at SIZE_MAX instead of wrapping: no limit allows that much. */
static inline size_t kvr_add_sat(size_t a, size_t b) { return b > SIZE_MAX - a ? SIZE_MAX : a + b; }
static inline size_t kvr_mul_sat(size_t a, size_t b) {
  return b != 0 && a > SIZE_MAX / b ? SIZE_MAX : a * b;
}
/* Product of sizes; false when it does not fit. */
static inline bool kvr_mul_size(size_t a, size_t b, size_t *out) {
  if (b != 0 && a > SIZE_MAX / b) return false;
  *out = a * b;
  return true;
}

#endif

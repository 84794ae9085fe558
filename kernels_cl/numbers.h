/* Element types of the kernels, and the functions that every attention kernel needs.
 *
 *   kv_type   of q and cache rows, by KV_DTYPE:   load1, load16, load_tail, to_kv
 *   out_type  of out, by OUT_DTYPE:               store1, store16
 *
 * Dtypes are 0 f32, 1 f16, 2 bf16. No device needs cl_khr_fp16: half is only loaded and stored. */

#ifndef HEAD_DIM /* D, 1..512 */
#define HEAD_DIM 128
#endif
#ifndef KV_DTYPE
#define KV_DTYPE 0
#endif
#ifndef OUT_DTYPE
#define OUT_DTYPE 0
#endif

#define LANES 16
#define DIM_VECS ((HEAD_DIM + LANES - 1) / LANES) /* vectors of a row of dims, the last one cut */
#define WHOLE_VECS (HEAD_DIM / LANES)
#define INT_LAST 0x7fffffff
#define LOG2_E 1.44269504f
#define LN_2 0.693147180559945f

#if KV_DTYPE == 0
typedef float kv_type;
static inline float16 load16(__global const kv_type *p) { return vload16(0, p); }
static inline float load1(__global const kv_type *p) { return *p; }
#elif KV_DTYPE == 1
typedef half kv_type;
static inline float16 load16(__global const kv_type *p) { return vload_half16(0, p); }
static inline float load1(__global const kv_type *p) { return vload_half(0, p); }
#else
typedef ushort kv_type;
static inline float16 load16(__global const kv_type *p) {
  return as_float16(convert_uint16(vload16(0, p)) << 16);
}
static inline float load1(__global const kv_type *p) { return as_float((uint)*p << 16); }
#endif

/* Bits of the nearest bf16 (ties to even) in the low halves. */
static inline uint16 round_bf16(float16 x) {
  const uint16 u = as_uint16(x);
  return isnan(x) ? u >> 16 | 64u : (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
}
static inline uint round_bf16_1(float x) {
  const uint u = as_uint(x);
  return isnan(x) ? u >> 16 | 64u : (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
}

/* The nearest finite number of the KV dtype; NaN stays NaN. */
#if KV_DTYPE == 0
#define LARGEST 3.40282347e38f
static inline float16 round_kv(float16 x) { return x; }
#elif KV_DTYPE == 1
#define LARGEST 65504.0f
static inline float16 round_kv(float16 x) {
  ushort16 bits;
  vstore_half16_rte(x, 0, (half *)&bits);
  return vload_half16(0, (const half *)&bits);
}
#else
#define LARGEST 3.38953139e38f
static inline float16 round_kv(float16 x) { return as_float16(round_bf16(x) << 16); }
#endif
static inline float16 to_kv(float16 x) {
  x = x > LARGEST ? (float16)(LARGEST) : x;
  return round_kv(x < -LARGEST ? (float16)(-LARGEST) : x);
}

#if OUT_DTYPE == 0
typedef float out_type;
static inline void store16(float16 x, __global out_type *p) { vstore16(x, 0, p); }
static inline void store1(float x, __global out_type *p) { *p = x; }
#elif OUT_DTYPE == 1
typedef half out_type;
static inline void store16(float16 x, __global out_type *p) { vstore_half16_rte(x, 0, p); }
static inline void store1(float x, __global out_type *p) { vstore_half_rte(x, 0, p); }
#else
typedef ushort out_type;
static inline void store16(float16 x, __global out_type *p) {
  vstore16(convert_ushort16(round_bf16(x)), 0, p);
}
static inline void store1(float x, __global out_type *p) { *p = (ushort)round_bf16_1(x); }
#endif

/* The last dims of a row, and zeros. */
static inline float16 load_tail(__global const kv_type *p) {
  float16 x = (float16)(0.0f);
  for (int d = 0; d < HEAD_DIM % LANES; d++) ((float *)&x)[d] = load1(p + d);
  return x;
}

/* (2^f - 1) / f for |f| <= 1/2. */
static inline float16 exp2_slope(float16 f) {
  float16 p = (float16)(1.32647274e-3f);
  p = p * f + 9.67151297e-3f;
  p = p * f + 5.55073375e-2f;
  p = p * f + 2.40222421e-1f;
  return p * f + 6.93146978e-1f;
}

/* 2^x for x <= 0, relative error 2e-7; exactly 1 at 0, exactly 0 below -127. A NaN stays one unless
 * its low 9 bits hold a payload, which those of hardware and of 16-bit types do not. */
static inline float16 exp2_neg(float16 x) {
  x = x < -127.0f ? (float16)(-127.0f) : x;
  const float16 t = x + 12582912.0f; /* 1.5 * 2^23: the nearest integer in the low bits */
  const float16 f = x - (t - 12582912.0f);
  return as_float16(as_int16(exp2_slope(f) * f + 1.0f) + (as_int16(t) << 23));
}

/* Relative error 9e-7: e = 2^t 2^f - 1 is summed so that nothing cancels near 0. NaN stays NaN. */
static inline float16 tanh16(float16 x) {
  float16 y = fabs(x) * -2.88539008f;
  y = y < -40.0f ? (float16)(-40.0f) : y;
  const float16 t = y + 12582912.0f;
  const float16 f = y - (t - 12582912.0f);
  const float16 whole = as_float16((as_int16(t) << 23) + 0x3f800000);
  const float16 e = exp2_slope(f) * f * whole + (whole - 1.0f);
  return copysign(e / (e + 2.0f), x);
}

/* First float of a row of the carried state: acc [NQ][D], (m, l) [NQ][2]. */
static inline size_t state_offset(int row, const kvr_attend_args a) {
  return (size_t)(a.state_row + row) * a.num_q_heads * (HEAD_DIM + 2);
}

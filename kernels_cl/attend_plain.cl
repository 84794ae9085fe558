/* kvr_attend, plain: the arguments and results of attend.cl in as little code as possible.
 *
 * For devices without vector registers of their own, and wherever the compiler fails on the tiles.
 * One work-item owns one packed row (token p / group, head h * group + p % group) and walks its
 * keys one by one, with q and acc in private memory.
 *
 * NDRange: global (num_rows * group rounded up to ROW_TILE, num_kv_heads), local (ROW_TILE, 1).
 */

#ifndef ROW_TILE /* rows of a work-group, one work-item each */
#define ROW_TILE 32
#endif

/* Running state of one row; m in base 2. */
typedef struct row_state {
  float m;
  float l;
  float16 acc[DIM_VECS];
} row_state;

static inline float16 load_dims(__global const kv_type *p, int i) {
  return i < WHOLE_VECS ? load16(p + i * LANES) : load_tail(p + i * LANES);
}

static inline void load_query(float16 *x, __global const kv_type *q, const kvr_attend_args a) {
  const int quantised = a.q_inv_scale != 0.0f && a.q_inv_scale != 1.0f;
  for (int i = 0; i < DIM_VECS; i++) {
    const float16 raw = load_dims(q, i);
    x[i] = (quantised ? to_kv(raw * a.q_inv_scale) : raw) * a.scale_log2;
  }
}

/* Carried, of a sink, or empty. */
static inline void load_state(row_state *r, int row, int head, __global const float *state,
                              __global const float *sinks, const kvr_attend_args a) {
  __global const float *from = state + state_offset(row, a);
  __global const float *ml = from + (size_t)a.num_q_heads * HEAD_DIM + 2 * head;
  const int carried = a.carry_in && ml[0] != -INFINITY;
  const float sink = a.use_sinks && !a.carry_in ? sinks[head] * LOG2_E : -INFINITY;
  r->m = carried ? ml[0] : sink;
  r->l = carried ? ml[1] : sink == -INFINITY ? 0.0f : 1.0f;
  for (int i = 0; i < DIM_VECS; i++) r->acc[i] = (float16)(0.0f);
  if (!carried) return;
  from += (size_t)head * HEAD_DIM;
  for (int i = 0; i < WHOLE_VECS; i++) r->acc[i] = vload16(i, from);
  for (int d = WHOLE_VECS * LANES; d < HEAD_DIM; d++) ((float *)r->acc)[d] = from[d];
}

static inline float sum_lanes(float16 x) {
  const float a = (x.s0 + x.s1) + (x.s2 + x.s3);
  const float b = (x.s4 + x.s5) + (x.s6 + x.s7);
  const float c = (x.s8 + x.s9) + (x.sa + x.sb);
  const float d = (x.sc + x.sd) + (x.se + x.sf);
  return (a + b) + (c + d);
}

static inline float score(const float16 *q, __global const kv_type *k, float cap) {
  float16 sum = (float16)(0.0f);
  for (int i = 0; i < DIM_VECS; i++) sum = q[i] * load_dims(k, i) + sum;
  const float s = sum_lanes(sum);
  return cap != 0.0f ? cap * tanh(s / cap) : s;
}

/* Adds one key to the state; a value without weight is not read, so it may be NaN. */
static inline void take(row_state *r, float s, __global const kv_type *v) {
  const float top = s <= r->m ? r->m : s; /* NaN too: it must reach the result */
  const float alpha = top == r->m ? 1.0f : exp2(r->m - top);
  const float p = top == -INFINITY ? 0.0f : exp2(s - top);
  r->m = top;
  if (p == 0.0f) return;
  r->l = r->l * alpha + p;
  for (int i = 0; i < DIM_VECS; i++) r->acc[i] = r->acc[i] * alpha + p * load_dims(v, i);
}

static inline void store_state(const row_state *r, int row, int head, __global float *state,
                               const kvr_attend_args a) {
  __global float *to = state + state_offset(row, a);
  __global float *ml = to + (size_t)a.num_q_heads * HEAD_DIM + 2 * head;
  ml[0] = r->m;
  ml[1] = r->l;
  to += (size_t)head * HEAD_DIM;
  for (int i = 0; i < WHOLE_VECS; i++) vstore16(r->acc[i], i, to);
  for (int d = WHOLE_VECS * LANES; d < HEAD_DIM; d++) to[d] = ((const float *)r->acc)[d];
}

static inline void store_result(const row_state *r, size_t at, __global out_type *out,
                                __global float *lse, const kvr_attend_args a) {
  lse[at] = r->l == 0.0f ? -INFINITY : r->m * LN_2 + log(r->l);
  const float norm = r->l == 0.0f ? 1.0f : r->l;
  out += at * HEAD_DIM;
  for (int i = 0; i < WHOLE_VECS; i++) store16(r->acc[i] / norm * a.out_scale, out + i * LANES);
  for (int d = WHOLE_VECS * LANES; d < HEAD_DIM; d++)
    store1(((const float *)r->acc)[d] / norm * a.out_scale, out + d);
}

/* Walks num steps and says how many it walked: some devices end long loops without a word. The
 * array, all ones, keeps compilers from knowing the answer. */
__kernel void kvr_count_steps(__global const int *ones, __global int *out, int num) {
  int sum = 0;
  for (int i = 0; i < num; i++) sum += ones[sum & 15];
  out[0] = sum;
}

__attribute__((reqd_work_group_size(ROW_TILE, 1, 1))) __kernel void
kvr_attend(__global const kv_type *q, __global const kv_type *ring, __global const kv_type *cur,
           __global float *state, __global out_type *out, __global float *lse,
           __global const float *sinks, const kvr_attend_args a) {
  const int group = a.num_q_heads / a.num_kv_heads;
  const int p = (int)get_global_id(0);
  const int h = (int)get_global_id(1);
  if (p >= a.num_rows * group) return;
  const int row = p / group;
  const int head = h * group + p % group;
  const size_t at = (size_t)(a.q_row + row) * a.num_q_heads + head;
  const size_t stride = (size_t)2 * a.num_kv_heads * HEAD_DIM;
  float16 x[DIM_VECS];
  row_state r;

  load_query(x, q + at * HEAD_DIM, a);
  load_state(&r, row, head, state, sinks, a);
  for (int key = max(a.lower, 0); key < a.kv_end; key++) {
    if (!kvr_visible(row, key, a)) continue;
    __global const kv_type *k = key < a.ring_end
                                    ? ring + (size_t)(a.ring_row + key) * stride
                                    : cur + (size_t)(a.cur_row + key - a.ring_end) * stride;
    k += (size_t)h * 2 * HEAD_DIM;
    take(&r, score(x, k, a.soft_cap_log2), k + HEAD_DIM);
  }
  if (a.finish)
    store_result(&r, at, out, lse, a);
  else
    store_state(&r, row, head, state, a);
}

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
  float acc[HEAD_DIM];
} row_state;

static inline void load_query(float *x, __global const kv_type *q, const kvr_attend_args a) {
  const int quantised = a.q_inv_scale != 0.0f && a.q_inv_scale != 1.0f;
  for (int d = 0; d < HEAD_DIM; d++) {
    const float raw = load1(q + d);
    x[d] = (quantised ? to_kv1(raw * a.q_inv_scale) : raw) * a.scale_log2;
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
  from += (size_t)head * HEAD_DIM;
  for (int d = 0; d < HEAD_DIM; d++) r->acc[d] = carried ? from[d] : 0.0f;
}

static inline float score(const float *q, __global const kv_type *k, float cap) {
  float s = 0.0f;
  for (int d = 0; d < HEAD_DIM; d++) s = q[d] * load1(k + d) + s;
  return cap != 0.0f ? cap * tanh(s / cap) : s;
}

/* Adds one key to the state; a value without weight is not read, so it may be NaN. */
static inline void take(row_state *r, float s, __global const kv_type *v) {
  if (!(s <= r->m)) { /* NaN too: it must reach the result */
    const float alpha = exp2(r->m - s);
    r->m = s;
    r->l *= alpha;
    for (int d = 0; d < HEAD_DIM; d++) r->acc[d] *= alpha;
  }
  const float p = r->m == -INFINITY ? 0.0f : exp2(s - r->m);
  if (p == 0.0f) return;
  r->l += p;
  for (int d = 0; d < HEAD_DIM; d++) r->acc[d] = p * load1(v + d) + r->acc[d];
}

static inline void store_state(const row_state *r, int row, int head, __global float *state,
                               const kvr_attend_args a) {
  __global float *to = state + state_offset(row, a);
  __global float *ml = to + (size_t)a.num_q_heads * HEAD_DIM + 2 * head;
  ml[0] = r->m;
  ml[1] = r->l;
  to += (size_t)head * HEAD_DIM;
  for (int d = 0; d < HEAD_DIM; d++) to[d] = r->acc[d];
}

static inline void store_result(const row_state *r, size_t at, __global out_type *out,
                                __global float *lse, const kvr_attend_args a) {
  lse[at] = r->l == 0.0f ? -INFINITY : r->m * LN_2 + log(r->l);
  const float norm = r->l == 0.0f ? 1.0f : r->l;
  for (int d = 0; d < HEAD_DIM; d++)
    store1(r->acc[d] / norm * a.out_scale, out + at * HEAD_DIM + d);
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
  float x[HEAD_DIM];
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

/* kvr_merge_states, kvr_merge_outputs: combine attention over disjoint sets of keys.
 *
 *   states:   M = max_j m_j   w_j = 2^(m_j - M)     out = sum w_j acc_j / sum w_j l_j   (base 2)
 *   outputs:  M = max LSE     w = exp(LSE - M)      out = (wA outA + wB outB) / (wA + wB)
 *   both multiply out by out_scale
 *
 * A part that saw nothing (m or LSE = -inf) has weight 0 and is not read: it may hold NaN. Where no
 * part saw anything, out is 0 and the LSE -inf. Parts are summed in their order: bits do not vary.
 *
 * NDRange of both: global (num_q_heads, num_rows) or more rows, any local size; a work-item per
 * (head, row).
 *
 *   state row  acc [NQ][D], (m, l) [NQ][2]     out_a, out_b, out  [row][NQ][D]
 *   lse, lse_a, lse_b  [row][NQ], natural logarithm */

#define WHOLE (HEAD_DIM / LANES * LANES) /* dims handled as vectors */

/* One output row. */
typedef struct vecs {
  float16 whole[WHOLE / LANES + 1];
  float tail[LANES];
} vecs;

static inline void clear(vecs *o) {
  for (int v = 0; v < WHOLE / LANES; v++) o->whole[v] = (float16)(0.0f);
  for (int d = WHOLE; d < HEAD_DIM; d++) o->tail[d - WHOLE] = 0.0f;
}

/* o += w x; x is read only where it counts. */
static inline void add(vecs *o, float w, __global const float *x) {
  if (!(w > 0.0f)) return;
  for (int v = 0; v < WHOLE / LANES; v++) o->whole[v] += w * vload16(v, x);
  for (int d = WHOLE; d < HEAD_DIM; d++) o->tail[d - WHOLE] += w * x[d];
}

/* out = o / sum * scale, or 0 where nothing was added. */
static inline void finish(const vecs *o, float sum, float scale, __global out_type *out) {
  const float norm = sum == 0.0f ? 1.0f : sum;
  for (int v = 0; v < WHOLE / LANES; v++) store16(o->whole[v] / norm * scale, out + v * LANES);
  for (int d = WHOLE; d < HEAD_DIM; d++) store1(o->tail[d - WHOLE] / norm * scale, out + d);
}

static inline __global const float *state_row(__global const float *state, size_t row, int nq) {
  return state + row * nq * (HEAD_DIM + 2);
}

static inline __global const float *ml_of(__global const float *row, int head, int nq) {
  return row + (size_t)nq * HEAD_DIM + 2 * head;
}

/* Part j of row i: 0 is the own state, j + 1 is row j * part_rows + i of parts. */
static inline __global const float *part_row(__global const float *state,
                                             __global const float *parts, int j, int i,
                                             const kvr_merge_args a) {
  return j == 0 ? state_row(state, (size_t)a.state_row + i, a.num_q_heads)
                : state_row(parts, (size_t)(j - 1) * a.part_rows + i, a.num_q_heads);
}

__kernel void kvr_merge_states(__global const float *state, __global const float *parts,
                               __global out_type *out, __global float *lse,
                               const kvr_merge_args a) {
  const int head = (int)get_global_id(0);
  const int i = (int)get_global_id(1);
  if (i >= a.num_rows) return;
  const int nq = a.num_q_heads;

  float top = -INFINITY;
  for (int j = 0; j <= a.num_parts; j++)
    top = fmax(top, ml_of(part_row(state, parts, j, i, a), head, nq)[0]);
  float sum = 0.0f;
  for (int j = 0; j <= a.num_parts; j++) {
    __global const float *ml = ml_of(part_row(state, parts, j, i, a), head, nq);
    if (ml[0] != -INFINITY) sum += exp2(ml[0] - top) * ml[1];
  }

  const size_t at = (size_t)(a.out_row + i) * nq + head;
  lse[at] = sum == 0.0f ? -INFINITY : top * LN_2 + log(sum);
  vecs o;
  clear(&o);
  for (int j = 0; j <= a.num_parts; j++) {
    __global const float *row = part_row(state, parts, j, i, a);
    add(&o, exp2(ml_of(row, head, nq)[0] - top), row + (size_t)head * HEAD_DIM);
  }
  finish(&o, sum, a.out_scale, out + at * HEAD_DIM);
}

__kernel void kvr_merge_outputs(__global const float *out_a, __global const float *lse_a,
                                __global const float *out_b, __global const float *lse_b,
                                __global out_type *out, __global float *lse,
                                const kvr_merge_args a) {
  const int head = (int)get_global_id(0);
  const int i = (int)get_global_id(1);
  if (i >= a.num_rows) return;
  const size_t from = (size_t)(a.state_row + i) * a.num_q_heads + head;
  const size_t at = (size_t)(a.out_row + i) * a.num_q_heads + head;

  const float top = fmax(lse_a[from], lse_b[from]);
  const float base = isinf(top) ? 0.0f : top; /* both -inf: weights 0, not NaN */
  const float wa = exp(lse_a[from] - base);
  const float wb = exp(lse_b[from] - base);
  const float sum = wa + wb;
  lse[at] = sum == 0.0f ? -INFINITY : base + log(sum);
  vecs o;
  clear(&o);
  add(&o, wa, out_a + from * HEAD_DIM);
  add(&o, wb, out_b + from * HEAD_DIM);
  finish(&o, sum, a.out_scale, out + at * HEAD_DIM);
}

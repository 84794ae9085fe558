/* kvr_attend with both products on bf16 numbers, summed in f32: the arguments of attend.cl, for
 * CPUs whose matrix or dot-product instructions outrun their f32 arithmetic.
 *
 *   PRODUCTS 2  AMX tiles (tdpbf16ps)     1  vdpbf16ps     0  f32 arithmetic, any device
 *
 * K, V, Q and the probabilities are rounded to bf16 (a bf16 cache is taken as it is), everything
 * else is f32; the row sum is taken over the rounded probabilities, so that they still sum to 1.
 *
 * Everything is kept transposed, a lane per row, so that both products are of one kind and no
 * operand is shuffled but V, once per block for all rows:
 *
 *     S^T [keys][rows]  = K [keys][dim pairs]   Q^T [dim pairs][rows]
 *     O^T [dims][rows] += V^T [dims][key pairs] P^T [key pairs][rows]
 *
 * A pair is two bf16 in 32 bits: neighbours along the summed axis. A panel is 32 rows. Lengths are
 * padded to 32 with zeros; padded keys are masked.
 *
 * NDRange: global (ceil(num_rows * group / ROW_TILE), num_kv_heads), local (1, 1).
 * Private memory: about (4 BLOCK + 6 ROW_TILE) * D + 192 * BLOCK bytes. */

#ifndef ROW_TILE /* packed rows of a work-item, a multiple of 32 */
#define ROW_TILE 256
#endif
#ifndef BLOCK /* keys at a time, a multiple of 32 */
#define BLOCK 256
#endif
#ifndef PRODUCTS
#define PRODUCTS 0
#endif

#define ROWS 32 /* of a panel */
#define ROW_PANELS (ROW_TILE / ROWS)
#define DIM_PAIRS ((HEAD_DIM + 31) / 32 * 16)
#define DIMS (2 * DIM_PAIRS)
#define KEY_PAIRS (BLOCK / 2)
#define KEYS 16 /* that share one look at the limits */
#define HIGH 0xffff0000u

/* A block of keys. */
typedef struct block {
  uint16 k[BLOCK][DIM_PAIRS / LANES];
  uint16 v[DIMS][KEY_PAIRS / LANES];
  int token[BLOCK]; /* -INT_LAST where every row sees the key, INT_LAST past the end */
  int first[BLOCK / KEYS];
  int last[BLOCK / KEYS];
  int num_keys;
  int padded_keys; /* a multiple of 32 */
  int strange_v;   /* some value is Inf or NaN: it must not meet a zero probability */
} block;

/* Running state of a tile, a lane per row. */
typedef struct rows {
  uint16 q[ROW_PANELS][DIM_PAIRS][2];
  float16 acc[ROW_PANELS][DIMS][2];
  float16 m[ROW_PANELS][2];
  float16 l[ROW_PANELS][2];
  int16 first[ROW_PANELS][2]; /* a row sees tokens from first to last */
  int16 last[ROW_PANELS][2];
  limits seen;
  int num_rows;
  /* of the panel in work */
  float16 s[BLOCK][2];    /* scores */
  uint16 p[KEY_PAIRS][2]; /* probabilities */
} rows;

/* ---- products ----
 *
 * multiply: C [num][ROWS] (+)= A [num][pairs] B [pairs][ROWS]; num a multiple of 32, pairs of 16.
 */

#if PRODUCTS == 2

/* Shapes of the eight tile registers, all 16 rows of 64 bytes. */
typedef struct tile_config {
  uchar palette;
  uchar start;
  uchar reserved[14];
  ushort row_bytes[16];
  uchar rows[16];
} tile_config;

static inline void begin_products(void) {
  tile_config c;
  c.palette = 1;
  c.start = 0;
  for (int i = 0; i < 14; i++) c.reserved[i] = 0;
  for (int i = 0; i < 16; i++) c.row_bytes[i] = i < 8 ? 64 : 0;
  for (int i = 0; i < 16; i++) c.rows[i] = i < 8 ? 16 : 0;
  __asm__ volatile("ldtilecfg %0" ::"m"(c));
}
static inline void end_products(void) { __asm__ volatile("tilerelease"); }

#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, from, stride)                                                                 \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"((long)(stride)) : "memory")
#define TILE_STORE(t, to, stride)                                                                  \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"((long)(stride)) : "memory")
#define TILE_ADD(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

static inline void multiply(float16 *to, const uint16 *from_a, const uint16 *from_b, int num,
                            int pairs, int a_stride, int add) {
  float *c = (float *)to;
  const uint *a = (const uint *)from_a;
  const uint *b = (const uint *)from_b;
  const int row = ROWS * 4;
  for (int i = 0; i < num; i += 32, c += 32 * ROWS, a += 32 * a_stride) {
    if (add) {
      TILE_LOAD(0, c, row);
      TILE_LOAD(1, c + 16, row);
      TILE_LOAD(2, c + 16 * ROWS, row);
      TILE_LOAD(3, c + 16 * ROWS + 16, row);
    } else {
      TILE_ZERO(0);
      TILE_ZERO(1);
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
    for (int k = 0; k < pairs; k += 16) {
      TILE_LOAD(4, a + k, a_stride * 4);
      TILE_LOAD(5, a + k + 16 * a_stride, a_stride * 4);
      TILE_LOAD(6, b + k * ROWS, row);
      TILE_LOAD(7, b + k * ROWS + 16, row);
      TILE_ADD(0, 4, 6);
      TILE_ADD(1, 4, 7);
      TILE_ADD(2, 5, 6);
      TILE_ADD(3, 5, 7);
    }
    TILE_STORE(0, c, row);
    TILE_STORE(1, c + 16, row);
    TILE_STORE(2, c + 16 * ROWS, row);
    TILE_STORE(3, c + 16 * ROWS + 16, row);
  }
}

#else

static inline void begin_products(void) {}
static inline void end_products(void) {}

#if PRODUCTS == 1
#define ADD_PAIRS(c, a, b) __asm__("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b))
#else
#define ADD_PAIRS(c, a, b)                                                                         \
  c = c + as_float16((a) << 16) * as_float16((b) << 16) +                                          \
      as_float16((a)&HIGH) * as_float16((b)&HIGH)
#endif

/* 8 rows of C in registers: 16 independent sums hide the latency of the instruction. */
static inline void multiply(float16 *c, const uint16 *from_a, const uint16 *b, int num, int pairs,
                            int a_stride, int add) {
  const uint *a = (const uint *)from_a;
  for (int i = 0; i < num; i += 8, c += 16, a += 8 * a_stride) {
    float16 sum[8][2];
    UNROLL for (int j = 0; j < 8; j++) {
      UNROLL for (int n = 0; n < 2; n++) sum[j][n] = add ? c[2 * j + n] : (float16)(0.0f);
    }
    for (int k = 0; k < pairs; k++) {
      const uint16 b0 = b[2 * k];
      const uint16 b1 = b[2 * k + 1];
      UNROLL for (int j = 0; j < 8; j++) {
        const uint16 aj = (uint16)(a[j * a_stride + k]);
        ADD_PAIRS(sum[j][0], aj, b0);
        ADD_PAIRS(sum[j][1], aj, b1);
      }
    }
    UNROLL for (int j = 0; j < 8; j++) {
      UNROLL for (int n = 0; n < 2; n++) c[2 * j + n] = sum[j][n];
    }
  }
}

#endif

/* ---- reading bf16 ---- */

/* Bits of dims 16 i .. 16 i + 15 in the low halves; zeros past the last dim. */
static inline uint16 load_bits(__global const kv_type *p, int i) {
  if (i >= DIM_VECS) return (uint16)(0);
#if KV_DTYPE == 2
  if (i < WHOLE_VECS) return convert_uint16(vload16(i, p));
#endif
  return round_bf16(i < WHOLE_VECS ? load16(p + i * LANES) : load_tail(p + i * LANES));
}

/* Dims 32 i .. 32 i + 31 as pairs. */
static inline uint16 load_pairs(__global const kv_type *p, int i) {
#if KV_DTYPE == 2
  if (2 * i + 2 <= WHOLE_VECS)
    return (uint16)(as_uint8(vload16(2 * i, p)), as_uint8(vload16(2 * i + 1, p)));
#endif
  const uint16 low = load_bits(p, 2 * i);
  const uint16 high = load_bits(p, 2 * i + 1);
  return (uint16)(low.even | low.odd << 16, high.even | high.odd << 16);
}

/* ---- a block of keys ---- */

/* 32 values from row pointers become columns of V^T. */
static inline void pack_values(block *b, int key, __global const kv_type *const *from, int num) {
  for (int i = 0; i < DIMS / LANES; i++) {
    float16 x[LANES];
    uint16 strange = (uint16)(0);
    UNROLL for (int j = 0; j < LANES; j++) {
      const uint16 low = 2 * j < num ? load_bits(from[2 * j] + HEAD_DIM, i) : (uint16)(0);
      const uint16 high = 2 * j + 1 < num ? load_bits(from[2 * j + 1] + HEAD_DIM, i) : (uint16)(0);
      strange = max(strange, max(low & 0x7fffu, high & 0x7fffu));
      x[j] = as_float16(low | high << 16);
    }
    b->strange_v |= any(strange >= 0x7f80u);
    transpose(x);
    UNROLL for (int d = 0; d < LANES; d++) b->v[i * LANES + d][key / 32] = as_uint16(x[d]);
  }
}

static inline void pack_limits(block *b) {
  for (int i = b->num_keys; i < b->padded_keys; i++) b->token[i] = INT_LAST;
  for (int i = 0; i < b->padded_keys; i += KEYS) {
    int first = INT_LAST;
    int last = -INT_LAST;
    for (int j = 0; j < KEYS; j++) {
      first = min(first, b->token[i + j]);
      last = max(last, b->token[i + j]);
    }
    b->first[i / KEYS] = first;
    b->last[i / KEYS] = last;
  }
}

/* Takes up to BLOCK keys off the spans. */
static inline void pack_block(block *b, span *spans, int h, __global const kv_type *ring,
                              __global const kv_type *cur, const kvr_attend_args a) {
  const size_t stride = (size_t)2 * a.num_kv_heads * HEAD_DIM;
  __global const kv_type *from[BLOCK];
  int n = 0;
  b->strange_v = 0;
  for (int s = 0; s < 3; s++) {
    const int num_keys = clamp(spans[s].end - spans[s].begin, 0, BLOCK - n);
    if (num_keys == 0) continue;
    __global const kv_type *k = key_row(spans, s, h, ring, cur, a);
    for (int i = 0; i < num_keys; i++) {
      from[n + i] = k + i * stride;
      b->token[n + i] = s == 0 ? ring_token(spans[s].begin + i, a) : spans[s].token + i;
    }
    spans[s].begin += num_keys;
    spans[s].token += num_keys;
    n += num_keys;
  }
  b->num_keys = n;
  b->padded_keys = (n + 31) / 32 * 32;
  for (int i = 0; i < b->padded_keys; i++) {
    for (int j = 0; j < DIM_PAIRS / LANES; j++)
      b->k[i][j] = i < n ? load_pairs(from[i], j) : (uint16)(0);
  }
  for (int i = 0; i < n; i += 32) pack_values(b, i, from + i, n - i);
  pack_limits(b);
}

/* ---- a panel of rows ---- */

/* Raw products become scores: scaled, capped, masked; their maximum so far goes to top. */
static inline void finish_scores(rows *r, const block *b, int panel, const kvr_attend_args a,
                                 float16 top[2]) {
  const float cap = a.soft_cap_log2;
  const float inv_cap = 1.0f / cap;
  for (int key = 0; key < b->padded_keys; key += KEYS) {
    const int masked =
        b->last[key / KEYS] > r->seen.lasts.low || b->first[key / KEYS] < r->seen.firsts.high;
    for (int j = 0; j < KEYS; j++) {
      const int16 token = (int16)(b->token[key + j]);
      UNROLL for (int i = 0; i < 2; i++) {
        float16 s = r->s[key + j][i] * a.scale_log2;
        if (cap != 0.0f)
          s = cap * tanh16(s * inv_cap); /* before the mask: -inf would become -cap */
        if (masked) {
          const int16 seen = token >= r->first[panel][i] & token <= r->last[panel][i];
          s = seen ? s : (float16)(-INFINITY);
        }
        top[i] = s < top[i] ? top[i] : s;
        r->s[key + j][i] = s;
      }
    }
  }
}

/* Nearest bf16 in the high half. */
static inline uint16 to_high(float16 x) {
  const uint16 u = as_uint16(x);
  return (u + 0x7fffu + (u >> 16 & 1u)) & HIGH;
}

/* Scores become probabilities relative to the new maximum; m, l and acc follow. */
static inline void softmax_panel(rows *r, const block *b, int panel, const float16 top[2]) {
  for (int i = 0; i < 2; i++) {
    /* A row that has seen nothing: -inf - 0 gives 0, where -inf - -inf would give NaN. */
    const float16 base = top[i] == -INFINITY ? (float16)(0.0f) : top[i];
    const float16 alpha = exp2_neg(r->m[panel][i] - base);
    float16 sum = (float16)(0.0f);
    for (int pair = 0; pair < b->padded_keys / 2; pair++) {
      const uint16 low = to_high(exp2_neg(r->s[2 * pair][i] - base));
      const uint16 high = to_high(exp2_neg(r->s[2 * pair + 1][i] - base));
      sum = sum + (as_float16(low) + as_float16(high));
      r->p[pair][i] = low >> 16 | high;
    }
    r->m[panel][i] = top[i];
    r->l[panel][i] = r->l[panel][i] * alpha + sum;
    if (all(alpha == 1.0f)) continue; /* the maximum stands, as it mostly does */
    for (int d = 0; d < DIMS; d++) r->acc[panel][d][i] = r->acc[panel][d][i] * alpha;
  }
}

/* Adds P V where values hold Inf or NaN: they meet only rows that give them weight. */
static inline void weigh_guarded(rows *r, const block *b, int panel) {
  for (int key = 0; key < b->num_keys; key++) {
    const int shift = key % 2 == 0 ? 16 : 0;
    UNROLL for (int i = 0; i < 2; i++) {
      const float16 p = as_float16(r->p[key / 2][i] << shift & HIGH);
      for (int d = 0; d < DIMS; d++) {
        const float v = as_float(((const uint *)b->v[d])[key / 2] << shift & HIGH);
        const float16 acc = r->acc[panel][d][i];
        r->acc[panel][d][i] = p == 0.0f ? acc : acc + p * v;
      }
    }
  }
}

static inline void attend_panel(rows *r, const block *b, int panel, const kvr_attend_args a) {
  float16 top[2] = {r->m[panel][0], r->m[panel][1]};
  multiply(r->s[0], b->k[0], r->q[panel][0], b->padded_keys, DIM_PAIRS, DIM_PAIRS, 0);
  finish_scores(r, b, panel, a, top);
  softmax_panel(r, b, panel, top);
  if (b->strange_v)
    weigh_guarded(r, b, panel);
  else
    multiply(r->acc[panel][0], b->v[0], r->p[0], DIMS, b->padded_keys / 2, KEY_PAIRS, 1);
}

/* ---- rows in and out, LANES at a time ---- */

/* 16 dims of a query, quantised, as bits in the low halves. */
static inline uint16 quantised_bits(__global const kv_type *p, int i, float inv_scale) {
  if (i >= DIM_VECS) return (uint16)(0);
  const float16 x = i < WHOLE_VECS ? load16(p + i * LANES) : load_tail(p + i * LANES);
  return round_bf16(to_kv(x * inv_scale));
}

static inline uint16 query_pairs(__global const kv_type *p, int i, const kvr_attend_args a) {
  if (a.q_inv_scale == 0.0f || a.q_inv_scale == 1.0f) return load_pairs(p, i);
  const uint16 low = quantised_bits(p, 2 * i, a.q_inv_scale);
  const uint16 high = quantised_bits(p, 2 * i + 1, a.q_inv_scale);
  return (uint16)(low.even | low.odd << 16, high.even | high.odd << 16);
}

/* Where the LANES rows from i on lie in q and out, in heads; the last row stands for those past it.
 */
static inline void find_places(size_t at[LANES], const rows *r, int i, int p0, int h,
                               const kvr_attend_args a) {
  for (int j = 0; j < LANES; j++) {
    const place w = place_of(p0 + min(i + j, r->num_rows - 1), h, a);
    at[j] = (size_t)(a.q_row + w.row) * a.num_q_heads + w.head;
  }
}

/* Queries of rows i .. i + LANES - 1; zeros past the last row. */
static inline void load_queries(rows *r, int i, int p0, int h, __global const kv_type *q,
                                const kvr_attend_args a) {
  size_t at[LANES];
  find_places(at, r, i, p0, h, a);
  for (int v = 0; v < DIM_PAIRS / LANES; v++) {
    float16 x[LANES];
    for (int j = 0; j < LANES; j++) {
      const uint16 pairs = query_pairs(q + at[j] * HEAD_DIM, v, a);
      x[j] = as_float16(i + j < r->num_rows ? pairs : (uint16)(0));
    }
    transpose(x);
    UNROLL for (int d = 0; d < LANES; d++) r->q[i / ROWS][v * LANES + d][i % ROWS / LANES] =
        as_uint16(x[d]);
  }
}

/* m and l of row i: carried, of a sink, or empty. Returns where acc is carried from, or NULL. */
static inline __global const float *load_softmax(rows *r, int i, place w,
                                                 __global const float *state,
                                                 __global const float *sinks,
                                                 const kvr_attend_args a) {
  __global const float *from = state + state_offset(w.row, a);
  __global const float *ml = from + (size_t)a.num_q_heads * HEAD_DIM + 2 * w.head;
  const int carried = a.carry_in && ml[0] != -INFINITY;
  const float sink = a.use_sinks && !a.carry_in ? sinks[w.head] * LOG2_E : -INFINITY;
  ((float *)r->m)[i] = carried ? ml[0] : sink;
  ((float *)r->l)[i] = carried ? ml[1] : sink == -INFINITY ? 0.0f : 1.0f;
  return carried ? from + (size_t)w.head * HEAD_DIM : 0;
}

static inline float16 load_acc(__global const float *p, int i) {
  if (p == 0) return (float16)(0.0f);
  if (i < WHOLE_VECS) return vload16(i, p);
  float16 x = (float16)(0.0f);
  for (int d = 0; d < HEAD_DIM % LANES; d++) ((float *)&x)[d] = p[i * LANES + d];
  return x;
}

/* State and limits of rows i .. i + LANES - 1. */
static inline void load_states(rows *r, int i, int p0, int h, __global const float *state,
                               __global const float *sinks, const kvr_attend_args a) {
  __global const float *from[LANES];
  for (int j = 0; j < LANES; j++) {
    from[j] = 0;
    ((int *)r->first)[i + j] = -INT_LAST;
    ((int *)r->last)[i + j] = INT_LAST - 1;
    ((float *)r->m)[i + j] = -INFINITY;
    ((float *)r->l)[i + j] = 0.0f;
    if (i + j >= r->num_rows) continue;
    const place w = place_of(p0 + i + j, h, a);
    const sight seen = sight_of(w.row, a);
    add_sight(&r->seen, seen);
    ((int *)r->first)[i + j] = seen.first;
    ((int *)r->last)[i + j] = seen.last;
    from[j] = load_softmax(r, i + j, w, state, sinks, a);
  }
  for (int v = 0; v < DIMS / LANES; v++) {
    float16 x[LANES];
    for (int j = 0; j < LANES; j++) x[j] = v < DIM_VECS ? load_acc(from[j], v) : (float16)(0.0f);
    transpose(x);
    for (int d = 0; d < LANES; d++) r->acc[i / ROWS][v * LANES + d][i % ROWS / LANES] = x[d];
  }
}

/* Dims 16 v .. 16 v + 15 of rows i .. i + LANES - 1. */
static inline void get_rows(const rows *r, int i, int v, float16 x[LANES]) {
  for (int d = 0; d < LANES; d++) x[d] = r->acc[i / ROWS][v * LANES + d][i % ROWS / LANES];
  transpose(x);
}

static inline void store_states(const rows *r, int i, int p0, int h, __global float *state,
                                const kvr_attend_args a) {
  const int num = min(LANES, r->num_rows - i);
  __global float *to[LANES];
  for (int j = 0; j < num; j++) {
    const place w = place_of(p0 + i + j, h, a);
    __global float *row = state + state_offset(w.row, a);
    __global float *ml = row + (size_t)a.num_q_heads * HEAD_DIM + 2 * w.head;
    to[j] = row + (size_t)w.head * HEAD_DIM;
    ml[0] = ((const float *)r->m)[i + j];
    ml[1] = ((const float *)r->l)[i + j];
  }
  for (int v = 0; v < DIM_VECS; v++) {
    float16 x[LANES];
    get_rows(r, i, v, x);
    for (int j = 0; j < num; j++) {
      if (v < WHOLE_VECS)
        vstore16(x[j], v, to[j]);
      else
        for (int d = 0; d < HEAD_DIM % LANES; d++) to[j][v * LANES + d] = ((const float *)&x[j])[d];
    }
  }
}

static inline void store_results(const rows *r, int i, int p0, int h, __global out_type *out,
                                 __global float *lse, const kvr_attend_args a) {
  const int num = min(LANES, r->num_rows - i);
  size_t at[LANES];
  float norm[LANES];
  find_places(at, r, i, p0, h, a);
  for (int j = 0; j < num; j++) {
    const float l = ((const float *)r->l)[i + j];
    lse[at[j]] = l == 0.0f ? -INFINITY : ((const float *)r->m)[i + j] * LN_2 + log(l);
    norm[j] = l == 0.0f ? 1.0f : l;
  }
  for (int v = 0; v < DIM_VECS; v++) {
    float16 x[LANES];
    get_rows(r, i, v, x);
    for (int j = 0; j < num; j++) {
      const float16 y = x[j] / norm[j] * a.out_scale;
      __global out_type *to = out + at[j] * HEAD_DIM + v * LANES;
      if (v < WHOLE_VECS)
        store16(y, to);
      else
        for (int d = 0; d < HEAD_DIM % LANES; d++) store1(((const float *)&y)[d], to + d);
    }
  }
}

__attribute__((reqd_work_group_size(1, 1, 1))) __kernel void
kvr_attend(__global const kv_type *q, __global const kv_type *ring, __global const kv_type *cur,
           __global float *state, __global out_type *out, __global float *lse,
           __global const float *sinks, const kvr_attend_args a) {
  const int p0 = (int)get_group_id(0) * ROW_TILE;
  const int h = (int)get_group_id(1);
  const int total = a.num_rows * (a.num_q_heads / a.num_kv_heads);
  if (p0 >= total) return; /* wider than its rows */
  rows r;
  block b;
  span spans[3];

  r.num_rows = min(ROW_TILE, total - p0);
  r.seen = no_limits();
  for (int i = 0; i < r.num_rows; i += ROWS) {
    for (int j = i; j < i + ROWS; j += LANES) {
      load_queries(&r, j, p0, h, q, a);
      load_states(&r, j, p0, h, state, sinks, a);
    }
  }
  find_spans(spans, r.seen, a);
  begin_products();
  for (;;) {
    pack_block(&b, spans, h, ring, cur, a);
    if (b.num_keys == 0) break;
    for (int panel = 0; panel * ROWS < r.num_rows; panel++) attend_panel(&r, &b, panel, a);
  }
  end_products();

  for (int i = 0; i < r.num_rows; i += LANES) {
    if (a.finish)
      store_results(&r, i, p0, h, out, lse, a);
    else
      store_states(&r, i, p0, h, state, a);
  }
}

/* kvr_attend: attention of query rows to one stretch of keys, with carried state (flash attention).
 *
 *   S = scale Q K^T      P = 2^(S - m)      acc = 2^(m_old - m) acc + P V      out = acc / l
 *
 * Order of the options: queries are quantised, scores scaled, capped, then masked; a sink is one
 * more key in the starting state; out is scaled at the end.
 *
 * One work-item owns one KV head and a tile of ROW_TILE packed rows: the `group` query heads of a
 * KV head are rows too, so packed row p is token p / group, head h * group + p % group.
 *
 *               row panels, ROWS each            Per block of BLOCK keys, in private memory:
 *              +------+------+-- ROW_TILE         1. pack K and V as f32; V in panels of dims
 *     q^T   D  |      |      |                    2. scores: 8 keys x ROWS rows in registers
 *              +------+------+                    3. running softmax, a lane per row
 *     k   D    :      :      :                    4. P V: 8 rows x 2 or 3 vectors of dims in
 *   +-------+  +------+------+                       registers, added to acc
 *   | BLOCK |  | 8 x  | ...  |  scores, P
 *   +-------+  +------+------+
 *
 * Keys come from up to three spans of the axis (ring, head run, tail run), each trimmed to what the
 * tile can see; a block may take keys of several spans. Every key has a token number (of a cached
 * key: its position less L, below 0) and every row sees the tokens from its first to its last, so
 * masks cost something only where 8 keys hold such a limit.
 * Keys that do not exist are packed as zeros, and neither they nor masked keys reach a result.
 *
 * NDRange: global (ceil(num_rows * group / ROW_TILE), num_kv_heads), local (1, 1).
 * Private memory: about 4 * (2 ROW_TILE + 2 BLOCK) * D + 4 * ROW_TILE * BLOCK bytes.
 *
 *   q, out     [row][NQ][D]           ring, cur  [row][2 NKV][D]: K0 V0 K1 V1 ..
 *   state row  acc [NQ][D], (m, l) [NQ][2]; m in base 2
 *   lse        [row][NQ], natural logarithm; -inf where a row saw nothing (out is then 0)
 *   sinks      [NQ], logits (natural, not scaled); -inf: none. Read with use_sinks only */

#ifndef ROW_TILE /* packed rows of a work-item: 16 or a multiple of 32 */
#define ROW_TILE 256
#endif
#ifndef BLOCK /* keys packed at a time, a multiple of 8 */
#define BLOCK 128
#endif

#define KEYS 8                           /* keys of a score micro-tile */
#define ROW_VECS (ROW_TILE < 32 ? 1 : 2) /* vectors of a row panel */
#define ROWS (LANES * ROW_VECS)          /* rows of a panel */
#define ROW_PANELS (ROW_TILE / ROWS)
#define OUT_ROWS 8 /* rows of a P V micro-tile */
/* Dim panels are 2 vectors wide; an odd last vector makes the last panel 3 wide (or 1, if alone).
 */
#define NARROW_PANELS (DIM_VECS % 2 == 0 ? DIM_VECS / 2 : DIM_VECS == 1 ? 0 : (DIM_VECS - 3) / 2)
#define LAST_VECS (DIM_VECS - 2 * NARROW_PANELS) /* 0, 1 or 3 */

/* A block of keys as f32. */
typedef struct block {
  float16 k[BLOCK][DIM_VECS];
  float16 v[BLOCK * DIM_VECS]; /* dim panels, [BLOCK][vectors] each */
  int token[BLOCK];            /* -INT_LAST where every row sees the key, INT_LAST past the end */
  int first[BLOCK / KEYS];     /* smallest and largest token of KEYS keys */
  int last[BLOCK / KEYS];
  int num_keys;
  int strange_v; /* some value is Inf or NaN: it must not meet a zero probability */
} block;

static inline int v_index(int key, int vec) {
  const int panel = min(vec / 2, NARROW_PANELS);
  const int vecs = panel < NARROW_PANELS ? 2 : LAST_VECS;
  return panel * 2 * BLOCK + key * vecs + vec - panel * 2;
}

static inline void pack_key(block *b, int key, int token, __global const kv_type *k) {
  __global const kv_type *v = k + HEAD_DIM;
  uint16 top = (uint16)(0);
  for (int i = 0; i < WHOLE_VECS; i++) {
    b->k[key][i] = load16(k + i * LANES);
    const float16 x = load16(v + i * LANES);
    b->v[v_index(key, i)] = x;
    top = max(top, as_uint16(x) & 0x7fffffffu);
  }
  if (WHOLE_VECS < DIM_VECS) {
    b->k[key][DIM_VECS - 1] = load_tail(k + WHOLE_VECS * LANES);
    const float16 x = load_tail(v + WHOLE_VECS * LANES);
    b->v[v_index(key, DIM_VECS - 1)] = x;
    top = max(top, as_uint16(x) & 0x7fffffffu);
  }
  b->strange_v |= any(top >= 0x7f800000u);
  b->token[key] = token;
}

/* Takes up to BLOCK keys off the spans. */
static inline void pack_block(block *b, span *spans, int h, __global const kv_type *ring,
                              __global const kv_type *cur, const kvr_attend_args a) {
  const size_t stride = (size_t)2 * a.num_kv_heads * HEAD_DIM;
  int n = 0;
  b->strange_v = 0;
  for (int s = 0; s < 3; s++) {
    const int num_keys = clamp(spans[s].end - spans[s].begin, 0, BLOCK - n);
    if (num_keys == 0) continue;
    __global const kv_type *k = key_row(spans, s, h, ring, cur, a);
    for (int i = 0; i < num_keys; i++)
      pack_key(b, n + i, s == 0 ? ring_token(spans[s].begin + i, a) : spans[s].token + i,
               k + i * stride);
    spans[s].begin += num_keys;
    spans[s].token += num_keys;
    n += num_keys;
  }
  b->num_keys = n;
  for (; n % KEYS != 0; n++) {
    for (int i = 0; i < DIM_VECS; i++) b->k[n][i] = (float16)(0.0f);
    b->token[n] = INT_LAST;
  }
  for (int i = 0; i < n; i += KEYS) {
    int first = INT_LAST;
    int last = -INT_LAST;
    UNROLL for (int j = 0; j < KEYS; j++) {
      first = min(first, b->token[i + j]);
      last = max(last, b->token[i + j]);
    }
    b->first[i / KEYS] = first;
    b->last[i / KEYS] = last;
  }
}

/* Running state of a tile, a lane per row. */
typedef struct rows {
  float16 q[ROW_PANELS][HEAD_DIM][ROW_VECS]; /* transposed, times scale */
  float16 s[ROW_PANELS][BLOCK][ROW_VECS];    /* scores, then probabilities */
  float16 m[ROW_PANELS][ROW_VECS];
  float16 l[ROW_PANELS][ROW_VECS];
  float16 alpha[ROW_PANELS][ROW_VECS]; /* what the block's new maximum does to acc */
  int16 first[ROW_PANELS][ROW_VECS];   /* a row sees tokens from first to last */
  int16 last[ROW_PANELS][ROW_VECS];
  float16 acc[ROW_TILE][DIM_VECS];
  limits seen;
  int num_rows;
} rows;

/* Keys of the next block, one after the other, and how many to prefetch per score micro-tile. */
typedef struct ahead {
  __global const kv_type *k;
  size_t stride;
  int num_keys;
  int per_step;
} ahead;

static inline ahead find_ahead(const span *spans, int h, int num_rows, __global const kv_type *ring,
                               __global const kv_type *cur, const kvr_attend_args a) {
  int s = 0;
  while (s < 2 && spans[s].begin >= spans[s].end) s++;
  const int num_keys = clamp(spans[s].end - spans[s].begin, 0, BLOCK);
  const int panels = (num_rows + ROWS - 1) / ROWS;
  const ahead next = {key_row(spans, s, h, ring, cur, a), (size_t)2 * a.num_kv_heads * HEAD_DIM,
                      num_keys, (KEYS + panels - 1) / panels};
  return next;
}

/* Spread over the dims of a micro-tile: a burst would wait for the memory it is to hide. */
static inline void prefetch_dims(const ahead *next, int num_keys, int d) {
  for (int n = 0; n < num_keys; n++) {
    PREFETCH(next->k + n * next->stride + d);
    PREFETCH(next->k + n * next->stride + HEAD_DIM + d);
  }
}

/* Scores of a panel of rows with the block's keys; their maximum so far goes to top. */
static inline void score_panel(rows *r, const block *b, int panel, float cap, float16 top[ROW_VECS],
                               ahead *next) {
  const float16 *restrict q = r->q[panel][0];
  const float inv_cap = 1.0f / cap;
  for (int key = 0; key < b->num_keys; key += KEYS) {
    const float *restrict k = (const float *)b->k[key];
    float16 s[KEYS][ROW_VECS];
    const int num_ahead = min(next->per_step, next->num_keys);
    UNROLL for (int j = 0; j < KEYS; j++) {
      UNROLL for (int i = 0; i < ROW_VECS; i++) s[j][i] = (float16)(0.0f);
    }
    for (int d0 = 0; d0 < HEAD_DIM; d0 += LANES) {
      prefetch_dims(next, num_ahead, d0);
      const int end = min(d0 + LANES, HEAD_DIM);
      _Pragma("clang loop unroll_count(2)") for (int d = d0; d < end; d++) {
        UNROLL for (int j = 0; j < KEYS; j++) {
          const float16 kd = (float16)(k[j * DIM_VECS * LANES + d]);
          UNROLL for (int i = 0; i < ROW_VECS; i++) s[j][i] = kd * q[d * ROW_VECS + i] + s[j][i];
        }
      }
    }
    next->k += num_ahead * next->stride;
    next->num_keys -= num_ahead;
    if (cap != 0.0f) { /* before the mask: -inf would become -cap */
      UNROLL for (int j = 0; j < KEYS; j++) {
        UNROLL for (int i = 0; i < ROW_VECS; i++) s[j][i] = cap * tanh16(s[j][i] * inv_cap);
      }
    }
    if (b->last[key / KEYS] > r->seen.lasts.low || b->first[key / KEYS] < r->seen.firsts.high) {
      UNROLL for (int j = 0; j < KEYS; j++) {
        const int16 token = (int16)(b->token[key + j]);
        UNROLL for (int i = 0; i < ROW_VECS; i++) {
          const int16 seen = token >= r->first[panel][i] & token <= r->last[panel][i];
          s[j][i] = seen ? s[j][i] : (float16)(-INFINITY);
        }
      }
    }
    UNROLL for (int j = 0; j < KEYS; j++) {
      UNROLL for (int i = 0; i < ROW_VECS; i++) {
        top[i] = s[j][i] < top[i] ? top[i] : s[j][i];
        r->s[panel][key + j][i] = s[j][i];
      }
    }
  }
}

/* Scores of a panel become probabilities relative to the new maximum; m, l and alpha follow. */
static inline void softmax_panel(rows *r, const block *b, int panel, const float16 top[ROW_VECS]) {
  float16 base[ROW_VECS];
  float16 sum[ROW_VECS];
  UNROLL for (int i = 0; i < ROW_VECS; i++) {
    /* A row that has seen nothing: -inf - 0 gives 0, where -inf - -inf would give NaN. */
    base[i] = top[i] == -INFINITY ? (float16)(0.0f) : top[i];
    r->alpha[panel][i] = exp2_neg(r->m[panel][i] - base[i]);
    r->m[panel][i] = top[i];
    sum[i] = (float16)(0.0f);
  }
  _Pragma("clang loop unroll_count(2)") for (int key = 0; key < b->num_keys; key++) {
    UNROLL for (int i = 0; i < ROW_VECS; i++) {
      const float16 p = exp2_neg(r->s[panel][key][i] - base[i]);
      r->s[panel][key][i] = p;
      sum[i] = sum[i] + p;
    }
  }
  UNROLL for (int i = 0; i < ROW_VECS; i++) r->l[panel][i] =
      r->l[panel][i] * r->alpha[panel][i] + sum[i];
}

/* acc = alpha acc + P V for OUT_ROWS rows and VECS vectors of dims. A block is summed on its own
 * first: over many keys that halves the rounding error. */
#define DEFINE_WEIGH(NAME, VECS)                                                                   \
  static inline void NAME(float16 *restrict acc, const float *restrict alpha,                      \
                          const float *restrict p, const float16 *restrict v, int num_keys) {      \
    float16 o[OUT_ROWS][VECS];                                                                     \
    UNROLL for (int r = 0; r < OUT_ROWS; r++) {                                                    \
      UNROLL for (int i = 0; i < VECS; i++) PREFETCH(acc + (OUT_ROWS + r) * DIM_VECS + i);         \
    }                                                                                              \
    UNROLL for (int r = 0; r < OUT_ROWS; r++) {                                                    \
      UNROLL for (int i = 0; i < VECS; i++) o[r][i] = (float16)(0.0f);                             \
    }                                                                                              \
    _Pragma("clang loop unroll_count(2)") for (int key = 0; key < num_keys; key++) {               \
      UNROLL for (int r = 0; r < OUT_ROWS; r++) {                                                  \
        const float16 pr = (float16)(p[key * ROWS + r]);                                           \
        UNROLL for (int i = 0; i < VECS; i++) o[r][i] = pr * v[key * VECS + i] + o[r][i];          \
      }                                                                                            \
    }                                                                                              \
    UNROLL for (int r = 0; r < OUT_ROWS; r++) {                                                    \
      UNROLL for (int i = 0; i < VECS; i++) acc[r * DIM_VECS + i] =                                \
          acc[r * DIM_VECS + i] * (float16)(alpha[r]) + o[r][i];                                   \
    }                                                                                              \
  }
DEFINE_WEIGH(weigh2, 2)
#if LAST_VECS > 0
DEFINE_WEIGH(weigh_last, LAST_VECS)
#endif

static inline void weigh_panel(rows *r, const block *b, int panel) {
  for (int dims = 0; dims <= NARROW_PANELS; dims++) {
    for (int row = 0; row < ROWS; row += OUT_ROWS) {
      if (panel * ROWS + row >= r->num_rows) break;
      float16 *acc = &r->acc[panel * ROWS + row][dims * 2];
      const float *alpha = (const float *)r->alpha[panel] + row;
      const float *p = (const float *)r->s[panel][0] + row;
      const float16 *v = b->v + dims * 2 * BLOCK;
      if (dims < NARROW_PANELS) {
        weigh2(acc, alpha, p, v, b->num_keys);
      } else {
#if LAST_VECS > 0
        weigh_last(acc, alpha, p, v, b->num_keys);
#endif
      }
    }
  }
}

/* The same when values hold Inf or NaN: they meet only rows that give them weight. */
static inline void weigh_panel_guarded(rows *r, const block *b, int panel) {
  for (int row = 0; row < ROWS && panel * ROWS + row < r->num_rows; row++) {
    float16 *acc = r->acc[panel * ROWS + row];
    const float alpha = ((const float *)r->alpha[panel])[row];
    for (int i = 0; i < DIM_VECS; i++) acc[i] = acc[i] * alpha;
    for (int key = 0; key < b->num_keys; key++) {
      const float p = ((const float *)r->s[panel][key])[row];
      if (p == 0.0f) continue;
      for (int i = 0; i < DIM_VECS; i++) acc[i] = p * b->v[v_index(key, i)] + acc[i];
    }
  }
}

/* Queries of rows i .. i + LANES - 1, transposed, quantised and scaled; zeros past the last row. */
static inline void load_queries(rows *r, int i, int p0, int h, __global const kv_type *q,
                                const kvr_attend_args a) {
  const int quantised = a.q_inv_scale != 0.0f && a.q_inv_scale != 1.0f;
  __global const kv_type *from[LANES];
  for (int j = 0; j < LANES; j++) {
    const place w = place_of(p0 + min(i + j, r->num_rows - 1), h, a);
    from[j] = q + ((size_t)(a.q_row + w.row) * a.num_q_heads + w.head) * HEAD_DIM;
  }
  for (int v = 0; v < DIM_VECS; v++) {
    float16 x[LANES];
    UNROLL for (int j = 0; j < LANES; j++) {
      x[j] = v < WHOLE_VECS ? load16(from[j] + v * LANES) : load_tail(from[j] + v * LANES);
      if (quantised) x[j] = to_kv(x[j] * a.q_inv_scale);
      x[j] = i + j < r->num_rows ? x[j] * a.scale_log2 : (float16)(0.0f);
    }
    transpose(x);
    for (int d = 0; d < LANES && v * LANES + d < HEAD_DIM; d++)
      r->q[i / ROWS][v * LANES + d][i % ROWS / LANES] = x[d];
  }
}

/* m, l and acc of row i: carried, of a sink, or empty. */
static inline void load_state(rows *r, int i, place w, __global const float *state,
                              __global const float *sinks, const kvr_attend_args a) {
  __global const float *from = state + state_offset(w.row, a);
  __global const float *ml = from + (size_t)a.num_q_heads * HEAD_DIM + 2 * w.head;
  const int carried = a.carry_in && ml[0] != -INFINITY;
  const float sink = a.use_sinks && !a.carry_in ? sinks[w.head] * LOG2_E : -INFINITY;
  ((float *)r->m)[i] = carried ? ml[0] : sink;
  ((float *)r->l)[i] = carried ? ml[1] : sink == -INFINITY ? 0.0f : 1.0f;
  from += (size_t)w.head * HEAD_DIM;
  for (int v = 0; v < DIM_VECS; v++) r->acc[i][v] = (float16)(0.0f);
  if (!carried) return;
  for (int v = 0; v < WHOLE_VECS; v++) r->acc[i][v] = vload16(v, from);
  for (int d = WHOLE_VECS * LANES; d < HEAD_DIM; d++) ((float *)r->acc[i])[d] = from[d];
}

/* Fills the panels in use; rows past the last one are zero queries that are never stored. */
static inline void load_rows(rows *r, int p0, int h, __global const kv_type *q,
                             __global const float *state, __global const float *sinks,
                             const kvr_attend_args a) {
  const int total = a.num_rows * (a.num_q_heads / a.num_kv_heads);
  r->num_rows = min(ROW_TILE, total - p0);
  r->seen = no_limits();
  const int end = (r->num_rows + ROWS - 1) / ROWS * ROWS;
  for (int i = 0; i < end; i += LANES) load_queries(r, i, p0, h, q, a);
  for (int i = 0; i < r->num_rows; i++) {
    const place w = place_of(p0 + i, h, a);
    const sight seen = sight_of(w.row, a);
    add_sight(&r->seen, seen);
    ((int *)r->first)[i] = seen.first;
    ((int *)r->last)[i] = seen.last;
    load_state(r, i, w, state, sinks, a);
  }
  for (int i = r->num_rows; i < end; i++) {
    for (int v = 0; v < DIM_VECS; v++) r->acc[i][v] = (float16)(0.0f);
    ((int *)r->first)[i] = -INT_LAST;
    ((int *)r->last)[i] = INT_LAST - 1;
    ((float *)r->m)[i] = -INFINITY;
    ((float *)r->l)[i] = 0.0f;
  }
}

static inline void store_state(const rows *r, int i, place w, __global float *state,
                               const kvr_attend_args a) {
  __global float *to = state + state_offset(w.row, a);
  __global float *ml = to + (size_t)a.num_q_heads * HEAD_DIM + 2 * w.head;
  ml[0] = ((const float *)r->m)[i];
  ml[1] = ((const float *)r->l)[i];
  to += (size_t)w.head * HEAD_DIM;
  for (int v = 0; v < WHOLE_VECS; v++) vstore16(r->acc[i][v], v, to);
  for (int d = WHOLE_VECS * LANES; d < HEAD_DIM; d++) to[d] = ((const float *)r->acc[i])[d];
}

static inline void store_result(const rows *r, int i, place w, __global out_type *out,
                                __global float *lse, const kvr_attend_args a) {
  const size_t at = (size_t)(a.q_row + w.row) * a.num_q_heads + w.head;
  const float m = ((const float *)r->m)[i];
  const float l = ((const float *)r->l)[i];
  lse[at] = l == 0.0f ? -INFINITY : m * LN_2 + log(l);
  const float norm = l == 0.0f ? 1.0f : l;
  out += at * HEAD_DIM;
  for (int v = 0; v < WHOLE_VECS; v++) store16(r->acc[i][v] / norm * a.out_scale, out + v * LANES);
  for (int d = WHOLE_VECS * LANES; d < HEAD_DIM; d++)
    store1(((const float *)r->acc[i])[d] / norm * a.out_scale, out + d);
}

__attribute__((reqd_work_group_size(1, 1, 1))) __kernel void
kvr_attend(__global const kv_type *q, __global const kv_type *ring, __global const kv_type *cur,
           __global float *state, __global out_type *out, __global float *lse,
           __global const float *sinks, const kvr_attend_args a) {
  const int p0 = (int)get_group_id(0) * ROW_TILE;
  const int h = (int)get_group_id(1);
  if (p0 >= a.num_rows * (a.num_q_heads / a.num_kv_heads)) return; /* wider than its rows */
  rows r;
  block b;

  load_rows(&r, p0, h, q, state, sinks, a);

  span spans[3];
  find_spans(spans, r.seen, a);
  for (;;) {
    pack_block(&b, spans, h, ring, cur, a);
    if (b.num_keys == 0) break;
    ahead next = find_ahead(spans, h, r.num_rows, ring, cur, a);
    const int guarded = b.strange_v;
    for (int panel = 0; panel * ROWS < r.num_rows; panel++) {
      float16 top[ROW_VECS];
      UNROLL for (int i = 0; i < ROW_VECS; i++) top[i] = r.m[panel][i];
      score_panel(&r, &b, panel, a.soft_cap_log2, top, &next);
      softmax_panel(&r, &b, panel, top);
      if (guarded)
        weigh_panel_guarded(&r, &b, panel);
      else
        weigh_panel(&r, &b, panel);
    }
  }

  for (int i = 0; i < r.num_rows; i++) {
    const place w = place_of(p0 + i, h, a);
    if (a.finish)
      store_result(&r, i, w, out, lse, a);
    else
      store_state(&r, i, w, state, a);
  }
}

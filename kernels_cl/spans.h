/* What a tile of query rows sees of the keys of a launch, for kernels that own many rows.
 *
 * Packed row p of a KV head is token p / group, head h * group + p % group. Every key has a token
 * number (of a cached key: its position less L, below 0) and every row sees the tokens from its
 * first to its last. Keys come from up to three spans of the axis: ring, head run, tail run. */

#define UNROLL _Pragma("unroll")

/* A hint only: CPUs that run a work-item per core hide the way to the last-level cache with it. */
#if defined(__x86_64__) || defined(__aarch64__)
#define PREFETCH(p) __builtin_prefetch((const void *)(size_t)(p))
#else
#define PREFETCH(p)
#endif

/* Where packed row p of KV head h lives. */
typedef struct place {
  int row; /* of the launch */
  int head;
} place;

static inline place place_of(int p, int h, const kvr_attend_args a) {
  const int group = a.num_q_heads / a.num_kv_heads;
  place w = {p / group, h * group + p % group};
  return w;
}

/* Of a number that every row in use has. */
typedef struct range {
  int low;
  int high;
} range;

static inline void extend(range *r, int x) {
  r->low = min(r->low, x);
  r->high = max(r->high, x);
}

/* Tokens that a row sees. */
typedef struct sight {
  int first;
  int last;
} sight;

/* Not below -L, so that differences of tokens fit an int. */
static inline sight sight_of(int row, const kvr_attend_args a) {
  const int token = kvr_run_token(row, a.row_split, a.row_t0, a.row_t1);
  const sight s = {a.window == 0 ? -INT_LAST : max(token + 1 - a.window, -a.num_cached),
                   a.causal ? token : INT_LAST - 1};
  return s;
}

/* Limits of all rows of a tile: a key is masked for none of them, some or all. */
typedef struct limits {
  range firsts;
  range lasts;
} limits;

static inline limits no_limits(void) {
  const limits l = {{INT_LAST, -INT_LAST}, {INT_LAST, -INT_LAST}};
  return l;
}

static inline void add_sight(limits *l, sight s) {
  extend(&l->firsts, s.first);
  extend(&l->lasts, s.last);
}

/* Keys x in [begin, end) of the axis, token number `token` at begin. */
typedef struct span {
  int begin;
  int end;
  int token;
} span;

/* Token of the cached key at x. */
static inline int ring_token(int x, const kvr_attend_args a) {
  return a.window == 0 ? -INT_LAST : (int)(kvr_ring_position(x, a) - a.num_cached);
}

/* Where the K row of a key of span number s begins. */
static inline __global const kv_type *key_row(const span *spans, int s, int h,
                                              __global const kv_type *ring,
                                              __global const kv_type *cur,
                                              const kvr_attend_args a) {
  const int x = spans[s].begin;
  const size_t row = (size_t)(s == 0 ? a.ring_row + x : a.cur_row + x - a.ring_end);
  return (s == 0 ? ring : cur) + (row * a.num_kv_heads + h) * 2 * HEAD_DIM;
}

/* What the tile can see of the cached keys: positions rise with x, so the first is searched. */
static inline span ring_run(limits l, const kvr_attend_args a) {
  span s = {max(a.lower, 0), min(a.ring_end, a.kv_end), 0};
  if (a.window == 0) return s;
  for (int end = s.end; s.begin < end;) {
    const int middle = s.begin + (end - s.begin) / 2;
    if (ring_token(middle, a) < l.firsts.low)
      s.begin = middle + 1;
    else
      end = middle;
  }
  return s;
}

/* What the tile can see of the run of new keys u.. that starts at token `token`. */
static inline span key_run(limits l, int u, int end, int token, const kvr_attend_args a) {
  const int begin = a.ring_end + u;
  const int num_keys = max(end - begin, 0);
  const int seen = a.causal ? clamp(l.lasts.high - token + 1, 0, num_keys) : num_keys;
  const int unseen = a.window == 0 ? 0 : clamp(l.firsts.low - token, 0, num_keys);
  const int skip = max(max(a.lower, 0) - begin, unseen);
  const span s = {begin + skip, begin + seen, token + skip};
  return s;
}

static inline void find_spans(span spans[3], limits l, const kvr_attend_args a) {
  const int split = clamp(a.key_split, 0, INT_LAST - a.ring_end);
  const int head_end = min(a.kv_end, a.ring_end + split);
  spans[0] = ring_run(l, a);
  spans[1] = key_run(l, 0, head_end, a.key_t0, a);
  spans[2] = key_run(l, split, a.kv_end, a.key_t1 + split - a.key_split, a);
}

/* LANES rows become LANES columns: four rounds of zipping the first half with the second. */
static inline void transpose(float16 x[LANES]) {
  UNROLL for (int round = 0; round < 4; round++) {
    float16 y[LANES];
    UNROLL for (int i = 0; i < LANES / 2; i++) {
      y[2 * i].even = x[i].lo;
      y[2 * i].odd = x[i + LANES / 2].lo;
      y[2 * i + 1].even = x[i].hi;
      y[2 * i + 1].odd = x[i + LANES / 2].hi;
    }
    UNROLL for (int i = 0; i < LANES; i++) x[i] = y[i];
  }
}

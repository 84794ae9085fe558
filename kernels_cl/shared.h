/* kernels_cl/shared.h -- compiled by the host C compiler and by the OpenCL compiler, so that host
 * tests exercise the very masks and index maps the kernels run.
 * Rules: no #include, no pointers, only int and float; every field is 4 bytes, so no padding. */
#ifndef KVR_SHARED_H
#define KVR_SHARED_H

/* Scalars of one launch of kvr_attend.
 *
 * The launch walks a virtual KV axis x in [0, kv_end):
 *   x <  ring_end  row ring_row + x of the ring buffer: a cached token, always in the past
 *   x >= ring_end  row cur_row + u of the current buffer, u = x - ring_end, new token key_t(u)
 * Query row i in [0, num_rows) is row q_row + i of q and out, and row state_row + i of the state;
 * it is new token query_t(i). Both t maps have two runs: head chunk, then tail chunk.
 *
 * Positions matter to the sliding window only: a new token t lies at num_cached + t, the cached
 * token of ring row ring_row + x at kvr_key_position(key_local0 + x), below num_cached. */
typedef struct kvr_attend_args {
  int num_rows;
  int q_row;
  int state_row;
  int row_split; /* rows [0, row_split) start at row_t0, rows [row_split, num_rows) at row_t1 */
  int row_t0;
  int row_t1;
  int ring_row;
  int ring_end;
  int cur_row;
  int kv_end;
  int key_split; /* new keys u in [0, key_split) start at key_t0, the others at key_t1 */
  int key_t0;
  int key_t1;
  int lower;    /* x below are masked */
  int causal;   /* 0: every new token of the launch is visible */
  int carry_in; /* 0: start from the empty state, 1: load (m, l, acc) */
  int finish;   /* 0: store (m, l, acc), 1: store out = acc / l and LSE instead */
  int num_q_heads;
  int num_kv_heads;
  float scale_log2;    /* softmax scale times log2(e), and the q scale: scores are kept in base 2 */
  float soft_cap_log2; /* cap times log2(e): scores become cap tanh(score / cap); 0: none */
  float q_inv_scale; /* queries are multiplied, clipped and rounded to the KV dtype; 0 or 1: not */
  float out_scale;   /* of the values, applied to out: never 0 */
  int use_sinks;     /* carry_in 0: start from one more key that has the sink's score, no value */
  int window;        /* a row sees positions above its own less window; 0: all */
  int num_cached;    /* L */
  int key_local0;    /* local cache index of x = 0 */
  int interleave;
  int total_weight;  /* W; 0: the position is the local index */
  int weight;        /* w[r] of the rank that holds the cached keys */
  int weight_before; /* w[0] + .. + w[r-1] */
} kvr_attend_args;

/* Scalars of the row movers (stage, cache_write): cache rows are found through a block table. */
typedef struct kvr_rows_args {
  int num_rows;   /* rows to walk */
  int buffer_row; /* first row in the contiguous buffer (slot or new KV) */
  int local0;     /* stage: local cache index of row 0 */
  int page_size;
  int page_first; /* pages [page_first, page_first + page_count) live in this pool buffer */
  int page_count;
  int row_words; /* 16-bit words of a cache row */
  /* cache_write only: new token of row i, and who owns its position */
  int split, t0, t1; /* rows [0, split) are tokens t0.., the others t1.. */
  int num_cached;    /* L */
  int interleave;
  int total_weight;  /* W */
  int weight;        /* w[r] */
  int weight_before; /* w[0] + .. + w[r-1] */
} kvr_rows_args;

/* Scalars of the merges. */
typedef struct kvr_merge_args {
  int num_rows;
  int num_parts; /* merge_states: partial states, part j at row j * part_rows of parts */
  int part_rows;
  int state_row; /* first row of the own state */
  int out_row;
  int num_q_heads;
  float out_scale; /* applied to out: never 0 */
} kvr_merge_args;

/* New token of row (or key) i of a two-run map. */
static inline int kvr_run_token(int i, int split, int t0, int t1) {
  return i < split ? t0 + i : t1 + (i - split);
}

/* Local cache index of global position g on the rank with weight w after `before`, or -1 if another
 * rank owns it. Positions repeat in cycles of interleave * total tokens. */
static inline int kvr_local_index(int g, int interleave, int total, int w, int before) {
  /* A product beyond int means that one cycle covers every position. */
  const long cycle_len = (long)interleave * total;
  const long cycle = g / cycle_len;
  const long o = g % cycle_len - (long)interleave * before;
  const long run = (long)interleave * w;
  return o >= 0 && o < run ? (int)(cycle * run + o) : -1;
}

/* Global position of local cache index m on the rank with weight w after `before`; m itself if
 * total is 0. The inverse of kvr_local_index, and it rises with m. */
static inline long kvr_key_position(int m, int interleave, int total, int w, int before) {
  if (total == 0) return m;
  const long run = (long)interleave * w;
  const int cycle = m / (run < 0x7fffffff ? (int)run : 0x7fffffff); /* cheaper than in 64 bits */
  return cycle * ((long)interleave * total - run) + (long)interleave * before + m;
}

/* Position of the cached key at x < ring_end. */
static inline long kvr_ring_position(int x, kvr_attend_args a) {
  return kvr_key_position(a.key_local0 + x, a.interleave, a.total_weight, a.weight,
                          a.weight_before);
}

/* 1 if query row i may see virtual KV position x: a value, not a branch. */
static inline int kvr_visible(int i, int x, kvr_attend_args a) {
  const int in_ring = x < a.ring_end;
  const int key = kvr_run_token(x - a.ring_end, a.key_split, a.key_t0, a.key_t1);
  const int row = kvr_run_token(i, a.row_split, a.row_t0, a.row_t1);
  const long distance = row - (in_ring ? kvr_ring_position(x, a) - a.num_cached : key);
  const int inside = (a.window == 0) | (distance < a.window);
  return (x >= a.lower) & (x < a.kv_end) & (in_ring | (key <= row) | !a.causal) & inside;
}

#endif

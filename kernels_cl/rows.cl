/* kvr_stage, kvr_cache_write: whole cache rows between pages and contiguous buffers, bit for bit.
 *
 *   pool row of local index x:  (table[x / page_size] - page_first) * page_size + x % page_size
 *
 * A pool may be split over several buffers: a launch walks all rows and moves those whose page lies
 * in its buffer, pages [page_first, page_first + page_count). Table entries of no row are not read.
 *
 *   stage        local index local0 + i of the table's request -> row buffer_row + i of slot
 *   cache_write  row buffer_row + i of rows (new token t(i), global position num_cached + t(i))
 *                -> its place in the pool, where this rank owns the position
 *
 * NDRange of both: global (num_rows) or (num_rows, n), any local size. A row is cut into n parts,
 * one per work-item of dimension 1: n = 1 suits CPUs, n = 16..64 with local (1, n) suits GPUs. */

#define WORDS 16 /* 16-bit words of a wide copy */

/* Copies this work-item's part of a row. */
static inline void copy_row(__global const ushort *from, __global ushort *to, int words) {
  const int n = (int)get_global_size(1);
  const int part = (int)get_global_id(1);
  const int wide = words / WORDS;
  for (int i = part; i < wide; i += n) vstore16(vload16(i, from), i, to);
  for (int i = wide * WORDS + part; i < words; i += n) to[i] = from[i];
}

/* First word of the pool row of local index x, or -1 where its page is not in this buffer. */
static inline long pool_word(__global const int *table, int x, const kvr_rows_args a) {
  const int page = table[x / a.page_size] - a.page_first;
  if (page < 0 || page >= a.page_count) return -1;
  return ((long)page * a.page_size + x % a.page_size) * a.row_words;
}

__kernel void kvr_stage(__global const ushort *pool, __global const int *table,
                        __global ushort *slot, const kvr_rows_args a) {
  const int i = (int)get_global_id(0);
  if (i >= a.num_rows) return;
  const long from = pool_word(table, a.local0 + i, a);
  if (from < 0) return;
  copy_row(pool + from, slot + (size_t)(a.buffer_row + i) * a.row_words, a.row_words);
}

__kernel void kvr_cache_write(__global const ushort *rows, __global ushort *pool,
                              __global const int *table, const kvr_rows_args a) {
  const int i = (int)get_global_id(0);
  if (i >= a.num_rows) return;
  const int position = a.num_cached + kvr_run_token(i, a.split, a.t0, a.t1);
  const int x = kvr_local_index(position, a.interleave, a.total_weight, a.weight, a.weight_before);
  if (x < 0) return;
  const long to = pool_word(table, x, a);
  if (to < 0) return;
  copy_row(rows + (size_t)(a.buffer_row + i) * a.row_words, pool + to, a.row_words);
}

#include "schedule/footprint.h"

#include <stdint.h>

#include "base/arith.h"

kvr_bounds kvr_bounds_of(const kvr_problem *p, const kvr_layout *l, const kvr_options *options) {
  kvr_bounds b = {.num_ranks = l->num_ranks,
                  .new_tokens = l->num_tokens,
                  .tile = options->tile,
                  .slots = options->num_slots};
  for (int r = 0; r < l->num_ranks; r++) b.rows = kvr_max(b.rows, l->rank_rows[r]);
  for (int i = 0; i < l->num_requests; i++) {
    b.context = kvr_max(b.context, p->requests[i].num_cached);
    b.pass_rows = kvr_max(b.pass_rows, kvr_layout_most_rows(l, i));
    const int chunk = kvr_request_chunk(&p->requests[i], l->num_ranks);
    b.lane_rows = kvr_max(b.lane_rows, kvr_min(chunk, p->requests[i].num_new));
  }
  b.pass_rows = kvr_min(b.pass_rows, options->query_tile);
  b.lane_rows = kvr_min(b.lane_rows, b.pass_rows);
  return b;
}

int kvr_bounds_default_rows(int num_ranks, int max_new_tokens, int max_requests) {
  /* A request of n tokens gives a rank at most 2 ceil(n / 2P) rows, and no more than n. */
  const int64_t rows = 2 * (max_new_tokens / (2 * (int64_t)num_ranks) + max_requests);
  return rows < max_new_tokens ? (int)rows : max_new_tokens;
}

static int rows_of(kvr_buffer buffer, const kvr_bounds *b) {
  const int64_t gathered = (int64_t)b->num_ranks * b->pass_rows;
  const int all_rows = gathered < b->new_tokens ? (int)gathered : b->new_tokens;
  switch (buffer) {
  case KVR_BUF_SLOT: return b->tile;
  case KVR_BUF_CURRENT: return b->new_tokens;
  case KVR_BUF_GATHERED: return b->context;
  case KVR_BUF_Q_ALL:
  case KVR_BUF_PARTIAL: return all_rows;
  case KVR_BUF_RECEIVED: return gathered > INT32_MAX ? INT32_MAX : (int)gathered;
  case KVR_BUF_STATE: return b->pass_rows;
  case KVR_BUF_LANE_Q:
  case KVR_BUF_LANE_STATE: return b->lane_rows;
  case KVR_BUF_PART_OUT:
  case KVR_BUF_PART_LSE:
  case KVR_BUF_NEW:
  case KVR_BUF_Q:
  case KVR_BUF_OUT:
  case KVR_BUF_LSE: return b->rows;
  default: return 0;
  }
}

static int memories_of(kvr_buffer buffer, const kvr_bounds *b) {
  switch (buffer) {
  case KVR_BUF_SLOT: return b->slots;
  case KVR_BUF_LANE_Q:
  case KVR_BUF_LANE_STATE: return 4;
  case KVR_BUF_PART_OUT:
  case KVR_BUF_PART_LSE: return 2;
  default: return 1;
  }
}

kvr_footprint kvr_footprint_of(unsigned buffers, const kvr_bounds *bounds) {
  kvr_footprint f = {{0}, {0}};
  for (int b = 0; b < KVR_NUM_BUFFERS; b++) {
    if (!(buffers & (1u << b))) continue;
    f.rows[b] = rows_of((kvr_buffer)b, bounds);
    f.memories[b] = f.rows[b] > 0 ? memories_of((kvr_buffer)b, bounds) : 0;
  }
  return f;
}

void kvr_footprint_merge(kvr_footprint *into, const kvr_footprint *from) {
  for (int b = 0; b < KVR_NUM_BUFFERS; b++) {
    into->rows[b] = kvr_max(into->rows[b], from->rows[b]);
    into->memories[b] = kvr_max(into->memories[b], from->memories[b]);
  }
}

size_t kvr_footprint_buffer_bytes(const kvr_footprint *f, kvr_buffer buffer,
                                  const kvr_row_bytes *row_bytes) {
  const size_t rows = (size_t)f->memories[buffer] * (size_t)f->rows[buffer];
  return kvr_mul_sat(rows, kvr_buffer_row_bytes(row_bytes, buffer));
}

static size_t sum_of(const kvr_footprint *f, const kvr_row_bytes *row_bytes,
                     const kvr_buffer *buffers, size_t num) {
  size_t sum = 0;
  for (size_t i = 0; i < num; i++)
    sum = kvr_add_sat(sum, kvr_footprint_buffer_bytes(f, buffers[i], row_bytes));
  return sum;
}

size_t kvr_footprint_bytes(const kvr_footprint *f, const kvr_row_bytes *row_bytes) {
  size_t sum = 0;
  for (int b = 0; b < KVR_NUM_BUFFERS; b++)
    sum = kvr_add_sat(sum, kvr_footprint_buffer_bytes(f, (kvr_buffer)b, row_bytes));
  return sum;
}

size_t kvr_footprint_slot_bytes(const kvr_footprint *f, const kvr_row_bytes *row_bytes) {
  static const kvr_buffer buffers[] = {KVR_BUF_SLOT, KVR_BUF_LANE_Q, KVR_BUF_LANE_STATE};
  return sum_of(f, row_bytes, buffers, sizeof buffers / sizeof *buffers);
}

size_t kvr_footprint_state_bytes(const kvr_footprint *f, const kvr_row_bytes *row_bytes) {
  static const kvr_buffer buffers[] = {KVR_BUF_STATE, KVR_BUF_PARTIAL, KVR_BUF_RECEIVED,
                                       KVR_BUF_PART_OUT, KVR_BUF_PART_LSE};
  return sum_of(f, row_bytes, buffers, sizeof buffers / sizeof *buffers);
}

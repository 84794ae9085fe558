/* Footprint: rows of every buffer that steps of bounded size need. One function sizes a session's
 * buffers, feeds the memory gate, and answers what a step would need. */
#ifndef KVR_SCHEDULE_FOOTPRINT_H
#define KVR_SCHEDULE_FOOTPRINT_H

#include "schedule/schedule.h"

/* Bounds of a step; all in rows (tokens). */
typedef struct kvr_bounds {
  int num_ranks;
  int new_tokens; /* of all requests */
  int context;    /* longest cached length of one request */
  int rows;       /* query rows of one rank */
  int pass_rows;  /* query rows of one rank in one pass */
  int lane_rows;  /* query rows of one rank in one head or tail run of a pass */
  int tile;
  int slots;
} kvr_bounds;

/* Exactly what one step needs. */
kvr_bounds kvr_bounds_of(const kvr_problem *problem, const kvr_layout *layout,
                         const kvr_options *options);
/* Bounds of default chunks: max_new_tokens split over up to max_requests requests. */
int kvr_bounds_default_rows(int num_ranks, int max_new_tokens, int max_requests);

typedef struct kvr_footprint {
  int memories[KVR_NUM_BUFFERS]; /* separate memories of a buffer on a rank; 0: not used */
  int rows[KVR_NUM_BUFFERS];     /* rows of each */
} kvr_footprint;

/* buffers: bit b for kvr_buffer b, see kvr_strategy_buffers. */
kvr_footprint kvr_footprint_of(unsigned buffers, const kvr_bounds *bounds);
/* The larger of both in every buffer. */
void kvr_footprint_merge(kvr_footprint *into, const kvr_footprint *from);
/* Bytes of one buffer, and of all; SIZE_MAX where they cannot be counted. */
size_t kvr_footprint_buffer_bytes(const kvr_footprint *footprint, kvr_buffer buffer,
                                  const kvr_row_bytes *row_bytes);
size_t kvr_footprint_bytes(const kvr_footprint *footprint, const kvr_row_bytes *row_bytes);
/* Bytes of all slots; of (m, l, acc) in all places; for reports. */
size_t kvr_footprint_slot_bytes(const kvr_footprint *footprint, const kvr_row_bytes *row_bytes);
size_t kvr_footprint_state_bytes(const kvr_footprint *footprint, const kvr_row_bytes *row_bytes);

#endif

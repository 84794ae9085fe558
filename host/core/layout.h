/* Layout: which rank attends which new token, and which rank stores which position. Pure index
 * math.
 *
 * The S new tokens of a request are cut into 2 P chunks of C; rank r attends chunk r (its head) and
 * chunk 2 P - 1 - r (its tail), which balances causal work. Only real tokens become rows: a rank's
 * buffers hold, request after request, the head run and then the tail run, without padding. */
#ifndef KVR_CORE_LAYOUT_H
#define KVR_CORE_LAYOUT_H

#include "kvring/problem.h"

/* Rows of one rank and one request (or a slice of them): two runs of tokens. */
typedef struct kvr_rows {
  int first; /* first row in the rank's buffers */
  int num;
  int split; /* rows [0, split) are tokens t0.., rows [split, num) are tokens t1.. */
  int t0, t1;
} kvr_rows;

/* Everything that follows from a problem, computed once. */
typedef struct kvr_layout {
  int num_ranks, num_requests;
  int num_tokens; /* new tokens of all requests */
  int *token0;    /* (num_requests) first token of a request in token order */
  kvr_rows *rows; /* (num_requests, num_ranks) */
  int *share;     /* (num_requests, num_ranks) cached tokens per rank */
  int *rank_rows; /* (num_ranks) rows of a rank over all requests */
} kvr_layout;

/* The problem must be valid. Errors: KVR_E_OOM. */
kvr_status kvr_layout_init(const kvr_problem *problem, kvr_layout *layout);
void kvr_layout_fini(kvr_layout *layout);

static inline const kvr_rows *kvr_layout_rows(const kvr_layout *l, int request, int rank) {
  return &l->rows[request * l->num_ranks + rank];
}
static inline int kvr_layout_share(const kvr_layout *l, int request, int rank) {
  return l->share[request * l->num_ranks + rank];
}
/* Longest share of a request: it sizes the ring. */
int kvr_layout_longest_share(const kvr_layout *layout, int request);
/* Most rows that one rank has of a request. */
int kvr_layout_most_rows(const kvr_layout *layout, int request);

/* C of a request: as given, or the default. */
int kvr_request_chunk(const kvr_request *request, int num_ranks);

/* Rows [begin, end) of rows, clipped to what exists. */
kvr_rows kvr_rows_slice(kvr_rows rows, int begin, int end);
/* New token of row i. */
int kvr_rows_token(kvr_rows rows, int i);
/* One past the last token of the rows; 0 if there are none. */
int kvr_rows_token_end(kvr_rows rows);

/* Weight of a rank, the weights before it, and their sum. */
int kvr_map_weight(const kvr_cache_desc *cache, int rank);
int kvr_map_weight_before(const kvr_cache_desc *cache, int rank);
int kvr_map_total_weight(const kvr_cache_desc *cache);

#endif

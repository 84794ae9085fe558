/* What must come out, worked out from the definitions and without the library's helpers. */
#include <string.h>

#include "base/arith.h"
#include "cli/check.h"

int check_chunk(const check_case *c, int request) {
  const kvr_request *q = &c->requests[request];
  return q->chunk > 0 ? q->chunk : kvr_max(1, kvr_ceil_div(q->num_new, 2 * c->ranks));
}

int check_half_rows(const check_case *c, int request, int rank, int half) {
  const int chunk = check_chunk(c, request), part = half == 0 ? rank : 2 * c->ranks - 1 - rank;
  int num = 0;
  for (int t = part * chunk; t < (part + 1) * chunk && t < c->requests[request].num_new; t++) num++;
  return num;
}

int check_most_rows(const check_case *c, int request) {
  int most = 0;
  for (int r = 0; r < c->ranks; r++)
    most = kvr_max(most, check_half_rows(c, request, r, 0) + check_half_rows(c, request, r, 1));
  return most;
}

void check_walk_map(const check_case *c, int num, int *owner, int *local) {
  int held[CHECK_RANKS] = {0};
  int g = 0;
  while (g < num)
    for (int r = 0; r < c->ranks; r++)
      for (int i = 0; i < c->interleave * c->weights[r] && g < num; i++, g++) {
        owner[g] = r;
        local[g] = held[r]++;
      }
}

int check_share(const check_case *c, int num_tokens, int rank) {
  int held = 0, g = 0;
  while (g < num_tokens)
    for (int r = 0; r < c->ranks; r++)
      for (int i = 0; i < c->interleave * c->weights[r] && g < num_tokens; i++, g++)
        held += r == rank;
  return held;
}

/* ---- windows: blocks that nobody sees stay where they are ---- */

/* Lowest position that a new row of the request sees: the first row's. */
static int lowest_visible(const check_case *c, int request) {
  const int L = c->requests[request].num_cached;
  return c->window > 0 && c->window <= L ? L - c->window + 1 : 0;
}

/* First block, of any rank, that holds a cached position which some row sees; past all blocks if
 * there is none. */
static int first_block(const check_case *c, int request) {
  const int L = c->requests[request].num_cached, low = lowest_visible(c, request);
  int first = 0;
  for (int r = 0; r < c->ranks; r++)
    first = kvr_max(first, kvr_ceil_div(check_share(c, L, r), c->tile));
  for (int r = 0; r < c->ranks; r++)
    if (check_share(c, low, r) < check_share(c, L, r))
      first = kvr_min(first, check_share(c, low, r) / c->tile);
  return first;
}

bool check_skips_blocks(const check_case *c, int request) {
  return c->requests[request].num_new > 0 && first_block(c, request) > 0;
}

/* Cached tokens from a block on. */
static int64_t cached_from(const check_case *c, int request, int block) {
  int64_t sum = 0;
  for (int r = 0; r < c->ranks; r++)
    sum += kvr_max(0, check_share(c, c->requests[request].num_cached, r) - block * c->tile);
  return sum;
}

/* Tokens of the streams that travel under rotate-all: each rank's share, then its new rows. */
static int64_t stream_tokens(const check_case *c, int request) {
  const int L = c->requests[request].num_cached;
  int first = first_block(c, request), rows[CHECK_RANKS];
  for (int r = 0; r < c->ranks; r++) {
    rows[r] = check_half_rows(c, request, r, 0) + check_half_rows(c, request, r, 1);
    if (rows[r] > 0) first = kvr_min(first, check_share(c, L, r) / c->tile);
  }
  int64_t sum = 0;
  for (int r = 0; r < c->ranks; r++)
    sum += kvr_max(0, check_share(c, L, r) + rows[r] - first * c->tile);
  return sum;
}

/* ---- bytes ---- */

/* Sums over the requests of a step. */
typedef struct sums {
  int64_t new_tokens;     /* S */
  int64_t new_with_cache; /* S where L > 0 */
  int64_t cached;         /* visible L where S > 0 */
  int64_t passes_cached;  /* passes * visible L */
  int64_t passes_all;     /* passes * visible (L + S) */
} sums;

static sums add_up(const check_case *c) {
  sums s = {0};
  for (int i = 0; i < c->num_requests; i++) {
    const int S = c->requests[i].num_new, L = c->requests[i].num_cached;
    const int rows = check_most_rows(c, i);
    const int passes = c->query_tile > 0 ? kvr_ceil_div(rows, c->query_tile) : rows > 0;
    const int64_t visible = cached_from(c, i, first_block(c, i));
    s.new_tokens += S;
    s.new_with_cache += L > 0 ? S : 0;
    s.cached += S > 0 ? visible : 0;
    s.passes_cached += passes * visible;
    s.passes_all += passes * stream_tokens(c, i);
  }
  return s;
}

/* Bytes that all ranks send together (specification, section 6, summed over ranks: every block
 * visits the P - 1 ranks that do not own it). */
int64_t check_bytes(const check_case *c, const char *strategy) {
  const sums s = add_up(c);
  const int64_t others = c->ranks - 1, element = (int64_t)kvr_dtype_size(c->dtype);
  const int64_t kv = 2 * (int64_t)c->num_kv_heads * c->head_dim * element;
  const int64_t q = (int64_t)c->num_q_heads * c->head_dim * element;
  const int64_t state = (int64_t)c->num_q_heads * (c->head_dim + 2) * 4;
  const int64_t gather = others * s.new_tokens * kv;
  if (strcmp(strategy, "current-only") == 0) return gather;
  if (strcmp(strategy, "ring") == 0 || strcmp(strategy, "ring-two-launch") == 0)
    return gather + others * s.passes_cached * kv;
  if (strcmp(strategy, "gather-kv") == 0) return gather + others * s.cached * kv;
  if (strcmp(strategy, "gather-q") == 0) return gather + others * s.new_with_cache * (q + state);
  if (strcmp(strategy, "rotate-q") == 0)
    return gather + (others > 0 ? s.new_with_cache * (others * q + c->ranks * state) : 0);
  if (strcmp(strategy, "rotate-all") == 0) return others * s.passes_all * kv;
  return -1; /* a strategy whose formula is not known here */
}

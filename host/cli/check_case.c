/* Cases: a function of seed and index, so that a failure can be repeated alone. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/arith.h"
#include "cli/check.h"

typedef struct source {
  uint64_t state;
} source;

static int below(source *s, int num) {
  s->state += UINT64_C(0x9e3779b97f4a7c15);
  return (int)(cli_hash(s->state) % (uint64_t)num);
}

static int between(source *s, int low, int high) { return low + below(s, high - low + 1); }

#define PICK(s, ...)                                                                               \
  pick(s, (const int[]){__VA_ARGS__}, (int)(sizeof((int[]){__VA_ARGS__}) / sizeof(int)))
static int pick(source *s, const int *values, int num) { return values[below(s, num)]; }

/* Each combination of dtype, head dim and output dtype costs seconds of kernel builds on a new
 * machine, so there are few of them: 4 in a quick run, 14 in a full one. */
static void choose_kernel(source *s, bool quick, check_case *c) {
  static const int any_out[KVR_NUM_DTYPES] = {64, 20, 64}; /* head dims with every output type */
  const bool rare = below(s, 12) == 0, narrow = below(s, 2) == 0;
  if (c->dtype == KVR_F32)
    c->head_dim = quick ? PICK(s, 8, 64) : rare ? 128 : PICK(s, 8, 64);
  else if (c->dtype == KVR_F16)
    c->head_dim = quick ? 20 : rare ? 80 : 20;
  else
    c->head_dim = quick ? 59 : rare ? 256 : PICK(s, 59, 64);
  const bool may_be_narrow = c->head_dim == any_out[c->dtype];
  c->out_dtype = !quick && narrow && may_be_narrow ? (kvr_dtype)between(s, 1, 2) : KVR_F32;
  if (quick && c->dtype == KVR_BF16) c->out_dtype = KVR_BF16;
}

static void choose_map(source *s, check_case *c) {
  static const char *const maps[] = {"striped", "paged", "contiguous", "weighted", "blocks"};
  c->map = maps[below(s, 5)];
  for (int r = 0; r < c->ranks; r++) c->weights[r] = 1;
  c->interleave = 1;
  if (strcmp(c->map, "paged") == 0) c->interleave = c->page_size;
  if (strcmp(c->map, "blocks") == 0) c->interleave = between(s, 2, 9);
  if (strcmp(c->map, "weighted") != 0) return;
  c->interleave = PICK(s, 1, 1, c->page_size, 3);
  for (int r = 0; r < c->ranks; r++) c->weights[r] = between(s, 0, 3);
  c->weights[below(s, c->ranks)] = 2; /* not all 0 */
}

/* Cached tokens around the boundaries of ranks and blocks. */
static int choose_cached(source *s, const check_case *c) {
  const int P = c->ranks, block = c->tile * P;
  switch (below(s, 10)) {
  case 0: return PICK(s, 0, 1, P - 1, P, P + 1);
  case 1: return block - 1;
  case 2: return block;
  case 3: return block + 1;
  case 4: return 2 * block + PICK(s, 0, 1, P, block, block + 1);
  case 5: return 0;
  default: return between(s, 1, 3 * block + P);
  }
}

/* New tokens around the boundaries of the head and tail chunks. */
static void choose_new(source *s, const check_case *c, kvr_request *q) {
  const int P = c->ranks, chunk = between(s, 1, 6), any = between(s, 1, 2 * P * chunk);
  q->num_new = PICK(s, 1, chunk - 1, chunk, chunk + 1, P * chunk, P * chunk + 1, 2 * P * chunk - 1,
                    2 * P * chunk, any, any);
  if (q->num_new < 0) q->num_new = 0;
  /* Half of the time the caller's chunk, which may be larger than needed: empty tails, short heads.
   */
  q->chunk = below(s, 2) == 0 && 2 * P * chunk >= q->num_new ? chunk : 0;
}

static void choose_requests(source *s, check_case *c) {
  c->num_requests = PICK(s, 1, 1, 1, 2, 3);
  for (int i = 0; i < c->num_requests; i++) {
    kvr_request *q = &c->requests[i];
    q->num_cached = choose_cached(s, c);
    choose_new(s, c, q);
    if (c->num_requests > 1 && below(s, 6) == 0) q->num_new = 0;
  }
  if (c->index % 11 == 0) /* first chunks of prompts, which current-only can serve */
    for (int i = 0; i < c->num_requests; i++) c->requests[i].num_cached = 0;
}

/* Blocks of many keys, launches of many rows: more than one tile of any kernel. */
static void choose_large(source *s, check_case *c) {
  c->large = true;
  c->head_dim = c->dtype == KVR_F16 ? 20 : 64;
  c->tile = PICK(s, 32, 100, 128, 256);
  c->query_tile = PICK(s, 0, 0, 40, 64);
  c->page_size = PICK(s, 1, 16, 16, 64);
  c->num_kv_heads = PICK(s, 1, 2);
  c->num_q_heads = c->num_kv_heads * PICK(s, 1, 4, 8);
  c->num_requests = PICK(s, 1, 1, 2);
  for (int i = 0; i < c->num_requests; i++) {
    kvr_request *q = &c->requests[i];
    const int cached = between(s, 1, 4 * c->tile * c->ranks);
    q->num_cached = below(s, 4) == 0 ? 0 : kvr_min(1500, cached);
    q->num_new = between(s, 1, PICK(s, 40, 400));
    q->chunk = 0;
  }
}

/* A prefill in chunks; requests may be done early, or start late. */
static void choose_steps(source *s, check_case *c) {
  c->num_steps = below(s, 5) == 0 ? between(s, 2, CHECK_STEPS) : 1;
  for (int i = 0; i < c->num_requests; i++) {
    const int num = c->requests[i].num_new;
    for (int k = 0; k + 1 < c->num_steps; k++) {
      const int done = check_step_done(c, i, k);
      c->ends[k][i] = kvr_min(num, done + between(s, 0, kvr_ceil_div(2 * num, c->num_steps)));
    }
    c->ends[c->num_steps - 1][i] = num;
  }
}

static int longest_request(const check_case *c) {
  int most = 1;
  for (int i = 0; i < c->num_requests; i++)
    most = kvr_max(most, c->requests[i].num_cached + c->requests[i].num_new);
  return most;
}

/* Around rows, blocks, and all that there is. */
static int choose_window(source *s, const check_case *c) {
  const kvr_request *q = &c->requests[below(s, c->num_requests)];
  const int L = q->num_cached, all = L + q->num_new, block = c->tile * c->ranks;
  const int any = between(s, 1, all + 1);
  const int window = PICK(s, 1, 1, 2, c->tile - 1, c->tile, c->tile + 1, block - 1, block,
                          block + 1, L, L + 1, all - 1, all, all + 1, 1 << 30, any, any);
  return kvr_max(1, window);
}

static void choose_masks(source *s, check_case *c) {
  static const float q_scales[] = {0.3f, 0.75f, 2, -1.25f, 1e-5f}, others[] = {0.5f, 2, 1, -1.5f};
  static const float caps[] = {1, 5, 20, 50};
  const bool any = below(s, 8) >= 3;
  c->window = any && below(s, 3) > 0 ? choose_window(s, c) : 0;
  c->sinks = any && below(s, 3) == 0;
  c->soft_cap = any && below(s, 3) == 0 ? caps[below(s, 4)] : 0;
  c->q_scale = any && below(s, 4) == 0 ? q_scales[below(s, 5)] : 0;
  c->k_scale = any && below(s, 4) == 0 ? others[below(s, 4)] : 0;
  c->v_scale = any && below(s, 4) == 0 ? others[below(s, 4)] : 0;
}

void check_case_generate(uint64_t seed, int index, bool quick, check_case *out) {
  static const int ranks[] = {1, 2, 3, 4, 5, 7, 8};
  source s = {cli_hash(seed * 2 + 1) + cli_hash((uint64_t)index + 17)};
  check_case c = {.seed = seed, .index = index, .ranks = ranks[index % 7]};
  c.dtype = (kvr_dtype)(index / 7 % 3);
  choose_kernel(&s, quick, &c);
  c.num_kv_heads = PICK(&s, 1, 2, 2, 3);
  c.num_q_heads = c.num_kv_heads * PICK(&s, 1, 2, 4, 5);
  c.copy_queue = below(&s, 2) == 0;
  c.rank_order = below(&s, 4) == 0;
  c.page_size = PICK(&s, 1, 2, 3, 4, 7, 16);
  c.spare_pages = between(&s, 0, 5);
  c.tile = PICK(&s, 3, 4, 5, 8, 8, 16);
  c.query_tile = PICK(&s, 0, 0, 0, 2, 3, 5);
  c.slots = PICK(&s, 2, 2, 2, 3, 4);
  c.causal = below(&s, 8) != 0;
  choose_requests(&s, &c);
  if (!quick && below(&s, 16) == 0) choose_large(&s, &c);
  choose_steps(&s, &c);
  choose_masks(&s, &c);
  choose_map(&s, &c);
  if (strcmp(c.map, "contiguous") == 0) c.interleave = kvr_ceil_div(longest_request(&c), c.ranks);
  c.bf16_math = c.dtype == KVR_BF16 && below(&s, 2) == 0;
  *out = c;
}

/* ---- in words ---- */

typedef struct text {
  char *to;
  size_t size;
} text;

__attribute__((format(printf, 2, 3))) static void say(text *t, const char *format, ...) {
  va_list args;
  va_start(args, format);
  const int len = vsnprintf(t->to, t->size, format, args);
  va_end(args);
  const size_t used = len < 0 ? 0 : (size_t)len < t->size ? (size_t)len : t->size - 1;
  t->to += used;
  t->size -= used;
}

static void say_requests(const check_case *c, text *t) {
  for (int i = 0; i < c->num_requests; i++) {
    say(t, "%s%d:%d", i > 0 ? "," : "", c->requests[i].num_new, c->requests[i].num_cached);
    if (c->requests[i].chunk > 0) say(t, "/C%d", c->requests[i].chunk);
    for (int k = 0; k + 1 < c->num_steps; k++) say(t, "%s%d", k > 0 ? "+" : "@", c->ends[k][i]);
  }
}

static void say_masks(const check_case *c, text *t) {
  if (c->bf16_math) say(t, " math auto");
  if (!c->causal) say(t, " not causal");
  if (c->window > 0) say(t, " window %d", c->window);
  if (c->soft_cap > 0) say(t, " cap %g", (double)c->soft_cap);
  if (c->sinks) say(t, " sinks");
  if (c->q_scale != 0) say(t, " q-scale %g", (double)c->q_scale);
  if (c->k_scale != 0) say(t, " k-scale %g", (double)c->k_scale);
  if (c->v_scale != 0) say(t, " v-scale %g", (double)c->v_scale);
}

void check_case_describe(const check_case *c, char *to, size_t size) {
  text t = {to, size};
  say(&t, "P=%d requests ", c->ranks);
  say_requests(c, &t);
  say(&t, " map %s I=%d page %d tile %d query-tile %d slots %d %s->%s %dx%d heads of %d", c->map,
      c->interleave, c->page_size, c->tile, c->query_tile, c->slots, kvr_dtype_name(c->dtype),
      kvr_dtype_name(c->out_dtype), c->num_q_heads, c->num_kv_heads, c->head_dim);
  say_masks(c, &t);
  say(&t, "%s%s", c->copy_queue ? " copy-queue" : "", c->rank_order ? " rank-order" : "");
}

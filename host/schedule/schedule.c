#include "schedule/schedule.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"

const char *kvr_op_name(kvr_op_kind kind) {
#define NAME(name, text, moves) text,
  static const char *const names[] = {KVR_OP_LIST(NAME)};
#undef NAME
  return (unsigned)kind < KVR_NUM_OPS ? names[kind] : "?";
}

const char *kvr_buffer_name(kvr_buffer buffer) {
#define NAME(name, unit) #name,
  static const char *const names[] = {KVR_BUFFER_LIST(NAME)};
#undef NAME
  return (unsigned)buffer < KVR_NUM_BUFFERS ? names[buffer] : "?";
}

/* ---- row sizes ---- */

kvr_row_bytes kvr_problem_row_bytes(const kvr_problem *p) {
  const size_t D = (size_t)p->cache.head_dim, NQ = (size_t)p->num_q_heads;
  const size_t element = kvr_dtype_size(p->cache.dtype);
  return (kvr_row_bytes){.kv = 2 * (size_t)p->cache.num_kv_heads * D * element,
                         .q = NQ * D * element,
                         .state = NQ * (D + 2) * sizeof(float),
                         .out = NQ * D * kvr_dtype_size(p->out_dtype),
                         .f32_out = NQ * D * sizeof(float),
                         .lse = NQ * sizeof(float)};
}

typedef enum unit {
  UNIT_NOTHING,
  UNIT_KV,
  UNIT_Q,
  UNIT_STATE,
  UNIT_OUT,
  UNIT_F32_OUT,
  UNIT_LSE
} unit;

size_t kvr_buffer_row_bytes(const kvr_row_bytes *row_bytes, kvr_buffer buffer) {
#define UNIT(name, unit) UNIT_##unit,
  static const unit units[KVR_NUM_BUFFERS] = {KVR_BUFFER_LIST(UNIT)};
#undef UNIT
  switch (units[buffer]) {
  case UNIT_KV: return row_bytes->kv;
  case UNIT_Q: return row_bytes->q;
  case UNIT_STATE: return row_bytes->state;
  case UNIT_OUT: return row_bytes->out;
  case UNIT_F32_OUT: return row_bytes->f32_out;
  case UNIT_LSE: return row_bytes->lse;
  case UNIT_NOTHING: return 0;
  }
  return 0;
}

/* ---- resources ---- */

static int num_pieces(const kvr_schedule *s, kvr_buffer buffer) {
  const int P = s->problem.cache.num_ranks;
  switch (buffer) {
  case KVR_BUF_NONE: return 0;
  case KVR_BUF_CACHE: return s->problem.num_requests;
  case KVR_BUF_SLOT: return s->options.num_slots;
  case KVR_BUF_CURRENT:
  case KVR_BUF_GATHERED:
  case KVR_BUF_Q_ALL:
  case KVR_BUF_PARTIAL:
  case KVR_BUF_RECEIVED:
  case KVR_BUF_LINK: return P;
  case KVR_BUF_STATE:
  case KVR_BUF_PART_OUT:
  case KVR_BUF_PART_LSE: return 2;
  case KVR_BUF_LANE_Q:
  case KVR_BUF_LANE_STATE: return 4;
  default: return 1;
  }
}

static void number_resources(kvr_schedule *s) {
  for (int b = 0; b < KVR_NUM_BUFFERS; b++) {
    s->pieces[b] = num_pieces(s, (kvr_buffer)b);
    s->resource0[b] = s->num_resources;
    s->num_resources += s->pieces[b] * s->problem.cache.num_ranks;
  }
}

int kvr_schedule_max_accesses(const kvr_schedule *s) {
  int most = 1;
  for (int b = 0; b < KVR_NUM_BUFFERS; b++) most = kvr_max(most, s->pieces[b]);
  return 6 * most;
}

static int add_access(const kvr_schedule *s, kvr_ref ref, bool write, kvr_access *out, int n) {
  if (ref.buffer == KVR_BUF_NONE) return n;
  const int pieces = s->pieces[ref.buffer];
  const int base = s->resource0[ref.buffer] + ref.rank * pieces;
  const int begin = ref.index == KVR_ALL ? 0 : ref.index;
  const int end = ref.index == KVR_ALL ? pieces : ref.index + 1;
  for (int i = begin; i < end; i++) out[n++] = (kvr_access){base + i, write};
  return n;
}

int kvr_op_accesses(const kvr_schedule *s, const kvr_op *op, kvr_access *out) {
  int n = add_access(s, op->src, false, out, 0);
  n = add_access(s, op->q, false, out, n);
  n = add_access(s, op->cur, false, out, n);
  /* The state is carried: a launch updates it in place, a merge only reads it. */
  n = add_access(s, op->state, op->kind == KVR_OP_ATTEND, out, n);
  n = add_access(s, op->dst, true, out, n);
  if (op->peer >= 0) {
    const kvr_ref link = {KVR_BUF_LINK, op->rank, op->peer, 0, 0};
    n = add_access(s, link, true, out, n);
  }
  return n;
}

/* ---- creation ---- */

static kvr_status out_of_memory(void) {
  return kvr_fail(KVR_E_OOM, "no host memory for the schedule");
}

/* The schedule outlives the caller's arrays. */
static kvr_status copy_problem(kvr_schedule *s, const kvr_problem *p) {
  s->problem = *p;
  s->problem.requests = NULL;
  s->problem.cache.weights = NULL;
  s->problem.sinks = NULL;
  if (p->num_requests > 0) {
    const size_t size = (size_t)p->num_requests * sizeof *p->requests;
    kvr_request *requests = malloc(size);
    if (requests == NULL) return out_of_memory();
    memcpy(requests, p->requests, size);
    s->problem.requests = requests;
  }
  if (p->cache.weights != NULL) {
    const size_t size = (size_t)p->cache.num_ranks * sizeof *p->cache.weights;
    int *weights = malloc(size);
    if (weights == NULL) return out_of_memory();
    memcpy(weights, p->cache.weights, size);
    s->problem.cache.weights = weights;
  }
  if (p->sinks != NULL) {
    const size_t size = (size_t)p->num_q_heads * sizeof *p->sinks;
    float *sinks = malloc(size);
    if (sinks == NULL) return out_of_memory();
    memcpy(sinks, p->sinks, size);
    s->problem.sinks = sinks;
  }
  return KVR_OK;
}

static int find_first_block(const kvr_schedule *s, int request) {
  const int lowest = kvr_schedule_first_position(s, request, 0);
  int block = s->num_blocks[request];
  for (int r = 0; r < s->layout.num_ranks; r++) {
    const int below = kvr_map_count(&s->problem.cache, lowest, r);
    if (below < kvr_layout_share(&s->layout, request, r))
      block = kvr_min(block, below / s->options.tile);
  }
  return block;
}

static kvr_status count_blocks(kvr_schedule *s) {
  const size_t R = (size_t)s->problem.num_requests;
  s->num_blocks = calloc(R + 1, sizeof *s->num_blocks);
  s->first_block = calloc(R + 1, sizeof *s->first_block);
  if (s->num_blocks == NULL || s->first_block == NULL) return out_of_memory();
  for (int i = 0; s->problem.requests != NULL && i < s->problem.num_requests; i++) {
    s->num_blocks[i] = kvr_ceil_div(kvr_layout_longest_share(&s->layout, i), s->options.tile);
    s->first_block[i] = find_first_block(s, i);
  }
  return KVR_OK;
}

static kvr_status init(kvr_schedule *s, const kvr_problem *problem, const kvr_options *options) {
  KVR_TRY(copy_problem(s, problem));
  s->options = *options;
  s->strategy = "?";
  s->row_bytes = kvr_problem_row_bytes(problem);
  s->new_kv = KVR_BUF_CURRENT;
  KVR_TRY(kvr_layout_init(&s->problem, &s->layout));
  KVR_TRY(count_blocks(s));
  number_resources(s);
  s->ledger = calloc((size_t)s->num_resources + 1, sizeof *s->ledger);
  s->scratch = calloc((size_t)kvr_schedule_max_accesses(s), sizeof *s->scratch);
  if (s->ledger == NULL || s->scratch == NULL) return out_of_memory();
  for (int i = 0; i < s->num_resources; i++) s->ledger[i].writer = -1;
  return KVR_OK;
}

kvr_status kvr_schedule_create(const kvr_problem *problem, const kvr_options *options,
                               kvr_schedule **out) {
  kvr_schedule *s = calloc(1, sizeof *s);
  if (s == NULL) return out_of_memory();
  const kvr_status status = init(s, problem, options);
  if (status != KVR_OK) {
    kvr_schedule_destroy(s);
    return status;
  }
  *out = s;
  return KVR_OK;
}

void kvr_schedule_destroy(kvr_schedule *s) {
  if (s == NULL) return;
  for (int i = 0; s->ledger != NULL && i < s->num_resources; i++) free(s->ledger[i].readers);
  free(s->ledger);
  free(s->scratch);
  free(s->ops);
  free(s->deps);
  free(s->marks);
  free(s->num_blocks);
  free(s->first_block);
  kvr_layout_fini(&s->layout);
  free((void *)(uintptr_t)s->problem.requests);
  free((void *)(uintptr_t)s->problem.cache.weights);
  free((void *)(uintptr_t)s->problem.sinks);
  free(s);
}

/* ---- appending ---- */

/* Doubles *items until it holds `need` of `size` bytes each. */
static kvr_status grow(void **items, int *capacity, int need, size_t size) {
  if (need <= *capacity) return KVR_OK;
  int larger = *capacity < 64 ? 64 : *capacity;
  while (larger < need) larger = larger > INT_MAX / 2 ? need : 2 * larger;
  void *moved = realloc(*items, (size_t)larger * size);
  if (moved == NULL) return out_of_memory();
  *items = moved;
  *capacity = larger;
  return KVR_OK;
}

static kvr_status add_dep(kvr_schedule *s, kvr_op *op, int on) {
  if (on < 0 || on == s->num_ops || s->marks[on] == s->num_ops + 1) return KVR_OK;
  s->marks[on] = s->num_ops + 1;
  KVR_TRY(grow((void **)&s->deps, &s->cap_deps, s->num_deps + 1, sizeof *s->deps));
  s->deps[s->num_deps++] = on;
  op->num_deps++;
  return KVR_OK;
}

static bool is_link(const kvr_schedule *s, int resource) {
  return resource >= s->resource0[KVR_BUF_LINK];
}

static kvr_status derive_deps(kvr_schedule *s, kvr_op *op, const kvr_access *accesses, int n) {
  for (int a = 0; a < n; a++) {
    const kvr_ledger_entry *e = &s->ledger[accesses[a].resource];
    const unsigned rule = is_link(s, accesses[a].resource) ? KVR_DROP_LINK
                          : accesses[a].write              ? KVR_DROP_WRITE_AFTER_WRITE
                                                           : KVR_DROP_READ_AFTER_WRITE;
    if (!(s->drop & rule)) KVR_TRY(add_dep(s, op, e->writer));
    if (!accesses[a].write || (s->drop & KVR_DROP_WRITE_AFTER_READ)) continue;
    for (int i = 0; i < e->num_readers; i++) KVR_TRY(add_dep(s, op, e->readers[i]));
  }
  return KVR_OK;
}

static kvr_status register_accesses(kvr_schedule *s, const kvr_access *accesses, int n) {
  for (int a = 0; a < n; a++) {
    kvr_ledger_entry *e = &s->ledger[accesses[a].resource];
    if (accesses[a].write) {
      e->writer = s->num_ops;
      e->num_readers = 0;
      continue;
    }
    KVR_TRY(grow((void **)&e->readers, &e->cap_readers, e->num_readers + 1, sizeof *e->readers));
    e->readers[e->num_readers++] = s->num_ops;
  }
  return KVR_OK;
}

static int64_t state_traffic(const kvr_schedule *s, const kvr_op *op) {
  const kvr_row_bytes *b = &s->row_bytes;
  const size_t out = op->dst.buffer == KVR_BUF_PART_OUT ? b->f32_out : b->out;
  size_t per_row = 0;
  if (op->kind == KVR_OP_ATTEND)
    per_row = (op->attend.carry_in ? b->state : 0) + (op->attend.finish ? out + b->lse : b->state);
  else if (op->kind == KVR_OP_MERGE_STATES)
    per_row = b->state * (op->src.buffer == KVR_BUF_NONE ? 1 : 1 + (size_t)s->layout.num_ranks) +
              out + b->lse;
  else if (op->kind == KVR_OP_MERGE_OUTPUTS)
    per_row = 2 * (b->f32_out + b->lse) + out + b->lse;
  const int rows = op->kind == KVR_OP_ATTEND ? op->attend.num_rows : op->dst.rows;
  return op->launch ? (int64_t)per_row * rows : 0;
}

kvr_status kvr_schedule_append(kvr_schedule *s, const kvr_op *given) {
  kvr_op op = *given;
  if (s->num_ops == KVR_MAX_OPS)
    return kvr_fail(KVR_E_RANGE,
                    "the step takes more than %d ops: use a larger tile, or fewer tokens",
                    KVR_MAX_OPS);
  KVR_TRY(grow((void **)&s->ops, &s->cap_ops, s->num_ops + 1, sizeof *s->ops));
  KVR_TRY(grow((void **)&s->marks, &s->cap_marks, s->num_ops + 1, sizeof *s->marks));
  s->marks[s->num_ops] = 0;
  op.first_dep = s->num_deps;
  op.num_deps = 0;
  op.bytes =
      op.peer >= 0 ? (int64_t)kvr_buffer_row_bytes(&s->row_bytes, op.dst.buffer) * op.dst.rows : 0;
  op.state_bytes = state_traffic(s, &op);
  const int n = kvr_op_accesses(s, &op, s->scratch);
  KVR_TRY(derive_deps(s, &op, s->scratch, n));
  KVR_TRY(register_accesses(s, s->scratch, n));
  s->ops[s->num_ops++] = op;
  return KVR_OK;
}

/* ---- questions ---- */

int kvr_schedule_num_passes(const kvr_schedule *s, int request) {
  return kvr_ceil_div(kvr_layout_most_rows(&s->layout, request), s->options.query_tile);
}

kvr_rows kvr_schedule_pass_rows(const kvr_schedule *s, int request, int pass, int rank) {
  const kvr_rows rows = *kvr_layout_rows(&s->layout, request, rank);
  const int64_t begin = (int64_t)pass * s->options.query_tile;
  const int64_t end = begin + s->options.query_tile;
  return kvr_rows_slice(rows, (int)(begin < rows.num ? begin : rows.num),
                        (int)(end < rows.num ? end : rows.num));
}

int kvr_schedule_num_blocks(const kvr_schedule *s, int request) { return s->num_blocks[request]; }

int kvr_schedule_first_position(const kvr_schedule *s, int request, int token) {
  if (s->problem.window == 0) return 0;
  const int64_t first =
      (int64_t)s->problem.requests[request].num_cached + token - s->problem.window + 1;
  return first > 0 ? (int)first : 0;
}

int kvr_schedule_first_block(const kvr_schedule *s, int request) { return s->first_block[request]; }

int kvr_schedule_block_len(const kvr_schedule *s, int request, int rank, int block) {
  const int64_t left =
      kvr_layout_share(&s->layout, request, rank) - (int64_t)block * s->options.tile;
  return left <= 0 ? 0 : left < s->options.tile ? (int)left : s->options.tile;
}

kvr_totals kvr_schedule_totals(const kvr_schedule *s) {
  kvr_totals t = {0};
  for (int i = 0; i < s->num_ops; i++) {
    const kvr_op *op = &s->ops[i];
    t.bytes_moved += op->bytes;
    t.state_bytes += op->state_bytes;
    t.launches += op->launch && (op->kind == KVR_OP_ATTEND || op->kind == KVR_OP_MERGE_STATES ||
                                 op->kind == KVR_OP_MERGE_OUTPUTS);
  }
  return t;
}

kvr_trace_record kvr_op_record(const kvr_schedule *s, int i) {
  const kvr_op *op = &s->ops[i];
  const bool travels = op->dst.buffer == KVR_BUF_SLOT || op->dst.buffer == KVR_BUF_LANE_Q ||
                       op->dst.buffer == KVR_BUF_LANE_STATE;
  return (kvr_trace_record){.op = i,
                            .kind = (int)op->kind,
                            .rank = op->rank,
                            .peer = op->peer,
                            .request = op->request,
                            .pass = op->pass,
                            .block = op->block,
                            .step = op->step,
                            .slot = travels ? op->dst.index : -1,
                            .launched = op->launch,
                            .bytes = op->bytes,
                            .state_bytes = op->state_bytes};
}

#include "ref/exec_host.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "core/validate.h"

typedef struct host_exec {
  const kvr_schedule *s;
  const kvr_host_io *io;
  int rows[KVR_NUM_BUFFERS];        /* of one memory */
  double **memory[KVR_NUM_BUFFERS]; /* (ranks, pieces) */
} host_exec;

static size_t width(const host_exec *x, kvr_buffer buffer) {
  const kvr_problem *p = &x->s->problem;
  const size_t D = (size_t)p->cache.head_dim, NQ = (size_t)p->num_q_heads;
  switch (buffer) {
  case KVR_BUF_SLOT:
  case KVR_BUF_CURRENT:
  case KVR_BUF_NEW:
  case KVR_BUF_GATHERED: return 2 * (size_t)p->cache.num_kv_heads * D;
  case KVR_BUF_STATE:
  case KVR_BUF_PARTIAL:
  case KVR_BUF_RECEIVED:
  case KVR_BUF_LANE_STATE: return NQ * (D + 2);
  case KVR_BUF_LSE:
  case KVR_BUF_PART_LSE: return NQ;
  default: return NQ * D;
  }
}

static double *row_at(const host_exec *x, kvr_buffer buffer, int rank, int memory, int row) {
  return x->memory[buffer][rank * x->s->pieces[buffer] + memory] + (size_t)row * width(x, buffer);
}

static double *ref_at(const host_exec *x, kvr_ref ref) {
  return row_at(x, ref.buffer, ref.rank, kvr_ref_memory(ref), ref.row);
}

/* ---- memory ---- */

static void need(host_exec *x, kvr_ref ref) {
  x->rows[ref.buffer] = kvr_max(x->rows[ref.buffer], ref.row + ref.rows);
}

static void measure(host_exec *x) {
  for (int i = 0; i < x->s->num_ops; i++) {
    const kvr_op *op = &x->s->ops[i];
    need(x, op->src);
    need(x, op->dst);
    need(x, op->q);
    need(x, op->cur);
    need(x, op->state);
  }
  x->rows[x->s->new_kv] = kvr_max(x->rows[x->s->new_kv], x->s->layout.num_tokens);
  x->rows[KVR_BUF_LSE] = x->rows[KVR_BUF_OUT];
  x->rows[KVR_BUF_PART_LSE] = x->rows[KVR_BUF_PART_OUT];
}

static int memories(const host_exec *x, int buffer) {
  if (buffer == KVR_BUF_CACHE || buffer == KVR_BUF_LINK || buffer == KVR_BUF_NONE) return 0;
  return x->s->layout.num_ranks * x->s->pieces[buffer];
}

static kvr_status allocate(host_exec *x) {
  measure(x);
  for (int b = 0; b < KVR_NUM_BUFFERS; b++) {
    const int n = memories(x, b);
    if (n == 0) continue;
    x->memory[b] = calloc((size_t)n, sizeof *x->memory[b]);
    if (x->memory[b] == NULL) return kvr_fail(KVR_E_OOM, "no host memory for the reference run");
    for (int i = 0; i < n; i++) {
      const size_t count = (size_t)x->rows[b] * width(x, (kvr_buffer)b);
      x->memory[b][i] = malloc((count + 1) * sizeof(double));
      if (x->memory[b][i] == NULL)
        return kvr_fail(KVR_E_OOM, "no host memory for the reference run");
      for (size_t j = 0; j < count; j++)
        x->memory[b][i][j] = (double)NAN; /* unwritten rows must not matter */
    }
  }
  return KVR_OK;
}

static void release(host_exec *x) {
  for (int b = 0; b < KVR_NUM_BUFFERS; b++) {
    for (int i = 0; x->memory[b] != NULL && i < memories(x, b); i++) free(x->memory[b][i]);
    free(x->memory[b]);
  }
}

/* ---- inputs and outputs ---- */

static void load_kv_row(const host_exec *x, int token, double *row) {
  const int NKV = x->s->problem.cache.num_kv_heads;
  const size_t D = (size_t)x->s->problem.cache.head_dim;
  for (int h = 0; h < NKV; h++) {
    const size_t at = ((size_t)token * (size_t)NKV + (size_t)h) * D;
    memcpy(row + 2 * (size_t)h * D, x->io->k + at, D * sizeof *row);
    memcpy(row + (2 * (size_t)h + 1) * D, x->io->v + at, D * sizeof *row);
  }
}

static void load(const host_exec *x) {
  const kvr_layout *l = &x->s->layout;
  for (int i = 0; i < l->num_requests; i++)
    for (int r = 0; r < l->num_ranks; r++) {
      const kvr_rows rows = *kvr_layout_rows(l, i, r);
      for (int j = 0; j < rows.num; j++) {
        const int token = l->token0[i] + kvr_rows_token(rows, j);
        memcpy(row_at(x, KVR_BUF_Q, r, 0, rows.first + j),
               x->io->q + (size_t)token * width(x, KVR_BUF_Q),
               width(x, KVR_BUF_Q) * sizeof(double));
        const int to = x->s->new_kv == KVR_BUF_CURRENT ? token : rows.first + j;
        load_kv_row(x, token, row_at(x, x->s->new_kv, r, 0, to));
      }
    }
}

static void store(const host_exec *x) {
  const kvr_layout *l = &x->s->layout;
  const size_t out = width(x, KVR_BUF_OUT), lse = width(x, KVR_BUF_LSE);
  for (int i = 0; i < l->num_requests; i++)
    for (int r = 0; r < l->num_ranks; r++) {
      const kvr_rows rows = *kvr_layout_rows(l, i, r);
      for (int j = 0; j < rows.num; j++) {
        const size_t token = (size_t)(l->token0[i] + kvr_rows_token(rows, j));
        memcpy(x->io->out + token * out, row_at(x, KVR_BUF_OUT, r, 0, rows.first + j),
               out * sizeof(double));
        memcpy(x->io->lse + token * lse, row_at(x, KVR_BUF_LSE, r, 0, rows.first + j),
               lse * sizeof(double));
      }
    }
}

/* ---- moves ---- */

static double *cache_row(const host_exec *x, int request, int rank, int local) {
  return x->io->cache[request * x->s->layout.num_ranks + rank] +
         (size_t)local * width(x, KVR_BUF_SLOT);
}

static void stage(const host_exec *x, const kvr_op *op) {
  memcpy(ref_at(x, op->dst), cache_row(x, op->request, op->rank, op->local0),
         (size_t)op->dst.rows * width(x, KVR_BUF_SLOT) * sizeof(double));
}

static void cache_write(const host_exec *x, const kvr_op *op) {
  const kvr_cache_desc *cache = &x->s->problem.cache;
  const size_t w = width(x, KVR_BUF_SLOT);
  for (int i = 0; i < op->src.rows; i++) {
    const int t = kvr_run_token(i, op->split, op->t0, op->t1);
    const int local =
        kvr_local_index(x->s->problem.requests[op->request].num_cached + t, cache->interleave,
                        kvr_map_total_weight(cache), kvr_map_weight(cache, op->rank),
                        kvr_map_weight_before(cache, op->rank));
    if (local >= 0)
      memcpy(cache_row(x, op->request, op->rank, local), ref_at(x, op->src) + (size_t)i * w,
             w * sizeof(double));
  }
}

/* ---- attention ---- */

static size_t num_heads(const host_exec *x) { return (size_t)x->s->problem.num_q_heads; }

static size_t head_dim(const host_exec *x) { return (size_t)x->s->problem.cache.head_dim; }

/* What a score and a value are turned into. */
typedef struct key_rule {
  double score_scale, soft_cap, value_scale;
} key_rule;

/* One more key for one (row, head): state acc, m, l in natural units. */
static void add_key(const double *q, const double *k, const double *v, const key_rule *rule,
                    size_t D, double *acc, double *ml) {
  double score = 0.0;
  for (size_t d = 0; d < D; d++) score += q[d] * k[d];
  score *= rule->score_scale;
  if (rule->soft_cap > 0.0) score = rule->soft_cap * tanh(score / rule->soft_cap);
  const double m = score > ml[0] ? score : ml[0];
  const double keep = ml[0] == -HUGE_VAL ? 0.0 : exp(ml[0] - m);
  const double p = exp(score - m);
  for (size_t d = 0; d < D; d++) acc[d] = keep * acc[d] + p * rule->value_scale * v[d];
  ml[0] = m;
  ml[1] = keep * ml[1] + p;
}

/* The state of rows that have seen nothing but, maybe, the attention sink. */
static void start_state(const host_exec *x, bool sinks, double *state) {
  const size_t NQ = num_heads(x), D = head_dim(x);
  memset(state, 0, width(x, KVR_BUF_STATE) * sizeof(double));
  for (size_t h = 0; h < NQ; h++) {
    const double sink = sinks ? (double)x->s->problem.sinks[h] : -HUGE_VAL;
    state[NQ * D + 2 * h] = sink;
    state[NQ * D + 2 * h + 1] = sink == -HUGE_VAL ? 0.0 : 1.0;
  }
}

static void finish_row(const host_exec *x, const double *state, double *out, double *lse) {
  const size_t NQ = num_heads(x), D = head_dim(x);
  for (size_t h = 0; h < NQ; h++) {
    const double *ml = state + NQ * D + 2 * h;
    for (size_t d = 0; d < D; d++) out[h * D + d] = ml[1] == 0.0 ? 0.0 : state[h * D + d] / ml[1];
    lse[h] = ml[1] == 0.0 ? -HUGE_VAL : ml[0] + log(ml[1]);
  }
}

static double *lse_of(const host_exec *x, kvr_ref out, int row) {
  const bool part = out.buffer == KVR_BUF_PART_OUT;
  return row_at(x, part ? KVR_BUF_PART_LSE : KVR_BUF_LSE, out.rank, kvr_ref_memory(out),
                out.row + row);
}

static void attend_row(const host_exec *x, const kvr_op *op, int i, double *state) {
  const kvr_problem *p = &x->s->problem;
  const size_t NQ = num_heads(x), D = head_dim(x), G = NQ / (size_t)p->cache.num_kv_heads;
  const key_rule rule = {kvr_problem_score_scale(p), (double)p->soft_cap,
                         kvr_problem_value_scale(p)};
  const double *q = ref_at(x, op->q) + (size_t)i * width(x, KVR_BUF_Q);
  const size_t w = width(x, KVR_BUF_SLOT);
  for (int key = 0; key < op->attend.kv_end; key++) {
    if (!kvr_visible(i, key, op->attend)) continue;
    const double *kv = key < op->attend.ring_end
                           ? ref_at(x, op->src) + (size_t)key * w
                           : ref_at(x, op->cur) + (size_t)(key - op->attend.ring_end) * w;
    for (size_t h = 0; h < NQ; h++)
      add_key(q + h * D, kv + 2 * (h / G) * D, kv + (2 * (h / G) + 1) * D, &rule, D, state + h * D,
              state + NQ * D + 2 * h);
  }
}

static void attend(const host_exec *x, const kvr_op *op) {
  for (int i = 0; i < op->attend.num_rows; i++) {
    double *state = ref_at(x, op->state) + (size_t)i * width(x, KVR_BUF_STATE);
    if (!op->attend.carry_in) start_state(x, op->attend.use_sinks, state);
    attend_row(x, op, i, state);
    if (op->attend.finish)
      finish_row(x, state, ref_at(x, op->dst) + (size_t)i * width(x, KVR_BUF_OUT),
                 lse_of(x, op->dst, i));
  }
}

/* ---- merges ---- */

static void add_state(double *acc, double *ml, const double *acc_b, const double *ml_b, size_t D) {
  if (ml_b[1] == 0.0) return; /* weight 0: may hold anything */
  const double m = ml_b[0] > ml[0] ? ml_b[0] : ml[0];
  const double a = ml[0] == -HUGE_VAL ? 0.0 : exp(ml[0] - m), b = exp(ml_b[0] - m);
  for (size_t d = 0; d < D; d++) acc[d] = a * acc[d] + b * acc_b[d];
  ml[0] = m;
  ml[1] = a * ml[1] + b * ml_b[1];
}

static void merge_states(const host_exec *x, const kvr_op *op) {
  const size_t NQ = num_heads(x), D = head_dim(x);
  const int parts = op->src.buffer == KVR_BUF_NONE ? 0 : x->s->layout.num_ranks;
  const size_t w = width(x, KVR_BUF_STATE);
  for (int i = 0; i < op->dst.rows; i++) {
    double *state = ref_at(x, op->state) + (size_t)i * w;
    for (int j = 0; j < parts; j++) {
      const double *part = ref_at(x, op->src) + ((size_t)j * (size_t)op->src.rows + (size_t)i) * w;
      for (size_t h = 0; h < NQ; h++)
        add_state(state + h * D, state + NQ * D + 2 * h, part + h * D, part + NQ * D + 2 * h, D);
    }
    finish_row(x, state, ref_at(x, op->dst) + (size_t)i * width(x, KVR_BUF_OUT),
               lse_of(x, op->dst, i));
  }
}

static void merge_outputs(const host_exec *x, const kvr_op *op) {
  const size_t NQ = num_heads(x), D = head_dim(x);
  for (size_t i = 0; i < (size_t)op->dst.rows * NQ; i++) {
    double acc[2] = {-HUGE_VAL, 0.0};
    double *out = ref_at(x, op->dst) + i * D;
    memset(out, 0, D * sizeof *out);
    for (int part = 0; part < 2; part++) {
      const double *from = row_at(x, KVR_BUF_PART_OUT, op->rank, part, op->src.row) + i * D;
      const double lse = row_at(x, KVR_BUF_PART_LSE, op->rank, part, op->src.row)[i];
      const double ml[2] = {lse, lse == -HUGE_VAL ? 0.0 : 1.0};
      add_state(out, acc, from, ml, D);
    }
    for (size_t d = 0; d < D; d++) out[d] = acc[1] == 0.0 ? 0.0 : out[d] / acc[1];
    lse_of(x, op->dst, 0)[i] = acc[1] == 0.0 ? -HUGE_VAL : acc[0] + log(acc[1]);
  }
}

/* ---- walking ---- */

static void run_op(const host_exec *x, const kvr_op *op) {
  if (!op->launch) return;
  switch (op->kind) {
  case KVR_OP_STAGE: stage(x, op); break;
  case KVR_OP_CACHE_WRITE: cache_write(x, op); break;
  case KVR_OP_ATTEND: attend(x, op); break;
  case KVR_OP_MERGE_STATES: merge_states(x, op); break;
  case KVR_OP_MERGE_OUTPUTS: merge_outputs(x, op); break;
  default:
    memcpy(ref_at(x, op->dst), ref_at(x, op->src),
           (size_t)op->dst.rows * width(x, op->dst.buffer) * sizeof(double));
  }
}

static uint64_t next_random(uint64_t *state) {
  uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

static bool is_ready(const kvr_schedule *s, const kvr_op *op, const bool *done) {
  const int *deps = kvr_op_deps(s, op);
  for (int d = 0; d < op->num_deps; d++)
    if (!done[deps[d]]) return false;
  return true;
}

/* Picks a random op that is not done, then the nearest one after it that is ready. */
static int pick_ready(const kvr_schedule *s, const bool *done, uint64_t *random) {
  const int start = (int)(next_random(random) % (uint64_t)s->num_ops);
  for (int n = 0; n < s->num_ops; n++) {
    const int i = (start + n) % s->num_ops;
    if (!done[i] && is_ready(s, &s->ops[i], done)) return i;
  }
  return -1;
}

static kvr_status run_shuffled(const host_exec *x, uint64_t seed) {
  const kvr_schedule *s = x->s;
  bool *done = calloc((size_t)s->num_ops + 1, sizeof *done);
  if (done == NULL) return kvr_fail(KVR_E_OOM, "no host memory for the reference run");
  kvr_status status = KVR_OK;
  for (int n = 0; n < s->num_ops && status == KVR_OK; n++) {
    const int i = pick_ready(s, done, &seed);
    if (i < 0) {
      status = kvr_fail(KVR_E_VERIFY, "%d ops are left and none is ready", s->num_ops - n);
      break;
    }
    run_op(x, &s->ops[i]);
    done[i] = true;
  }
  free(done);
  return status;
}

kvr_status kvr_exec_host_run(const kvr_schedule *s, const kvr_host_io *io, uint64_t order_seed) {
  host_exec x = {.s = s, .io = io};
  kvr_status status = allocate(&x);
  if (status == KVR_OK) {
    load(&x);
    if (order_seed == 0)
      for (int i = 0; i < s->num_ops; i++) run_op(&x, &s->ops[i]);
    else
      status = run_shuffled(&x, order_seed);
    store(&x);
  }
  release(&x);
  return status;
}

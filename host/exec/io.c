/* Inputs to the ranks' buffers, and outputs back: from and to host memory or the caller's buffers,
 * in token order or one tensor per rank. */
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "device/cl_error.h"
#include "exec/exec.h"

/* Tokens of heads, in the caller's tensor or in a buffer of ours; strides in bytes. */
typedef struct view {
  char *host;
  cl_mem mem;
  size_t offset, token_stride, head_stride;
} view;

static view tensor_view(const kvr_tensor *t, int heads, int dim, int token) {
  const size_t e = kvr_dtype_size(t->dtype);
  const size_t head = t->head_stride != 0 ? t->head_stride : (size_t)dim;
  const size_t stride = t->token_stride != 0 ? t->token_stride : head * (size_t)heads;
  return (view){.host = t->host,
                .mem = t->mem,
                .offset = (t->offset + stride * (size_t)token) * e,
                .token_stride = stride * e,
                .head_stride = head * e};
}

/* ---- moving num tokens of heads x width bytes ---- */

typedef struct move {
  cl_command_queue queue;
  view ours;   /* mem */
  view theirs; /* host or mem */
  size_t width, heads, tokens;
} move;

static bool is_dense(const view *v, const move *m) {
  return v->head_stride == m->width && v->token_stride == m->width * m->heads;
}

static kvr_status move_dense(const kvr_exec *x, const move *m, bool in, cl_event *event) {
  const size_t bytes = m->width * m->heads * m->tokens;
  const view *o = &m->ours, *t = &m->theirs;
  if (t->mem != NULL)
    KVR_CL(clEnqueueCopyBuffer,
           (m->queue, in ? t->mem : o->mem, in ? o->mem : t->mem, in ? t->offset : o->offset,
            in ? o->offset : t->offset, bytes, x->num_waits, kvr_exec_waits(x), event));
  else if (in)
    KVR_CL(clEnqueueWriteBuffer, (m->queue, o->mem, CL_FALSE, o->offset, bytes, t->host + t->offset,
                                  x->num_waits, kvr_exec_waits(x), event));
  else
    KVR_CL(clEnqueueReadBuffer, (m->queue, o->mem, CL_FALSE, o->offset, bytes, t->host + t->offset,
                                 x->num_waits, kvr_exec_waits(x), event));
  return KVR_OK;
}

static kvr_status move_rect(const kvr_exec *x, const move *m, bool in, cl_event *event) {
  const view *o = &m->ours, *t = &m->theirs;
  const size_t region[3] = {m->width, m->heads, m->tokens}, zero[3] = {0, 0, 0};
  const size_t ours[3] = {o->offset, 0, 0}, theirs[3] = {t->offset, 0, 0};
  if (t->mem != NULL)
    KVR_CL(clEnqueueCopyBufferRect,
           (m->queue, in ? t->mem : o->mem, in ? o->mem : t->mem, in ? theirs : ours,
            in ? ours : theirs, region, in ? t->head_stride : o->head_stride,
            in ? t->token_stride : o->token_stride, in ? o->head_stride : t->head_stride,
            in ? o->token_stride : t->token_stride, x->num_waits, kvr_exec_waits(x), event));
  else if (in)
    KVR_CL(clEnqueueWriteBufferRect,
           (m->queue, o->mem, CL_FALSE, ours, zero, region, o->head_stride, o->token_stride,
            t->head_stride, t->token_stride, t->host + t->offset, x->num_waits, kvr_exec_waits(x),
            event));
  else
    KVR_CL(clEnqueueReadBufferRect, (m->queue, o->mem, CL_FALSE, ours, zero, region, o->head_stride,
                                     o->token_stride, t->head_stride, t->token_stride,
                                     t->host + t->offset, x->num_waits, kvr_exec_waits(x), event));
  return KVR_OK;
}

static kvr_status move_tokens(const kvr_exec *x, const move *m, bool in, cl_event *event) {
  const bool dense = is_dense(&m->ours, m) && is_dense(&m->theirs, m);
  return dense ? move_dense(x, m, in, event) : move_rect(x, m, in, event);
}

/* ---- which rows ---- */

/* A run of tokens of one rank: where it lies in token order, in rank order, and in our buffers. */
typedef struct run {
  int rank, token, row, num;
} run;

static int runs_of(const kvr_schedule *s, int request, int rank, run out[2]) {
  const kvr_rows rows = *kvr_layout_rows(&s->layout, request, rank);
  const int token0 = s->layout.token0[request];
  int n = 0;
  if (rows.split > 0) out[n++] = (run){rank, token0 + rows.t0, rows.first, rows.split};
  if (rows.num > rows.split)
    out[n++] = (run){rank, token0 + rows.t1, rows.first + rows.split, rows.num - rows.split};
  return n;
}

static view theirs_at(const kvr_tensor *tensors, kvr_placement placement, const run *r, int heads,
                      int dim) {
  return placement == KVR_TOKEN_ORDER ? tensor_view(&tensors[0], heads, dim, r->token)
                                      : tensor_view(&tensors[r->rank], heads, dim, r->row);
}

/* ---- uploads ---- */

static kvr_status upload_q(kvr_exec *x, const kvr_io *io, const run *r, cl_event *event) {
  const kvr_problem *p = &x->schedule->problem;
  const int D = p->cache.head_dim, NQ = p->num_q_heads;
  const size_t width = (size_t)D * kvr_dtype_size(p->cache.dtype);
  const move m = {.queue = kvr_exec_queue(x, r->rank, 0),
                  .ours = {.mem = x->ranks[r->rank].memory[KVR_BUF_Q][0],
                           .offset = (size_t)r->row * x->row_bytes.q,
                           .token_stride = x->row_bytes.q,
                           .head_stride = width},
                  .theirs = theirs_at(io->q, io->placement, r, NQ, D),
                  .width = width,
                  .heads = (size_t)NQ,
                  .tokens = (size_t)r->num};
  return move_tokens(x, &m, true, event);
}

/* K (part 0) and V (part 1) interleave by head in a cache row. */
static kvr_status upload_kv(kvr_exec *x, const kvr_io *io, const run *r, int part,
                            cl_event *event) {
  const kvr_problem *p = &x->schedule->problem;
  const int D = p->cache.head_dim, NKV = p->cache.num_kv_heads;
  const size_t width = (size_t)D * kvr_dtype_size(p->cache.dtype);
  const kvr_buffer buffer = x->schedule->new_kv;
  const int row = buffer == KVR_BUF_CURRENT ? r->token : r->row;
  const move m = {.queue = kvr_exec_queue(x, r->rank, 0),
                  .ours = {.mem = x->ranks[r->rank].memory[buffer][0],
                           .offset = (size_t)row * x->row_bytes.kv + (size_t)part * width,
                           .token_stride = x->row_bytes.kv,
                           .head_stride = 2 * width},
                  .theirs = theirs_at(part == 0 ? io->k : io->v, io->placement, r, NKV, D),
                  .width = width,
                  .heads = (size_t)NKV,
                  .tokens = (size_t)r->num};
  return move_tokens(x, &m, true, event);
}

/* Entries of a request's block table in the copy on the host. */
static int *host_table(const kvr_exec *x, int request) {
  return x->host_tables + (size_t)request * (size_t)x->desc.max_table_entries;
}

static int num_entries(const kvr_exec *x, int request, const int **table) {
  int num;
  *table = kvr_cache_table(x->cache, x->schedule->problem.requests[request].cache_id, &num);
  return *table == NULL ? 0 : kvr_min(num, x->desc.max_table_entries);
}

static void copy_tables_and_sinks(kvr_exec *x) {
  const kvr_problem *p = &x->schedule->problem;
  for (int i = 0; i < p->num_requests; i++) {
    const int *table;
    const int num = num_entries(x, i, &table);
    if (num > 0) memcpy(host_table(x, i), table, (size_t)num * sizeof *table);
  }
  if (p->sinks != NULL) memcpy(x->host_sinks, p->sinks, (size_t)p->num_q_heads * sizeof *p->sinks);
}

static kvr_status upload_tables(kvr_exec *x, int rank) {
  for (int i = 0; i < x->schedule->problem.num_requests; i++) {
    const int *table;
    const int num = num_entries(x, i, &table);
    if (num == 0) continue;
    cl_event event;
    KVR_CL(clEnqueueWriteBuffer, (kvr_exec_queue(x, rank, 0), x->ranks[rank].tables[i], CL_FALSE, 0,
                                  (size_t)num * sizeof *table, host_table(x, i), x->num_waits,
                                  kvr_exec_waits(x), &event));
    KVR_TRY(kvr_exec_add_sink(x, rank, "upload of a block table", event));
  }
  return KVR_OK;
}

static kvr_status upload_sinks(kvr_exec *x, int rank) {
  const kvr_problem *p = &x->schedule->problem;
  if (p->sinks == NULL) return KVR_OK;
  cl_event event;
  KVR_CL(clEnqueueWriteBuffer, (kvr_exec_queue(x, rank, 0), x->ranks[rank].sinks, CL_FALSE, 0,
                                (size_t)p->num_q_heads * sizeof *p->sinks, x->host_sinks,
                                x->num_waits, kvr_exec_waits(x), &event));
  return kvr_exec_add_sink(x, rank, "upload of sinks", event);
}

static kvr_status upload_run(kvr_exec *x, const kvr_io *io, const run *r) {
  cl_event event;
  KVR_TRY(upload_q(x, io, r, &event));
  KVR_TRY(kvr_exec_add_sink(x, r->rank, "upload of q", event));
  for (int part = 0; part < 2; part++) {
    KVR_TRY(upload_kv(x, io, r, part, &event));
    KVR_TRY(kvr_exec_add_sink(x, r->rank, part == 0 ? "upload of k" : "upload of v", event));
  }
  return KVR_OK;
}

/* Everything of one rank, then one event for it. */
static kvr_status upload_rank(kvr_exec *x, const kvr_io *io, int rank, cl_uint num_waits,
                              const cl_event *waits) {
  const int first = x->num_sinks;
  kvr_exec_waits_clear(x);
  for (cl_uint i = 0; i < num_waits; i++) KVR_TRY(kvr_exec_waits_add(x, waits[i]));
  KVR_TRY(upload_tables(x, rank));
  KVR_TRY(upload_sinks(x, rank));
  for (int i = 0; i < x->schedule->layout.num_requests; i++) {
    run runs[2];
    const int n = runs_of(x->schedule, i, rank, runs);
    for (int k = 0; k < n; k++) KVR_TRY(upload_run(x, io, &runs[k]));
  }
  for (int i = first; i < x->num_sinks; i++) KVR_TRY(kvr_exec_waits_add(x, x->sinks[i].event));
  KVR_CL(clEnqueueMarkerWithWaitList, (kvr_exec_queue(x, rank, 0), x->num_waits, kvr_exec_waits(x),
                                       &x->ranks[rank].input_ready));
  x->ranks[rank].dirty[0] = true;
  return KVR_OK;
}

/* The caller's events are kept so that a step that waits for them in vain can say so. */
static kvr_status keep_waits(kvr_exec *x, cl_uint num_waits, const cl_event *waits) {
  for (cl_uint i = 0; i < num_waits; i++) {
    KVR_CL(clRetainEvent, (waits[i]));
    KVR_TRY(kvr_exec_add_sink(x, -1, "an event that the caller passed", waits[i]));
  }
  return KVR_OK;
}

kvr_status kvr_exec_upload(kvr_exec *x, const kvr_io *io, cl_uint num_waits,
                           const cl_event *waits) {
  KVR_TRY(keep_waits(x, num_waits, waits));
  copy_tables_and_sinks(x);
  for (int r = 0; r < x->group->num_ranks; r++) {
    const kvr_status status = upload_rank(x, io, r, num_waits, waits);
    if (status != KVR_OK) return kvr_fail_at(status, "rank %d, input", r);
  }
  x->num_inputs = x->num_sinks;
  return KVR_OK;
}

/* ---- downloads ---- */

static kvr_status download(kvr_exec *x, const kvr_io *io, const run *r, bool lse) {
  const kvr_problem *p = &x->schedule->problem;
  const int dim = lse ? 1 : p->cache.head_dim, NQ = p->num_q_heads;
  const size_t width = (size_t)dim * kvr_dtype_size(lse ? KVR_F32 : p->out_dtype);
  const size_t stride = width * (size_t)NQ;
  const move m = {.queue = kvr_exec_queue(x, r->rank, 0),
                  .ours = {.mem = x->ranks[r->rank].memory[lse ? KVR_BUF_LSE : KVR_BUF_OUT][0],
                           .offset = (size_t)r->row * stride,
                           .token_stride = stride,
                           .head_stride = width},
                  .theirs = theirs_at(lse ? io->lse : io->out, io->placement, r, NQ, dim),
                  .width = width,
                  .heads = (size_t)NQ,
                  .tokens = (size_t)r->num};
  cl_event event;
  KVR_TRY(move_tokens(x, &m, false, &event));
  return kvr_exec_add_sink(x, r->rank, lse ? "download of lse" : "download of out", event);
}

/* Output rows of a rank are complete when its last op that writes OUT is: such ops are chained. */
static cl_event output_ready(const kvr_exec *x, int rank) {
  for (int i = x->schedule->num_ops - 1; i >= 0; i--) {
    const kvr_op *op = &x->schedule->ops[i];
    if (op->rank == rank && op->dst.buffer == KVR_BUF_OUT) return x->events[i];
  }
  return NULL;
}

static kvr_status download_rank(kvr_exec *x, const kvr_io *io, int rank) {
  kvr_exec_waits_clear(x);
  KVR_TRY(kvr_exec_waits_add(x, output_ready(x, rank)));
  for (int i = 0; i < x->schedule->layout.num_requests; i++) {
    run runs[2];
    const int n = runs_of(x->schedule, i, rank, runs);
    for (int k = 0; k < n; k++) {
      KVR_TRY(download(x, io, &runs[k], false));
      if (io->lse != NULL) KVR_TRY(download(x, io, &runs[k], true));
    }
  }
  x->ranks[rank].dirty[0] = true;
  return KVR_OK;
}

kvr_status kvr_exec_download(kvr_exec *x, const kvr_io *io) {
  for (int r = 0; r < x->group->num_ranks; r++) {
    const kvr_status status = download_rank(x, io, r);
    if (status != KVR_OK) return kvr_fail_at(status, "rank %d, output", r);
  }
  return KVR_OK;
}

/* ---- checks ---- */

typedef struct tensor_rule {
  const char *name;
  const kvr_tensor *tensors;
  int heads, dim;
  kvr_dtype dtype;
  bool required;
} tensor_rule;

static kvr_status check_memory(const kvr_exec *x, const tensor_rule *rule, const kvr_tensor *t,
                               int tokens) {
  if (t->mem == NULL) return KVR_OK;
  if (kvr_cache_owns(x->cache, t->mem))
    return kvr_fail(KVR_E_CONFLICT, "%s lies in a buffer of the KV cache; pass another buffer",
                    rule->name);
  const view v = tensor_view(t, rule->heads, rule->dim, 0);
  const size_t e = kvr_dtype_size(t->dtype);
  size_t size = 0, need = kvr_mul_sat(t->offset, e); /* no wrap: offset and strides are anybody's */
  need = kvr_add_sat(need, kvr_mul_sat((size_t)(tokens - 1), v.token_stride));
  need = kvr_add_sat(need, kvr_mul_sat((size_t)(rule->heads - 1), v.head_stride));
  need = kvr_add_sat(need, (size_t)rule->dim * e);
  KVR_CL(clGetMemObjectInfo, (t->mem, CL_MEM_SIZE, sizeof size, &size, NULL));
  if (need > size)
    return kvr_fail(KVR_E_SHAPE, "%s needs %zu bytes of its buffer, which has %zu", rule->name,
                    need, size);
  return KVR_OK;
}

static kvr_status check_tensor(const kvr_exec *x, const tensor_rule *rule, const kvr_tensor *t,
                               int tokens) {
  if (tokens == 0) return KVR_OK;
  if ((t->host == NULL) == (t->mem == NULL))
    return kvr_fail(KVR_E_NULL, "%s must have either host memory or an OpenCL buffer", rule->name);
  if (t->dtype != rule->dtype)
    return kvr_fail(KVR_E_DTYPE, "%s is %s, this step needs %s", rule->name,
                    kvr_dtype_name(t->dtype), kvr_dtype_name(rule->dtype));
  const view v = tensor_view(t, rule->heads, rule->dim, 0);
  const size_t width = (size_t)rule->dim * kvr_dtype_size(t->dtype);
  if (v.head_stride < width || v.token_stride < v.head_stride * (size_t)rule->heads ||
      v.token_stride % v.head_stride != 0)
    return kvr_fail(
        KVR_E_LAYOUT,
        "%s: head_stride must be at least %d elements and token_stride a multiple of it, "
        "at least heads * head_stride",
        rule->name, rule->dim);
  return check_memory(x, rule, t, tokens);
}

static kvr_status check_rule(const kvr_exec *x, const kvr_schedule *s, const kvr_io *io,
                             const tensor_rule *rule) {
  if (rule->tensors == NULL)
    return rule->required && s->layout.num_tokens > 0
               ? kvr_fail(KVR_E_NULL, "io->%s is NULL", rule->name)
               : KVR_OK;
  if (io->placement == KVR_TOKEN_ORDER)
    return check_tensor(x, rule, rule->tensors, s->layout.num_tokens);
  for (int r = 0; r < s->layout.num_ranks; r++)
    KVR_TRY(check_tensor(x, rule, &rule->tensors[r], s->layout.rank_rows[r]));
  return KVR_OK;
}

kvr_status kvr_exec_check_io(const kvr_exec *x, const kvr_schedule *s, const kvr_io *io) {
  if (io == NULL) return kvr_fail(KVR_E_NULL, "io is NULL");
  if (io->struct_size != sizeof *io)
    return kvr_fail(KVR_E_SHAPE, "kvr_io.struct_size is %zu, this library expects %zu",
                    io->struct_size, sizeof *io);
  if (io->placement != KVR_TOKEN_ORDER && io->placement != KVR_RANK_ORDER)
    return kvr_fail(KVR_E_RANGE, "io->placement is %d; use KVR_TOKEN_ORDER or KVR_RANK_ORDER",
                    (int)io->placement);
  const kvr_problem *p = &s->problem;
  const int D = p->cache.head_dim;
  const tensor_rule rules[] = {{"q", io->q, p->num_q_heads, D, p->cache.dtype, true},
                               {"k", io->k, p->cache.num_kv_heads, D, p->cache.dtype, true},
                               {"v", io->v, p->cache.num_kv_heads, D, p->cache.dtype, true},
                               {"out", io->out, p->num_q_heads, D, p->out_dtype, true},
                               {"lse", io->lse, p->num_q_heads, 1, KVR_F32, false}};
  for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
    KVR_TRY(check_rule(x, s, io, &rules[i]));
  return KVR_OK;
}

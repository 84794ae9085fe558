#include "exec/exec_cl.h"

#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "device/cl_error.h"
#include "device/watch.h"
#include "exec/exec.h"

/* Ops in flight before the host waits for old ones: drivers slow down with long queues. */
enum { MAX_IN_FLIGHT = 4096 };

/* ---- buffers ---- */

static kvr_status allocate_buffer(kvr_exec *x, int rank, kvr_buffer buffer) {
  const int n = x->desc.footprint.memories[buffer];
  const size_t bytes =
      (size_t)x->desc.footprint.rows[buffer] * kvr_buffer_row_bytes(&x->row_bytes, buffer);
  if (n == 0) return KVR_OK;
  x->ranks[rank].memory[buffer] = calloc((size_t)n, sizeof(cl_mem));
  if (x->ranks[rank].memory[buffer] == NULL)
    return kvr_fail(KVR_E_OOM, "no host memory for the executor");
  for (int i = 0; i < n; i++)
    KVR_TRY(kvr_group_alloc(x->group, rank, bytes, kvr_buffer_name(buffer),
                            &x->ranks[rank].memory[buffer][i]));
  return KVR_OK;
}

static size_t table_bytes(const kvr_exec *x) {
  return (size_t)kvr_max(1, x->desc.max_table_entries) * sizeof(int);
}

static size_t sink_bytes(const kvr_exec *x) { return (size_t)x->desc.num_q_heads * sizeof(float); }

static kvr_status allocate_rank(kvr_exec *x, int rank) {
  for (int b = 0; b < KVR_NUM_BUFFERS; b++) KVR_TRY(allocate_buffer(x, rank, (kvr_buffer)b));
  KVR_TRY(kvr_group_alloc(x->group, rank, sink_bytes(x), "sinks", &x->ranks[rank].sinks));
  x->ranks[rank].tables = calloc((size_t)x->desc.max_requests + 1, sizeof(cl_mem));
  if (x->ranks[rank].tables == NULL) return kvr_fail(KVR_E_OOM, "no host memory for the executor");
  for (int i = 0; i < x->desc.max_requests; i++)
    KVR_TRY(
        kvr_group_alloc(x->group, rank, table_bytes(x), "block table", &x->ranks[rank].tables[i]));
  return KVR_OK;
}

static kvr_status allocate_host(kvr_exec *x) {
  x->ranks = calloc((size_t)x->group->num_ranks, sizeof *x->ranks);
  x->host_tables = calloc((size_t)x->desc.max_requests + 1, table_bytes(x));
  x->host_sinks = malloc(sink_bytes(x));
  if (x->ranks == NULL || x->host_tables == NULL || x->host_sinks == NULL)
    return kvr_fail(KVR_E_OOM, "no host memory for the executor");
  return KVR_OK;
}

static void free_rank(kvr_exec *x, int rank) {
  kvr_rank_exec *r = &x->ranks[rank];
  for (int b = 0; b < KVR_NUM_BUFFERS; b++) {
    const size_t bytes =
        (size_t)x->desc.footprint.rows[b] * kvr_buffer_row_bytes(&x->row_bytes, (kvr_buffer)b);
    for (int i = 0; r->memory[b] != NULL && i < x->desc.footprint.memories[b]; i++)
      kvr_group_free(x->group, rank, r->memory[b][i], bytes);
    free(r->memory[b]);
  }
  kvr_group_free(x->group, rank, r->sinks, sink_bytes(x));
  for (int i = 0; r->tables != NULL && i < x->desc.max_requests; i++)
    kvr_group_free(x->group, rank, r->tables[i], table_bytes(x));
  free(r->tables);
}

static kvr_status init(kvr_exec *x) {
  const kvr_cache_desc *cache = kvr_cache_describe(x->cache);
  const kvr_problem shape = {.cache = *cache,
                             .num_q_heads = x->desc.num_q_heads,
                             .out_dtype = x->desc.out_dtype};
  x->row_bytes = kvr_problem_row_bytes(&shape);
  x->bytes = kvr_footprint_bytes(&x->desc.footprint, &x->row_bytes) +
             (size_t)x->desc.max_requests * table_bytes(x) + sink_bytes(x);
  KVR_TRY(allocate_host(x));
  for (int r = 0; r < x->group->num_ranks; r++) KVR_TRY(allocate_rank(x, r));
  KVR_TRY(kvr_exec_create_kernels(x));
  return kvr_exec_build(x, x->desc.out_dtype);
}

kvr_status kvr_exec_create(kvr_group *group, kvr_cache *cache, const kvr_exec_desc *desc,
                           kvr_exec **out) {
  kvr_exec *x = calloc(1, sizeof *x);
  if (x == NULL) return kvr_fail(KVR_E_OOM, "no host memory for the executor");
  x->group = group;
  x->cache = cache;
  x->desc = *desc;
  const kvr_status status = init(x);
  if (status != KVR_OK) {
    kvr_exec_destroy(x);
    return status;
  }
  *out = x;
  return KVR_OK;
}

void kvr_exec_destroy(kvr_exec *x) {
  if (x == NULL) return;
  if (x->ranks != NULL) {
    kvr_exec_destroy_kernels(x);
    for (int r = 0; r < x->group->num_ranks; r++) free_rank(x, r);
  }
  kvr_group_free_host(x->group, x->host_tables);
  kvr_group_free_host(x->group, x->host_sinks);
  free(x->ranks);
  free(x->waits);
  free(x->sinks);
  free(x);
}

void kvr_exec_set_gate(kvr_exec *x, kvr_exec_gate *gate, void *data) {
  x->gate = gate;
  x->gate_data = data;
}

size_t kvr_exec_bytes(const kvr_exec *x) { return x->bytes; }

/* ---- walking ---- */

static bool reads_inputs(const kvr_op *op) {
  return op->q.buffer == KVR_BUF_Q || op->src.buffer == KVR_BUF_Q ||
         op->src.buffer == KVR_BUF_CURRENT || op->cur.buffer == KVR_BUF_CURRENT ||
         op->src.buffer == KVR_BUF_NEW;
}

/* Dependencies, and the inputs of the ranks it touches. A producer's queue must be flushed before
 * another queue waits for it. */
static kvr_status collect_waits(kvr_exec *x, const kvr_op *op) {
  const int *deps = kvr_op_deps(x->schedule, op);
  kvr_exec_waits_clear(x);
  for (int d = 0; d < op->num_deps; d++) {
    const kvr_op *producer = &x->schedule->ops[deps[d]];
    KVR_TRY(kvr_exec_flush(x, producer->rank, kvr_exec_queue_of(x, producer)));
    KVR_TRY(kvr_exec_waits_add(x, x->events[deps[d]]));
  }
  if (op->num_deps > 0 && !reads_inputs(op)) return KVR_OK;
  KVR_TRY(kvr_exec_flush(x, op->rank, 0));
  KVR_TRY(kvr_exec_waits_add(x, x->ranks[op->rank].input_ready));
  if (op->peer < 0) return KVR_OK;
  KVR_TRY(kvr_exec_flush(x, op->peer, 0));
  return kvr_exec_waits_add(x, x->ranks[op->peer].input_ready);
}

static kvr_status enqueue_op(kvr_exec *x, int i) {
  const kvr_op *op = &x->schedule->ops[i];
  const int queue = kvr_exec_queue_of(x, op);
  KVR_TRY(collect_waits(x, op));
  if (x->gate != NULL) KVR_TRY(kvr_exec_waits_add(x, x->gate(x->gate_data, i)));
  KVR_TRY(kvr_exec_launch(x, op, &x->events[i]));
  x->num_enqueued = i + 1;
  x->records[i] = kvr_op_record(x->schedule, i);
  x->records[i].queue = queue;
  x->ranks[op->rank].dirty[queue] = true;
  return KVR_OK;
}

static kvr_status enqueue_ops(kvr_exec *x) {
  for (int i = 0; i < x->schedule->num_ops; i++) {
    if (i - x->num_harvested >= MAX_IN_FLIGHT) {
      for (int r = 0; r < x->group->num_ranks; r++)
        for (int q = 0; q < 2; q++) KVR_TRY(kvr_exec_flush(x, r, q));
      KVR_TRY(kvr_exec_harvest(x, i - MAX_IN_FLIGHT / 2));
    }
    const kvr_status status = enqueue_op(x, i);
    if (status != KVR_OK) return kvr_exec_fail_op(x, i, status);
  }
  return KVR_OK;
}

/* One event per rank: its last op on each queue, its cache writes, its outputs. */
static kvr_status rank_event(kvr_exec *x, int rank, cl_event *out) {
  kvr_exec_waits_clear(x);
  for (int i = x->num_harvested; i < x->schedule->num_ops; i++)
    if (x->schedule->ops[i].rank == rank) KVR_TRY(kvr_exec_waits_add(x, x->events[i]));
  for (int i = 0; i < x->num_sinks; i++)
    if (x->sinks[i].rank == rank) KVR_TRY(kvr_exec_waits_add(x, x->sinks[i].event));
  KVR_CL(clEnqueueMarkerWithWaitList,
         (kvr_exec_queue(x, rank, 0), x->num_waits, kvr_exec_waits(x), out));
  return KVR_OK;
}

static kvr_status flush_all(kvr_exec *x) {
  for (int r = 0; r < x->group->num_ranks; r++)
    for (int q = 0; q < 2; q++) {
      x->ranks[r].dirty[q] = true;
      KVR_TRY(kvr_exec_flush(x, r, q));
    }
  return KVR_OK;
}

static kvr_status rank_events(kvr_exec *x, cl_event *events) {
  for (int r = 0; r < x->group->num_ranks; r++) {
    const kvr_status status = rank_event(x, r, &events[r]);
    if (status == KVR_OK) continue;
    while (r-- > 0) clReleaseEvent(events[r]);
    return status;
  }
  return KVR_OK;
}

static kvr_status enqueue_all(kvr_exec *x, const kvr_io *io, cl_uint num_waits,
                              const cl_event *waits, cl_event *events) {
  KVR_TRY(kvr_exec_upload(x, io, num_waits, waits));
  KVR_TRY(enqueue_ops(x));
  KVR_TRY(kvr_exec_download(x, io));
  if (events != NULL) KVR_TRY(rank_events(x, events));
  const kvr_status status = flush_all(x);
  for (int r = 0; status != KVR_OK && events != NULL && r < x->group->num_ranks; r++)
    clReleaseEvent(events[r]);
  return status;
}

kvr_status kvr_exec_enqueue(kvr_exec *x, const kvr_schedule *schedule, const kvr_io *io,
                            cl_uint num_waits, const cl_event *waits, cl_event *events,
                            kvr_trace_record *records) {
  x->events = calloc((size_t)schedule->num_ops + 1, sizeof(cl_event));
  if (x->events == NULL) return kvr_fail(KVR_E_OOM, "no host memory for events");
  x->schedule = schedule;
  x->records = records;
  memset(records, 0, (size_t)schedule->num_ops * sizeof *records);
  const kvr_status status = enqueue_all(x, io, num_waits, waits, events);
  return status == KVR_OK ? KVR_OK : kvr_exec_end(x, status);
}

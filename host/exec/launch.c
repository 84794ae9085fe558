/* Enqueues one op: a kernel launch, a copy, or a marker in its place. */
#include <math.h>

#include "base/arith.h"
#include "base/error.h"
#include "core/validate.h"
#include "device/cl_error.h"
#include "exec/exec.h"
#include "transport/transport.h"

static kvr_status set_arg(cl_kernel kernel, cl_uint index, size_t size, const void *value) {
  return kvr_cl_check(clSetKernelArg(kernel, index, size, value), "clSetKernelArg");
}

static kvr_status set_mems(cl_kernel kernel, const cl_mem *mems, cl_uint num) {
  for (cl_uint i = 0; i < num; i++) KVR_TRY(set_arg(kernel, i, sizeof(cl_mem), &mems[i]));
  return KVR_OK;
}

static cl_command_queue queue_of(const kvr_exec *exec, const kvr_op *op) {
  return kvr_exec_queue(exec, op->rank, kvr_exec_queue_of(exec, op));
}

/* The memory of a reference, or the queries' where the kernel will not read it: a kernel argument
 * must be some buffer. */
static cl_mem memory_or_dummy(const kvr_exec *exec, const kvr_op *op, kvr_ref ref) {
  const cl_mem dummy = exec->ranks[op->rank].memory[KVR_BUF_Q][0];
  if (ref.buffer == KVR_BUF_NONE || exec->desc.footprint.memories[ref.buffer] == 0) return dummy;
  return kvr_exec_memory(exec, ref);
}

static cl_mem lse_memory(const kvr_exec *exec, const kvr_op *op) {
  const bool part = op->dst.buffer == KVR_BUF_PART_OUT;
  return exec->ranks[op->rank]
      .memory[part ? KVR_BUF_PART_LSE : KVR_BUF_LSE][part ? op->dst.index : 0];
}

static kvr_dtype out_dtype(const kvr_exec *exec, const kvr_op *op) {
  return op->dst.buffer == KVR_BUF_PART_OUT ? KVR_F32 : exec->schedule->problem.out_dtype;
}

/* ---- sizes: always explicit, since PoCL compiles a kernel anew for every local size ---- */

kvr_launch_size kvr_rows_size(const kvr_kernels *kernels, int num_rows) {
  const size_t parts = kernels->is_cpu ? 1 : 32;
  return (kvr_launch_size){.global = {(size_t)num_rows, parts}, .local = {1, parts}};
}

kvr_launch_size kvr_merge_size(int num_rows, int num_q_heads) {
  return (kvr_launch_size){.global = {(size_t)num_q_heads, (size_t)num_rows}, .local = {1, 1}};
}

/* ---- attention ---- */

static const kvr_attend_kernels *attend_kernels(const kvr_exec *exec, const kvr_op *op) {
  return &exec->ranks[op->rank].kernels->attend[out_dtype(exec, op)];
}

static kvr_attend_args attend_args(const kvr_exec *exec, const kvr_op *op) {
  const kvr_problem *p = &exec->schedule->problem;
  const double log2_e = 1.4426950408889634;
  const double q_scale = p->q_scale != 0.0f ? (double)p->q_scale : 1.0;
  kvr_attend_args a = op->attend;
  a.num_q_heads = p->num_q_heads;
  a.num_kv_heads = p->cache.num_kv_heads;
  a.scale_log2 = (float)(kvr_problem_score_scale(p) * q_scale * log2_e);
  a.soft_cap_log2 = (float)((double)p->soft_cap * log2_e);
  a.q_inv_scale = (float)(1.0 / q_scale);
  /* Parts of the two-launch ring are scaled when they are merged. */
  const bool part = op->dst.buffer == KVR_BUF_PART_OUT;
  a.out_scale = part ? 1.0f : (float)kvr_problem_value_scale(p);
  return a;
}

/* After the current wait list, or after a launch of the same op. */
static kvr_status launch_attend(kvr_exec *exec, const kvr_op *op, cl_mem state,
                                const kvr_attend_args *args, const cl_event *after,
                                cl_event *event) {
  const int group = args->num_q_heads / args->num_kv_heads;
  const kvr_attend_kernels *kernels = attend_kernels(exec, op);
  const int variant = kvr_variant_pick(kernels->usable, args->num_rows, group);
  const cl_kernel kernel = kernels->kernel[variant];
  const cl_mem mems[7] = {memory_or_dummy(exec, op, op->q),   memory_or_dummy(exec, op, op->src),
                          memory_or_dummy(exec, op, op->cur), state,
                          memory_or_dummy(exec, op, op->dst), lse_memory(exec, op),
                          exec->ranks[op->rank].sinks};
  KVR_TRY(set_mems(kernel, mems, 7));
  KVR_TRY(set_arg(kernel, 7, sizeof *args, args));
  size_t global[2], local[2];
  kvr_variant_sizes(variant, args->num_rows, group, args->num_kv_heads, global, local);
  KVR_CL(clEnqueueNDRangeKernel,
         (queue_of(exec, op), kernel, 2, NULL, global, local, after != NULL ? 1 : exec->num_waits,
          after != NULL ? after : kvr_exec_waits(exec), event));
  return KVR_OK;
}

/* Keys [args.lower, args.kv_end) in launches of max_keys, the state carried from each to the next
 * in the op's own state, or in the rank's carry buffer. */
static kvr_status attend_in_parts(kvr_exec *exec, const kvr_op *op, int max_keys, cl_event *event) {
  const kvr_attend_args whole = attend_args(exec, op);
  const bool own = op->state.buffer != KVR_BUF_NONE;
  const cl_mem state = own ? kvr_exec_memory(exec, op->state) : exec->ranks[op->rank].carry;
  cl_event last = NULL;
  for (int begin = whole.lower; begin < whole.kv_end; begin += max_keys) {
    kvr_attend_args part = whole;
    cl_event next = NULL;
    part.lower = begin;
    part.kv_end = kvr_min(begin + max_keys, whole.kv_end);
    part.carry_in = begin > whole.lower ? 1 : whole.carry_in;
    part.finish = part.kv_end < whole.kv_end ? 0 : whole.finish;
    if (!own) part.state_row = 0;
    const kvr_status status =
        launch_attend(exec, op, state, &part, last != NULL ? &last : NULL, &next);
    if (last != NULL) clReleaseEvent(last);
    last = next;
    KVR_TRY(status);
  }
  *event = last;
  return KVR_OK;
}

static kvr_status attend(kvr_exec *exec, const kvr_op *op, cl_event *event) {
  const kvr_attend_args args = attend_args(exec, op);
  const int max_keys = attend_kernels(exec, op)->max_keys;
  if (args.kv_end - args.lower > max_keys) return attend_in_parts(exec, op, max_keys, event);
  return launch_attend(exec, op, memory_or_dummy(exec, op, op->state), &args, NULL, event);
}

/* ---- merges ---- */

static kvr_status merge(kvr_exec *exec, const kvr_op *op, cl_event *event) {
  const kvr_problem *p = &exec->schedule->problem;
  const kvr_kernels *k = exec->ranks[op->rank].kernels;
  const kvr_merge_args args = {.num_rows = op->dst.rows,
                               .num_parts =
                                   op->src.buffer == KVR_BUF_RECEIVED ? exec->group->num_ranks : 0,
                               .part_rows = op->src.rows,
                               .state_row =
                                   op->kind == KVR_OP_MERGE_STATES ? op->state.row : op->src.row,
                               .out_row = op->dst.row,
                               .num_q_heads = p->num_q_heads,
                               .out_scale = (float)kvr_problem_value_scale(p)};
  const cl_mem out = kvr_exec_memory(exec, op->dst), lse = lse_memory(exec, op);
  const bool states = op->kind == KVR_OP_MERGE_STATES;
  const cl_kernel kernel = states ? k->merge_states[p->out_dtype] : k->merge_outputs[p->out_dtype];
  if (states) {
    const cl_mem mems[4] = {kvr_exec_memory(exec, op->state), memory_or_dummy(exec, op, op->src),
                            out, lse};
    KVR_TRY(set_mems(kernel, mems, 4));
    KVR_TRY(set_arg(kernel, 4, sizeof args, &args));
  } else {
    cl_mem *const parts = exec->ranks[op->rank].memory[KVR_BUF_PART_OUT];
    cl_mem *const lses = exec->ranks[op->rank].memory[KVR_BUF_PART_LSE];
    const cl_mem mems[6] = {parts[0], lses[0], parts[1], lses[1], out, lse};
    KVR_TRY(set_mems(kernel, mems, 6));
    KVR_TRY(set_arg(kernel, 6, sizeof args, &args));
  }
  const kvr_launch_size size = kvr_merge_size(op->dst.rows, p->num_q_heads);
  KVR_CL(clEnqueueNDRangeKernel, (queue_of(exec, op), kernel, 2, NULL, size.global, size.local,
                                  exec->num_waits, kvr_exec_waits(exec), event));
  return KVR_OK;
}

/* ---- rows through block tables ---- */

static kvr_rows_args rows_args(const kvr_exec *exec, const kvr_op *op) {
  const kvr_cache_desc *cache = &exec->schedule->problem.cache;
  const bool stage = op->kind == KVR_OP_STAGE;
  return (kvr_rows_args){.num_rows = stage ? op->dst.rows : op->src.rows,
                         .buffer_row = stage ? op->dst.row : op->src.row,
                         .local0 = op->local0,
                         .page_size = cache->page_size,
                         .row_words = (int)(exec->row_bytes.kv / 2),
                         .split = op->split,
                         .t0 = op->t0,
                         .t1 = op->t1,
                         .num_cached = exec->schedule->problem.requests[op->request].num_cached,
                         .interleave = cache->interleave,
                         .total_weight = kvr_map_total_weight(cache),
                         .weight = kvr_map_weight(cache, op->rank),
                         .weight_before = kvr_map_weight_before(cache, op->rank)};
}

/* One launch per buffer of the pool; each waits for the one before it, and the last one's event is
 * the op's. */
static kvr_status move_rows(kvr_exec *exec, const kvr_op *op, cl_event *event) {
  const bool stage = op->kind == KVR_OP_STAGE;
  const kvr_kernels *k = exec->ranks[op->rank].kernels;
  const cl_kernel kernel = stage ? k->stage : k->cache_write;
  const cl_mem rows = kvr_exec_memory(exec, stage ? op->dst : op->src);
  const kvr_launch_size size = kvr_rows_size(k, stage ? op->dst.rows : op->src.rows);
  cl_event last = NULL;
  for (int i = 0; i < kvr_cache_num_buffers(exec->cache); i++) {
    kvr_rows_args args = rows_args(exec, op);
    const cl_mem pool =
        kvr_cache_buffer(exec->cache, op->rank, i, &args.page_first, &args.page_count);
    const cl_mem table = exec->ranks[op->rank].tables[op->request];
    const cl_mem stage_mems[3] = {pool, table, rows}, write_mems[3] = {rows, pool, table};
    cl_event next = NULL;
    kvr_status status = set_mems(kernel, stage ? stage_mems : write_mems, 3);
    if (status == KVR_OK) status = set_arg(kernel, 3, sizeof args, &args);
    if (status == KVR_OK)
      status =
          kvr_cl_check(clEnqueueNDRangeKernel(queue_of(exec, op), kernel, 2, NULL, size.global,
                                              size.local, last != NULL ? 1 : exec->num_waits,
                                              last != NULL ? &last : kvr_exec_waits(exec), &next),
                       "clEnqueueNDRangeKernel");
    if (last != NULL) clReleaseEvent(last);
    last = next;
    KVR_TRY(status);
  }
  *event = last;
  return KVR_OK;
}

/* ---- copies and markers ---- */

static kvr_status copy(kvr_exec *exec, const kvr_op *op, cl_event *event) {
  const size_t row = kvr_buffer_row_bytes(&exec->row_bytes, op->dst.buffer);
  const kvr_transport_copy c = {.src = kvr_exec_memory(exec, op->src),
                                .src_offset = row * (size_t)op->src.row,
                                .dst = kvr_exec_memory(exec, op->dst),
                                .dst_offset = row * (size_t)op->dst.row,
                                .bytes = row * (size_t)op->dst.rows};
  return kvr_transport_same_context.hop(queue_of(exec, op), &c, exec->num_waits,
                                        kvr_exec_waits(exec), event);
}

static kvr_status marker(kvr_exec *exec, const kvr_op *op, cl_event *event) {
  KVR_CL(clEnqueueMarkerWithWaitList,
         (queue_of(exec, op), exec->num_waits, kvr_exec_waits(exec), event));
  return KVR_OK;
}

kvr_status kvr_exec_launch(kvr_exec *exec, const kvr_op *op, cl_event *event) {
  if (!op->launch) return marker(exec, op, event);
  switch (op->kind) {
  case KVR_OP_ATTEND: return attend(exec, op, event);
  case KVR_OP_MERGE_STATES:
  case KVR_OP_MERGE_OUTPUTS: return merge(exec, op, event);
  case KVR_OP_STAGE:
  case KVR_OP_CACHE_WRITE: return move_rows(exec, op, event);
  default: return copy(exec, op, event);
  }
}

/* Launches every kernel once on no rows, as wide as any launch of a step can be.
 *
 * Drivers finish compiling at the first launch with a given work-group size. And PoCL 3.1 keeps a
 * binary per kernel and width: a launch wider than any before it makes a second entry, and commands
 * still in flight are then counted off the wrong one, until an assertion ends the process. So the
 * widest launch comes first, while nothing else runs. */
#include "base/arith.h"
#include "base/error.h"
#include "device/cl_error.h"
#include "exec/exec.h"

static kvr_status launch(const kvr_exec *x, int rank, cl_kernel kernel, const cl_mem *mems,
                         cl_uint num_mems, const void *args, size_t args_size,
                         const kvr_launch_size *size) {
  for (cl_uint i = 0; i < num_mems; i++)
    KVR_CL(clSetKernelArg, (kernel, i, sizeof(cl_mem), &mems[i]));
  KVR_CL(clSetKernelArg, (kernel, num_mems, args_size, args));
  KVR_CL(clEnqueueNDRangeKernel,
         (kvr_exec_queue(x, rank, 0), kernel, 2, NULL, size->global, size->local, 0, NULL, NULL));
  return KVR_OK;
}

static int max_rows(const kvr_exec *x, const kvr_buffer *buffers, int num) {
  int rows = 1;
  for (int i = 0; i < num; i++) rows = kvr_max(rows, x->desc.footprint.rows[buffers[i]]);
  return rows;
}

static kvr_status warm_attend(const kvr_exec *x, int rank, kvr_dtype out) {
  static const kvr_buffer queries[] = {KVR_BUF_Q, KVR_BUF_Q_ALL, KVR_BUF_LANE_Q};
  const kvr_kernels *k = x->ranks[rank].kernels;
  const int heads = x->desc.num_q_heads, kv_heads = kvr_cache_describe(x->cache)->num_kv_heads;
  const cl_mem any = x->ranks[rank].memory[KVR_BUF_Q][0];
  const cl_mem mems[7] = {any, any, any, any, any, any, any};
  const kvr_attend_args args = {.finish = 1,
                                .num_q_heads = heads,
                                .num_kv_heads = kv_heads,
                                .out_scale = 1.0f};
  for (int v = 0; v < kvr_num_variants(); v++) {
    kvr_launch_size size;
    if (!k->attend[out].usable[v]) continue;
    kvr_variant_sizes(v, max_rows(x, queries, 3), heads / kv_heads, kv_heads, size.global,
                      size.local);
    KVR_TRY(launch(x, rank, k->attend[out].kernel[v], mems, 7, &args, sizeof args, &size));
  }
  return KVR_OK;
}

static kvr_status warm_rows(const kvr_exec *x, int rank) {
  static const kvr_buffer rows[] = {KVR_BUF_SLOT, KVR_BUF_GATHERED, KVR_BUF_CURRENT, KVR_BUF_NEW};
  const kvr_kernels *k = x->ranks[rank].kernels;
  const cl_mem any = x->ranks[rank].memory[KVR_BUF_Q][0];
  const cl_mem mems[3] = {any, any, any};
  const kvr_rows_args args = {.num_rows = 0, .page_size = 1};
  const kvr_launch_size size = kvr_rows_size(k, max_rows(x, rows, 4));
  KVR_TRY(launch(x, rank, k->stage, mems, 3, &args, sizeof args, &size));
  return launch(x, rank, k->cache_write, mems, 3, &args, sizeof args, &size);
}

static kvr_status warm_merges(const kvr_exec *x, int rank, kvr_dtype out) {
  const kvr_kernels *k = x->ranks[rank].kernels;
  const cl_mem any = x->ranks[rank].memory[KVR_BUF_Q][0];
  const cl_mem mems[6] = {any, any, any, any, any, any};
  const kvr_merge_args args = {.num_rows = 0,
                               .num_q_heads = x->desc.num_q_heads,
                               .out_scale = 1.0f};
  const kvr_launch_size size =
      kvr_merge_size(kvr_max(1, x->desc.footprint.rows[KVR_BUF_Q]), x->desc.num_q_heads);
  KVR_TRY(launch(x, rank, k->merge_states[out], mems, 4, &args, sizeof args, &size));
  return launch(x, rank, k->merge_outputs[out], mems, 6, &args, sizeof args, &size);
}

kvr_status kvr_exec_warm_up(kvr_exec *x, int rank, kvr_dtype out_dtype) {
  KVR_TRY(warm_attend(x, rank, out_dtype));
  KVR_TRY(warm_rows(x, rank));
  KVR_TRY(warm_merges(x, rank, out_dtype));
  KVR_CL(clFinish, (kvr_exec_queue(x, rank, 0)));
  return KVR_OK;
}

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

/* No rows and no keys: nothing is read or written. */
static kvr_status warm_attend(const kvr_exec *x, int rank, kvr_dtype out) {
  const kvr_kernels *k = x->ranks[rank].kernels;
  const cl_mem any = x->ranks[rank].memory[KVR_BUF_Q][0];
  const cl_mem mems[7] = {any, any, any, any, any, any, any};
  const kvr_attend_args args = {.finish = 1,
                                .num_q_heads = 1,
                                .num_kv_heads = 1,
                                .out_scale = 1.0f};
  for (int v = 0; v < kvr_num_variants(); v++) {
    kvr_launch_size size;
    kvr_variant_sizes(v, 1, 1, 1, size.global, size.local);
    KVR_TRY(launch(x, rank, k->attend[out][v], mems, 7, &args, sizeof args, &size));
  }
  return KVR_OK;
}

static kvr_status warm_rows(const kvr_exec *x, int rank) {
  const kvr_kernels *k = x->ranks[rank].kernels;
  const cl_mem any = x->ranks[rank].memory[KVR_BUF_Q][0];
  const cl_mem mems[3] = {any, any, any};
  const kvr_rows_args args = {.num_rows = 0, .page_size = 1};
  const kvr_launch_size size = kvr_rows_size(k, 1);
  KVR_TRY(launch(x, rank, k->stage, mems, 3, &args, sizeof args, &size));
  return launch(x, rank, k->cache_write, mems, 3, &args, sizeof args, &size);
}

/* One row of one head: it computes on what the buffers happen to hold, before any step uses them.
 */
static kvr_status warm_merges(const kvr_exec *x, int rank, kvr_dtype out) {
  const kvr_rank_exec *r = &x->ranks[rank];
  const kvr_merge_args args = {.num_rows = 1,
                               .num_q_heads = x->desc.num_q_heads,
                               .out_scale = 1.0f};
  const kvr_launch_size size = kvr_merge_size(1, 1);
  const cl_mem o = r->memory[KVR_BUF_OUT][0], l = r->memory[KVR_BUF_LSE][0];
  if (kvr_dtype_size(out) > kvr_dtype_size(x->desc.out_dtype)) return KVR_OK;
  if (x->desc.footprint.memories[KVR_BUF_STATE] > 0) {
    const cl_mem state = r->memory[KVR_BUF_STATE][0], mems[4] = {state, state, o, l};
    KVR_TRY(launch(x, rank, r->kernels->merge_states[out], mems, 4, &args, sizeof args, &size));
  }
  if (x->desc.footprint.memories[KVR_BUF_PART_OUT] > 0) {
    const cl_mem part = r->memory[KVR_BUF_PART_OUT][0], lse = r->memory[KVR_BUF_PART_LSE][0];
    const cl_mem mems[6] = {part, lse, part, lse, o, l};
    KVR_TRY(launch(x, rank, r->kernels->merge_outputs[out], mems, 6, &args, sizeof args, &size));
  }
  return KVR_OK;
}

kvr_status kvr_exec_warm_up(kvr_exec *x, int rank, kvr_dtype out_dtype) {
  KVR_TRY(warm_attend(x, rank, out_dtype));
  KVR_TRY(warm_rows(x, rank));
  KVR_TRY(warm_merges(x, rank, out_dtype));
  KVR_CL(clFinish, (kvr_exec_queue(x, rank, 0)));
  return KVR_OK;
}

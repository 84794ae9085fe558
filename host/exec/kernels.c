#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/arith.h"
#include "base/error.h"
#include "device/cl_error.h"
#include "device/program.h"
#include "exec/exec.h"

static kvr_status make_kernel(cl_program program, const char *name, cl_kernel *out) {
  cl_int code;
  *out = clCreateKernel(program, name, &code);
  return kvr_cl_check(code, "clCreateKernel");
}

static kvr_status build_rows(kvr_exec *exec, int rank, kvr_kernels *k) {
  cl_device_type type;
  KVR_CL(clGetDeviceInfo,
         (exec->group->ranks[rank].device, CL_DEVICE_TYPE, sizeof type, &type, NULL));
  k->is_cpu = (type & CL_DEVICE_TYPE_CPU) != 0;
  KVR_TRY(kvr_program_create(exec->group, rank, "rows.cl", "", NULL, &k->rows_program));
  KVR_TRY(make_kernel(k->rows_program, "kvr_stage", &k->stage));
  return make_kernel(k->rows_program, "kvr_cache_write", &k->cache_write);
}

kvr_status kvr_exec_create_kernels(kvr_exec *exec) {
  const kvr_group *group = exec->group;
  for (int r = 0; r < group->num_ranks; r++) {
    for (int other = 0; other < r; other++)
      if (group->ranks[other].device == group->ranks[r].device)
        exec->ranks[r].kernels = exec->ranks[other].kernels;
    if (exec->ranks[r].kernels != NULL) continue;
    exec->ranks[r].kernels = calloc(1, sizeof *exec->ranks[r].kernels);
    if (exec->ranks[r].kernels == NULL) return kvr_fail(KVR_E_OOM, "no host memory for kernels");
    exec->ranks[r].owns_kernels = true;
    KVR_TRY(build_rows(exec, r, exec->ranks[r].kernels));
  }
  return KVR_OK;
}

static void release_kernel(cl_kernel kernel) {
  if (kernel != NULL) clReleaseKernel(kernel);
}

static void release_program(cl_program program) {
  if (program != NULL) clReleaseProgram(program);
}

static void destroy(kvr_kernels *k) {
  for (int t = 0; t < KVR_NUM_DTYPES; t++) {
    kvr_attend_kernels_fini(&k->attend[t]);
    release_kernel(k->merge_states[t]);
    release_kernel(k->merge_outputs[t]);
    release_program(k->merge_program[t]);
  }
  release_kernel(k->stage);
  release_kernel(k->cache_write);
  release_program(k->rows_program);
  free(k);
}

static size_t carry_bytes(const kvr_exec *exec) {
  static const kvr_buffer queries[] = {KVR_BUF_Q, KVR_BUF_Q_ALL, KVR_BUF_LANE_Q};
  const size_t row = kvr_buffer_row_bytes(&exec->row_bytes, KVR_BUF_STATE);
  int rows = 0;
  for (int i = 0; i < 3; i++) rows = kvr_max(rows, exec->desc.footprint.rows[queries[i]]);
  return (size_t)rows * row;
}

/* Where a launch cannot take all keys, state is carried even by ops that have no place for it. */
static kvr_status allocate_carry(kvr_exec *exec, kvr_dtype out) {
  for (int r = 0; r < exec->group->num_ranks; r++)
    if (exec->ranks[r].kernels->attend[out].max_keys < INT_MAX && exec->ranks[r].carry == NULL)
      KVR_TRY(kvr_group_alloc(exec->group, r, carry_bytes(exec), "carried state",
                              &exec->ranks[r].carry));
  return KVR_OK;
}

void kvr_exec_destroy_kernels(kvr_exec *exec) {
  for (int r = 0; r < exec->group->num_ranks; r++)
    kvr_group_free(exec->group, r, exec->ranks[r].carry, carry_bytes(exec));
  for (int r = 0; r < exec->group->num_ranks; r++)
    if (exec->ranks[r].owns_kernels) destroy(exec->ranks[r].kernels);
}

/* ---- by output type ---- */

static kvr_status build_merge(kvr_exec *exec, int rank, kvr_dtype out) {
  kvr_kernels *k = exec->ranks[rank].kernels;
  char options[64];
  snprintf(options, sizeof options, "-DHEAD_DIM=%d -DOUT_DTYPE=%d",
           kvr_cache_describe(exec->cache)->head_dim, (int)out);
  if (k->merge_program[out] == NULL)
    KVR_TRY(
        kvr_program_create(exec->group, rank, "merge.cl", options, NULL, &k->merge_program[out]));
  if (k->merge_states[out] == NULL)
    KVR_TRY(make_kernel(k->merge_program[out], "kvr_merge_states", &k->merge_states[out]));
  return make_kernel(k->merge_program[out], "kvr_merge_outputs", &k->merge_outputs[out]);
}

static kvr_status build_type(kvr_exec *exec, kvr_dtype out) {
  for (int r = 0; r < exec->group->num_ranks; r++) {
    if (!exec->ranks[r].owns_kernels || exec->ranks[r].kernels->merge_outputs[out] != NULL)
      continue;
    kvr_attend_kernels *attend = &exec->ranks[r].kernels->attend[out];
    kvr_attend_kernels_fini(attend); /* of an attempt that failed later on */
    KVR_TRY(kvr_attend_kernels_init(attend, exec->group, r, kvr_cache_describe(exec->cache), out,
                                    exec->desc.math));
    KVR_TRY(build_merge(exec, r, out));
    KVR_TRY(kvr_exec_warm_up(exec, r, out));
  }
  return allocate_carry(exec, out);
}

kvr_math kvr_exec_math(const kvr_exec *exec, int rank) {
  const kvr_attend_kernels *attend = &exec->ranks[rank].kernels->attend[exec->desc.out_dtype];
  return kvr_attend_kernels_use_bf16(attend) ? KVR_MATH_BF16 : KVR_MATH_F32;
}

kvr_status kvr_exec_build(kvr_exec *exec, kvr_dtype out_dtype) {
  KVR_TRY(build_type(exec, out_dtype));
  /* The two-launch ring writes its partial outputs in f32 whatever the output type is. */
  return exec->desc.footprint.memories[KVR_BUF_PART_OUT] > 0 ? build_type(exec, KVR_F32) : KVR_OK;
}

#include "device/attend_kernel.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "device/cl_error.h"
#include "device/cpu_products.h"
#include "device/program.h"
#include "device/self_test.h"

/* Vectors of the source become registers only on such devices; on others they are many scalars,
 * which their compilers unroll without end. */
static kvr_status has_vectors(const kvr_group *group, int rank, bool *out) {
  cl_uint width = 0;
  KVR_CL(clGetDeviceInfo, (group->ranks[rank].device, CL_DEVICE_NATIVE_VECTOR_WIDTH_FLOAT,
                           sizeof width, &width, NULL));
  *out = width >= 4;
  return KVR_OK;
}

/* What is built: fixed for a session. */
typedef struct plan {
  const kvr_group *group;
  int rank;
  const kvr_cache_desc *cache;
  kvr_dtype out_dtype;
  bool vectors;          /* the device has them */
  bool bf16;             /* use variants with bf16 products */
  kvr_products products; /* of those */
} plan;

static kvr_status build(kvr_attend_kernels *k, const plan *p, int variant) {
  const kvr_variant *v = kvr_variant_get(variant);
  kvr_self_test user = {.cache = p->cache, .out_dtype = p->out_dtype, .variant = variant};
  char options[256], name[64];
  if (!kvr_variant_options(variant, p->cache, p->out_dtype, p->products, options, sizeof options))
    return kvr_fail(KVR_E_RANGE, "build options of kernel variant %s do not fit", v->name);
  snprintf(name, sizeof name, "kernel variant %s", v->name);
  const kvr_program_test test = {.name = name, .run = kvr_self_test_run, .user = &user};
  KVR_TRY(kvr_program_create(p->group, p->rank, v->file, options, &test, &k->program[variant]));
  cl_int code;
  k->kernel[variant] = clCreateKernel(k->program[variant], "kvr_attend", &code);
  KVR_TRY(kvr_cl_check(code, "clCreateKernel"));
  k->usable[variant] = true;
  return KVR_OK;
}

/* ---- how long a loop may be ---- */

enum { STEPS = 1 << 20 };

static kvr_status run_count(const kvr_rank *r, cl_kernel kernel, const cl_mem mems[2],
                            cl_int *out) {
  const size_t one = 1;
  const cl_int num = STEPS;
  for (cl_uint i = 0; i < 2; i++) KVR_CL(clSetKernelArg, (kernel, i, sizeof(cl_mem), &mems[i]));
  KVR_CL(clSetKernelArg, (kernel, 2, sizeof num, &num));
  KVR_CL(clEnqueueNDRangeKernel, (r->queue, kernel, 1, NULL, &one, &one, 0, NULL, NULL));
  KVR_CL(clEnqueueReadBuffer, (r->queue, mems[1], CL_TRUE, 0, sizeof *out, out, 0, NULL, NULL));
  return KVR_OK;
}

/* Steps that loops of one work-item really make, out of STEPS. */
static kvr_status count_steps(const kvr_rank *r, cl_program program, cl_int *out) {
  cl_int ones[16], codes[3];
  for (int i = 0; i < 16; i++) ones[i] = 1;
  const cl_kernel kernel = clCreateKernel(program, "kvr_count_steps", &codes[0]);
  const cl_mem mems[2] = {clCreateBuffer(r->context, CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR,
                                         sizeof ones, ones, &codes[1]),
                          clCreateBuffer(r->context, CL_MEM_READ_WRITE, sizeof(cl_int), NULL,
                                         &codes[2])};
  kvr_status status = kvr_cl_check(codes[0], "clCreateKernel");
  for (int i = 1; i < 3 && status == KVR_OK; i++) status = kvr_cl_check(codes[i], "clCreateBuffer");
  if (status == KVR_OK) status = run_count(r, kernel, mems, out);
  for (int i = 0; i < 2; i++)
    if (codes[i + 1] == CL_SUCCESS) clReleaseMemObject(mems[i]);
  if (codes[0] == CL_SUCCESS) clReleaseKernel(kernel);
  return status;
}

/* KVRING_MAX_KEYS=N lowers the limit, so that it can be seen without a device that has one. */
static kvr_status read_max_keys(int *out) {
  const char *text = getenv("KVRING_MAX_KEYS");
  if (text == NULL || text[0] == '\0') return KVR_OK;
  char *end;
  errno = 0;
  const long value = strtol(text, &end, 10);
  if (errno != 0 || *end != '\0' || value < 1 || value > INT_MAX)
    return kvr_fail(KVR_E_RANGE, "KVRING_MAX_KEYS is '%s'; it must be a number of keys, 1 or more",
                    text);
  *out = kvr_min(*out, (int)value);
  return KVR_OK;
}

/* llvmpipe ends every kernel's loops after 65,535 steps altogether, so launches must be shorter. */
static kvr_status find_max_keys(kvr_attend_kernels *k, const kvr_rank *r, int head_dim) {
  const int plain = kvr_variant_find("plain");
  const int steps_per_key = 2 * (head_dim / 16 + 1) + 2; /* two loops over vectors of dims */
  cl_int steps = STEPS;
  k->max_keys = INT_MAX;
  if (k->usable[plain]) KVR_TRY(count_steps(r, k->program[plain], &steps));
  if (steps < STEPS) k->max_keys = kvr_max(1, steps / 2 / steps_per_key); /* half of it is spare */
  return read_max_keys(&k->max_keys);
}

/* ---- which variants ---- */

/* Adds the beginning of a reason to why: there must be room for those of all variants. */
static void add_reason(char *why, size_t size, const char *reason) {
  const size_t used = strlen(why);
  snprintf(why + used, size - used, "%s%.300s", used > 0 ? "; " : "", reason);
}

/* Builds the variants with or without vectors; a quarantined one is left out, its reason noted. */
static kvr_status build_kind(kvr_attend_kernels *k, const plan *p, bool vectors, int *num,
                             char *why, size_t size) {
  for (int i = 0; i < kvr_num_variants(); i++) {
    const kvr_variant *v = kvr_variant_get(i);
    if (v->vectors != vectors || (v->bf16 && !p->bf16)) continue;
    const kvr_status status = build(k, p, i);
    if (status == KVR_E_UNSUPPORTED)
      add_reason(why, size, kvr_error_message());
    else if (status != KVR_OK)
      return status;
    *num += k->usable[i] && !v->bf16; /* small launches need another one */
  }
  return KVR_OK;
}

static kvr_status build_all(kvr_attend_kernels *k, const plan *p) {
  char why[1800] = "";
  int num = 0;
  for (int attempt = 0; attempt < 2 && num == 0; attempt++)
    KVR_TRY(build_kind(k, p, attempt == 0 ? p->vectors : !p->vectors, &num, why, sizeof why));
  if (num > 0) return KVR_OK;
  return kvr_fail(KVR_E_UNSUPPORTED,
                  "no attention kernel is right on %s, choose another device: %s",
                  p->group->infos[p->rank].name, why);
}

static kvr_status build_named(kvr_attend_kernels *k, const plan *p, const char *name) {
  char names[256] = "";
  const int variant = kvr_variant_find(name);
  if (variant >= 0) return build(k, p, variant);
  for (int i = 0; i < kvr_num_variants(); i++)
    snprintf(names + strlen(names), sizeof names - strlen(names), " %s", kvr_variant_get(i)->name);
  return kvr_fail(KVR_E_RANGE, "KVRING_VARIANT is '%s'; the kernel variants are:%s", name, names);
}

/* Instructions of this machine's CPU serve the devices that are this CPU. */
static kvr_status choose_math(plan *p, kvr_math math) {
  const char *type = p->group->infos[p->rank].type;
  if (p->vectors && strcmp(type, "cpu") == 0) p->products = kvr_cpu_products();
  const bool fast = p->products != KVR_PRODUCTS_F32;
  p->bf16 =
      fast && (math == KVR_MATH_BF16 || (math == KVR_MATH_AUTO && p->cache->dtype == KVR_BF16));
  if (math != KVR_MATH_BF16 || fast) return KVR_OK;
  return kvr_fail(KVR_E_UNSUPPORTED,
                  "math bf16: %s has no instructions that multiply bf16 faster than f32 (AMX or "
                  "AVX512-BF16 on a CPU); use auto or f32",
                  p->group->infos[p->rank].name);
}

kvr_status kvr_attend_kernels_init(kvr_attend_kernels *k, const kvr_group *group, int rank,
                                   const kvr_cache_desc *cache, kvr_dtype out_dtype,
                                   kvr_math math) {
  plan p = {.group = group, .rank = rank, .cache = cache, .out_dtype = out_dtype};
  const char *name = getenv("KVRING_VARIANT");
  *k = (kvr_attend_kernels){.program = {NULL}};
  KVR_TRY(has_vectors(group, rank, &p.vectors));
  KVR_TRY(choose_math(&p, math));
  k->products = p.products;
  kvr_status status = name != NULL && name[0] != '\0' ? build_named(k, &p, name) : build_all(k, &p);
  if (status == KVR_OK) status = find_max_keys(k, &group->ranks[rank], cache->head_dim);
  if (status != KVR_OK) kvr_attend_kernels_fini(k);
  return status;
}

bool kvr_attend_kernels_use_bf16(const kvr_attend_kernels *k) {
  const int variant = kvr_variant_pick(k->usable, 1 << 16, 1);
  return variant >= 0 && kvr_variant_get(variant)->bf16;
}

void kvr_attend_kernels_fini(kvr_attend_kernels *k) {
  for (int i = 0; i < KVR_MAX_VARIANTS; i++) {
    if (k->kernel[i] != NULL) clReleaseKernel(k->kernel[i]);
    if (k->program[i] != NULL) clReleaseProgram(k->program[i]);
  }
  *k = (kvr_attend_kernels){.program = {NULL}};
}

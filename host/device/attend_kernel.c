#include "device/attend_kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "device/cl_error.h"
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

static kvr_status build(kvr_attend_kernels *k, const kvr_group *group, int rank,
                        const kvr_cache_desc *cache, kvr_dtype out_dtype, int variant) {
  const kvr_variant *v = kvr_variant_get(variant);
  kvr_self_test user = {.cache = cache, .out_dtype = out_dtype, .variant = variant};
  char options[256], name[64];
  if (!kvr_variant_options(variant, cache, out_dtype, options, sizeof options))
    return kvr_fail(KVR_E_RANGE, "build options of kernel variant %s do not fit", v->name);
  snprintf(name, sizeof name, "kernel variant %s", v->name);
  const kvr_program_test test = {.name = name, .run = kvr_self_test_run, .user = &user};
  KVR_TRY(kvr_program_create(group, rank, v->file, options, &test, &k->program[variant]));
  cl_int code;
  k->kernel[variant] = clCreateKernel(k->program[variant], "kvr_attend", &code);
  KVR_TRY(kvr_cl_check(code, "clCreateKernel"));
  k->usable[variant] = true;
  return KVR_OK;
}

/* Adds a sentence to why, cut where it is full. */
static void add_reason(char *why, size_t size, const char *reason) {
  const size_t used = strlen(why);
  snprintf(why + used, size - used, "%s%s", used > 0 ? "; " : "", reason);
}

/* Builds the variants of one kind; a quarantined one is left out and its reason noted. */
static kvr_status build_kind(kvr_attend_kernels *k, const kvr_group *group, int rank,
                             const kvr_cache_desc *cache, kvr_dtype out_dtype, bool vectors,
                             int *num, char *why, size_t size) {
  for (int i = 0; i < kvr_num_variants(); i++) {
    if (kvr_variant_get(i)->vectors != vectors) continue;
    const kvr_status status = build(k, group, rank, cache, out_dtype, i);
    if (status == KVR_E_UNSUPPORTED)
      add_reason(why, size, kvr_error_message());
    else if (status != KVR_OK)
      return status;
    *num += k->usable[i];
  }
  return KVR_OK;
}

static kvr_status build_all(kvr_attend_kernels *k, const kvr_group *group, int rank,
                            const kvr_cache_desc *cache, kvr_dtype out_dtype) {
  char why[1500] = "";
  bool vectors;
  int num = 0;
  KVR_TRY(has_vectors(group, rank, &vectors));
  for (int attempt = 0; attempt < 2 && num == 0; attempt++)
    KVR_TRY(build_kind(k, group, rank, cache, out_dtype, attempt == 0 ? vectors : !vectors, &num,
                       why, sizeof why));
  if (num > 0) return KVR_OK;
  return kvr_fail(KVR_E_UNSUPPORTED,
                  "no attention kernel is right on %s, choose another device: %s",
                  group->infos[rank].name, why);
}

static kvr_status build_named(kvr_attend_kernels *k, const kvr_group *group, int rank,
                              const kvr_cache_desc *cache, kvr_dtype out_dtype, const char *name) {
  char names[256] = "";
  const int variant = kvr_variant_find(name);
  if (variant >= 0) return build(k, group, rank, cache, out_dtype, variant);
  for (int i = 0; i < kvr_num_variants(); i++)
    snprintf(names + strlen(names), sizeof names - strlen(names), " %s", kvr_variant_get(i)->name);
  return kvr_fail(KVR_E_RANGE, "KVRING_VARIANT is '%s'; the kernel variants are:%s", name, names);
}

kvr_status kvr_attend_kernels_init(kvr_attend_kernels *k, const kvr_group *group, int rank,
                                   const kvr_cache_desc *cache, kvr_dtype out_dtype) {
  *k = (kvr_attend_kernels){.program = {NULL}};
  const char *name = getenv("KVRING_VARIANT");
  const kvr_status status = name != NULL && name[0] != '\0'
                                ? build_named(k, group, rank, cache, out_dtype, name)
                                : build_all(k, group, rank, cache, out_dtype);
  if (status != KVR_OK) kvr_attend_kernels_fini(k);
  return status;
}

void kvr_attend_kernels_fini(kvr_attend_kernels *k) {
  for (int i = 0; i < KVR_MAX_VARIANTS; i++) {
    if (k->kernel[i] != NULL) clReleaseKernel(k->kernel[i]);
    if (k->program[i] != NULL) clReleaseProgram(k->program[i]);
  }
  *k = (kvr_attend_kernels){.program = {NULL}};
}

/* Attention kernels that are known to be right on their device. */
#ifndef KVR_DEVICE_ATTEND_KERNEL_H
#define KVR_DEVICE_ATTEND_KERNEL_H

#include "device/group.h"
#include "device/variant.h"

/* The kvr_attend kernels of one device for one shape and output type: by variant, NULL where it is
 * not usable. Owned; release with kvr_attend_kernels_fini. */
typedef struct kvr_attend_kernels {
  cl_program program[KVR_MAX_VARIANTS];
  cl_kernel kernel[KVR_MAX_VARIANTS];
  bool usable[KVR_MAX_VARIANTS];
  kvr_products products; /* of the bf16 variants */
  int max_keys; /* of one launch; INT_MAX: any number. Software GPUs may end long loops silently */
} kvr_attend_kernels;

/* Builds the variants made for the device of a rank; each has passed the self-test there. Where
 * none of them is right, the others are tried. math says whether those with bf16 products are among
 * them. KVRING_VARIANT=NAME builds that one alone.
 * Errors: KVR_E_UNSUPPORTED naming every variant and what is wrong with it, or if there is no
 * faster bf16 for KVR_MATH_BF16; KVR_E_RANGE for an unknown name; KVR_E_CL. On failure nothing is
 * owned. */
kvr_status kvr_attend_kernels_init(kvr_attend_kernels *kernels, const kvr_group *group, int rank,
                                   const kvr_cache_desc *cache, kvr_dtype out_dtype, kvr_math math);
/* Whether a launch of many rows uses bf16 products. */
bool kvr_attend_kernels_use_bf16(const kvr_attend_kernels *kernels);
void kvr_attend_kernels_fini(kvr_attend_kernels *kernels); /* accepts all zero */

#endif

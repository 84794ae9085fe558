/* The test that an attention kernel passes before its first use on a device. */
#ifndef KVR_DEVICE_SELF_TEST_H
#define KVR_DEVICE_SELF_TEST_H

#include "device/group.h"
#include "device/variant.h"

typedef struct kvr_self_test {
  const kvr_cache_desc *cache; /* head_dim and dtype are those of the program */
  kvr_dtype out_dtype;
  int variant;
} kvr_self_test;

/* A kvr_program_test.run with a kvr_self_test as user: checks the kernel against the limits of the
 * device, then runs a small attention (grouped heads, carried state, window, soft cap, sinks, NaN
 * around the data) and compares it with double precision. KVR_E_UNSUPPORTED: not usable, and why.
 */
kvr_status kvr_self_test_run(void *user, const kvr_group *group, int rank, cl_program program);

#endif

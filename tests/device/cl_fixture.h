/* Raw OpenCL and number formats for tests of kernels: first device, sources from the tree. */
#ifndef KVR_TESTS_DEVICE_CL_FIXTURE_H
#define KVR_TESTS_DEVICE_CL_FIXTURE_H

#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 120
#endif
#include <CL/cl.h>

#include <stddef.h>
#include <stdint.h>

enum { F32, F16, BF16 };
extern const size_t dtype_size[3];

/* Group setup and teardown of cmocka; without a device the program ends with 77, skipped. */
int setup_device(void **state);
int teardown_device(void **state);

/* A kernel of kernels_cl/FILE behind shared.h; a build that fails fails the test. */
cl_kernel build_kernel(const char *file, const char *kernel, const char *options);
cl_mem upload(const void *data, size_t bytes);
void download(cl_mem mem, void *data, size_t bytes);
/* Sets mems, then args, and enqueues (g0, g1) work-groups of (l0, 1) work-items. */
void launch(cl_kernel k, int num_mems, const cl_mem *mems, const void *args, size_t args_size,
            size_t g0, size_t g1, size_t l0);

/* Deterministic; a value lies in [-1, 1). */
uint32_t random_bits(void);
float random_value(void);

/* Element i of an array of a dtype; storing rounds to nearest even. */
float load(const void *p, size_t i, int dtype);
void store(void *p, size_t i, int dtype, float x);

/* Error of one number over what is allowed; NaN counts as huge. */
double excess(double got, double want, double allowed);

#endif

#include "cl_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef KVR_SOURCE_DIR
#define KVR_SOURCE_DIR "."
#endif

const size_t dtype_size[3] = {4, 2, 2};

/* Device and programs. */

static cl_device_id device;
static cl_context context;
static cl_command_queue queue;

static void check(cl_int e, const char *what) {
  if (e != CL_SUCCESS) fail_msg("%s: %d", what, (int)e);
}
#define CHECK(call) check(call, #call)

int setup_device(void **state) {
  (void)state;
  cl_platform_id platform;
  cl_int e;
  if (clGetPlatformIDs(1, &platform, NULL) != CL_SUCCESS ||
      clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL) != CL_SUCCESS) {
    printf("SKIPPED: no usable OpenCL device\n");
    exit(77);
  }
  context = clCreateContext(NULL, 1, &device, NULL, NULL, &e);
  check(e, "clCreateContext");
  queue = clCreateCommandQueue(context, device, 0, &e);
  check(e, "clCreateCommandQueue");
  return 0;
}

int teardown_device(void **state) {
  (void)state;
  CHECK(clReleaseCommandQueue(queue));
  CHECK(clReleaseContext(context));
  return 0;
}

static char *read_source(const char *file) {
  char path[512];
  snprintf(path, sizeof path, "%s/kernels_cl/%s", KVR_SOURCE_DIR, file);
  FILE *f = fopen(path, "rb");
  if (!f) fail_msg("cannot read %s", path);
  char *text = calloc(1, 1 << 16);
  assert_true(fread(text, 1, (1 << 16) - 1, f) > 0);
  fclose(f);
  return text;
}

cl_kernel build_kernel(const char *file, const char *kernel, const char *options) {
  char all[512], log[4096] = "";
  char *text[4] = {read_source("shared.h"), read_source("numbers.h"), read_source("spans.h"),
                   read_source(file)};
  cl_int e;
  cl_program program = clCreateProgramWithSource(context, 4, (const char **)text, NULL, &e);
  check(e, "clCreateProgramWithSource");
  snprintf(all, sizeof all, "-cl-std=CL1.2 -Werror %s", options);
  if (clBuildProgram(program, 1, &device, all, NULL, NULL) != CL_SUCCESS) {
    clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, sizeof log, log, NULL);
    fail_msg("%s %s: %s", file, all, log);
  }
  cl_kernel k = clCreateKernel(program, kernel, &e);
  check(e, kernel);
  clReleaseProgram(program);
  for (int i = 0; i < 4; i++) free(text[i]);
  return k;
}

cl_mem upload(const void *data, size_t bytes) {
  cl_int e;
  cl_mem mem = clCreateBuffer(context, CL_MEM_COPY_HOST_PTR, bytes, (void *)(uintptr_t)data, &e);
  check(e, "clCreateBuffer");
  return mem;
}

void download(cl_mem mem, void *data, size_t bytes) {
  CHECK(clEnqueueReadBuffer(queue, mem, CL_TRUE, 0, bytes, data, 0, NULL, NULL));
}

void launch(cl_kernel k, int num_mems, const cl_mem *mems, const void *args, size_t args_size,
            size_t g0, size_t g1, size_t l0) {
  const size_t global[2] = {g0 * l0, g1}, local[2] = {l0, 1};
  for (int i = 0; i < num_mems; i++) CHECK(clSetKernelArg(k, (cl_uint)i, sizeof mems[i], &mems[i]));
  CHECK(clSetKernelArg(k, (cl_uint)num_mems, args_size, args));
  CHECK(clEnqueueNDRangeKernel(queue, k, 2, NULL, global, local, 0, NULL, NULL));
}

/* Numbers. */

static uint32_t seed = 1;

uint32_t random_bits(void) {
  seed = seed * 1664525u + 1013904223u;
  return seed >> 8;
}

float random_value(void) { return (float)random_bits() / 8388608.0f - 1.0f; }

static uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

static float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

static float from_half(uint16_t h) {
  const float sign = h & 0x8000 ? -1.0f : 1.0f;
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * ldexpf((float)mantissa, -24);
  return sign * ldexpf((float)(mantissa + 1024), exponent - 25);
}

/* Nearest half by search: slow, and nothing like what the kernels do. Ties go to even. */
static uint16_t to_half(float x) {
  if (isnan(x)) return 0x7e00;
  const uint16_t sign = signbit(x) ? 0x8000 : 0;
  const double v = fabs((double)x);
  if (v >= 65520) return (uint16_t)(sign | 0x7c00);
  int lo = 0, hi = 0x7bff; /* halves are ordered like their bits */
  while (hi - lo > 1) {
    const int mid = (lo + hi) / 2;
    if ((double)from_half((uint16_t)mid) <= v)
      lo = mid;
    else
      hi = mid;
  }
  const double below = v - (double)from_half((uint16_t)lo);
  const double above = (double)from_half((uint16_t)hi) - v;
  const int up = above < below || (above <= below && lo % 2 == 1);
  return (uint16_t)(sign | (up ? hi : lo));
}

float load(const void *p, size_t i, int dtype) {
  if (dtype == F32) return ((const float *)p)[i];
  const uint16_t u = ((const uint16_t *)p)[i];
  return dtype == F16 ? from_half(u) : float_of((uint32_t)u << 16);
}

void store(void *p, size_t i, int dtype, float x) {
  const uint32_t u = bits_of(x);
  if (dtype == F32)
    ((float *)p)[i] = x;
  else if (dtype == F16)
    ((uint16_t *)p)[i] = to_half(x);
  else
    ((uint16_t *)p)[i] = (uint16_t)(isnan(x) ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16);
}

double excess(double got, double want, double allowed) {
  if (got == want) return 0;
  const double e = fabs(got - want) / allowed;
  return isnan(e) ? 1e300 : e;
}

/* Grouped heads, three blocks of keys, rows of two and more tiles: L cached keys in a first launch
 * that stores its state, then T new tokens, causal, in a second one that carries it on. All inputs
 * are multiples of 1/8 up to 1, exact in every dtype, made by a hash wherever they are needed. */
#include "device/self_test.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "device/cl_error.h"
#include "shared.h"

enum { L = 45, T = 100, WINDOW = 70, NKV = 2, GROUP = 3, NQ = NKV * GROUP };
enum { PAD = 2, ROWS = PAD + T + PAD }; /* rows of every tensor; those of the pads are NaN */
static const double CAP = 5.0, OUT_SCALE = 0.5, SPREAD = 6.0;
static const float SINK = 0.5f; /* of even heads */

typedef enum tensor { QUERY, CACHED, NEW, STATE, OUT, LSE, SINKS, NUM_TENSORS } tensor;

typedef struct test {
  const kvr_rank *rank;
  const kvr_self_test *what;
  size_t dim;
  void *host[NUM_TENSORS];
  size_t bytes[NUM_TENSORS];
  cl_mem mems[NUM_TENSORS];
  cl_kernel kernel;
} test;

/* ---- numbers ---- */

/* Element `at` of a tensor (of its rows without the pad). */
static float input(tensor t, size_t at) {
  uint64_t x = (uint64_t)at * 0x9e3779b97f4a7c15u + (uint64_t)(t + 1) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 31) * 0x94d049bb133111ebu;
  return (float)((int)(x >> 40) % 9 - 4 + (int)(x >> 20 & 7) - 4) / 8.0f;
}

static uint16_t half_of(float x) {
  int e;
  if (isnan(x)) return 0x7e00;
  if (x == 0.0f) return 0;
  const float m = frexpf(fabsf(x), &e);
  return (uint16_t)((x < 0 ? 0x8000 : 0) | (e + 14) << 10 | (int)((2 * m - 1) * 1024));
}

static double of_half(uint16_t h) {
  const int e = h >> 10 & 31, m = h & 1023;
  if (e == 31) return (double)NAN;
  const double x = e == 0 ? ldexp(m, -24) : ldexp(m + 1024, e - 25);
  return h & 0x8000 ? -x : x;
}

static void store(void *array, size_t at, kvr_dtype dtype, float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  switch (dtype) {
  case KVR_F16: ((uint16_t *)array)[at] = half_of(x); break;
  case KVR_BF16: ((uint16_t *)array)[at] = (uint16_t)(bits >> 16); break;
  default: ((float *)array)[at] = x;
  }
}

static double load(const void *array, size_t at, kvr_dtype dtype) {
  if (dtype == KVR_F32) return (double)((const float *)array)[at];
  const uint16_t half = ((const uint16_t *)array)[at];
  if (dtype == KVR_F16) return of_half(half);
  const uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return (double)x;
}

/* ---- the answer ---- */

static double scale(const test *t) { return SPREAD / sqrt((double)t->dim); }

/* First element of the K row of position g and KV head h; its V row follows. */
static size_t key_at(const test *t, int g, int h) {
  return ((size_t)(g < L ? g : g - L) * 2 * NKV + (size_t)(2 * h)) * t->dim;
}

static double score(const test *t, int token, int head, int g) {
  const tensor from = g < L ? CACHED : NEW;
  const size_t q = (size_t)(token * NQ + head) * t->dim, k = key_at(t, g, head / GROUP);
  double s = 0;
  for (size_t d = 0; d < t->dim; d++) s += (double)(input(QUERY, q + d) * input(from, k + d));
  return CAP * tanh(s * scale(t) / CAP);
}

/* Output (dim) before out_scale and LSE of one row; scores are small, so no maximum is needed. */
static double answer(const test *t, int token, int head, double *out) {
  double sum = head % 2 == 0 ? exp((double)SINK) : 0;
  for (size_t d = 0; d < t->dim; d++) out[d] = 0;
  for (int g = token + L >= WINDOW ? token + L - WINDOW + 1 : 0; g <= token + L; g++) {
    const double p = exp(score(t, token, head, g));
    const size_t v = key_at(t, g, head / GROUP) + t->dim;
    for (size_t d = 0; d < t->dim; d++) out[d] += p * (double)input(g < L ? CACHED : NEW, v + d);
    sum += p;
  }
  for (size_t d = 0; d < t->dim; d++) out[d] /= sum;
  return log(sum);
}

static bool bf16_products(const test *t) { return kvr_variant_get(t->what->variant)->bf16; }

/* Rounding of the output type comes on top of what the arithmetic loses. */
static double tolerance(const test *t) {
  const kvr_dtype out = t->what->out_dtype;
  if (bf16_products(t)) return 1e-2; /* probabilities have 8 bits; inputs are exact */
  return out == KVR_F32 ? 1e-4 : out == KVR_F16 ? 1e-3 : 8e-3;
}

static kvr_status compare_row(const test *t, int token, int head, double *want) {
  const size_t at = (size_t)(PAD + token) * NQ + (size_t)head;
  const double lse = answer(t, token, head, want);
  const double got = (double)((const float *)t->host[LSE])[at];
  if (!(fabs(got - lse) <= (bf16_products(t) ? 1e-2 : 1e-4) * (1 + fabs(lse))))
    return kvr_fail(KVR_E_UNSUPPORTED,
                    "wrong result in its self-test: token %d, head %d: LSE %.7g instead of %.7g",
                    token, head, got, lse);
  for (size_t d = 0; d < t->dim; d++) {
    const double out = load(t->host[OUT], at * t->dim + d, t->what->out_dtype);
    if (!(fabs(out - want[d] * OUT_SCALE) <= tolerance(t)))
      return kvr_fail(KVR_E_UNSUPPORTED,
                      "wrong result in its self-test: token %d, head %d, dim %zu: %.7g instead of "
                      "%.7g",
                      token, head, d, out, want[d] * OUT_SCALE);
  }
  return KVR_OK;
}

static kvr_status compare(const test *t) {
  static const int tokens[] = {0, 1, 7, 30, 55, 86, T - 1}; /* in first, last and other tiles */
  double *want = calloc(t->dim, sizeof *want);
  if (want == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a self-test");
  kvr_status status = KVR_OK;
  for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
    for (int h = 0; h < NQ && status == KVR_OK; h++) status = compare_row(t, tokens[i], h, want);
  free(want);
  return status;
}

/* ---- the run ---- */

static void fill(void *array, tensor which, size_t row, int rows, kvr_dtype dtype) {
  for (size_t i = 0; i < ROWS * row; i++) {
    const bool used = i >= PAD * row && i < (size_t)(PAD + rows) * row;
    store(array, i, dtype, used ? input(which, i - PAD * row) : NAN);
  }
}

static kvr_status make_tensors(test *t) {
  const kvr_dtype in = t->what->cache->dtype;
  const size_t element = kvr_dtype_size(in), out = kvr_dtype_size(t->what->out_dtype);
  const size_t heads = (size_t)ROWS * NQ;
  const size_t bytes[NUM_TENSORS] = {heads * t->dim * element,
                                     (size_t)ROWS * 2 * NKV * t->dim * element,
                                     (size_t)ROWS * 2 * NKV * t->dim * element,
                                     heads * (t->dim + 2) * sizeof(float),
                                     heads * t->dim * out,
                                     heads * sizeof(float),
                                     NQ * sizeof(float)};
  for (int i = 0; i < NUM_TENSORS; i++) {
    t->bytes[i] = bytes[i];
    t->host[i] = malloc(bytes[i]);
    if (t->host[i] == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a self-test");
    memset(t->host[i], 0xff, bytes[i]); /* NaN in every dtype */
  }
  fill(t->host[QUERY], QUERY, NQ * t->dim, T, in);
  fill(t->host[CACHED], CACHED, (size_t)2 * NKV * t->dim, L, in);
  fill(t->host[NEW], NEW, (size_t)2 * NKV * t->dim, T, in);
  for (int h = 0; h < NQ; h++) ((float *)t->host[SINKS])[h] = h % 2 == 0 ? SINK : -INFINITY;
  for (int i = 0; i < NUM_TENSORS; i++) {
    cl_int code;
    t->mems[i] = clCreateBuffer(t->rank->context, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR,
                                t->bytes[i], t->host[i], &code);
    KVR_TRY(kvr_cl_check(code, "clCreateBuffer"));
  }
  return KVR_OK;
}

static kvr_attend_args arguments(const test *t, bool first) {
  return (kvr_attend_args){.num_rows = T,
                           .q_row = PAD,
                           .state_row = PAD,
                           .row_split = T / 2,
                           .row_t1 = T / 2,
                           .ring_row = PAD,
                           .ring_end = first ? L : 0,
                           .cur_row = PAD,
                           .kv_end = first ? L : T,
                           .key_split = first ? 0 : T / 3,
                           .key_t1 = first ? 0 : T / 3,
                           .causal = 1,
                           .carry_in = !first,
                           .finish = !first,
                           .num_q_heads = NQ,
                           .num_kv_heads = NKV,
                           .scale_log2 = (float)(scale(t) / log(2)),
                           .soft_cap_log2 = (float)(CAP / log(2)),
                           .out_scale = (float)OUT_SCALE,
                           .use_sinks = first,
                           .window = WINDOW,
                           .num_cached = L};
}

static kvr_status launch(const test *t, bool first) {
  const kvr_attend_args args = arguments(t, first);
  size_t global[2], local[2];
  for (cl_uint i = 0; i < NUM_TENSORS; i++)
    KVR_CL(clSetKernelArg, (t->kernel, i, sizeof(cl_mem), &t->mems[i]));
  KVR_CL(clSetKernelArg, (t->kernel, NUM_TENSORS, sizeof args, &args));
  kvr_variant_sizes(t->what->variant, T, GROUP, NKV, global, local);
  KVR_CL(clEnqueueNDRangeKernel,
         (t->rank->queue, t->kernel, 2, NULL, global, local, 0, NULL, NULL));
  return KVR_OK;
}

/* Before the launch: with too much local memory some drivers end the process. */
static kvr_status check_limits(const test *t) {
  const cl_device_id device = t->rank->device;
  const size_t local = (size_t)kvr_variant_get(t->what->variant)->local;
  cl_ulong needed, present;
  size_t most;
  KVR_CL(clGetKernelWorkGroupInfo,
         (t->kernel, device, CL_KERNEL_LOCAL_MEM_SIZE, sizeof needed, &needed, NULL));
  KVR_CL(clGetDeviceInfo, (device, CL_DEVICE_LOCAL_MEM_SIZE, sizeof present, &present, NULL));
  KVR_CL(clGetKernelWorkGroupInfo,
         (t->kernel, device, CL_KERNEL_WORK_GROUP_SIZE, sizeof most, &most, NULL));
  if (needed > present)
    return kvr_fail(KVR_E_UNSUPPORTED, "it needs %llu bytes of local memory, the device has %llu",
                    (unsigned long long)needed, (unsigned long long)present);
  if (local > most)
    return kvr_fail(KVR_E_UNSUPPORTED, "it needs work-groups of %zu, the device runs %zu", local,
                    most);
  return KVR_OK;
}

static kvr_status read_results(const test *t) {
  static const tensor results[] = {OUT, LSE};
  for (int i = 0; i < 2; i++)
    KVR_CL(clEnqueueReadBuffer, (t->rank->queue, t->mems[results[i]], CL_TRUE, 0,
                                 t->bytes[results[i]], t->host[results[i]], 0, NULL, NULL));
  return KVR_OK;
}

static kvr_status run(test *t, cl_program program) {
  cl_int code;
  t->kernel = clCreateKernel(program, "kvr_attend", &code);
  KVR_TRY(kvr_cl_check(code, "clCreateKernel"));
  KVR_TRY(check_limits(t));
  KVR_TRY(make_tensors(t));
  KVR_TRY(launch(t, true));
  KVR_TRY(launch(t, false));
  KVR_TRY(read_results(t));
  return compare(t);
}

kvr_status kvr_self_test_run(void *user, const kvr_group *group, int rank, cl_program program) {
  const kvr_self_test *what = user;
  test t = {.rank = &group->ranks[rank], .what = what, .dim = (size_t)what->cache->head_dim};
  const kvr_status status = run(&t, program);
  clFinish(t.rank->queue); /* a failed read may have left launches */
  for (int i = 0; i < NUM_TENSORS; i++) {
    if (t.mems[i] != NULL) clReleaseMemObject(t.mems[i]);
    free(t.host[i]);
  }
  if (t.kernel != NULL) clReleaseKernel(t.kernel);
  return status;
}

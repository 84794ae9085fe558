/* Bytes and launches, counted at the OpenCL calls themselves (the linker wraps them), against
 * formulas written here: neither the schedule nor the trace is believed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device_case.h"

/* ---- the shim ---- */

static struct {
  long long copied; /* bytes of all buffer-to-buffer copies */
  int copies, attends, merges, stages, writes, markers, buffers;
} calls;

cl_int __real_clEnqueueCopyBuffer(cl_command_queue queue, cl_mem src, cl_mem dst, size_t src_offset,
                                  size_t dst_offset, size_t size, cl_uint num,
                                  const cl_event *waits, cl_event *event);
cl_int __wrap_clEnqueueCopyBuffer(cl_command_queue queue, cl_mem src, cl_mem dst, size_t src_offset,
                                  size_t dst_offset, size_t size, cl_uint num,
                                  const cl_event *waits, cl_event *event);
cl_int __wrap_clEnqueueCopyBuffer(cl_command_queue queue, cl_mem src, cl_mem dst, size_t src_offset,
                                  size_t dst_offset, size_t size, cl_uint num,
                                  const cl_event *waits, cl_event *event) {
  assert_true(size > 0); /* zero bytes would be CL_INVALID_VALUE on some drivers */
  calls.copied += (long long)size;
  calls.copies++;
  return __real_clEnqueueCopyBuffer(queue, src, dst, src_offset, dst_offset, size, num, waits,
                                    event);
}

cl_int __real_clEnqueueNDRangeKernel(cl_command_queue queue, cl_kernel kernel, cl_uint dim,
                                     const size_t *offset, const size_t *global,
                                     const size_t *local, cl_uint num, const cl_event *waits,
                                     cl_event *event);
cl_int __wrap_clEnqueueNDRangeKernel(cl_command_queue queue, cl_kernel kernel, cl_uint dim,
                                     const size_t *offset, const size_t *global,
                                     const size_t *local, cl_uint num, const cl_event *waits,
                                     cl_event *event);
cl_int __wrap_clEnqueueNDRangeKernel(cl_command_queue queue, cl_kernel kernel, cl_uint dim,
                                     const size_t *offset, const size_t *global,
                                     const size_t *local, cl_uint num, const cl_event *waits,
                                     cl_event *event) {
  char name[64] = "";
  clGetKernelInfo(kernel, CL_KERNEL_FUNCTION_NAME, sizeof name, name, NULL);
  calls.attends += strcmp(name, "kvr_attend") == 0;
  calls.merges += strncmp(name, "kvr_merge", 9) == 0;
  calls.stages += strcmp(name, "kvr_stage") == 0;
  calls.writes += strcmp(name, "kvr_cache_write") == 0;
  for (cl_uint d = 0; d < dim; d++) assert_true(global[d] > 0);
  return __real_clEnqueueNDRangeKernel(queue, kernel, dim, offset, global, local, num, waits,
                                       event);
}

cl_mem __real_clCreateBuffer(cl_context context, cl_mem_flags flags, size_t size, void *host,
                             cl_int *code);
cl_mem __wrap_clCreateBuffer(cl_context context, cl_mem_flags flags, size_t size, void *host,
                             cl_int *code);
cl_mem __wrap_clCreateBuffer(cl_context context, cl_mem_flags flags, size_t size, void *host,
                             cl_int *code) {
  calls.buffers++;
  return __real_clCreateBuffer(context, flags, size, host, code);
}

/* ---- the problem ---- */

enum { NQ = 4, NKV = 2, D = 8, TILE = 5 };
static const long long kv_row = 2 * NKV * D * 4, q_row = NQ * D * 4, state_row = NQ * (D + 2) * 4;

static int ceil_div(int a, int b) { return (a + b - 1) / b; }

/* Striped share of rank r. */
static int loc(int L, int P, int r) { return (L + P - 1 - r) / P; }

static int window; /* of the cases made from now on */

static pure_case make_case(int P, int L, int S) {
  pure_case c = {0};
  c.problem = (kvr_problem){.struct_size = sizeof c.problem,
                            .cache = {.struct_size = sizeof c.problem.cache,
                                      .num_ranks = P,
                                      .num_kv_heads = NKV,
                                      .head_dim = D,
                                      .page_size = 3,
                                      .num_pages = 1000,
                                      .interleave = 1},
                            .num_q_heads = NQ,
                            .causal = 1,
                            .window = window,
                            .num_requests = 1};
  c.requests[0] = (kvr_request){.num_new = S, .num_cached = L};
  c.options = (kvr_options){.struct_size = sizeof c.options, .tile = TILE, .num_slots = 2};
  return c;
}

static void run(int P, int L, int S, int query_tile, const char *strategy) {
  pure_case c = make_case(P, L, S);
  c.problem.requests = c.requests;
  c.options.query_tile = query_tile;
  case_fill(&c, 11);
  kvr_group *group = device_group(P, 0);
  device_run r = {0};
  device_run_init(&r, &c, group, strategy);
  memset(&calls, 0, sizeof calls);
  if (device_run_step(&r, &c, strategy) != KVR_OK)
    fail_msg("%s: %s", strategy, kvr_error_message());
  assert_int_equal(calls.buffers, 0); /* nothing is allocated in a step */
  device_run_fini(&r, &c);
  kvr_group_destroy(group);
  case_free(&c);
}

/* Rows of rank r with default chunks. */
static int rows_of(int P, int S, int r) {
  const int C = ceil_div(S, 2 * P) > 0 ? ceil_div(S, 2 * P) : 1;
  int rows = 0;
  for (int t = 0; t < S; t++) {
    const int chunk = t / C;
    rows += (chunk < P ? chunk : 2 * P - 1 - chunk) == r;
  }
  return rows;
}

static int most_rows(int P, int S) {
  int most = 0;
  for (int r = 0; r < P; r++) most = rows_of(P, S, r) > most ? rows_of(P, S, r) : most;
  return most;
}

/* Launches of one ring pass: one per block that holds a token, and the last step in any case. */
static int ring_launches(int P, int L, int S) {
  const int steps = ceil_div(loc(L, P, 0), TILE) * P;
  int launches = 0;
  for (int r = 0; r < P; r++) {
    if (rows_of(P, S, r) == 0) continue;
    for (int v = 0; v < steps; v++) {
      const int source = (r + P - v % P) % P;
      launches += v + 1 == steps || loc(L, P, source) > v / P * TILE;
    }
  }
  return launches;
}

static int active_ranks(int P, int S) {
  int n = 0;
  for (int r = 0; r < P; r++) n += rows_of(P, S, r) > 0;
  return n;
}

static const int shapes[][3] = {{1, 20, 7},  {2, 23, 9},  {3, 2, 13},
                                {3, 41, 12}, {4, 61, 33}, {5, 17, 1}};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

static void test_ring(void **state) {
  (void)state;
  for (int i = 0; i < NUM_SHAPES; i++) {
    const int P = shapes[i][0], L = shapes[i][1], S = shapes[i][2];
    run(P, L, S, 0, "ring");
    assert_int_equal(calls.copied, (P - 1) * (long long)(L + S) * kv_row);
    assert_int_equal(calls.attends, ring_launches(P, L, S));
    assert_int_equal(calls.merges, 0);
    run(P, L, S, 2, "ring"); /* every pass over a tile of rows is another trip of the cache */
    const int passes = ceil_div(most_rows(P, S), 2);
    assert_int_equal(calls.copied, (P - 1) * ((long long)passes * L + S) * kv_row);
  }
}

/* Blocks of TILE * P positions that lie below the window of the first new token stay where they
 * are. */
static void test_ring_with_window(void **state) {
  (void)state;
  static const int windows[] = {1, 7, 20, 30, 1000};
  for (int i = 0; i < NUM_SHAPES; i++)
    for (size_t w = 0; w < sizeof windows / sizeof *windows; w++) {
      const int P = shapes[i][0], L = shapes[i][1], S = shapes[i][2];
      const int lowest = L - windows[w] + 1 > 0 ? L - windows[w] + 1 : 0;
      const int blocks = ceil_div(loc(L, P, 0), TILE);
      const int skipped = lowest >= L ? blocks : lowest / (TILE * P);
      long long tokens = 0;
      for (int r = 0; r < P; r++) {
        const int left = loc(L, P, r) - skipped * TILE;
        tokens += left > 0 ? left : 0;
      }
      window = windows[w];
      run(P, L, S, 0, "ring");
      window = 0;
      assert_int_equal(calls.copied, (P - 1) * (tokens + S) * kv_row);
    }
}

static void test_two_launch(void **state) {
  (void)state;
  for (int i = 0; i < NUM_SHAPES; i++) {
    const int P = shapes[i][0], L = shapes[i][1], S = shapes[i][2], n = active_ranks(P, S);
    run(P, L, S, 0, "ring-two-launch");
    assert_int_equal(calls.copied, (P - 1) * (long long)(L + S) * kv_row);
    assert_int_equal(calls.attends, ring_launches(P, L, S) + n); /* the fused ring saves these */
    assert_int_equal(calls.merges, n);
  }
}

static void test_gather_kv(void **state) {
  (void)state;
  for (int i = 0; i < NUM_SHAPES; i++) {
    const int P = shapes[i][0], L = shapes[i][1], S = shapes[i][2];
    run(P, L, S, 0, "gather-kv");
    long long received = 0;
    for (int r = 0; r < P; r++) received += L - loc(L, P, r);
    assert_int_equal(calls.copied, received * kv_row + (P - 1) * S * kv_row);
    assert_int_equal(calls.attends, active_ranks(P, S));
    assert_int_equal(calls.merges, 0);
  }
}

static void test_gather_q(void **state) {
  (void)state;
  for (int i = 0; i < NUM_SHAPES; i++) {
    const int P = shapes[i][0], L = shapes[i][1], S = shapes[i][2];
    run(P, L, S, 0, "gather-q");
    /* P - 1 ranks send each row's query and state; the own ones are copied as well, inside the rank
     */
    assert_int_equal(calls.copied, (P - 1) * S * kv_row + P * S * (q_row + state_row));
    int launches = active_ranks(P, S);
    for (int r = 0; r < P; r++) launches += loc(L, P, r) > 0 ? ceil_div(loc(L, P, r), TILE) : 1;
    assert_int_equal(calls.attends, launches);
    assert_int_equal(calls.merges, active_ranks(P, S));
  }
}

static void test_rotate_q(void **state) {
  (void)state;
  for (int i = 0; i < NUM_SHAPES; i++) {
    const int P = shapes[i][0], L = shapes[i][1], S = shapes[i][2];
    run(P, L, S, 0, "rotate-q");
    const long long per_row = P > 1 ? (P - 1) * q_row + P * state_row : 0;
    assert_int_equal(calls.copied, (P - 1) * S * kv_row + S * per_row);
    const int C = ceil_div(S, 2 * P);
    const int lanes = ceil_div(S, C); /* chunks with a real token */
    int blocks = 0;
    for (int r = 0; r < P; r++) blocks += ceil_div(loc(L, P, r), TILE);
    assert_int_equal(calls.attends, lanes * (1 + blocks)); /* home, and every share's blocks */
    assert_int_equal(calls.merges, active_ranks(P, S));
  }
}

static void test_rotate_all(void **state) {
  (void)state;
  for (int i = 0; i < NUM_SHAPES; i++) {
    const int P = shapes[i][0], L = shapes[i][1], S = shapes[i][2];
    run(P, L, S, 0, "rotate-all");
    long long own = 0; /* new rows behind the cached ones are copied inside the rank first */
    for (int r = 0; r < P; r++) own += rows_of(P, S, r);
    assert_int_equal(calls.copied, (P - 1) * (long long)(L + S) * kv_row + own * kv_row);
    assert_int_equal(calls.merges, 0);
  }
}

static void test_current_only(void **state) {
  (void)state;
  run(4, 0, 33, 0, "current-only");
  assert_int_equal(calls.copied, 3 * 33 * kv_row);
  assert_int_equal(calls.attends, 4);
  run(5, 0, 1, 0, "current-only");
  assert_int_equal(calls.copied, 4 * kv_row);
  assert_int_equal(calls.attends, 1);
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_ring),       cmocka_unit_test(test_ring_with_window),
      cmocka_unit_test(test_two_launch), cmocka_unit_test(test_gather_kv),
      cmocka_unit_test(test_gather_q),   cmocka_unit_test(test_rotate_q),
      cmocka_unit_test(test_rotate_all), cmocka_unit_test(test_current_only),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

/* kvr_merge_states and kvr_merge_outputs against double references. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cl_fixture.h"
#include "shared.h"

enum { MERGE_D = 59, MERGE_NQ = 3, MERGE_ROWS = 4, PARTS = 3, STATE_W = MERGE_NQ * (MERGE_D + 2) };

static const float OUT_SCALE = 0.7f;

static kvr_merge_args merge_args(int num_parts) {
  return (kvr_merge_args){.num_rows = MERGE_ROWS,
                          .num_parts = num_parts,
                          .part_rows = MERGE_ROWS + 1,
                          .state_row = 2,
                          .out_row = 1,
                          .num_q_heads = MERGE_NQ,
                          .out_scale = OUT_SCALE};
}

/* LSE (in base e) of part j of merged pair (row, head): all patterns of -inf, huge differences. */
static float part_lse(int j, int row, int head) {
  if (row == 0) return head == j ? 1.5f : -INFINITY;
  if (row == 1 && head == 0) return -INFINITY;
  if (row == 1) return j == head ? 200.0f : -0.25f * (float)j;
  return row == 2 ? 3.25f : random_value() * 10;
}

/* A state row block of random parts; what has no weight holds NaN. ml 0: normalised outputs. */
static void fill_part(float *acc, float *ml, float lse, float *lse_out) {
  const float l = ml ? 1.0f + (float)(random_bits() % 7) : 1.0f;
  for (int d = 0; d < MERGE_D; d++) acc[d] = isinf(lse) ? NAN : l * random_value();
  if (ml) ml[0] = isinf(lse) ? lse : (lse - logf(l)) * 1.44269504f;
  if (ml) ml[1] = isinf(lse) ? 0.0f : l;
  *lse_out = lse;
}

/* want[d], *want_lse from normalised parts x[j] with their LSE. */
static double merge_reference(int n, const float *const *x, const float *norm, const float *lse,
                              double *want) {
  double top = -HUGE_VAL, sum = 0;
  for (int j = 0; j < n; j++) top = fmax(top, (double)lse[j]);
  for (int d = 0; d < MERGE_D; d++) want[d] = 0;
  for (int j = 0; j < n; j++) {
    if (isinf(lse[j])) continue;
    const double w = exp((double)lse[j] - top);
    sum += w;
    for (int d = 0; d < MERGE_D; d++) want[d] += w * (double)x[j][d] / (double)norm[j];
  }
  for (int d = 0; d < MERGE_D && sum > 0; d++) want[d] *= (double)OUT_SCALE / sum;
  return sum > 0 ? top + log(sum) : -HUGE_VAL;
}

static void expect_merged(const void *out, int dtype, const float *lse, int row, int head,
                          const double *want, double want_lse) {
  const size_t at = (size_t)((merge_args(0).out_row + row) * MERGE_NQ + head);
  const double rounding = dtype == F32 ? 0 : dtype == F16 ? 1.0 / 2048 : 1.0 / 256;
  assert_true(excess((double)lse[at], want_lse, 2e-6 * (1 + fabs(want_lse))) <= 1);
  for (int d = 0; d < MERGE_D; d++) {
    const double got = (double)load(out, at * MERGE_D + (size_t)d, dtype);
    assert_true(excess(got, want[d], 4e-6 + rounding * fabs(want[d])) <= 1);
  }
}

static void merge_states_case(int num_parts, int dtype) {
  enum { OWN = (MERGE_ROWS + 2) * STATE_W, REST = PARTS * (MERGE_ROWS + 1) * STATE_W };
  enum { OUT = (MERGE_ROWS + 2) * MERGE_NQ };
  const kvr_merge_args a = merge_args(num_parts);
  static float own[OWN], rest[REST], lse[OUT], out[OUT * MERGE_D];
  float all[PARTS + 1], norm[PARTS + 1];
  static float lses[MERGE_ROWS][MERGE_NQ][PARTS + 1];
  char options[64];

  for (int r = 0; r < MERGE_ROWS; r++)
    for (int h = 0; h < MERGE_NQ; h++)
      for (int j = 0; j <= num_parts; j++) {
        float *row = j == 0 ? own + (a.state_row + r) * STATE_W
                            : rest + ((j - 1) * a.part_rows + r) * STATE_W;
        fill_part(row + h * MERGE_D, row + MERGE_NQ * MERGE_D + 2 * h, part_lse(j, r, h),
                  &lses[r][h][j]);
      }
  snprintf(options, sizeof options, "-DHEAD_DIM=%d -DOUT_DTYPE=%d", MERGE_D, dtype);
  cl_kernel k = build_kernel("merge.cl", "kvr_merge_states", options);
  cl_mem mems[] = {upload(own, sizeof own), upload(rest, sizeof rest), upload(out, sizeof out),
                   upload(lse, sizeof lse)};
  launch(k, 4, mems, &a, sizeof a, MERGE_NQ, MERGE_ROWS, 1);
  download(mems[2], out, sizeof out);
  download(mems[3], lse, sizeof lse);
  for (int i = 0; i < 4; i++) clReleaseMemObject(mems[i]);
  clReleaseKernel(k);

  for (int r = 0; r < MERGE_ROWS; r++)
    for (int h = 0; h < MERGE_NQ; h++) {
      const float *x[PARTS + 1];
      double want[MERGE_D];
      for (int j = 0; j <= num_parts; j++) {
        const float *row = j == 0 ? own + (a.state_row + r) * STATE_W
                                  : rest + ((j - 1) * a.part_rows + r) * STATE_W;
        x[j] = row + h * MERGE_D;
        norm[j] = row[MERGE_NQ * MERGE_D + 2 * h + 1];
        all[j] = lses[r][h][j];
      }
      const double want_lse = merge_reference(num_parts + 1, x, norm, all, want);
      expect_merged(out, dtype, lse, r, h, want, want_lse);
    }
}

static void test_merge_states(void **state) {
  (void)state;
  for (int dtype = F32; dtype <= BF16; dtype++) merge_states_case(PARTS, dtype);
  merge_states_case(0, F32);
  merge_states_case(1, F32);
}

static void test_merge_outputs(void **state) {
  (void)state;
  enum { ROWS = MERGE_ROWS + 2, N = ROWS * MERGE_NQ };
  const kvr_merge_args a = merge_args(0);
  static float o[2][N * MERGE_D], lse[2][N], out[N * MERGE_D], out_lse[N];
  for (int j = 0; j < 2; j++)
    for (int r = 0; r < MERGE_ROWS; r++)
      for (int h = 0; h < MERGE_NQ; h++) {
        const int at = (a.state_row + r) * MERGE_NQ + h;
        fill_part(o[j] + at * MERGE_D, NULL, part_lse(j, r, h), &lse[j][at]);
      }
  char options[64];
  snprintf(options, sizeof options, "-DHEAD_DIM=%d", MERGE_D);
  cl_kernel k = build_kernel("merge.cl", "kvr_merge_outputs", options);
  cl_mem mems[] = {upload(o[0], sizeof o[0]), upload(lse[0], sizeof lse[0]),
                   upload(o[1], sizeof o[1]), upload(lse[1], sizeof lse[1]),
                   upload(out, sizeof out),   upload(out_lse, sizeof out_lse)};
  launch(k, 6, mems, &a, sizeof a, MERGE_NQ, MERGE_ROWS, 1);
  download(mems[4], out, sizeof out);
  download(mems[5], out_lse, sizeof out_lse);
  for (int i = 0; i < 6; i++) clReleaseMemObject(mems[i]);
  clReleaseKernel(k);
  for (int r = 0; r < MERGE_ROWS; r++)
    for (int h = 0; h < MERGE_NQ; h++) {
      const int at = (a.state_row + r) * MERGE_NQ + h;
      const float *x[2] = {o[0] + at * MERGE_D, o[1] + at * MERGE_D};
      const float ones[2] = {1, 1}, both[2] = {lse[0][at], lse[1][at]};
      double want[MERGE_D];
      const double want_lse = merge_reference(2, x, ones, both, want);
      expect_merged(out, F32, out_lse, r, h, want, want_lse);
    }
}

static void test_defaults(void **state) {
  (void)state;
  clReleaseKernel(build_kernel("merge.cl", "kvr_merge_states", ""));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_merge_states),
      cmocka_unit_test(test_merge_outputs),
      cmocka_unit_test(test_defaults),
  };
  return cmocka_run_group_tests(tests, setup_device, teardown_device);
}

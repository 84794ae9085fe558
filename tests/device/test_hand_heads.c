/* Which KV head a query head reads, head dims of all kinds, and tensors at odd offsets: whole
 * steps, for every strategy and several P. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "hand_case.h"
#include "kvring/opencl.h"

/* ---- grouped heads ---- */

static double head_number(int request, int position, int head, int dim) {
  (void)request, (void)position, (void)dim;
  return head;
}

static void expect_group_numbers(const hand_step *s, const void *data) {
  (void)data;
  const int NQ = s->c->problem.num_q_heads, group = NQ / s->c->problem.cache.num_kv_heads;
  for (int t = 0; t < s->c->num_tokens; t++)
    for (int h = 0; h < NQ; h++) hand_expect_out(s, t, h, h / group, 1e-5);
}

/* Head h reads KV head h / G: not h / NKV, and not h % NKV. */
static void query_heads_read_the_kv_head_of_their_group(void **state) {
  (void)state;
  static const int heads[][2] = {{28, 4}, {12, 12}, {32, 8}, {6, 2}, {4, 2}, {16, 1}, {5, 1}};
  for (size_t n = 0; n < sizeof heads / sizeof *heads; n++)
    for (int i = 0; i < HAND_NUM_RANKS; i++) {
      pure_case c = hand_case(hand_ranks[i], 5, 3, heads[n][0], heads[n][1], 4);
      hand_run_formula(&c, hand_zero, hand_zero, head_number, expect_group_numbers, NULL);
    }
}

/* Random data: groups of 1 to 16, also over a single KV head. */
static void groups_of_any_size_are_right(void **state) {
  (void)state;
  static const int heads[][2] = {{2, 2}, {1, 1}, {4, 2}, {8, 1}, {16, 2}, {16, 1}, {32, 2}};
  for (size_t n = 0; n < sizeof heads / sizeof *heads; n++)
    for (int i = 0; i < HAND_NUM_RANKS; i++) {
      pure_case c = hand_case(hand_ranks[i], 37, 11, heads[n][0], heads[n][1], 4);
      hand_fill_random(&c, 7 + n);
      hand_run(&c, NULL, NULL);
      case_free(&c);
    }
}

/* ---- head dims ---- */

static void odd_and_common_head_dims_are_right_and_repeat_bits(void **state) {
  (void)state;
  static const int dims[] = {59, 64, 80, 128, 256};
  static const int lengths[][2] = {{0, 1}, {1, 1}, {31, 2}, {32, 33}, {62, 65}};
  for (size_t n = 0; n < sizeof dims / sizeof *dims; n++)
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++)
      for (size_t i = (n + k) % 2; i < HAND_NUM_RANKS; i += 2) {
        pure_case c = hand_case(hand_ranks[i], lengths[k][0], lengths[k][1], 2, 1, dims[n]);
        c.options.tile = 16;
        hand_fill_random(&c, 3 * n + k);
        hand_run(&c, hand_expect_same_bits_again, NULL);
        case_free(&c);
      }
}

/* Only dims from 128 on are used: a kernel with a 128 in it would see nothing. */
static void dims_beyond_128_are_used(void **state) {
  (void)state;
  for (int i = 0; i < HAND_NUM_RANKS; i++) hand_run_upper_dims(hand_ranks[i], 256);
}

/* ---- offsets: rows and tensors that no vector is aligned to ---- */

enum { TENSORS = 5, GUARD = 7 }; /* elements around each */

typedef struct placed {
  kvr_tensor t[TENSORS]; /* q, k, v, out, lse */
  char *bytes[TENSORS];
  size_t size[TENSORS];
} placed;

static const int is_output[TENSORS] = {0, 0, 0, 1, 1};

/* Tensor n of `count` elements behind `offset` others, in host memory or (context) in a buffer. */
static void place(placed *p, int n, const void *data, size_t count, kvr_dtype dtype, size_t offset,
                  cl_context context) {
  const size_t e = kvr_dtype_size(dtype);
  cl_int code = CL_SUCCESS;
  p->size[n] = (offset + count + GUARD) * e;
  p->bytes[n] = malloc(p->size[n]);
  assert_non_null(p->bytes[n]);
  memset(p->bytes[n], 0xff, p->size[n]);
  if (data != NULL) memcpy(p->bytes[n] + offset * e, data, count * e);
  p->t[n] = (kvr_tensor){.offset = offset, .dtype = dtype};
  if (context == NULL)
    p->t[n].host = p->bytes[n];
  else
    p->t[n].mem = clCreateBuffer(context, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, p->size[n],
                                 p->bytes[n], &code);
  assert_int_equal(code, CL_SUCCESS);
}

static void release(placed *p) {
  for (int n = 0; n < TENSORS; n++) {
    if (p->t[n].mem != NULL) clReleaseMemObject(p->t[n].mem);
    free(p->bytes[n]);
  }
}

/* Halves that are exact: small multiples of 1/8. */
static double eighths(int request, int position, int head, int dim) {
  return floor(4.0 * hand_scrambled(request, position, head, dim)) / 8.0;
}
static double eighths_value(int request, int position, int head, int dim) {
  return floor(4.0 * hand_scrambled_value(request, position, head, dim)) / 8.0;
}
static uint16_t half_of_eighths(double x) {
  int exponent;
  if (x == 0.0) return 0;
  const double m = frexp(fabs(x), &exponent); /* in [1/2, 1) */
  return (uint16_t)((x < 0 ? 0x8000 : 0) | (exponent + 14) << 10 | (int)(m * 2048.0 - 1024.0));
}

static uint16_t *halves(const double *x, size_t n) {
  uint16_t *to = malloc(n * sizeof *to);
  assert_non_null(to);
  for (size_t i = 0; i < n; i++) to[i] = half_of_eighths(x[i]);
  return to;
}

static void run_at_offset(pure_case *c, device_run *run, const char *strategy, size_t offset,
                          cl_context context) {
  const size_t n = (size_t)c->num_tokens * (size_t)c->problem.cache.head_dim;
  const size_t NQ = (size_t)c->problem.num_q_heads, NKV = (size_t)c->problem.cache.num_kv_heads;
  const size_t heads = (size_t)c->num_tokens * NQ;
  uint16_t *in[3] = {halves(c->q, n * NQ), halves(c->k, n * NKV), halves(c->v, n * NKV)};
  placed p;
  place(&p, 0, in[0], n * NQ, KVR_F16, offset, context);
  place(&p, 1, in[1], n * NKV, KVR_F16, offset, context);
  place(&p, 2, in[2], n * NKV, KVR_F16, offset, context);
  place(&p, 3, NULL, n * NQ, KVR_F32, offset, context);
  place(&p, 4, NULL, heads, KVR_F32, offset, context);
  const kvr_io io = {.struct_size = sizeof io,
                     .q = &p.t[0],
                     .k = &p.t[1],
                     .v = &p.t[2],
                     .out = &p.t[3],
                     .lse = &p.t[4]};
  kvr_options options = c->options;
  options.strategy = strategy;
  kvr_plan *plan;
  device_run_rewind(run, c);
  device_ok(kvr_plan_create(run->session, &c->problem, &options, &plan), strategy);
  device_ok(kvr_plan_run(plan, &io), strategy);
  kvr_plan_destroy(plan);
  for (int i = 0; i < TENSORS; i++) {
    cl_command_queue queue;
    device_ok(kvr_group_queue(hand_group(c->problem.cache.num_ranks), 0, &queue), "queue");
    if (p.t[i].mem != NULL && is_output[i])
      assert_int_equal(clEnqueueReadBuffer(queue, p.t[i].mem, CL_TRUE, 0, p.size[i], p.bytes[i], 0,
                                           NULL, NULL),
                       CL_SUCCESS);
  }
  const float *out = (const float *)(void *)p.bytes[3], *lse = (const float *)(void *)p.bytes[4];
  for (size_t i = 0; i < offset + GUARD; i++) { /* nothing around them was written */
    assert_true(isnan(out[i < offset ? i : i + n * NQ]) != 0);
    assert_true(isnan(lse[i < offset ? i : i + heads]) != 0);
  }
  memcpy(run->out, out + offset, n * NQ * sizeof *out);
  memcpy(run->lse, lse + offset, heads * sizeof *lse);
  assert_true(device_run_error(run, c) < 2e-5);
  assert_true(device_pools_are_right(run, c));
  release(&p);
  for (int i = 0; i < 3; i++) free(in[i]);
}

/* Rows of 118 and 40 bytes, pages of 5, tensors behind 1 and 3 elements: host memory and buffers.
 */
static void halves_at_odd_offsets_are_right(void **state) {
  (void)state;
  static const int dims[] = {59, 20}, offsets[] = {1, 3};
  for (int n = 0; n < 2; n++)
    for (int i = 0; i < HAND_NUM_RANKS; i++) {
      pure_case c = hand_case(hand_ranks[i], 23, 7, 2, 1, dims[n]);
      c.problem.cache.page_size = 5;
      c.problem.cache.dtype = KVR_F16;
      hand_fill(&c, eighths, eighths, eighths_value);
      device_run run = {0};
      cl_context context;
      device_run_init(&run, &c, hand_group(hand_ranks[i]), "all");
      device_ok(kvr_group_context(hand_group(hand_ranks[i]), 0, &context), "kvr_group_context");
      for (int k = 0; k < 2; k++)
        for (int s = 0; s + 1 < kvr_num_strategies(); s++)
          run_at_offset(&c, &run, kvr_strategy_name(s), (size_t)offsets[k],
                        (s + k) % 2 ? context : NULL);
      device_run_fini(&run, &c);
      case_free(&c);
    }
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(query_heads_read_the_kv_head_of_their_group),
      cmocka_unit_test(groups_of_any_size_are_right),
      cmocka_unit_test(odd_and_common_head_dims_are_right_and_repeat_bits),
      cmocka_unit_test(dims_beyond_128_are_used),
      cmocka_unit_test(halves_at_odd_offsets_are_right),
  };
  return cmocka_run_group_tests(tests, NULL, hand_close);
}

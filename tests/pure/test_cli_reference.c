/* What the tool compares with: conversions, synthetic data, the reference, and its own maps and
 * byte formulas against the library's. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cli/check_case.c"
#include "cli/check_expect.c"
#include "cli/check_steps.c"
#include "cli/convert.c"
#include "cli/reference.c"
#include "cli/synthetic.c"

static void test_half_and_back(void **state) {
  (void)state;
  for (unsigned bits = 0; bits < 0x10000; bits++) {
    const float value = cli_half_to_float((uint16_t)bits);
    if (isnan(value))
      assert_true(isnan(cli_half_to_float(cli_float_to_half(value))));
    else
      assert_int_equal(cli_float_to_half(value), bits);
  }
  assert_int_equal(cli_float_to_half(65519.0f), 0x7bff);
  assert_int_equal(cli_float_to_half(65520.0f), 0x7c00);
  assert_int_equal(cli_float_to_half(0x1p-25f), 0);          /* tie to even */
  assert_int_equal(cli_float_to_half(0x1.8p-24f), 2);        /* tie to even */
  assert_int_equal(cli_float_to_half(1 + 0x1p-11f), 0x3c00); /* tie to even */
  assert_int_equal(cli_float_to_half(-1.0f), 0xbc00);
}

static void test_bfloat(void **state) {
  (void)state;
  assert_int_equal(cli_float_to_bfloat(1.0f), 0x3f80);
  assert_int_equal(cli_float_to_bfloat(1 + 0x1p-8f), 0x3f80);   /* tie to even */
  assert_int_equal(cli_float_to_bfloat(1 + 0x1.8p-7f), 0x3f82); /* tie to even */
  assert_true(isnan(cli_bfloat_to_float(cli_float_to_bfloat(NAN))));
  assert_int_equal(cli_float_to_bfloat(HUGE_VALF), 0x7f80);
}

static void test_synthetic(void **state) {
  (void)state;
  enum { TOKENS = 600, HEADS = 3, DIM = 59, NUM = TOKENS * HEADS * DIM };
  static cli_synthetic s;
  static float whole[NUM], part[NUM];
  double mean = 0, square = 0;
  cli_synthetic_init(&s, 7);
  cli_rows_at at = {CLI_K, 0, 0, TOKENS, HEADS, DIM};
  cli_synthetic_fill(&s, at, 1, KVR_F32, whole);
  for (int i = 0; i < NUM; i++) {
    mean += (double)whole[i] / NUM;
    square += (double)whole[i] * (double)whole[i] / NUM;
  }
  assert_true(fabs(mean) < 0.02);
  assert_true(fabs(square - 1) < 0.02);
  at.first_token = 100;
  at.num_tokens = 50;
  cli_synthetic_fill(&s, at, 1, KVR_F32, part); /* does not depend on chunking */
  assert_memory_equal(part, whole + 100 * HEADS * DIM, 50 * HEADS * DIM * sizeof *part);
  at.tensor = CLI_V;
  cli_synthetic_fill(&s, at, 1, KVR_F32, part);
  assert_memory_not_equal(part, whole + 100 * HEADS * DIM, 50 * HEADS * DIM * sizeof *part);
}

/* One row by the plain definition. */
static double plain(const cli_reference *r, const float *q, int end, int head, int dim,
                    double *lse) {
  const float *k = r->k, *v = r->v;
  const int kv = head / (r->num_q_heads / r->num_kv_heads), D = r->head_dim;
  double l = 0, sum = 0;
  for (int x = 0; x < end; x++) {
    if (r->hidden != NULL && r->hidden[x]) continue;
    double score = 0;
    for (int d = 0; d < D; d++)
      score += (double)q[head * D + d] * (double)k[(x * r->num_kv_heads + kv) * D + d];
    const double p = exp(score * r->scale);
    l += p;
    sum += p * (double)v[(x * r->num_kv_heads + kv) * D + dim];
  }
  *lse = log(l);
  return l > 0 ? sum / l : 0;
}

static void test_reference(void **state) {
  (void)state;
  enum { KEYS_ALL = 300, NQ = 4, NKV = 2, D = 20 };
  static cli_synthetic s;
  static float k[KEYS_ALL * NKV * D], v[KEYS_ALL * NKV * D], q[NQ * D];
  static unsigned char hidden[KEYS_ALL];
  double out[2 * NQ * D], lse[2 * NQ], want_lse;
  cli_synthetic_init(&s, 3);
  cli_synthetic_fill(&s, (cli_rows_at){CLI_K, 0, 0, KEYS_ALL, NKV, D}, 1, KVR_F32, k);
  cli_synthetic_fill(&s, (cli_rows_at){CLI_V, 0, 0, KEYS_ALL, NKV, D}, 1, KVR_F32, v);
  cli_synthetic_fill(&s, (cli_rows_at){CLI_Q, 0, 0, 1, NQ, D}, 3, KVR_F32, q);
  for (int x = 0; x < KEYS_ALL; x++) hidden[x] = x % 3 == 1;
  const cli_reference r = {.num_q_heads = NQ,
                           .num_kv_heads = NKV,
                           .head_dim = D,
                           .scale = 0.25,
                           .dtype = KVR_F32,
                           .k = k,
                           .v = v,
                           .hidden = hidden};
  const cli_reference_row rows[2] = {{.q = q, .end = KEYS_ALL - 1, .head_step = 1},
                                     {.q = q, .end = 0, .head_step = 1}};
  assert_int_equal(cli_reference_run(&r, rows, 2, out, lse), KVR_OK);
  for (int h = 0; h < NQ; h++) {
    for (int d = 0; d < D; d++) {
      assert_true(fabs(out[h * D + d] - plain(&r, q, KEYS_ALL - 1, h, d, &want_lse)) < 1e-12);
      assert_true(out[(NQ + h) * D + d] == 0);
    }
    assert_true(fabs(lse[h] - want_lse) < 1e-12);
    assert_true(lse[NQ + h] < 0 && isinf(lse[NQ + h]));
  }
}

/* One key of logit 0 and value 1, and a sink, by hand; then a row that sees the sink alone. */
static void test_reference_sinks(void **state) {
  (void)state;
  static const float k[2] = {0, 0}, v[2] = {1, 1}, q[2] = {1, 1};
  const float sinks[2] = {0, -HUGE_VALF};
  const cli_reference r = {.num_q_heads = 2,
                           .num_kv_heads = 1,
                           .head_dim = 1,
                           .scale = 1,
                           .value_scale = 3,
                           .sinks = sinks,
                           .k = k,
                           .v = v};
  const cli_reference_row rows[2] = {{.q = q, .end = 1, .head_step = 1},
                                     {.q = q, .end = 0, .head_step = 1}};
  double out[4], lse[4];
  assert_int_equal(cli_reference_run(&r, rows, 2, out, lse), KVR_OK);
  assert_true(out[0] == 1.5 && fabs(lse[0] - log(2)) < 1e-15);
  assert_true(out[1] == 3 && lse[1] == 0);
  assert_true(out[2] == 0 && lse[2] == 0);
  assert_true(out[3] == 0 && lse[3] == -HUGE_VAL);
}

/* A query of bf16 that a scale makes inexact: 1 / 3 is not a number of bf16. */
static void test_reference_quantises(void **state) {
  (void)state;
  const uint16_t one = cli_float_to_bfloat(1), q[1] = {one};
  const uint16_t k[2] = {0, one}, v[2] = {0, one};
  cli_reference r = {.num_q_heads = 1,
                     .num_kv_heads = 1,
                     .head_dim = 1,
                     .scale = 1,
                     .q_scale = 3,
                     .dtype = KVR_BF16,
                     .k = k,
                     .v = v};
  const cli_reference_row row = {.q = q, .end = 2, .head_step = 1};
  double out, lse = 0;
  assert_int_equal(cli_reference_run(&r, &row, 1, &out, &lse), KVR_OK);
  const double quantised = 3 * (double)cli_bfloat_to_float(cli_float_to_bfloat(1 / 3.0f));
  assert_true(fabs(quantised - 1) > 1e-4); /* or this would test nothing */
  assert_true(fabs(lse - log(1 + exp(quantised))) < 1e-14);
  r.q_scale = 1e-18; /* clipped to the largest number of bf16 */
  r.scale = 1e-20;
  const uint16_t big[1] = {cli_float_to_bfloat(0x1p100f)};
  const cli_reference_row far = {.q = big, .end = 2, .head_step = 1};
  assert_int_equal(cli_reference_run(&r, &far, 1, &out, &lse), KVR_OK);
  assert_true(fabs(lse - log(1 + exp(1e-38 * 0x1.fep127))) < 1e-12);
}

static double factor_of(const float *out, float lse) {
  static const double ref[4] = {0.5, -0.25, 1, 0};
  const cli_compared c = {out, KVR_F32, lse, ref, 2.0, 4, 3.0, 1};
  cli_error error = {0};
  cli_compare_row(&c, &error);
  return error.factor;
}

static void test_comparison(void **state) {
  (void)state;
  assert_true(factor_of((const float[]){0.5f, -0.25f, 1, 0}, 2) == 0);
  assert_true(factor_of((const float[]){0.50003f, -0.25f, 1, 0}, 2) < 1);
  assert_true(factor_of((const float[]){0.5001f, -0.25f, 1, 0}, 2) > 1);
  assert_true(isinf(factor_of((const float[]){0.5f, NAN, 1, 0}, 2)));
  assert_true(factor_of((const float[]){0.5f, -0.25f, 1, 0}, 2.0001f) > 1);
  assert_true(isinf(factor_of((const float[]){0.5f, -0.25f, 1, 0}, -HUGE_VALF)));
}

/* The check's own map, walked position by position, is the library's. */
static void test_map(void **state) {
  (void)state;
  int owner[1000], local[1000];
  for (int index = 0; index < 300; index++) {
    check_case c;
    check_case_generate(5, index, index % 2 == 0, &c);
    const kvr_cache_desc desc = {.num_ranks = c.ranks,
                                 .interleave = c.interleave,
                                 .weights = c.weights};
    check_walk_map(&c, 500, owner, local);
    for (int g = 0; g < 500; g++) {
      assert_int_equal(owner[g], kvr_map_owner(&desc, g));
      assert_int_equal(local[g], kvr_map_local(&desc, g));
    }
    for (int r = 0; r < c.ranks; r++)
      assert_int_equal(check_share(&c, 77, r), kvr_map_count(&desc, 77, r));
  }
}

static kvr_problem problem_of(const check_case *c) {
  return (kvr_problem){.struct_size = sizeof(kvr_problem),
                       .cache = {.struct_size = sizeof(kvr_cache_desc),
                                 .num_ranks = c->ranks,
                                 .num_kv_heads = c->num_kv_heads,
                                 .head_dim = c->head_dim,
                                 .page_size = c->page_size,
                                 .num_pages = 10000,
                                 .interleave = c->interleave,
                                 .weights = c->weights,
                                 .dtype = c->dtype},
                       .num_q_heads = c->num_q_heads,
                       .out_dtype = c->out_dtype,
                       .causal = c->causal,
                       .window = c->window,
                       .num_requests = c->num_requests,
                       .requests = c->requests};
}

/* Compares the bytes of one step under every strategy. */
static int compare_bytes(const check_case *c) {
  const kvr_problem problem = problem_of(c);
  int num = 0;
  for (int i = 0; i < kvr_num_strategies(); i++) {
    kvr_options options = {.struct_size = sizeof options,
                           .strategy = kvr_strategy_name(i),
                           .tile = c->tile,
                           .query_tile = c->query_tile,
                           .num_slots = c->slots};
    kvr_plan_info info;
    if (!check_serves(c, options.strategy)) continue;
    assert_int_equal(kvr_plan_estimate(&problem, &options, &info), KVR_OK);
    assert_int_equal(info.bytes_moved, check_bytes(c, options.strategy));
    num++;
  }
  return num;
}

/* The check's own byte formulas are what the schedules move; windows that skip blocks included. */
static void test_bytes(void **state) {
  (void)state;
  int skipping = 0, chunked = 0;
  for (int index = 0; index < 400; index++) {
    check_case c;
    check_case_generate(9, index, index % 2 == 0, &c);
    for (int step = 0; step < c.num_steps; step++) {
      const check_case now = check_step_case(&c, step);
      assert_true(compare_bytes(&now) >= 6);
      for (int i = 0; i < now.num_requests; i++) skipping += check_skips_blocks(&now, i);
    }
    chunked += c.num_steps > 1;
  }
  assert_true(skipping > 20 && chunked > 40);
}

/* Steps of a case are its whole, in order, and what a strategy serves depends on what is cached. */
static void test_steps(void **state) {
  (void)state;
  int mixed = 0;
  for (int index = 0; index < 200; index++) {
    check_case c;
    check_case_generate(3, index, true, &c);
    for (int i = 0; i < c.num_requests; i++) {
      int cached = c.requests[i].num_cached;
      for (int step = 0; step < c.num_steps; step++) {
        const check_case now = check_step_case(&c, step);
        assert_int_equal(now.requests[i].num_cached, cached);
        assert_true(now.requests[i].num_new >= 0);
        cached += now.requests[i].num_new;
      }
      assert_int_equal(cached, c.requests[i].num_cached + c.requests[i].num_new);
    }
    for (int step = 0; step < c.num_steps; step++) {
      const check_case now = check_step_case(&c, step);
      const char *name = check_step_strategy(&c, "ring", step);
      assert_true(check_serves(&now, name));
      assert_string_equal(name, check_step_strategy(&c, "ring", step)); /* repeats */
      mixed += strcmp(name, "ring") != 0;
    }
    assert_string_equal(check_step_strategy(&c, "ring", c.num_steps - 1), "ring");
  }
  assert_true(mixed > 20);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_half_and_back),   cmocka_unit_test(test_bfloat),
      cmocka_unit_test(test_synthetic),       cmocka_unit_test(test_reference),
      cmocka_unit_test(test_reference_sinks), cmocka_unit_test(test_reference_quantises),
      cmocka_unit_test(test_comparison),      cmocka_unit_test(test_map),
      cmocka_unit_test(test_bytes),           cmocka_unit_test(test_steps),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

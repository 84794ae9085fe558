/* kvr_merge_states in numbers small enough to check by hand, and over random splits. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "kvring/plan.h"
#include "pure_case.h"

typedef struct partial {
  float out, lse;
} partial;

static partial merged(partial a, partial b) {
  partial c = {77, 77};
  assert_int_equal(kvr_merge_states(&a.out, &a.lse, &b.out, &b.lse, 1, 1, &c.out, &c.lse), KVR_OK);
  return c;
}

/* In both orders, exactly. */
static void expect(partial a, partial b, partial want) {
  for (int swap = 0; swap < 2; swap++) {
    const partial got = swap ? merged(b, a) : merged(a, b);
    assert_true(got.out == want.out);
    assert_true(got.lse == want.lse);
  }
}

/* (-inf) - (-inf) would be NaN. */
static void merging_two_empty_partials_gives_nothing(void **state) {
  (void)state;
  expect((partial){7, -INFINITY}, (partial){9, -INFINITY}, (partial){0, -INFINITY});
  expect((partial){NAN, -INFINITY}, (partial){INFINITY, -INFINITY}, (partial){0, -INFINITY});
}

static void an_empty_partial_is_never_read(void **state) {
  (void)state;
  expect((partial){7, -INFINITY}, (partial){3, 0.5f}, (partial){3, 0.5f});
  expect((partial){NAN, -INFINITY}, (partial){3, 0.5f}, (partial){3, 0.5f});
  expect((partial){-INFINITY, -INFINITY}, (partial){3, 0.5f}, (partial){3, 0.5f});
}

/* exp(200) is beyond f32. */
static void partials_far_apart_do_not_overflow(void **state) {
  (void)state;
  expect((partial){1, 0}, (partial){-3, 200}, (partial){-3, 200});
  expect((partial){1, -200}, (partial){-3, 0}, (partial){-3, 0});
  expect((partial){1, -3e38f}, (partial){-3, 3e38f}, (partial){-3, 3e38f});
}

/* Sums of 2 and 8: taken as logarithms of base 2 the result would be 7.2330. */
static void partials_are_merged_with_natural_logarithms(void **state) {
  (void)state;
  const partial got = merged((partial){0, logf(2)}, (partial){10, logf(8)});
  assert_float_equal(got.out, 8.0f, 1e-6f);
  assert_float_equal(got.lse, logf(10), 1e-6f);
  assert_float_equal(got.lse * 1.442695f, log2f(10), 1e-5f); /* as docs/semantics.md says */
}

static void equal_partials_give_the_mean(void **state) {
  (void)state;
  const partial got = merged((partial){1, 1e4f}, (partial){3, 1e4f});
  assert_true(got.out == 2.0f);
  assert_float_equal(got.lse, 1e4f + logf(2), 1e-3f); /* floats are that far apart there */
}

/* ---- random splits ---- */

enum { KEYS = 24, DIM = 3 };

typedef struct keys {
  double score[KEYS], value[KEYS][DIM];
} keys;

/* Partial over the keys whose part is `part`; -1: over all keys. */
static void attend(const keys *k, const int *parts, int part, float *out, float *lse) {
  double sum = 0, acc[DIM] = {0}, max = -HUGE_VAL;
  for (int x = 0; x < KEYS; x++)
    if (part < 0 || parts[x] == part) max = fmax(max, k->score[x]);
  for (int x = 0; x < KEYS; x++) {
    if (part >= 0 && parts[x] != part) continue;
    sum += exp(k->score[x] - max);
    for (int d = 0; d < DIM; d++) acc[d] += exp(k->score[x] - max) * k->value[x][d];
  }
  for (int d = 0; d < DIM; d++) out[d] = sum > 0 ? (float)(acc[d] / sum) : NAN;
  *lse = sum > 0 ? (float)(max + log(sum)) : -INFINITY;
}

/* Up to three parts, some of them empty, merged in place and in any order. */
static void merging_any_split_equals_the_whole(void **state) {
  (void)state;
  uint64_t random = 3;
  for (int trial = 0; trial < 2000; trial++) {
    keys k;
    int parts[KEYS], first = case_between(&random, 0, 2);
    float whole[DIM], lse, got[DIM], got_lse, other[DIM], other_lse;
    const double spread = trial % 3 == 0 ? 100.0 : 3.0;
    for (int x = 0; x < KEYS; x++) {
      parts[x] = case_between(&random, 0, trial % 4);
      k.score[x] = spread * case_normal(&random);
      for (int d = 0; d < DIM; d++) k.value[x][d] = case_normal(&random);
      if (parts[x] == 3) parts[x] = 0;
    }
    attend(&k, parts, -1, whole, &lse);
    attend(&k, parts, first, got, &got_lse);
    for (int n = 1; n < 3; n++) {
      attend(&k, parts, (first + n) % 3, other, &other_lse);
      assert_int_equal(kvr_merge_states(got, &got_lse, other, &other_lse, 1, DIM, got, &got_lse),
                       KVR_OK);
    }
    for (int d = 0; d < DIM; d++) assert_float_equal(got[d], whole[d], 1e-4f);
    assert_float_equal(got_lse, lse, 1e-6f * (1 + fabsf(lse)));
  }
}

/* ---- refused ---- */

static void bad_partials_are_refused_and_nothing_is_written(void **state) {
  (void)state;
  const float bad[] = {INFINITY, NAN};
  for (int i = 0; i < 2; i++)
    for (int side = 0; side < 2; side++) {
      const float out[2] = {1, 2}, lse[2] = {0, side == 0 ? bad[i] : 0};
      const float other[2] = {0, side == 1 ? bad[i] : 0};
      float got[2] = {77, 77}, got_lse[2] = {77, 77};
      assert_int_equal(kvr_merge_states(out, lse, out, other, 2, 1, got, got_lse), KVR_E_RANGE);
      assert_true(got[0] == 77 && got[1] == 77 && got_lse[0] == 77 && got_lse[1] == 77);
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(merging_two_empty_partials_gives_nothing),
      cmocka_unit_test(an_empty_partial_is_never_read),
      cmocka_unit_test(partials_far_apart_do_not_overflow),
      cmocka_unit_test(partials_are_merged_with_natural_logarithms),
      cmocka_unit_test(equal_partials_give_the_mean),
      cmocka_unit_test(merging_any_split_equals_the_whole),
      cmocka_unit_test(bad_partials_are_refused_and_nothing_is_written),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

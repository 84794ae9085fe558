/* LSE is the natural logarithm, of many keys and of few, whatever serves them: whole steps, for
 * every strategy and several P. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "hand_case.h"

enum { D = 8 };

static void expect_last_lse(const hand_step *s, const void *data) {
  hand_expect_lse(s, s->c->num_tokens - 1, 0, *(const double *)data, 1e-5);
}

static void lse_of_a_hundred_thousand_keys_is_natural(void **state) {
  (void)state;
  const double want = 11.512925;
  for (int i = 0; i < HAND_NUM_RANKS; i++)
    for (int S = 1; S <= (i % 3 == 0 ? 40 : 1); S += 39) {
      pure_case c = hand_case(hand_ranks[i], 100000 - S, S, 1, 1, D);
      c.options.tile = 4096;
      c.problem.cache.page_size = 64;
      c.sample = S;
      hand_run_formula(&c, hand_zero, hand_zero, hand_position, expect_last_lse, &want);
    }
}

/* One row with all keys cached, or the last row of many: few rows and many rows are served by
 * different shapes of the kernel. */
static void lse_does_not_depend_on_how_many_rows_there_are(void **state) {
  (void)state;
  static const int rows[] = {1, 20, 100, 600};
  double want = (double)NAN;
  for (int i = 0; i < HAND_NUM_RANKS; i++)
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
      pure_case c = hand_case(hand_ranks[i], 700 - rows[k], rows[k], 1, 1, D);
      c.options.tile = 50;
      c.sample = rows[k];
      hand_fill(&c, hand_scrambled_query, hand_scrambled, hand_scrambled_value);
      const double last = c.want_lse[rows[k] - 1];
      if (isnan(want)) want = last;
      assert_true(last == want);
      hand_run(&c, expect_last_lse, &want);
      case_free(&c);
    }
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(lse_of_a_hundred_thousand_keys_is_natural),
      cmocka_unit_test(lse_does_not_depend_on_how_many_rows_there_are),
  };
  return cmocka_run_group_tests(tests, NULL, hand_close);
}

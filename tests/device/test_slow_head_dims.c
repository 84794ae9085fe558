/* Head dims that need long to compile: random data, and data in the upper dims alone. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "hand_case.h"

static void large_and_odd_head_dims_are_right_and_repeat_bits(void **state) {
  (void)state;
  static const int dims[] = {96, 192, 331, 512};
  for (size_t n = 0; n < sizeof dims / sizeof *dims; n++)
    for (int i = 0; i < HAND_NUM_RANKS; i++) {
      pure_case c = hand_case(hand_ranks[i], 62, i % 2 ? 65 : 1, 2, 1, dims[n]);
      c.options.tile = 16;
      hand_fill_random(&c, 3 + n);
      hand_run(&c, hand_expect_same_bits_again, NULL);
      case_free(&c);
    }
}

static void dims_beyond_128_are_used(void **state) {
  (void)state;
  for (int i = 0; i < HAND_NUM_RANKS; i++) {
    hand_run_upper_dims(hand_ranks[i], 192);
    hand_run_upper_dims(hand_ranks[i], 512);
  }
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(large_and_odd_head_dims_are_right_and_repeat_bits),
      cmocka_unit_test(dims_beyond_128_are_used),
  };
  return cmocka_run_group_tests(tests, NULL, hand_close);
}

/* Rings of any depth and number of ranks end: two and three slots, one block per share and many.
 * A hang ends the program. One slot is refused, since it would race or wait for itself. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "hand_case.h"

enum { TILE = 3, SECONDS = 10 };

/* Building kernels is not what the alarm is for. */
static void build_kernels(void) {
  pure_case c = hand_case(2, 3, 1, 2, 1, 4);
  hand_run_formula(&c, hand_zero, hand_zero, hand_position, NULL, NULL);
}

static void every_depth_ends_for_every_ring(void **state) {
  (void)state;
  static const int ranks[] = {2, 3, 5, 7, 8}, blocks[] = {1, 2, 9};
  build_kernels();
  for (size_t r = 0; r < sizeof ranks / sizeof *ranks; r++)
    for (int depth = 2; depth <= 3; depth++)
      for (size_t b = 0; b < sizeof blocks / sizeof *blocks; b++) {
        /* The last block of the last rank's share is one token short. */
        pure_case c =
            hand_case(ranks[r], blocks[b] * TILE * ranks[r] - 1, 4 * ranks[r] + 1, 2, 1, 4);
        c.options.num_slots = depth;
        c.options.query_tile = b == 1 ? 3 : 0;
        alarm(SECONDS);
        hand_run_formula(&c, hand_scrambled_query, hand_scrambled, hand_scrambled_value, NULL,
                         NULL);
        alarm(0);
      }
}

static void one_slot_is_refused_with_a_reason(void **state) {
  (void)state;
  pure_case c = hand_case(3, 20, 4, 1, 1, 4);
  hand_fill(&c, hand_zero, hand_zero, hand_position);
  device_run run = {0};
  device_run_init(&run, &c, hand_group(3), "all");
  c.options.num_slots = 1;
  for (int i = 0; i + 1 < kvr_num_strategies(); i++) {
    assert_int_equal(device_run_step(&run, &c, kvr_strategy_name(i)), KVR_E_RANGE);
    assert_non_null(strstr(kvr_error_message(), "num_slots is 1; a ring needs at least 2"));
    assert_int_equal(kvr_cache_length(run.cache, run.ids[0]), 20);
  }
  device_run_fini(&run, &c);
  case_free(&c);
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_depth_ends_for_every_ring),
      cmocka_unit_test(one_slot_is_refused_with_a_reason),
  };
  return cmocka_run_group_tests(tests, NULL, hand_close);
}

/* 5,000 sessions in one process, each with a step: some libraries run out of handles long before.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "device_case.h"
#include "session_cycles.h"

static void test_5000_sessions(void **state) {
  (void)state;
  session_cycles(5000);
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_5000_sessions)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}

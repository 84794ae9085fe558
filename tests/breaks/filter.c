/* Preloaded into a cmocka test program: runs only the tests that match KVRING_BREAK_FILTER. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

__attribute__((constructor)) static void set_filter(void) {
  const char *filter = getenv("KVRING_BREAK_FILTER");
  if (filter != NULL) cmocka_set_test_filter(filter);
}

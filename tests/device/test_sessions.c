/* Sessions leave nothing behind (many more of them: test_slow_sessions). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "fault_bed.h"
#include "session_cycles.h"

static void test_sessions_leave_nothing(void **state) {
  (void)state;
  session_cycles(70);
}

/* A kernel that is kept is seen. */
static void test_kept_objects_are_noticed(void **state) {
  (void)state;
  fault_bed b;
  bed_init(&b, &(bed_desc){.strategy = "ring"});
  const cl_objects before = faults.live;
  const cl_event event = clCreateUserEvent(b.group->ranks[0].context, NULL);
  assert_int_equal(faults.live.events, before.events + 1);
  clReleaseEvent(event);
  const cl_mem mem = clCreateBuffer(b.group->ranks[0].context, 0, 16, NULL, NULL);
  assert_int_equal(faults.live.buffers, before.buffers + 1);
  clReleaseMemObject(mem);
  bed_replace_session(&b);
  assert_int_equal(faults.live.kernels, before.kernels);
  kvr_session_destroy(b.run.session);
  b.run.session = NULL;
  assert_true(faults.live.kernels < before.kernels && faults.live.programs < before.programs);
  bed_fini(&b);
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_sessions_leave_nothing),
      cmocka_unit_test(test_kept_objects_are_noticed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

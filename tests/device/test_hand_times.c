/* Profiling stamps that no clock can have made: such an op has no times, the step is right, and the
 * trace leaves it out. This program has its own clGetEventProfilingInfo, in front of the driver's.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "hand_case.h"
#include "kvring/opencl.h"

/* ---- the driver's clock ---- */

static struct {
  cl_int code;
  cl_ulong start, end;
  int calls;
} stamps;

cl_int clGetEventProfilingInfo(cl_event event, cl_profiling_info name, size_t size, void *value,
                               size_t *size_ret) {
  (void)event;
  stamps.calls++;
  if (stamps.code != CL_SUCCESS) return stamps.code;
  assert_int_equal(size, sizeof(cl_ulong));
  memcpy(value, name == CL_PROFILING_COMMAND_START ? &stamps.start : &stamps.end, size);
  if (size_ret != NULL) *size_ret = size;
  return CL_SUCCESS;
}

/* ---- steps ---- */

static int events_in(const char *path) {
  char line[4096];
  int num = 0;
  FILE *file = fopen(path, "r");
  assert_non_null(file);
  while (fgets(line, sizeof line, file) != NULL) {
    num += strstr(line, "\"ph\":\"X\"") != NULL;
    assert_null(strstr(line, "\"dur\":-"));
    assert_null(strstr(line, "e+")); /* 1.8e10 seconds would be a number like 1.8e+16 */
  }
  fclose(file);
  return num;
}

/* Traced ops of a step whose events all carry these stamps. */
static int traced_ops(const device_run *run) {
  char path[64];
  kvr_trace *trace;
  snprintf(path, sizeof path, "test_hand_times.%ld.json", (long)getpid());
  device_ok(kvr_trace_create(&trace), "kvr_trace_create");
  device_ok(kvr_trace_add(trace, "step", run->records, run->num_records), "kvr_trace_add");
  device_ok(kvr_trace_write(trace, path), "kvr_trace_write");
  kvr_trace_destroy(trace);
  const int num = events_in(path);
  remove(path);
  return num;
}

typedef struct stamp_case {
  cl_int code;
  cl_ulong start, end;
  int valid;
} stamp_case;

static void expect_times(const hand_step *s, const void *data) {
  const stamp_case *c = data;
  assert_true(stamps.calls > 0);
  for (int i = 0; i < s->run->num_records; i++) {
    const kvr_trace_record *r = &s->run->records[i];
    assert_true(r->start_ns == (c->valid ? (int64_t)c->start : 0));
    assert_true(r->end_ns == (c->valid ? (int64_t)c->end : 0));
  }
  assert_int_equal(traced_ops(s->run) > 0, c->valid);
}

static void impossible_stamps_give_no_times(void **state) {
  (void)state;
  static const stamp_case cases[] = {
      {CL_SUCCESS, 1000, 3000, 1},
      {CL_SUCCESS, 3000, 1000, 0}, /* the end before the start */
      {CL_SUCCESS, 0, 0, 0},
      {CL_SUCCESS, 0, 3000, 0},
      {CL_SUCCESS, 3000, 0, 0},
      {CL_SUCCESS, 3000, UINT64_MAX, 0}, /* 1.8e10 seconds */
      {CL_PROFILING_INFO_NOT_AVAILABLE, 1000, 3000, 0},
  };
  for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
    pure_case c = hand_case(3, 20, 5, 1, 1, 4);
    memset(&stamps, 0, sizeof stamps);
    stamps.code = cases[n].code, stamps.start = cases[n].start, stamps.end = cases[n].end;
    hand_run_formula(&c, hand_zero, hand_zero, hand_position, expect_times, &cases[n]);
  }
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {cmocka_unit_test(impossible_stamps_give_no_times)};
  return cmocka_run_group_tests(tests, NULL, hand_close);
}

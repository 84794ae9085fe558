/* Options of the tool: defaults, strict numbers, and messages that say what to write instead. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "cli/options.c"
#include "cli/parse.c"

/* Parses up to four words as options of prefill. The options point into them until the next call.
 */
static kvr_status parse4(const char *const words[4], cli_options *out) {
  static char copies[4][64];
  char *argv[4];
  int argc = 0;
  for (; argc < 4 && words[argc] != NULL; argc++) {
    strcpy(copies[argc], words[argc]);
    argv[argc] = copies[argc];
  }
  return cli_options_parse(argc, argv, CLI_CMD_PREFILL, out);
}
#define PARSE(out, ...) parse4((const char *const[4]){__VA_ARGS__}, out)

static void expect_failure(const char *const words[4], kvr_status status, const char *part) {
  cli_options o;
  assert_int_equal(parse4(words, &o), status);
  if (strstr(kvr_error_message(), part) == NULL)
    fail_msg("message '%s' lacks '%s'", kvr_error_message(), part);
}
#define FAILS(status, part, ...) expect_failure((const char *const[4]){__VA_ARGS__}, status, part)

static void test_defaults(void **state) {
  (void)state;
  cli_options o;
  assert_int_equal(PARSE(&o, NULL), KVR_OK);
  assert_int_equal(o.ranks, 4);
  assert_int_equal(o.tile, 1024);
  assert_int_equal(o.verify, 0);
  assert_int_equal(o.only, -1);
  assert_string_equal(o.strategy, "auto");
  assert_null(o.input);
  assert_false(cli_options_given(&o, "ranks"));
}

static void test_values(void **state) {
  (void)state;
  cli_options o;
  assert_int_equal(PARSE(&o, "--ranks", "7", "--dtype=bf16", "--verify"), KVR_OK);
  assert_int_equal(o.ranks, 7);
  assert_int_equal(o.dtype, KVR_BF16);
  assert_int_equal(o.verify, 64);
  assert_true(cli_options_given(&o, "ranks"));
  assert_int_equal(PARSE(&o, "--verify=0", "--memory-budget", "3G", "--copy-queue"), KVR_OK);
  assert_int_equal(o.verify, 0);
  assert_int_equal(o.memory_budget, (size_t)3 << 30);
  assert_true(o.copy_queue);
  assert_int_equal(PARSE(&o, "--seed", "18446744073709551615"), KVR_OK);
  assert_true(o.seed == UINT64_MAX);
}

static void test_strict_numbers(void **state) {
  (void)state;
  FAILS(KVR_E_RANGE, "'4x'", "--ranks", "4x");
  FAILS(KVR_E_RANGE, "''", "--ranks", "");
  FAILS(KVR_E_RANGE, "'\t4'", "--ranks", "\t4");
  FAILS(KVR_E_RANGE, "1..1024", "--ranks", "0");
  FAILS(KVR_E_RANGE, "1..1024", "--ranks", "99999999999999999999");
  FAILS(KVR_E_RANGE, "whole number", "--seed", "-1");
  FAILS(KVR_E_RANGE, "2G", "--memory-budget", "2GB");
  FAILS(KVR_E_RANGE, "limit", "--memory-budget", "99999999T");
  FAILS(KVR_E_RANGE, "f32, f16 or bf16", "--dtype", "fp16");
  FAILS(KVR_E_RANGE, "0..1", "--causal", "2");
}

static void test_names_the_nearest(void **state) {
  (void)state;
  FAILS(KVR_E_RANGE, "--ranks", "--rank", "4");
  FAILS(KVR_E_RANGE, "--kv-heads", "--kvheads", "4");
  FAILS(KVR_E_RANGE, "--help lists", "--zzzzzzzz");
  FAILS(KVR_E_RANGE, "unexpected argument", "ring");
  FAILS(KVR_E_RANGE, "needs a value", "--tokens");
  FAILS(KVR_E_RANGE, "--json needs a value, but --verify follows", "--json", "--verify");
  FAILS(KVR_E_RANGE, "takes no value", "--copy-queue=1");
  FAILS(KVR_E_RANGE, "no option of this command", "--full");
  const char *const names[] = {"devices", "doctor", "prefill"};
  assert_string_equal(cli_nearest("prefil", names, 3), "prefill");
  assert_null(cli_nearest("qqqqqqq", names, 3));
}

static void test_masks(void **state) {
  (void)state;
  cli_options o;
  assert_int_equal(PARSE(&o, NULL), KVR_OK);
  assert_int_equal(o.window, 0);
  assert_true(o.soft_cap == 0 && o.q_scale == 1 && o.k_scale == 1 && o.v_scale == 1);
  assert_true(o.timeout == KVR_DEFAULT_TIMEOUT);
  assert_null(o.sinks);
  assert_int_equal(PARSE(&o, "--sinks=random", "--q-scale=-0.5", "--soft-cap=2e1"), KVR_OK);
  assert_string_equal(o.sinks, "random");
  assert_true(o.q_scale == -0.5 && o.soft_cap == 20);
  assert_int_equal(PARSE(&o, "--window", "128", "--timeout=1e6"), KVR_OK);
  assert_true(o.window == 128 && o.timeout == KVR_MAX_TIMEOUT);
  FAILS(KVR_E_RANGE, "0..2147483647", "--window", "-1");
  FAILS(KVR_E_RANGE, "-3; it must be in", "--soft-cap", "-3");
  FAILS(KVR_E_RANGE, "or 0 for none", "--soft-cap", "1e-300");
  FAILS(KVR_E_RANGE, "use 1 for no scale", "--q-scale", "0");
  FAILS(KVR_E_RANGE, "1e300; its size must be in", "--k-scale", "1e300");
  FAILS(KVR_E_RANGE, "not a finite number", "--v-scale", "nan");
  FAILS(KVR_E_RANGE, "not a finite number", "--v-scale", "inf");
  FAILS(KVR_E_RANGE, "not a finite number", "--v-scale", " 1");
}

static void test_timeout(void **state) {
  (void)state;
  FAILS(KVR_E_RANGE, "--timeout is 0; it must be more than 0 and at most 1e+06", "--timeout", "0");
  FAILS(KVR_E_RANGE, "more than 0", "--timeout", "-1");
  FAILS(KVR_E_RANGE, "at most 1e+06", "--timeout", "1000001");
}

static void test_math(void **state) {
  (void)state;
  cli_options o;
  assert_int_equal(PARSE(&o, "--math", "auto"), KVR_OK);
  assert_int_equal(PARSE(&o, "--math=f32"), KVR_OK);
  assert_int_equal(PARSE(&o, "--math", "bf16"), KVR_OK);
  assert_int_equal(o.math, KVR_MATH_BF16);
  FAILS(KVR_E_RANGE, "'f64'; use auto, f32 or bf16", "--math", "f64");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_defaults),       cmocka_unit_test(test_values),
      cmocka_unit_test(test_strict_numbers), cmocka_unit_test(test_names_the_nearest),
      cmocka_unit_test(test_masks),          cmocka_unit_test(test_timeout),
      cmocka_unit_test(test_math),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

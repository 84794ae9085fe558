/* Whole steps with bf16 products: bf16 caches under KVR_MATH_AUTO. Probabilities have 8 bits, so
 * results are good to about 2e-3 of max|V|; everything else is as exact as with f32 products. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device/attend_kernel.h"
#include "device_case.h"

enum { NUM_CASES = 20 };
static const double tolerance = 1e-2;  /* largest error, of max|V| */
static const double f32_errors = 1e-5; /* f32 products stay below */

static const char *const strategies[] = {"ring",     "ring-two-launch", "gather-kv",
                                         "gather-q", "rotate-q",        "rotate-all"};
enum { NUM_STRATEGIES = sizeof strategies / sizeof *strategies };

static void force_variant(const char *name) {
  if (name != NULL)
    setenv("KVRING_VARIANT", name, 1);
  else
    unsetenv("KVRING_VARIANT");
}

static double run_case(pure_case *c, kvr_group *group, const char *strategy, kvr_math *math) {
  device_run run = {.auto_math = true};
  device_run_init(&run, c, group, strategy);
  *math = kvr_session_math(run.session, 0);
  device_ok(device_run_step(&run, c, strategy), strategy);
  assert_true(device_pools_are_right(&run, c));
  const double error = device_run_error(&run, c);
  device_run_fini(&run, c);
  return error;
}

static void expect_right(const char *variant, bool bf16) {
  double worst = 0;
  force_variant(variant);
  for (int seed = 500; seed < 500 + NUM_CASES; seed++) {
    pure_case c;
    device_case_init(&c, (uint64_t)seed, KVR_BF16);
    kvr_group *group = device_group(c.problem.cache.num_ranks, seed % 2);
    for (int i = 0; i < NUM_STRATEGIES; i++) {
      kvr_math math;
      const double error = run_case(&c, group, strategies[i], &math);
      assert_int_equal(math, bf16 ? KVR_MATH_BF16 : KVR_MATH_F32);
      if (!(error < tolerance)) fail_msg("seed %d, %s: error %g", seed, strategies[i], error);
      worst = fmax(worst, error);
    }
    kvr_group_destroy(group);
    case_free(&c);
  }
  force_variant(NULL);
  /* Rounded probabilities show: the variant did run. */
  if ((worst > f32_errors) != bf16) fail_msg("the largest error is %g", worst);
}

static void test_bf16_products(void **state) {
  (void)state;
  expect_right("bf16x64", true);
  expect_right("bf16x256", true);
}

static void test_f32_products(void **state) {
  (void)state;
  expect_right("rows64", false);
}

/* The kernels are built for the instructions that the CPU is fastest with. */
static void test_products_are_those_of_the_cpu(void **state) {
  (void)state;
  const kvr_cache_desc cache = {.head_dim = 20, .dtype = KVR_BF16};
  kvr_group *group = device_group(1, 0);
  kvr_attend_kernels k;
  char options[256] = "", want[32];
  device_ok(kvr_attend_kernels_init(&k, group, 0, &cache, KVR_F32, KVR_MATH_AUTO),
            "kvr_attend_kernels_init");
  assert_int_equal(k.products, kvr_cpu_products());
  assert_int_equal(kvr_attend_kernels_use_bf16(&k), kvr_cpu_products() != KVR_PRODUCTS_F32);
  if (kvr_attend_kernels_use_bf16(&k)) {
    const cl_program program = k.program[kvr_variant_find("bf16x256")];
    snprintf(want, sizeof want, "-DPRODUCTS=%d", (int)kvr_cpu_products());
    assert_int_equal(clGetProgramBuildInfo(program, group->ranks[0].device,
                                           CL_PROGRAM_BUILD_OPTIONS, sizeof options, options, NULL),
                     CL_SUCCESS);
    assert_non_null(strstr(options, want));
  }
  kvr_attend_kernels_fini(&k);
  kvr_group_destroy(group);
}

/* K, V and queries that are not bf16 are rounded only on request. */
static void test_math_is_a_limit(void **state) {
  (void)state;
  kvr_group *group = device_group(1, 0);
  kvr_cache *cache;
  kvr_session *session;
  const kvr_cache_desc desc = {.struct_size = sizeof desc,
                               .num_ranks = 1,
                               .num_kv_heads = 1,
                               .head_dim = 20,
                               .page_size = 4,
                               .num_pages = 4,
                               .interleave = 1};
  kvr_limits limits = {.struct_size = sizeof limits,
                       .num_q_heads = 1,
                       .max_new_tokens = 4,
                       .max_requests = 1};
  device_ok(kvr_cache_create(group, &desc, &cache), "kvr_cache_create");
  device_ok(kvr_session_create(group, cache, &limits, &session), "kvr_session_create");
  assert_int_equal(kvr_session_math(session, 0), KVR_MATH_F32);
  assert_int_equal(kvr_session_math(session, 1), KVR_MATH_AUTO);
  kvr_session_destroy(session);
  limits.math = KVR_MATH_BF16;
  if (kvr_session_create(group, cache, &limits, &session) == KVR_OK) {
    assert_int_equal(kvr_session_math(session, 0), KVR_MATH_BF16);
    kvr_session_destroy(session);
  } else {
    assert_non_null(strstr(kvr_error_message(), "use auto or f32"));
  }
  limits.math = KVR_NUM_MATHS;
  assert_int_equal(kvr_session_create(group, cache, &limits, &session), KVR_E_RANGE);
  assert_non_null(strstr(kvr_error_message(), "math is 3"));
  kvr_cache_destroy(cache);
  kvr_group_destroy(group);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_bf16_products),
      cmocka_unit_test(test_f32_products),
      cmocka_unit_test(test_products_are_those_of_the_cpu),
      cmocka_unit_test(test_math_is_a_limit),
  };
  device_require();
  return cmocka_run_group_tests(tests, NULL, NULL);
}

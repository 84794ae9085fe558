/* Kernel variants that are wrong, too large, do not build or end the process are left out for good,
 * the user hears of it once, and steps stay right. Calls of the library are wrapped by the linker:
 * a bad variant is a right one with a planted build option. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "device/attend_kernel.h"
#include "device/quarantine.h"
#include "device_case.h"

static const double tolerance = 2e-5;
static char dir[64]; /* program binaries and quarantine of one test */

/* ---- planted faults ---- */

static struct {
  const char *where;  /* part of the build options of what is broken; NULL: nothing */
  const char *but;    /* part of the options of what is not broken; NULL: nothing */
  const char *option; /* that breaks it */
  bool wrong;         /* its results */
  bool exit;          /* building it ends the process */
  size_t work_group;  /* largest work-group that its kernels admit to; 0: as they say */
  cl_ulong local_memory;
  cl_int code; /* that asking about its kernels returns */
} plant;

/* The options of the last build: kernels are asked about right after it. */
static bool broken;

cl_int __real_clBuildProgram(cl_program program, cl_uint num, const cl_device_id *devices,
                             const char *options,
                             void(CL_CALLBACK *notify)(cl_program program, void *user), void *user);
cl_int __wrap_clBuildProgram(cl_program program, cl_uint num, const cl_device_id *devices,
                             const char *options,
                             void(CL_CALLBACK *notify)(cl_program program, void *user), void *user);
cl_int __wrap_clBuildProgram(cl_program program, cl_uint num, const cl_device_id *devices,
                             const char *options,
                             void(CL_CALLBACK *notify)(cl_program program, void *user),
                             void *user) {
  char text[1024];
  broken = plant.where != NULL && strstr(options, plant.where) != NULL &&
           (plant.but == NULL || strstr(options, plant.but) == NULL);
  if (broken && plant.exit) _exit(3);
  snprintf(text, sizeof text, "%s %s", options, broken && plant.option != NULL ? plant.option : "");
  return __real_clBuildProgram(program, num, devices, text, notify, user);
}

/* Results of a broken kernel are read right after its build. */
cl_int __real_clEnqueueReadBuffer(cl_command_queue queue, cl_mem mem, cl_bool blocking,
                                  size_t offset, size_t size, void *data, cl_uint num_waits,
                                  const cl_event *waits, cl_event *event);
cl_int __wrap_clEnqueueReadBuffer(cl_command_queue queue, cl_mem mem, cl_bool blocking,
                                  size_t offset, size_t size, void *data, cl_uint num_waits,
                                  const cl_event *waits, cl_event *event);
cl_int __wrap_clEnqueueReadBuffer(cl_command_queue queue, cl_mem mem, cl_bool blocking,
                                  size_t offset, size_t size, void *data, cl_uint num_waits,
                                  const cl_event *waits, cl_event *event) {
  const cl_int code =
      __real_clEnqueueReadBuffer(queue, mem, blocking, offset, size, data, num_waits, waits, event);
  if (broken && plant.wrong)
    for (size_t i = 0; i < size / sizeof(float); i++) ((float *)data)[i] *= 1.001f;
  return code;
}

cl_int __real_clGetKernelWorkGroupInfo(cl_kernel kernel, cl_device_id device,
                                       cl_kernel_work_group_info name, size_t size, void *value,
                                       size_t *out_size);
cl_int __wrap_clGetKernelWorkGroupInfo(cl_kernel kernel, cl_device_id device,
                                       cl_kernel_work_group_info name, size_t size, void *value,
                                       size_t *out_size);
cl_int __wrap_clGetKernelWorkGroupInfo(cl_kernel kernel, cl_device_id device,
                                       cl_kernel_work_group_info name, size_t size, void *value,
                                       size_t *out_size) {
  const cl_int code = __real_clGetKernelWorkGroupInfo(kernel, device, name, size, value, out_size);
  if (broken && name == CL_KERNEL_WORK_GROUP_SIZE && plant.work_group > 0)
    memcpy(value, &plant.work_group, sizeof plant.work_group);
  if (broken && name == CL_KERNEL_LOCAL_MEM_SIZE && plant.local_memory > 0)
    memcpy(value, &plant.local_memory, sizeof plant.local_memory);
  return broken && plant.code != CL_SUCCESS ? plant.code : code;
}

/* ---- a group that listens, a small cache ---- */

static struct {
  int num;
  char last[1024];
} heard;

static void hear(void *user, const char *text) {
  assert_ptr_equal(user, &heard);
  heard.num++;
  snprintf(heard.last, sizeof heard.last, "%s", text);
}

static kvr_group *listening_group(int num_ranks) {
  kvr_group *group;
  const kvr_group_desc desc = {.struct_size = sizeof desc,
                               .num_ranks = num_ranks,
                               .devices = getenv("KVRING_TEST_DEVICES"),
                               .copy_queue = 1,
                               .notice = hear,
                               .notice_user = &heard};
  device_ok(kvr_group_create(&desc, &group), "kvr_group_create");
  heard.num = 0;
  return group;
}

static const kvr_cache_desc cache = {.head_dim = 20, .dtype = KVR_F32};

/* Names of the variants that are usable now. */
static const char *usable(kvr_group *group) {
  static char names[128];
  kvr_attend_kernels k;
  names[0] = '\0';
  device_ok(kvr_attend_kernels_init(&k, group, 0, &cache, KVR_F32, KVR_MATH_AUTO),
            "kvr_attend_kernels_init");
  for (int i = 0; i < kvr_num_variants(); i++)
    if (k.usable[i])
      snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s",
               names[0] != '\0' ? " " : "", kvr_variant_get(i)->name);
  kvr_attend_kernels_fini(&k);
  return names;
}

static int open_dir(void **state) {
  (void)state;
  memset(&plant, 0, sizeof plant);
  broken = false;
  snprintf(dir, sizeof dir, "/tmp/kvring-variants-XXXXXX");
  if (mkdtemp(dir) == NULL) return -1;
  return setenv("KVRING_CACHE_DIR", dir, 1);
}

static int close_dir(void **state) {
  (void)state;
  char command[128];
  unsetenv("KVRING_VARIANT");
  unsetenv("KVRING_MAX_KEYS");
  snprintf(command, sizeof command, "rm -r '%s'", dir);
  return system(command);
}

/* ---- one variant is bad ---- */

static void expect_quarantine(const char *reason) {
  kvr_group *group = listening_group(1);
  assert_string_equal(usable(group), "rows256 rows16");
  assert_int_equal(heard.num, 1);
  if (strstr(heard.last, "kernel variant rows64") == NULL || strstr(heard.last, reason) == NULL ||
      strstr(heard.last, ".refused") == NULL)
    fail_msg("the user is told: %s", heard.last);
  /* Remembered, even where it would be right now; and told once. */
  memset(&plant, 0, sizeof plant);
  assert_string_equal(usable(group), "rows256 rows16");
  assert_int_equal(heard.num, 1);
  kvr_group_destroy(group);
}

static void test_wrong_results(void **state) {
  (void)state;
  plant.where = "-DROW_TILE=64", plant.wrong = true;
  expect_quarantine("wrong result in its self-test: token 0, head 0: LSE");
}

static void test_failing_build(void **state) {
  (void)state;
  plant.where = "-DROW_TILE=64", plant.option = "-DBLOCK=many";
  expect_quarantine("clBuildProgram");
}

static void test_small_work_groups(void **state) {
  (void)state;
  setenv("KVRING_VARIANT", "plain", 1);
  plant.where = "-DROW_TILE=32", plant.work_group = 16;
  kvr_group *group = listening_group(1);
  kvr_attend_kernels k;
  assert_int_equal(kvr_attend_kernels_init(&k, group, 0, &cache, KVR_F32, KVR_MATH_AUTO),
                   KVR_E_UNSUPPORTED);
  assert_non_null(strstr(kvr_error_message(), "work-groups of 32, the device runs 16"));
  assert_int_equal(heard.num, 1);
  kvr_group_destroy(group);
}

static void test_too_much_local_memory(void **state) {
  (void)state;
  plant.where = "-DROW_TILE=64", plant.local_memory = (cl_ulong)1 << 40;
  expect_quarantine("1099511627776 bytes of local memory");
}

/* A failing call says nothing about the kernel: the error is passed on, and nothing remembered. */
static void test_other_errors(void **state) {
  (void)state;
  plant.where = "-DROW_TILE=64", plant.code = CL_OUT_OF_HOST_MEMORY;
  kvr_group *group = listening_group(1);
  kvr_attend_kernels k;
  assert_int_equal(kvr_attend_kernels_init(&k, group, 0, &cache, KVR_F32, KVR_MATH_AUTO),
                   KVR_E_OOM);
  assert_non_null(strstr(kvr_error_message(), "clGetKernelWorkGroupInfo"));
  memset(&plant, 0, sizeof plant);
  assert_string_equal(usable(group), "rows256 rows64 rows16");
  assert_int_equal(heard.num, 0);
  kvr_group_destroy(group);
}

static void test_removing_the_file_lifts_it(void **state) {
  (void)state;
  char command[128];
  plant.where = "-DROW_TILE=64", plant.wrong = true;
  kvr_group *group = listening_group(1);
  assert_string_equal(usable(group), "rows256 rows16");
  memset(&plant, 0, sizeof plant);
  snprintf(command, sizeof command, "rm '%s'/*.refused", dir);
  assert_int_equal(system(command), 0);
  assert_string_equal(usable(group), "rows256 rows64 rows16");
  kvr_group_destroy(group);
}

/* Without a folder to remember in, the test runs every time. */
static void test_without_a_folder(void **state) {
  (void)state;
  setenv("KVRING_CACHE_DIR", "", 1);
  plant.where = "-DROW_TILE=64", plant.wrong = true;
  kvr_group *group = listening_group(1);
  assert_string_equal(usable(group), "rows256 rows16");
  assert_string_equal(usable(group), "rows256 rows16");
  assert_int_equal(heard.num, 2);
  kvr_group_destroy(group);
}

/* ---- all are bad ---- */

static void test_plain_takes_over(void **state) {
  (void)state;
  plant.where = "-DROW_TILE", plant.but = "-DROW_TILE=32", plant.wrong = true;
  kvr_group *group = listening_group(1);
  assert_string_equal(usable(group), "plain");
  assert_int_equal(heard.num, 3);
  kvr_group_destroy(group);
}

static void test_device_is_refused(void **state) {
  (void)state;
  plant.where = "-DROW_TILE", plant.wrong = true;
  kvr_group *group = listening_group(1);
  kvr_attend_kernels k;
  assert_int_equal(kvr_attend_kernels_init(&k, group, 0, &cache, KVR_F32, KVR_MATH_AUTO),
                   KVR_E_UNSUPPORTED);
  for (int i = 0; i < kvr_num_variants(); i++) /* f32 caches have no use for bf16 */
    if (!kvr_variant_get(i)->bf16 && strstr(kvr_error_message(), kvr_variant_get(i)->name) == NULL)
      fail_msg("%s is not named: %s", kvr_variant_get(i)->name, kvr_error_message());
  kvr_group_destroy(group);
}

/* ---- a variant that ends the process ---- */

/* Runs this program again with an argument that names what the other process does. */
static int run_again(const char *what) {
  char command[256];
  char self[200];
  const ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
  assert_true(n > 0);
  self[n] = '\0';
  snprintf(command, sizeof command, "'%s' %s", self, what);
  const int status = system(command);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int die_in_trial(void) {
  plant.where = "-DROW_TILE=64", plant.exit = true;
  usable(listening_group(1));
  return 0; /* not reached */
}

static void test_ended_process(void **state) {
  (void)state;
  assert_int_equal(run_again("die"), 3);
  kvr_group *group = listening_group(1);
  assert_string_equal(usable(group), "rows256 rows16");
  assert_int_equal(heard.num, 1);
  assert_non_null(strstr(heard.last, "ended the process"));
  assert_string_equal(usable(group), "rows256 rows16");
  assert_int_equal(heard.num, 1);
  kvr_group_destroy(group);
}

/* A trial that a signal interrupts says nothing; one that is abandoned does. */
static int interrupt_trial(const char *how) {
  char path[128];
  kvr_trial trial;
  snprintf(path, sizeof path, "%s/some.bin", getenv("KVRING_CACHE_DIR"));
  if (!kvr_trial_begin(&trial, path)) return 1;
  if (strcmp(how, "interrupt") == 0) kvr_interrupted();
  _exit(0);
}

static void test_interrupted_trials(void **state) {
  (void)state;
  char path[128];
  kvr_trial trial;
  snprintf(path, sizeof path, "%s/some.bin", dir);
  assert_int_equal(run_again("interrupt"), 0);
  assert_true(kvr_trial_begin(&trial, path));
  kvr_trial_end(&trial);
  assert_int_equal(run_again("abandon"), 0);
  assert_false(kvr_trial_begin(&trial, path));
  assert_true(kvr_trial_begin(&trial, path)); /* found once, then it is up to the quarantine */
  kvr_trial_end(&trial);
}

/* ---- steps ---- */

static void expect_right_steps(int first_seed, int num) {
  for (int seed = first_seed; seed < first_seed + num; seed++) {
    pure_case c;
    device_case_init(&c, (uint64_t)seed, (kvr_dtype)(seed % KVR_NUM_DTYPES));
    kvr_group *group = listening_group(c.problem.cache.num_ranks);
    for (int i = 0; i < kvr_num_strategies(); i++) {
      const char *strategy = kvr_strategy_name(i);
      if (strcmp(strategy, "current-only") == 0) continue;
      device_run run = {0};
      device_run_init(&run, &c, group, strategy);
      device_ok(device_run_step(&run, &c, strategy), strategy);
      const double error = device_run_error(&run, &c);
      if (!(error < tolerance)) fail_msg("seed %d, %s: error %g", seed, strategy, error);
      device_run_fini(&run, &c);
    }
    kvr_group_destroy(group);
    case_free(&c);
  }
}

static void test_steps_without_a_variant(void **state) {
  (void)state;
  plant.where = "-DROW_TILE=16", plant.wrong = true;
  expect_right_steps(300, 2);
}

static void test_every_variant_alone(void **state) {
  (void)state;
  for (int i = 0; i < kvr_num_variants(); i++) {
    setenv("KVRING_VARIANT", kvr_variant_get(i)->name, 1);
    kvr_group *group = listening_group(1);
    assert_string_equal(usable(group), kvr_variant_get(i)->name);
    kvr_group_destroy(group);
  }
  setenv("KVRING_VARIANT", "plain", 1);
  expect_right_steps(310, 2);
  setenv("KVRING_VARIANT", "rows", 1);
  kvr_group *group = listening_group(1);
  kvr_attend_kernels k;
  assert_int_equal(kvr_attend_kernels_init(&k, group, 0, &cache, KVR_F32, KVR_MATH_AUTO),
                   KVR_E_RANGE);
  assert_non_null(strstr(kvr_error_message(), "'rows'; the kernel variants are: bf16x256"));
  kvr_group_destroy(group);
}

/* Devices that cannot walk all keys in one launch get several, and carry the state. */
static void test_launches_of_few_keys(void **state) {
  (void)state;
  unsetenv("KVRING_CACHE_DIR"); /* all variants are right: use what is built */
  static const char *const limits[] = {"1", "7", "100"};
  for (int i = 0; i < 3; i++) {
    setenv("KVRING_MAX_KEYS", limits[i], 1);
    expect_right_steps(320 + 3 * i, 3);
  }
  setenv("KVRING_MAX_KEYS", "0", 1);
  kvr_group *group = listening_group(1);
  kvr_attend_kernels k;
  assert_int_equal(kvr_attend_kernels_init(&k, group, 0, &cache, KVR_F32, KVR_MATH_AUTO),
                   KVR_E_RANGE);
  assert_non_null(strstr(kvr_error_message(), "KVRING_MAX_KEYS is '0'"));
  kvr_group_destroy(group);
}

#define IN_DIR(test) cmocka_unit_test_setup_teardown(test, open_dir, close_dir)

int main(int argc, char **argv) {
  if (argc > 1) return strcmp(argv[1], "die") == 0 ? die_in_trial() : interrupt_trial(argv[1]);
  const struct CMUnitTest tests[] = {
      IN_DIR(test_wrong_results),       IN_DIR(test_failing_build),
      IN_DIR(test_small_work_groups),   IN_DIR(test_too_much_local_memory),
      IN_DIR(test_other_errors),        IN_DIR(test_removing_the_file_lifts_it),
      IN_DIR(test_without_a_folder),    IN_DIR(test_plain_takes_over),
      IN_DIR(test_device_is_refused),   IN_DIR(test_ended_process),
      IN_DIR(test_interrupted_trials),  IN_DIR(test_steps_without_a_variant),
      IN_DIR(test_every_variant_alone), IN_DIR(test_launches_of_few_keys),
  };
  device_require();
  return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Devices, how a list of devices becomes places of ranks, queues, and the memory budget. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device/device_select.h"
#include "device/group.h"
#include "device_case.h"
#include "kvring/opencl.h"

#define assert_message(part) assert_non_null(strstr(kvr_error_message(), part))

/* ---- lists, on devices that do not exist ---- */

static kvr_device fake[] = {
    {.info = {.platform = "Alpha CL", .name = "Broken 9", .why_not = "its driver has no compiler"}},
    {.info = {.platform = "Alpha CL", .name = "Iris / Xe 7", .device_index = 1}},
    {.info = {.platform = "Beta", .name = "GeForce 3090", .platform_index = 1}},
    {.info = {.platform = "Beta", .name = "Broken too", .platform_index = 1, .device_index = 1}},
};
static const kvr_devices fakes = {.num = 4, .devices = fake};
static char handles[6]; /* their addresses are the handles; OpenCL never sees them */

static int make_fakes(void **state) {
  (void)state;
  for (int i = 0; i < fakes.num; i++) {
    fake[i].platform = (cl_platform_id)(void *)&handles[4 + fake[i].info.platform_index];
    fake[i].id = (cl_device_id)(void *)&handles[i];
    fake[i].info.compute_units = 8;
  }
  snprintf(fake[3].info.why_not, sizeof fake[3].info.why_not, "it is big-endian");
  return 0;
}

/* want: indices of the fakes, one digit per place. */
static void expect_places(const char *list, const char *want) {
  kvr_places places;
  char got[16] = "";
  device_ok(kvr_places_init(&fakes, list, 1, &places), list);
  for (int i = 0; i < places.num; i++)
    for (int f = 0; f < fakes.num; f++)
      if (places.list[i].id == fake[f].id) got[i] = (char)('0' + f);
  kvr_places_fini(&places);
  assert_string_equal(got, want);
}

static void test_lists(void **state) {
  (void)state;
  expect_places(NULL, "1"); /* the first usable one */
  expect_places("", "1");
  expect_places("0.1", "1");
  expect_places("1.0,1.0", "22");
  expect_places(" 1.0 ,\tgeforce", "22");
  expect_places("FORCE", "2");
  expect_places("beta", "2");     /* by platform */
  expect_places("alpha", "1");    /* the first usable one of several */
  expect_places("iris / x", "1"); /* this slash cuts nothing */
  expect_places("3090", "2");
  expect_places("0.1/1", "1");
  expect_places("0.1/0", "1"); /* one per rank: one rank */
}

static void test_lists_are_checked(void **state) {
  (void)state;
  static const struct {
    const char *list;
    kvr_status want;
    const char *part;
  } cases[] = {
      {"1.0,0.1", KVR_E_UNSUPPORTED, "two platforms, Beta and Alpha CL"},
      {"0.0", KVR_E_UNSUPPORTED, "0.0 (Broken 9) cannot be used: its driver has no compiler"},
      {"too", KVR_E_UNSUPPORTED, "it is big-endian"},
      {"0.2", KVR_E_RANGE, "0.1 Iris / Xe 7, 1.0 GeForce 3090"},
      {"99999999999999999999.0", KVR_E_RANGE, "no such index"},
      {"radeon", KVR_E_RANGE, "no OpenCL device matches 'radeon'"},
      {"9", KVR_E_RANGE, "write PLATFORM.DEVICE"}, /* though Broken 9 has a 9 */
      {"1.0,", KVR_E_RANGE, "empty entry"},
      {",", KVR_E_RANGE, "empty entry"},
      {" ", KVR_E_RANGE, "empty entry"},
      {"/2", KVR_E_RANGE, "matches '/2'"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    kvr_places places;
    assert_int_equal(kvr_places_init(&fakes, cases[i].list, 1, &places), cases[i].want);
    assert_message(cases[i].part);
    assert_int_equal(places.num, 0);
    assert_null(places.list);
  }
}

static void test_no_usable_device(void **state) {
  (void)state;
  kvr_places places;
  const kvr_devices broken = {.num = 1, .devices = fake}, none = {0};
  assert_int_equal(kvr_places_init(&broken, NULL, 1, &places), KVR_E_UNSUPPORTED);
  assert_message("no compiler");
  assert_int_equal(kvr_places_init(&none, NULL, 1, &places), KVR_E_UNSUPPORTED);
  assert_message("pocl-opencl-icd");
}

static void test_long_entry(void **state) {
  (void)state;
  kvr_places places;
  char list[400];
  memset(list, 'x', sizeof list - 1);
  list[sizeof list - 1] = '\0';
  assert_int_equal(kvr_places_init(&fakes, list, 1, &places), KVR_E_RANGE);
  assert_message("399 characters");
}

/* ---- real devices ---- */

static kvr_status create(int ranks, const char *devices, kvr_group **out) {
  const kvr_group_desc desc = {.struct_size = sizeof desc, .num_ranks = ranks, .devices = devices};
  return kvr_group_create(&desc, out);
}

static void test_device_list(void **state) {
  (void)state;
  kvr_device_info *infos;
  int num;
  device_ok(kvr_device_list(&infos, &num), "kvr_device_list");
  assert_true(num > 0);
  for (int i = 0; i < num; i++) {
    assert_true(infos[i].platform[0] != '\0' && infos[i].name[0] != '\0');
    assert_int_equal(strncmp(infos[i].version, "OpenCL ", 7), 0);
    assert_true(infos[i].memory_bytes > 0 && infos[i].max_alloc_bytes > 0);
    assert_true(infos[i].compute_units > 0 && infos[i].max_work_group > 0);
    assert_true(i == 0 || infos[i].platform_index >= infos[i - 1].platform_index);
  }
  free(infos);
  assert_int_equal(kvr_device_list(NULL, &num), KVR_E_NULL);
  assert_int_equal(kvr_device_list(&infos, NULL), KVR_E_NULL);
}

static void test_queues(void **state) {
  (void)state;
  for (int copy = 0; copy < 2; copy++) {
    kvr_group *group = device_group(3, copy);
    assert_int_equal(kvr_group_num_ranks(group), 3);
    for (int r = 0; r < 3; r++) {
      cl_command_queue queue;
      cl_context context;
      cl_command_queue_properties properties;
      device_ok(kvr_group_queue(group, r, &queue), "kvr_group_queue");
      device_ok(kvr_group_context(group, r, &context), "kvr_group_context");
      assert_ptr_equal(context, group->ranks[0].context);
      for (int other = 0; other < r; other++)
        assert_ptr_not_equal(queue, group->ranks[other].queue);
      assert_int_equal(group->ranks[r].copy_queue != queue, copy);
      clGetCommandQueueInfo(queue, CL_QUEUE_PROPERTIES, sizeof properties, &properties, NULL);
      assert_int_equal(properties, CL_QUEUE_PROFILING_ENABLE);
    }
    kvr_group_destroy(group);
  }
}

static void test_bad_arguments(void **state) {
  (void)state;
  kvr_group *group = (kvr_group *)1;
  kvr_group_desc desc = {.struct_size = sizeof desc, .num_ranks = 1};
  assert_int_equal(kvr_group_create(NULL, &group), KVR_E_NULL);
  assert_int_equal(kvr_group_create(&desc, NULL), KVR_E_NULL);
  assert_int_equal(create(0, NULL, &group), KVR_E_RANGE);
  assert_null(group);
  assert_int_equal(create(1 << 30, NULL, &group), KVR_E_RANGE);
  desc.copy_queue = 2;
  assert_int_equal(kvr_group_create(&desc, &group), KVR_E_RANGE);
  desc.struct_size = 1;
  assert_int_equal(kvr_group_create(&desc, &group), KVR_E_SHAPE);
  assert_message("struct_size is 1, this library expects");
  assert_int_equal(create(1, "no such device", &group), KVR_E_RANGE);
  assert_null(group);
  kvr_group_destroy(NULL);
}

static void test_bad_ranks(void **state) {
  (void)state;
  kvr_group *group = device_group(2, 0);
  kvr_device_info info;
  cl_context context;
  cl_command_queue queue;
  for (int rank = -1; rank <= 2; rank += 3) {
    assert_int_equal(kvr_group_device(group, rank, &info), KVR_E_RANGE);
    assert_message("ranks 0 to 1");
    assert_int_equal(kvr_group_memory(group, rank, NULL, NULL, NULL), KVR_E_RANGE);
    assert_int_equal(kvr_group_context(group, rank, &context), KVR_E_RANGE);
    assert_int_equal(kvr_group_queue(group, rank, &queue), KVR_E_RANGE);
  }
  kvr_group_destroy(group);
}

/* Every object of a group refers to its context: a count of 1 says that all are gone. */
static void test_everything_is_released(void **state) {
  (void)state;
  kvr_group *group = device_group(3, 1);
  cl_mem mem;
  cl_context context;
  cl_uint count = 0;
  device_ok(kvr_group_context(group, 0, &context), "kvr_group_context");
  device_ok(kvr_group_alloc(group, 1, 64, "test", &mem), "kvr_group_alloc");
  clRetainContext(context);
  kvr_group_free(group, 1, mem, 64);
  kvr_group_destroy(group);
  clGetContextInfo(context, CL_CONTEXT_REFERENCE_COUNT, sizeof count, &count, NULL);
  assert_int_equal(count, 1);
  clReleaseContext(context);
}

/* ---- sub-devices ---- */

/* The first device as an entry of a list, if it can be cut in two. */
static bool can_cut(char *entry, size_t size) {
  kvr_group *whole = device_group(1, 0);
  const kvr_device_info info = whole->infos[0];
  cl_device_partition_property types[8] = {0};
  clGetDeviceInfo(whole->ranks[0].device, CL_DEVICE_PARTITION_PROPERTIES, sizeof types, types,
                  NULL);
  kvr_group_destroy(whole);
  snprintf(entry, size, "%d.%d", info.platform_index, info.device_index);
  const bool can = types[0] != 0 && info.compute_units >= 2;
  if (!can)
    print_message("skipped: %s has %d compute unit(s) and cannot be cut in two\n", info.name,
                  info.compute_units);
  return can;
}

static void test_sub_devices(void **state) {
  (void)state;
  char entry[32], list[64];
  if (!can_cut(entry, sizeof entry)) skip();
  static const char *const cuts[] = {"/2", "/0"};
  for (int i = 0; i < 2; i++) {
    const int ranks = i == 0 ? 3 : 2;
    kvr_group *group;
    kvr_device_info info;
    snprintf(list, sizeof list, "%s%s", entry, cuts[i]);
    device_ok(create(ranks, list, &group), list);
    assert_ptr_not_equal(group->ranks[0].device, group->ranks[1].device);
    if (ranks == 3) assert_ptr_equal(group->ranks[0].device, group->ranks[2].device);
    device_ok(kvr_group_device(group, 1, &info), "kvr_group_device");
    assert_non_null(strstr(info.name, "(sub-device 2 of 2)"));
    assert_int_equal(info.compute_units, group->places.list[1].root.info.compute_units / 2);
    kvr_group_destroy(group);
  }
}

static void test_cuts_are_checked(void **state) {
  (void)state;
  char entry[32], list[64];
  kvr_group *group;
  if (!can_cut(entry, sizeof entry)) skip();
  snprintf(list, sizeof list, "%s/99999999999", entry);
  assert_int_equal(create(1, list, &group), KVR_E_RANGE);
  assert_message("compute units");
  snprintf(list, sizeof list, "%s/0", entry);
  assert_int_equal(create(4000, list, &group), KVR_E_RANGE);
  assert_message("cannot be cut into 4000");
}

/* ---- memory ---- */

static void check_memory(const kvr_group *group, int rank, size_t now, size_t peak) {
  size_t n, p;
  device_ok(kvr_group_memory(group, rank, &n, &p, NULL), "kvr_group_memory");
  assert_int_equal(n, now);
  assert_int_equal(p, peak);
}

static void test_budget(void **state) {
  (void)state;
  const kvr_group_desc desc = {.struct_size = sizeof desc,
                               .num_ranks = 2,
                               .devices = getenv("KVRING_TEST_DEVICES"),
                               .memory_budget = 1000};
  kvr_group *group;
  cl_mem a, b;
  device_ok(kvr_group_create(&desc, &group), "kvr_group_create");
  device_ok(kvr_group_alloc(group, 1, 600, "first", &a), "kvr_group_alloc");
  assert_int_equal(kvr_group_alloc(group, 1, 401, "second", &b), KVR_E_OOM);
  assert_message("rank 1: second needs 401 bytes, but 600 of the budget of 1000");
  assert_null(b);
  assert_int_equal(kvr_group_alloc(group, 1, SIZE_MAX, "second", &b), KVR_E_OOM);
  device_ok(kvr_group_alloc(group, 1, 400, "second", &b), "the rest of the budget");
  check_memory(group, 1, 1000, 1000);
  check_memory(group, 0, 0, 0); /* the other rank has its own */
  kvr_group_free(group, 1, b, 400);
  check_memory(group, 1, 600, 1000);
  device_ok(kvr_group_alloc(group, 1, 100, "third", &b), "kvr_group_alloc");
  check_memory(group, 1, 700, 1000); /* below the peak */
  kvr_group_free(group, 1, b, 100);
  device_ok(kvr_group_alloc(group, 1, 0, "nothing", &b), "kvr_group_alloc");
  assert_null(b);
  kvr_group_free(group, 1, b, 0);
  kvr_group_free(group, 1, a, 600);
  check_memory(group, 1, 0, 1000);
  assert_int_equal(kvr_group_alloc(group, 2, 1, "no rank", &a), KVR_E_RANGE);
  kvr_group_destroy(group);
}

/* Ranks on one device share its memory. */
static void test_default_budget(void **state) {
  (void)state;
  kvr_group *one = device_group(1, 0), *four = device_group(4, 0);
  assert_true(one->ranks[0].budget >= one->infos[0].memory_bytes);
  if (four->places.num == 1)
    for (int r = 0; r < 4; r++) assert_int_equal(four->ranks[r].budget, one->ranks[0].budget / 4);
  kvr_group_destroy(four);
  kvr_group_destroy(one);
}

static void test_largest_allocation(void **state) {
  (void)state;
  cl_mem mem;
  setenv("KVRING_MAX_ALLOC", "512", 1);
  kvr_group *group = device_group(1, 0);
  unsetenv("KVRING_MAX_ALLOC");
  assert_int_equal(kvr_group_alloc(group, 0, 513, "slot", &mem), KVR_E_OOM);
  assert_message("slot needs a buffer of 513 bytes");
  assert_message("is 512");
  device_ok(kvr_group_alloc(group, 0, 512, "slot", &mem), "kvr_group_alloc");
  kvr_group_free(group, 0, mem, 512);
  kvr_group_destroy(group);
  static const char *const wrong[] = {"0", "-1", "4k", " 5", "99999999999999999999999"};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    setenv("KVRING_MAX_ALLOC", wrong[i], 1);
    assert_int_equal(create(1, NULL, &group), KVR_E_RANGE);
    assert_message("KVRING_MAX_ALLOC");
  }
  unsetenv("KVRING_MAX_ALLOC");
}

/* ---- a machine without OpenCL ---- */

/* In a process of its own, since the loader looks for platforms once. */
static int without_platform(void) {
  kvr_device_info *infos;
  kvr_group *group;
  int num;
  const bool ok = kvr_device_list(&infos, &num) == KVR_E_UNSUPPORTED &&
                  strstr(kvr_error_message(), "pocl-opencl-icd") != NULL &&
                  create(1, NULL, &group) == KVR_E_UNSUPPORTED && group == NULL &&
                  strstr(kvr_error_message(), "no OpenCL platform") != NULL;
  return ok ? 0 : 1;
}

static void test_no_platform(void **state) {
  (void)state;
  char *const args[] = {"test_group", "without-platform", NULL};
  int status = -1;
  const pid_t child = fork();
  if (child == 0) {
    setenv("OCL_ICD_VENDORS", "/nonexistent", 1);
    execv("/proc/self/exe", args);
    _exit(2);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
}

int main(int argc, char **argv) {
  if (argc == 2 && strcmp(argv[1], "without-platform") == 0) return without_platform();
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_lists),
      cmocka_unit_test(test_lists_are_checked),
      cmocka_unit_test(test_no_usable_device),
      cmocka_unit_test(test_long_entry),
      cmocka_unit_test(test_device_list),
      cmocka_unit_test(test_queues),
      cmocka_unit_test(test_bad_arguments),
      cmocka_unit_test(test_bad_ranks),
      cmocka_unit_test(test_everything_is_released),
      cmocka_unit_test(test_sub_devices),
      cmocka_unit_test(test_cuts_are_checked),
      cmocka_unit_test(test_budget),
      cmocka_unit_test(test_default_budget),
      cmocka_unit_test(test_largest_allocation),
      cmocka_unit_test(test_no_platform),
  };
  return cmocka_run_group_tests(tests, make_fakes, NULL);
}

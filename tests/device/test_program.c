/* Programs from embedded sources, and their binaries on disk. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device/binary_file.h"
#include "device/cl_error.h"
#include "device/program.h"
#include "device_case.h"
#include "shared.h"

#define assert_message(part) assert_non_null(strstr(kvr_error_message(), part))

enum { MOST_BYTES = 1 << 22, HEADER_BYTES = 32 };

/* A new empty directory that is the cache during a test. */
static char dir[64];

static int open_dir(void **state) {
  (void)state;
  snprintf(dir, sizeof dir, "/tmp/kvring-test-XXXXXX");
  if (mkdtemp(dir) == NULL) return -1;
  return setenv("KVRING_CACHE_DIR", dir, 1);
}

/* Files of the directory that end in `end`; the last one's path goes to path, if given. */
static int count_files(const char *end, char *path, size_t size) {
  DIR *d = opendir(dir);
  int num = 0;
  for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
    const size_t len = strlen(e->d_name);
    if (e->d_name[0] == '.' || len < strlen(end) || strcmp(e->d_name + len - strlen(end), end) != 0)
      continue;
    if (path != NULL) snprintf(path, size, "%s/%s", dir, e->d_name);
    num++;
  }
  if (d != NULL) closedir(d);
  return num;
}

static int close_dir(void **state) {
  (void)state;
  char path[512];
  while (count_files("", path, sizeof path) > 0 && remove(path) == 0) continue;
  return rmdir(dir);
}

static unsigned char bytes[MOST_BYTES];

static size_t read_file(const char *path) {
  FILE *f = fopen(path, "rb");
  assert_non_null(f);
  const size_t size = fread(bytes, 1, sizeof bytes, f);
  assert_true(size > HEADER_BYTES && size < sizeof bytes);
  fclose(f);
  return size;
}

static void write_file(const char *path, size_t size) {
  FILE *f = fopen(path, "wb");
  assert_non_null(f);
  assert_int_equal(fwrite(bytes, 1, size, f), size);
  assert_int_equal(fclose(f), 0);
}

/* Changes whenever a file is written anew. */
static ino_t inode(const char *path) {
  struct stat st;
  assert_int_equal(stat(path, &st), 0);
  return st.st_ino;
}

/* ---- what a program must do: run ---- */

/* Moves one row of 16 words through kvr_stage. */
static void expect_works(kvr_group *group, int rank, cl_program program) {
  const kvr_rank *r = &group->ranks[rank];
  const kvr_rows_args args = {.num_rows = 1,
                              .page_size = 1,
                              .page_count = 2,
                              .row_words = 16,
                              .buffer_row = 0};
  const size_t one = 1;
  const int table = 1;
  uint16_t pool[2][16], slot[16] = {0};
  for (int i = 0; i < 32; i++) pool[i / 16][i % 16] = (uint16_t)(1000 + i);
  cl_int code;
  const cl_kernel kernel = clCreateKernel(program, "kvr_stage", &code);
  assert_int_equal(code, CL_SUCCESS);
  cl_mem mems[3];
  const size_t sizes[3] = {sizeof pool, sizeof table, sizeof slot};
  for (int i = 0; i < 3; i++) {
    device_ok(kvr_group_alloc(group, rank, sizes[i], "test", &mems[i]), "kvr_group_alloc");
    clSetKernelArg(kernel, (cl_uint)i, sizeof(cl_mem), &mems[i]);
  }
  clSetKernelArg(kernel, 3, sizeof args, &args);
  clEnqueueWriteBuffer(r->queue, mems[0], CL_TRUE, 0, sizeof pool, pool, 0, NULL, NULL);
  clEnqueueWriteBuffer(r->queue, mems[1], CL_TRUE, 0, sizeof table, &table, 0, NULL, NULL);
  code = clEnqueueNDRangeKernel(r->queue, kernel, 1, NULL, &one, NULL, 0, NULL, NULL);
  assert_int_equal(code, CL_SUCCESS);
  clEnqueueReadBuffer(r->queue, mems[2], CL_TRUE, 0, sizeof slot, slot, 0, NULL, NULL);
  assert_memory_equal(slot, pool[1], sizeof slot);
  for (int i = 0; i < 3; i++) kvr_group_free(group, rank, mems[i], sizes[i]);
  clReleaseKernel(kernel);
}

static void build(kvr_group *group, int rank, const char *options) {
  cl_program program;
  device_ok(kvr_program_create(group, rank, "rows.cl", options, NULL, &program),
            "kvr_program_create");
  expect_works(group, rank, program);
  clReleaseProgram(program);
}

/* ---- programs ---- */

static void test_every_source_builds(void **state) {
  kvr_group *group = *state;
  static const char *const files[] = {"attend.cl", "merge.cl", "rows.cl"};
  for (int i = 0; i < 3; i++) {
    cl_program program;
    device_ok(kvr_program_create(group, 0, files[i], "", NULL, &program), files[i]);
    clReleaseProgram(program);
  }
}

static void test_options_are_checked(void **state) {
  kvr_group *group = *state;
  cl_program program = NULL;
  static const char *const refused[] = {"-cl-fast-relaxed-math", "-DA=1 -cl-finite-math-only",
                                        "-cl-unsafe-math-optimizations -DA=1"};
  for (int i = 0; i < 3; i++)
    assert_int_equal(kvr_program_create(group, 0, "rows.cl", refused[i], NULL, &program),
                     KVR_E_UNSUPPORTED);
  assert_message("-cl-unsafe-math-optimizations");
  build(group, 0, "-cl-mad-enable"); /* not all of them are refused */
  assert_int_equal(kvr_program_create(group, 0, "other.cl", "", NULL, &program), KVR_E_RANGE);
  assert_message("other.cl");
  assert_int_equal(kvr_program_create(group, 1, "rows.cl", "", NULL, &program), KVR_E_RANGE);
  assert_int_equal(kvr_program_create(NULL, 0, "rows.cl", "", NULL, &program), KVR_E_NULL);
  assert_int_equal(kvr_program_create(group, 0, "rows.cl", NULL, NULL, &program), KVR_E_NULL);
  assert_null(program);
}

/* A broken build names the file, its line, the options and the driver, and leaves no binary. */
static void test_broken_builds_say_why(void **state) {
  kvr_group *group = *state;
  cl_program program = NULL;
  const int before = count_files(".bin", NULL, 0);
  const char *options = "-DWORDS=4 -Dkvr_rows_args=no_such_type";
  assert_int_equal(kvr_program_create(group, 0, "rows.cl", options, NULL, &program), KVR_E_CL);
  assert_message("rank 0: clBuildProgram: CL_BUILD_PROGRAM_FAILURE (-11): rows.cl");
  assert_message("'-cl-std=CL1.2 -Werror -DWORDS=4 -Dkvr_rows_args=no_such_type'");
  assert_message("error:");
  assert_message("rows.cl:");
  assert_message(group->infos[0].driver);
  assert_null(program);
  assert_int_equal(count_files(".bin", NULL, 0), before);
}

/* ---- binaries of programs ---- */

static void test_second_build_is_a_hit(void **state) {
  kvr_group *group = *state;
  char path[512];
  build(group, 0, "");
  assert_int_equal(count_files("", path, sizeof path), 1);
  const ino_t first = inode(path);
  build(group, 0, "");
  assert_int_equal(count_files("", NULL, 0), 1);
  assert_int_equal(inode(path), first);
  build(group, 0, "-DOTHER=1");
  assert_int_equal(count_files(".bin", NULL, 0), 2);
}

/* Builds over a damaged file and expects it to be replaced by one that is a hit again. */
static void expect_rebuilt(kvr_group *group, const char *path) {
  const ino_t damaged = inode(path);
  build(group, 0, "");
  const ino_t rebuilt = inode(path);
  assert_int_not_equal(rebuilt, damaged);
  build(group, 0, "");
  assert_int_equal(inode(path), rebuilt);
  assert_int_equal(count_files("", NULL, 0), 1);
}

static void test_damaged_files_are_rebuilt(void **state) {
  kvr_group *group = *state;
  char path[512];
  build(group, 0, "");
  assert_int_equal(count_files(".bin", path, sizeof path), 1);
  const size_t size = read_file(path);
  bytes[size - 5] ^= 1;
  write_file(path, size);
  expect_rebuilt(group, path);
  write_file(path, size / 2);
  expect_rebuilt(group, path);
  write_file(path, 0);
  expect_rebuilt(group, path);
}

/* The key as it is in a file. */
static char *key_in(const char *path) {
  uint64_t key_size;
  read_file(path);
  memcpy(&key_size, bytes + 8, sizeof key_size);
  char *key = calloc(key_size + 1, 1);
  assert_non_null(key);
  memcpy(key, bytes + HEADER_BYTES, key_size);
  return key;
}

static void test_key_holds_everything(void **state) {
  kvr_group *group = *state;
  char path[512], again[512];
  build(group, 0, "-DSEEN=1");
  assert_int_equal(count_files(".bin", path, sizeof path), 1);
  char *key = key_in(path);
  assert_non_null(strstr(key, group->infos[0].platform));
  assert_non_null(strstr(key, group->infos[0].name));
  assert_non_null(strstr(key, group->infos[0].driver));
  assert_non_null(strstr(key, kvr_version()));
  assert_non_null(strstr(key, "-DSEEN=1"));
  assert_non_null(strstr(key, "#line 1 \"shared.h\""));
  assert_non_null(strstr(key, "kvr_cache_write"));
  assert_true(kvr_binary_path(dir, key, again, sizeof again));
  assert_string_equal(again, path);
  free(key);
}

/* A file that is sound in itself, but holds what the driver does not take or another program. */
static void test_wrong_binaries_are_rebuilt(void **state) {
  kvr_group *group = *state;
  char path[512];
  build(group, 0, "");
  assert_int_equal(count_files(".bin", path, sizeof path), 1);
  char *key = key_in(path);
  assert_true(kvr_binary_store(path, key, (const unsigned char *)"not a binary", 12));
  expect_rebuilt(group, path);
  assert_true(kvr_binary_store(path, "another key", (const unsigned char *)"not a binary", 12));
  expect_rebuilt(group, path);
  free(key);
}

static void test_cache_may_be_off_or_unwritable(void **state) {
  kvr_group *group = *state;
  static const char *const dirs[] = {"", "/proc/kvring", "/dev/null/kvring"};
  for (int i = 0; i < 3; i++) {
    setenv("KVRING_CACHE_DIR", dirs[i], 1);
    build(group, 0, "");
  }
  setenv("KVRING_CACHE_DIR", dir, 1);
  assert_int_equal(count_files("", NULL, 0), 0);
}

/* Sub-devices are several devices in one context; they share one binary. */
static void test_sub_devices(void **state) {
  const kvr_device_info *info = &((kvr_group *)*state)->infos[0];
  char list[32], path[512];
  kvr_group *group;
  snprintf(list, sizeof list, "%d.%d/2", info->platform_index, info->device_index);
  const kvr_group_desc desc = {.struct_size = sizeof desc, .num_ranks = 2, .devices = list};
  if (kvr_group_create(&desc, &group) != KVR_OK) skip();
  build(group, 1, "");
  assert_int_equal(count_files("", path, sizeof path), 1);
  const ino_t first = inode(path);
  build(group, 1, "");
  build(group, 0, "");
  assert_int_equal(count_files("", NULL, 0), 1);
  assert_int_equal(inode(path), first);
  kvr_group_destroy(group);
}

/* ---- several processes ---- */

static int child_build(void) {
  kvr_group *group = device_group(1, 0);
  cl_program program;
  const kvr_status status = kvr_program_create(group, 0, "rows.cl", "-DCHILD=1", NULL, &program);
  if (status == KVR_OK) clReleaseProgram(program);
  kvr_group_destroy(group);
  return status == KVR_OK ? 0 : 1;
}

static void test_processes_at_once(void **state) {
  (void)state;
  enum { CHILDREN = 4 };
  char *const args[] = {"test_program", "child", NULL};
  pid_t children[CHILDREN];
  for (int i = 0; i < CHILDREN; i++) {
    children[i] = fork();
    if (children[i] != 0) continue;
    execv("/proc/self/exe", args);
    _exit(2);
  }
  for (int i = 0; i < CHILDREN; i++) {
    int status = -1;
    assert_int_equal(waitpid(children[i], &status, 0), children[i]);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
  }
  char path[512];
  size_t size;
  assert_int_equal(count_files("", path, sizeof path), 1); /* no temporary file is left */
  char *key = key_in(path);
  unsigned char *binary = kvr_binary_load(path, key, &size);
  assert_non_null(binary);
  free(binary);
  free(key);
}

/* ---- files ---- */

static void test_directories(void **state) {
  (void)state;
  char path[64], *home = strdup(getenv("HOME") != NULL ? getenv("HOME") : "/");
  unsetenv("KVRING_CACHE_DIR");
  setenv("XDG_CACHE_HOME", "/xdg", 1);
  assert_true(kvr_binary_dir(path, sizeof path));
  assert_string_equal(path, "/xdg/kvring");
  setenv("XDG_CACHE_HOME", "relative", 1);
  setenv("HOME", "/me", 1);
  assert_true(kvr_binary_dir(path, sizeof path));
  assert_string_equal(path, "/me/.cache/kvring");
  assert_false(kvr_binary_dir(path, 5));
  unsetenv("XDG_CACHE_HOME");
  unsetenv("HOME");
  assert_false(kvr_binary_dir(path, sizeof path));
  setenv("HOME", home, 1);
  setenv("KVRING_CACHE_DIR", "", 1);
  assert_false(kvr_binary_dir(path, sizeof path));
  setenv("KVRING_CACHE_DIR", dir, 1);
  assert_true(kvr_binary_dir(path, sizeof path));
  assert_string_equal(path, dir);
  free(home);
}

static bool loads(const char *path) {
  size_t size;
  unsigned char *binary = kvr_binary_load(path, "the key", &size);
  const bool ok = binary != NULL && size == 10 && memcmp(binary, "the binary", 10) == 0;
  free(binary);
  return ok;
}

/* Any flipped bit and any lost or added byte is noticed. */
static void test_every_damage_is_noticed(void **state) {
  (void)state;
  char path[512];
  snprintf(path, sizeof path, "%s/file", dir);
  assert_true(kvr_binary_store(path, "the key", (const unsigned char *)"the binary", 10));
  const size_t size = read_file(path);
  assert_int_equal(size, HEADER_BYTES + 7 + 10);
  for (size_t bit = 0; bit < 8 * size; bit++) {
    bytes[bit / 8] ^= (unsigned char)(1u << bit % 8);
    write_file(path, size);
    assert_false(loads(path));
    bytes[bit / 8] ^= (unsigned char)(1u << bit % 8);
  }
  for (size_t len = 0; len < size; len++) {
    write_file(path, len);
    assert_false(loads(path));
  }
  write_file(path, size + 1);
  assert_false(loads(path));
  write_file(path, size);
  assert_true(loads(path)); /* the control */
  size_t got;
  assert_null(kvr_binary_load(path, "the kex", &got));
  assert_null(kvr_binary_load("/nonexistent/file", "the key", &got));
  assert_null(kvr_binary_load(dir, "the key", &got));
}

static int open_group(void **state) {
  *state = device_group(1, 0);
  return 0;
}

static int close_group(void **state) {
  kvr_group_destroy(*state);
  return 0;
}

#define DIR_TEST(test) cmocka_unit_test_setup_teardown(test, open_dir, close_dir)

int main(int argc, char **argv) {
  if (argc == 2 && strcmp(argv[1], "child") == 0) return child_build();
  device_require();
  const struct CMUnitTest tests[] = {
      DIR_TEST(test_every_source_builds),
      DIR_TEST(test_options_are_checked),
      DIR_TEST(test_broken_builds_say_why),
      DIR_TEST(test_second_build_is_a_hit),
      DIR_TEST(test_damaged_files_are_rebuilt),
      DIR_TEST(test_key_holds_everything),
      DIR_TEST(test_wrong_binaries_are_rebuilt),
      DIR_TEST(test_cache_may_be_off_or_unwritable),
      DIR_TEST(test_sub_devices),
      DIR_TEST(test_processes_at_once),
      DIR_TEST(test_directories),
      DIR_TEST(test_every_damage_is_noticed),
  };
  return cmocka_run_group_tests(tests, open_group, close_group);
}

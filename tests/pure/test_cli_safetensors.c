/* safetensors: what is written is read back; nothing that a file claims is believed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "cli/json.c"
#include "cli/safetensors.c"

static void temporary_name(char path[64]) {
  strcpy(path, "/tmp/kvring-test-XXXXXX");
  const int descriptor = mkstemp(path);
  assert_true(descriptor >= 0);
  close(descriptor);
}

static void write_bytes(const char *path, const void *bytes, size_t num) {
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(bytes, 1, num, file), num);
  fclose(file);
}

/* A file with this header and num_data bytes of zeros. */
static void write_file(const char *path, const char *header, size_t num_data) {
  const size_t len = strlen(header);
  unsigned char *bytes = calloc(8 + len + num_data, 1);
  for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)((uint64_t)len >> 8 * i);
  memcpy(bytes + 8, header, len);
  write_bytes(path, bytes, 8 + len + num_data);
  free(bytes);
}

static void test_round_trip(void **state) {
  (void)state;
  char path[64];
  const float a[6] = {1, 2, 3, 4, 5, 6};
  const uint16_t b[2] = {0x3c00, 0x4000};
  const cli_tensor tensors[2] =
      {{.name = "out", .dtype = KVR_F32, .num_dims = 3, .shape = {1, 2, 3}, .data = a},
       {.name = "half", .dtype = KVR_F16, .num_dims = 1, .shape = {2}, .data = b}};
  cli_safetensors *file;
  cli_tensor t;
  temporary_name(path);
  assert_int_equal(cli_safetensors_write(path, tensors, 2), KVR_OK);
  assert_int_equal(cli_safetensors_open(path, &file), KVR_OK);
  assert_int_equal(cli_safetensors_find(file, "out", &t), KVR_OK);
  assert_int_equal(t.num_dims, 3);
  assert_int_equal(t.shape[2], 3);
  assert_memory_equal(t.data, a, sizeof a);
  assert_int_equal((uintptr_t)t.data % 8, 0);
  assert_int_equal(cli_safetensors_find(file, "half", &t), KVR_OK);
  assert_int_equal(t.dtype, KVR_F16);
  assert_memory_equal(t.data, b, sizeof b);
  assert_int_equal(cli_safetensors_find(file, "q", &t), KVR_E_IO);
  assert_non_null(strstr(kvr_error_message(), "out, half"));
  cli_safetensors_close(file);
  remove(path);
}

static void test_refuses(void **state) {
  (void)state;
  static const struct {
    const char *header, *message;
  } cases[] = {
      {"[]", "not a JSON object"},
      {"{\"q\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[0,8]}}", "dtype I64"},
      {"{\"q\":{\"shape\":[1],\"data_offsets\":[0,8]}}", "dtype (none)"},
      {"{\"q\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", "no shape"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,8]}}", "not a size"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,8]}}", "not a size"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":[1e300],\"data_offsets\":[0,8]}}", "not a size"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,8]}}",
       "overflows"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}",
       "more than 8"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", "data_offsets"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", "truncated"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}", "truncated"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}", "its shape needs 4"},
      {"{\"q\":7}", "dtype"},
      {"{}", "it has: none"},
  };
  char path[64];
  temporary_name(path);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    cli_safetensors *file = NULL;
    cli_tensor t;
    write_file(path, cases[i].header, 8);
    kvr_status status = cli_safetensors_open(path, &file);
    if (status == KVR_OK) status = cli_safetensors_find(file, "q", &t);
    assert_int_equal(status, KVR_E_IO);
    if (strstr(kvr_error_message(), cases[i].message) == NULL)
      fail_msg("case %zu: message '%s' lacks '%s'", i, kvr_error_message(), cases[i].message);
    cli_safetensors_close(file);
  }
  remove(path);
}

static void test_short_files(void **state) {
  (void)state;
  static const unsigned char huge[16] = {255, 255, 255, 255, 255, 255, 255, 255, '{', '}'};
  char path[64];
  cli_safetensors *file;
  temporary_name(path);
  write_bytes(path, huge, 0);
  assert_int_equal(cli_safetensors_open(path, &file), KVR_E_IO);
  write_bytes(path, huge, 7);
  assert_int_equal(cli_safetensors_open(path, &file), KVR_E_IO);
  write_bytes(path, huge, 16);
  assert_int_equal(cli_safetensors_open(path, &file), KVR_E_IO);
  assert_non_null(strstr(kvr_error_message(), "claims"));
  remove(path);
  assert_int_equal(cli_safetensors_open(path, &file), KVR_E_IO);
  assert_int_equal(cli_safetensors_open("/tmp", &file), KVR_E_IO);
}

/* Files with a few bytes changed are read or refused, never more (run under sanitizers). */
static void test_mutations(void **state) {
  (void)state;
  static const char header[] =
      "{\"q\":{\"dtype\":\"F32\",\"shape\":[2,1,1],\"data_offsets\":[0,8]}}";
  char path[64], mutated[sizeof header];
  uint32_t random = 12345;
  temporary_name(path);
  for (int round = 0; round < 3000; round++) {
    strcpy(mutated, header);
    for (int k = 0; k < 3; k++) {
      random = random * 1664525u + 1013904223u;
      const size_t at = (random >> 8) % (sizeof header - 1);
      mutated[at] = (char)(32 + (random >> 24) % 95);
    }
    cli_safetensors *file = NULL;
    cli_tensor t;
    write_file(path, mutated, 8);
    if (cli_safetensors_open(path, &file) == KVR_OK &&
        cli_safetensors_find(file, "q", &t) == KVR_OK) {
      volatile unsigned char sum = 0;
      for (size_t i = 0; i < t.bytes; i++)
        sum = (unsigned char)(sum + ((const unsigned char *)t.data)[i]);
      assert_true(t.bytes <= 8);
    }
    cli_safetensors_close(file);
  }
  remove(path);
}

static void test_write_fails_cleanly(void **state) {
  (void)state;
  const float a[1] = {1};
  const cli_tensor t = {.name = "a", .dtype = KVR_F32, .num_dims = 1, .shape = {1}, .data = a};
  assert_int_equal(cli_safetensors_write("/nonexistent/folder/x", &t, 1), KVR_E_IO);
  assert_non_null(strstr(kvr_error_message(), "/nonexistent/folder/x"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_round_trip),          cmocka_unit_test(test_refuses),
      cmocka_unit_test(test_short_files),         cmocka_unit_test(test_mutations),
      cmocka_unit_test(test_write_fails_cleanly),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

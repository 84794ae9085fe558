/* The input is a safetensors file, read in every way that the tool reads one: as q, k and v of
 * --input, as --sinks, tensor by tensor. With KVR_FUZZ_CONTROL the target also does what the reader
 * must not: it believes data_offsets. */
#include <string.h>
#include <unistd.h>

#include "cli/convert.c"
#include "cli/data.c"
#include "cli/json.c"
#include "cli/reference.c"
#include "cli/safetensors.c"
#include "cli/sinks.c"
#include "cli/synthetic.c"
#include "fuzz.h"

static char file_name[64];
static int descriptor = -1;

static void write_file(const uint8_t *data, size_t size) {
  if (descriptor < 0) {
    char temporary[] = "/tmp/kvring-fuzz-XXXXXX";
    descriptor = mkstemp(temporary);
    HOLDS(descriptor >= 0);
    unlink(temporary); /* reached through the descriptor from now on */
    snprintf(file_name, sizeof file_name, "/proc/self/fd/%d", descriptor);
  }
  HOLDS(ftruncate(descriptor, (off_t)size) == 0);
  HOLDS(pwrite(descriptor, data, size, 0) == (ssize_t)size);
}

/* Reads every byte of a tensor, which must lie in the file. */
static void touch(const cli_safetensors *file, const cli_tensor *t) {
  static volatile unsigned char sink;
  const unsigned char *bytes = t->data, *map = file->map;
  HOLDS(t->bytes <= file->map_bytes && bytes >= map);
  HOLDS((size_t)(bytes - map) <= file->map_bytes - t->bytes);
  size_t product = kvr_dtype_size(t->dtype);
  for (int d = 0; d < t->num_dims; d++) product *= t->shape[d];
  HOLDS(product == t->bytes);
  for (size_t i = 0; i < t->bytes; i++) sink = (unsigned char)(sink + bytes[i]);
}

static void read_tensors(void) {
  cli_safetensors *file;
  cli_tensor tensor;
  if (cli_safetensors_open(file_name, &file) != KVR_OK) return;
  for (const cJSON *item = file->header->child; item != NULL; item = item->next)
    if (cli_safetensors_find(file, item->string, &tensor) == KVR_OK) touch(file, &tensor);
  HOLDS(cli_safetensors_find(file, "no such tensor", &tensor) != KVR_OK ||
        cJSON_GetObjectItemCaseSensitive(file->header, "no such tensor") != NULL);
  cli_safetensors_close(file);
}

static void read_input(void) {
  cli_data data = {0};
  cli_given_shape given;
  if (cli_data_open(file_name, &data, &given) == KVR_OK) {
    const size_t num = data.v.shape[0] * data.v.shape[1] * data.v.shape[2];
    HOLDS(given.num_tokens > 0 && given.num_q_heads > 0 && given.num_kv_heads > 0);
    HOLDS(cli_max_abs(data.v.dtype, data.v.data, num) >= 0);
    (void)cli_data_check_finite(file_name, &data);
  }
  cli_data_fini(&data);
}

static void read_sinks(void) {
  float *sinks;
  if (cli_sinks_load(file_name, 4, 0, &sinks) != KVR_OK) {
    HOLDS(sinks == NULL && kvr_error_message()[0] != '\0');
    return;
  }
  for (int h = 0; h < 4; h++) HOLDS(sinks[h] < HUGE_VALF);
  free(sinks);
}

#ifdef KVR_FUZZ_CONTROL
static void believe(const uint8_t *data, size_t size) {
  cli_safetensors *file;
  size_t begin;
  static volatile uint8_t sink;
  if (cli_safetensors_open(file_name, &file) != KVR_OK) return;
  const size_t start = (size_t)(file->data - (const unsigned char *)file->map);
  for (const cJSON *item = file->header->child; item != NULL && start < size; item = item->next) {
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    if (size_of(cJSON_GetArrayItem(offsets, 0), &begin)) sink = data[start + begin];
  }
  (void)sink;
  cli_safetensors_close(file);
}
#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  write_file(data, size);
  read_tensors();
  read_input();
  read_sinks();
#ifdef KVR_FUZZ_CONTROL
  believe(data, size);
#endif
  return 0;
}

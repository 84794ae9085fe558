#include "cli/safetensors.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/error.h"
#include "cli/json.h"

enum { LENGTH_BYTES = 8 };
#define MAX_HEADER ((size_t)100 << 20) /* the limit of the reference implementation */

struct cli_safetensors {
  char *path;
  void *map;
  size_t map_bytes;
  cJSON *header;
  const unsigned char *data; /* first byte after the header */
  size_t data_bytes;
};

static const char *const dtype_names[KVR_NUM_DTYPES] = {"F32", "F16", "BF16"};

/* ---- reading ---- */

static kvr_status map_file(const char *path, cli_safetensors *file) {
  const int descriptor = open(path, O_RDONLY);
  if (descriptor < 0) return kvr_fail(KVR_E_IO, "cannot open %s: %s", path, strerror(errno));
  struct stat info;
  kvr_status status = KVR_OK;
  if (fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode))
    status = kvr_fail(KVR_E_IO, "%s is not a regular file", path);
  else if (info.st_size < LENGTH_BYTES)
    status = kvr_fail(KVR_E_IO, "%s has %lld bytes; a safetensors file has at least %d", path,
                      (long long)info.st_size, LENGTH_BYTES);
  if (status == KVR_OK) {
    file->map_bytes = (size_t)info.st_size;
    file->map = mmap(NULL, file->map_bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (file->map == MAP_FAILED) {
      file->map = NULL;
      status = kvr_fail(KVR_E_IO, "cannot map %s: %s", path, strerror(errno));
    }
  }
  close(descriptor);
  return status;
}

static kvr_status parse_header(const char *path, cli_safetensors *file) {
  const unsigned char *bytes = file->map;
  uint64_t length = 0;
  for (int i = LENGTH_BYTES; i-- > 0;) length = length << 8 | bytes[i];
  const size_t most = file->map_bytes - LENGTH_BYTES;
  if (length > most || length > MAX_HEADER)
    return kvr_fail(KVR_E_IO, "%s: the header claims %llu bytes, but at most %zu can follow", path,
                    (unsigned long long)length, most < MAX_HEADER ? most : MAX_HEADER);
  file->header = cJSON_ParseWithLength((const char *)bytes + LENGTH_BYTES, (size_t)length);
  if (!cJSON_IsObject(file->header))
    return kvr_fail(KVR_E_IO, "%s: the header of %llu bytes is not a JSON object", path,
                    (unsigned long long)length);
  file->data = bytes + LENGTH_BYTES + length;
  file->data_bytes = most - (size_t)length;
  return KVR_OK;
}

kvr_status cli_safetensors_open(const char *path, cli_safetensors **out) {
  cli_safetensors *file = calloc(1, sizeof *file);
  if (file == NULL || (file->path = malloc(strlen(path) + 1)) == NULL) {
    free(file);
    return kvr_fail(KVR_E_OOM, "no host memory to read %s", path);
  }
  strcpy(file->path, path);
  kvr_status status = map_file(path, file);
  if (status == KVR_OK) status = parse_header(path, file);
  if (status != KVR_OK) {
    cli_safetensors_close(file);
    return status;
  }
  *out = file;
  return KVR_OK;
}

void cli_safetensors_close(cli_safetensors *file) {
  if (file == NULL) return;
  cJSON_Delete(file->header);
  if (file->map != NULL) munmap(file->map, file->map_bytes);
  free(file->path);
  free(file);
}

/* Lists the tensors of a file in a message. */
static kvr_status fail_missing(const cli_safetensors *file, const char *name) {
  char names[200] = "";
  for (const cJSON *item = file->header->child; item != NULL; item = item->next) {
    const size_t used = strlen(names);
    if (strcmp(item->string, "__metadata__") != 0)
      snprintf(names + used, sizeof names - used, "%s%.40s", used > 0 ? ", " : "", item->string);
  }
  return kvr_fail(KVR_E_IO, "%s has no tensor '%s'; it has: %s", file->path, name,
                  names[0] != '\0' ? names : "none");
}

/* A JSON number as a size. Doubles hold integers exactly up to 2^53. */
static bool size_of(const cJSON *item, size_t *out) {
  if (!cJSON_IsNumber(item)) return false;
  const double value = item->valuedouble;
  if (!(value >= 0 && value <= 9007199254740992.0) || value != (double)(uint64_t)value)
    return false;
  *out = (size_t)value;
  return true;
}

static kvr_status read_dtype(const cli_safetensors *file, const cJSON *item, cli_tensor *out) {
  const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "dtype"));
  for (int i = 0; text != NULL && i < KVR_NUM_DTYPES; i++)
    if (strcmp(text, dtype_names[i]) == 0) {
      out->dtype = (kvr_dtype)i;
      return KVR_OK;
    }
  return kvr_fail(KVR_E_IO, "%s: tensor '%s' has dtype %.20s; use F32, F16 or BF16", file->path,
                  out->name, text != NULL ? text : "(none)");
}

static kvr_status read_shape(const cli_safetensors *file, const cJSON *item, cli_tensor *out) {
  const cJSON *shape = cJSON_GetObjectItemCaseSensitive(item, "shape");
  out->bytes = kvr_dtype_size(out->dtype);
  if (!cJSON_IsArray(shape))
    return kvr_fail(KVR_E_IO, "%s: tensor '%s' has no shape", file->path, out->name);
  for (const cJSON *dim = shape->child; dim != NULL; dim = dim->next) {
    if (out->num_dims == CLI_MAX_DIMS)
      return kvr_fail(KVR_E_IO, "%s: tensor '%s' has more than %d dimensions", file->path,
                      out->name, CLI_MAX_DIMS);
    size_t *size = &out->shape[out->num_dims++];
    if (!size_of(dim, size))
      return kvr_fail(KVR_E_IO, "%s: dimension %d of tensor '%s' is not a size", file->path,
                      out->num_dims - 1, out->name);
    if (!kvr_mul_size(out->bytes, *size, &out->bytes))
      return kvr_fail(KVR_E_IO, "%s: the shape of tensor '%s' overflows at dimension %d (%zu)",
                      file->path, out->name, out->num_dims - 1, *size);
  }
  return KVR_OK;
}

static kvr_status read_data(const cli_safetensors *file, const cJSON *item, cli_tensor *out) {
  const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
  size_t begin, end;
  if (cJSON_GetArraySize(offsets) != 2 || !size_of(cJSON_GetArrayItem(offsets, 0), &begin) ||
      !size_of(cJSON_GetArrayItem(offsets, 1), &end))
    return kvr_fail(KVR_E_IO, "%s: tensor '%s' has no pair of data_offsets", file->path, out->name);
  if (begin > end || end > file->data_bytes)
    return kvr_fail(KVR_E_IO,
                    "%s: tensor '%s' is at bytes %zu to %zu, but the file holds %zu: truncated?",
                    file->path, out->name, begin, end, file->data_bytes);
  if (end - begin != out->bytes)
    return kvr_fail(KVR_E_IO, "%s: tensor '%s' has %zu bytes, but its shape needs %zu", file->path,
                    out->name, end - begin, out->bytes);
  out->data = file->data + begin;
  return KVR_OK;
}

kvr_status cli_safetensors_find(const cli_safetensors *file, const char *name, cli_tensor *out) {
  const cJSON *item = cJSON_GetObjectItemCaseSensitive(file->header, name);
  if (item == NULL) return fail_missing(file, name);
  cli_tensor tensor = {0};
  snprintf(tensor.name, sizeof tensor.name, "%s", name);
  KVR_TRY(read_dtype(file, item, &tensor));
  KVR_TRY(read_shape(file, item, &tensor));
  KVR_TRY(read_data(file, item, &tensor));
  *out = tensor;
  return KVR_OK;
}

/* ---- writing ---- */

static kvr_status tensor_bytes(const cli_tensor *tensor, size_t *out) {
  size_t bytes = kvr_dtype_size(tensor->dtype);
  for (int i = 0; i < tensor->num_dims; i++)
    if (!kvr_mul_size(bytes, tensor->shape[i], &bytes))
      return kvr_fail(KVR_E_SHAPE, "the shape of tensor '%s' overflows", tensor->name);
  *out = bytes;
  return KVR_OK;
}

/* The header of the file, padded with spaces so that the data starts at a multiple of 8. Owned. */
static kvr_status make_header(const cli_tensor *tensors, int num, char **out, size_t *out_len) {
  cJSON *root = cJSON_CreateObject();
  size_t begin = 0;
  kvr_status status = root != NULL ? KVR_OK : kvr_fail(KVR_E_OOM, "no host memory for a header");
  for (int i = 0; i < num && status == KVR_OK; i++) {
    size_t bytes = 0;
    status = tensor_bytes(&tensors[i], &bytes);
    cJSON *item = cJSON_AddObjectToObject(root, tensors[i].name);
    cJSON_AddStringToObject(item, "dtype", dtype_names[tensors[i].dtype]);
    cJSON *shape = cJSON_AddArrayToObject(item, "shape");
    for (int d = 0; d < tensors[i].num_dims; d++)
      cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)tensors[i].shape[d]));
    cJSON *offsets = cJSON_AddArrayToObject(item, "data_offsets");
    cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)begin));
    begin += bytes;
    cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)begin));
  }
  char *text = status == KVR_OK ? cJSON_PrintUnformatted(root) : NULL;
  cJSON_Delete(root);
  const size_t len = text != NULL ? strlen(text) : 0, padded = (len + 7) / 8 * 8;
  char *header = text != NULL ? malloc(padded + 1) : NULL;
  if (header != NULL) {
    memset(header, ' ', padded);
    memcpy(header, text, len);
    *out = header;
    *out_len = padded;
  } else if (status == KVR_OK)
    status = kvr_fail(KVR_E_OOM, "no host memory for a header");
  free(text);
  return status;
}

kvr_status cli_safetensors_write(const char *path, const cli_tensor *tensors, int num) {
  char *header = NULL;
  size_t len = 0;
  KVR_TRY(make_header(tensors, num, &header, &len));
  cli_file file = {0};
  kvr_status status = cli_file_open(path, &file);
  if (status == KVR_OK) {
    unsigned char length[LENGTH_BYTES];
    for (int i = 0; i < LENGTH_BYTES; i++) length[i] = (unsigned char)((uint64_t)len >> 8 * i);
    fwrite(length, 1, sizeof length, file.stream);
    fwrite(header, 1, len, file.stream);
    for (int i = 0; i < num; i++) {
      size_t bytes = 0;
      if (tensor_bytes(&tensors[i], &bytes) == KVR_OK && bytes > 0)
        fwrite(tensors[i].data, 1, bytes, file.stream);
    }
    status = cli_file_close(&file, 1);
  }
  free(header);
  return status;
}

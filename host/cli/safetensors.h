/* safetensors: 8 bytes of header length (little endian), a JSON header, then the tensors' bytes.
 * The reader trusts nothing: every length and offset is checked before it is used. */
#ifndef KVR_CLI_SAFETENSORS_H
#define KVR_CLI_SAFETENSORS_H

#include <stddef.h>

#include "kvring/problem.h"

enum { CLI_MAX_DIMS = 8, CLI_MAX_NAME = 64 };

typedef struct cli_tensor {
  char name[CLI_MAX_NAME];
  kvr_dtype dtype;
  int num_dims;
  size_t shape[CLI_MAX_DIMS];
  size_t bytes;
  const void *data; /* reader: lent by the file, any alignment; writer: borrowed from the caller */
} cli_tensor;

typedef struct cli_safetensors cli_safetensors;

/* Opens a file (mapped, read on use). Owned; release with cli_safetensors_close.
 * Errors: KVR_E_IO naming file and reason. */
kvr_status cli_safetensors_open(const char *path, cli_safetensors **out);
void cli_safetensors_close(cli_safetensors *file); /* accepts NULL */

/* Finds an F32, F16 or BF16 tensor. Errors: KVR_E_IO if it is missing (naming those that exist),
 * has another type, or a shape or offsets that do not fit the file. */
kvr_status cli_safetensors_find(const cli_safetensors *file, const char *name, cli_tensor *out);

/* Writes tensors to a temporary name, then renames. bytes is ignored: shape and dtype give it.
 * Errors: KVR_E_IO, KVR_E_OOM. */
kvr_status cli_safetensors_write(const char *path, const cli_tensor *tensors, int num);

#endif

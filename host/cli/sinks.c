#include "cli/sinks.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/data.h"

/* As random as the logits of synthetic data, so that sinks matter and do not drown everything. */
static kvr_status make_random(int num, uint64_t seed, float *out) {
  cli_synthetic *s = malloc(sizeof *s);
  if (s == NULL) return kvr_fail(KVR_E_OOM, "no host memory for random sinks");
  cli_synthetic_init(s, seed);
  const cli_rows_at at = {.tensor = CLI_SINKS, .num_tokens = num, .heads = 1, .head_dim = 1};
  cli_synthetic_fill(s, at, CLI_QUERY_SCALE, KVR_F32, out);
  free(s);
  return KVR_OK;
}

static kvr_status check_tensor(const char *path, const cli_tensor *t, int num) {
  if (t->dtype != KVR_F32)
    return kvr_fail(KVR_E_DTYPE, "%s: tensor 'sinks' is %s; store it as F32", path,
                    kvr_dtype_name(t->dtype));
  if (t->num_dims != 1)
    return kvr_fail(KVR_E_SHAPE, "%s: tensor 'sinks' has %d dimensions; it needs 1, (query heads)",
                    path, t->num_dims);
  if (t->shape[0] != (size_t)num)
    return kvr_fail(KVR_E_SHAPE,
                    "%s: tensor 'sinks' has %zu numbers, but there are %d query heads; it needs "
                    "one for each",
                    path, t->shape[0], num);
  return KVR_OK;
}

static kvr_status check_values(const char *path, const float *sinks, int num) {
  for (int h = 0; h < num; h++)
    if (isnan(sinks[h]) || sinks[h] == HUGE_VALF)
      return kvr_fail(KVR_E_RANGE, "%s: sinks[%d] is %g; it must be finite, or -inf for none", path,
                      h, (double)sinks[h]);
  return KVR_OK;
}

static kvr_status read_file(const char *path, int num, float *out) {
  cli_safetensors *file;
  cli_tensor tensor;
  KVR_TRY(cli_safetensors_open(path, &file));
  kvr_status status = cli_safetensors_find(file, "sinks", &tensor);
  if (status == KVR_OK) status = check_tensor(path, &tensor, num);
  if (status == KVR_OK) memcpy(out, tensor.data, (size_t)num * sizeof *out);
  cli_safetensors_close(file);
  return status == KVR_OK ? check_values(path, out, num) : status;
}

kvr_status cli_sinks_load(const char *from, int num_q_heads, uint64_t seed, float **out) {
  *out = NULL;
  if (from == NULL) return KVR_OK;
  float *sinks = malloc((size_t)num_q_heads * sizeof *sinks);
  if (sinks == NULL) return kvr_fail(KVR_E_OOM, "no host memory for %d sinks", num_q_heads);
  const kvr_status status = strcmp(from, "random") == 0 ? make_random(num_q_heads, seed, sinks)
                                                        : read_file(from, num_q_heads, sinks);
  if (status == KVR_OK)
    *out = sinks;
  else
    free(sinks);
  return status;
}

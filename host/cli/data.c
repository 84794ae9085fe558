#include "cli/data.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "cli/convert.h"

/* ---- from a file ---- */

static kvr_status check_dims(const char *path, const cli_tensor *t) {
  if (t->num_dims != 3)
    return kvr_fail(KVR_E_SHAPE,
                    "%s: tensor '%s' has %d dimensions; it needs 3 (tokens, heads, head_dim)", path,
                    t->name, t->num_dims);
  for (int d = 0; d < 3; d++)
    if (t->shape[d] < 1 || t->shape[d] > INT_MAX)
      return kvr_fail(KVR_E_SHAPE, "%s: dimension %d of tensor '%s' is %zu; it must be in 1..%d",
                      path, d, t->name, t->shape[d], INT_MAX);
  return KVR_OK;
}

static kvr_status check_together(const char *path, const cli_data *x) {
  const cli_tensor *q = &x->q, *k = &x->k, *v = &x->v;
  if (memcmp(k->shape, v->shape, 3 * sizeof *k->shape) != 0)
    return kvr_fail(KVR_E_SHAPE, "%s: k is (%zu, %zu, %zu), but v is (%zu, %zu, %zu)", path,
                    k->shape[0], k->shape[1], k->shape[2], v->shape[0], v->shape[1], v->shape[2]);
  if (q->shape[0] != k->shape[0] || q->shape[2] != k->shape[2])
    return kvr_fail(
        KVR_E_SHAPE,
        "%s: q is (%zu, %zu, %zu) and k (%zu, %zu, %zu); tokens and head_dim must agree", path,
        q->shape[0], q->shape[1], q->shape[2], k->shape[0], k->shape[1], k->shape[2]);
  if (q->dtype != k->dtype || q->dtype != v->dtype)
    return kvr_fail(KVR_E_DTYPE, "%s: q is %s, k %s, v %s; they must have one dtype", path,
                    kvr_dtype_name(q->dtype), kvr_dtype_name(k->dtype), kvr_dtype_name(v->dtype));
  return KVR_OK;
}

/* Data that is not aligned to its elements is copied. */
static kvr_status align(cli_tensor *t, void **copy) {
  if ((uintptr_t)t->data % kvr_dtype_size(t->dtype) == 0) return KVR_OK;
  *copy = malloc(t->bytes);
  if (*copy == NULL)
    return kvr_fail(KVR_E_OOM, "no host memory for %zu bytes of tensor '%s'", t->bytes, t->name);
  memcpy(*copy, t->data, t->bytes);
  t->data = *copy;
  return KVR_OK;
}

kvr_status cli_data_open(const char *path, cli_data *x, cli_given_shape *given) {
  KVR_TRY(cli_safetensors_open(path, &x->file));
  cli_tensor *tensors[3] = {&x->q, &x->k, &x->v};
  static const char *const names[3] = {"q", "k", "v"};
  for (int i = 0; i < 3; i++) {
    KVR_TRY(cli_safetensors_find(x->file, names[i], tensors[i]));
    KVR_TRY(check_dims(path, tensors[i]));
  }
  KVR_TRY(check_together(path, x));
  for (int i = 0; i < 3; i++) KVR_TRY(align(tensors[i], &x->aligned[i]));
  *given = (cli_given_shape){.num_tokens = (int)x->q.shape[0],
                             .num_q_heads = (int)x->q.shape[1],
                             .num_kv_heads = (int)x->k.shape[1],
                             .head_dim = (int)x->q.shape[2],
                             .dtype = x->q.dtype};
  return KVR_OK;
}

/* Index of the first number that is not finite; num if all are. */
static size_t find_strange(const cli_tensor *t, size_t num) {
  float part[256];
  for (size_t i = 0; i < num; i += 256) {
    const size_t len = num - i < 256 ? num - i : 256;
    cli_to_float(t->dtype, (const char *)t->data + i * kvr_dtype_size(t->dtype), len, part);
    for (size_t j = 0; j < len; j++)
      if (!isfinite(part[j])) return i + j;
  }
  return num;
}

kvr_status cli_data_check_finite(const char *path, const cli_data *x) {
  const cli_tensor *tensors[3] = {&x->q, &x->k, &x->v};
  for (int i = 0; i < 3; i++) {
    const cli_tensor *t = tensors[i];
    const size_t row = t->shape[1] * t->shape[2], num = t->shape[0] * row;
    const size_t at = find_strange(t, num);
    if (at < num)
      return kvr_fail(KVR_E_RANGE,
                      "%s: %s[%zu, %zu, %zu] is not finite, so nothing can be verified; mend the "
                      "file, or leave --verify out",
                      path, t->name, at / row, at % row / t->shape[2], at % t->shape[2]);
  }
  return KVR_OK;
}

/* First row of a request in the file. */
static size_t file_row(const cli_shape *s, int request) {
  size_t row = 0;
  for (int i = 0; i < request; i++)
    row += (size_t)s->requests[i].num_cached + (size_t)s->requests[i].num_new;
  return row;
}

/* ---- synthetic ---- */

static size_t row_bytes(const cli_shape *s, int heads) {
  return (size_t)heads * (size_t)s->cache.head_dim * kvr_dtype_size(s->cache.dtype);
}

static kvr_status make(const cli_data *x, cli_tensor_id tensor, int request, void **out) {
  const cli_shape *s = x->shape;
  const int rows = s->requests[request].num_cached + s->requests[request].num_new;
  size_t bytes;
  void *data = NULL;
  if (kvr_mul_size((size_t)rows, row_bytes(s, s->cache.num_kv_heads), &bytes))
    data = malloc(bytes > 0 ? bytes : 1);
  if (data == NULL)
    return kvr_fail(KVR_E_OOM, "no host memory for the keys and values of %d tokens", rows);
  const cli_rows_at at = {.tensor = tensor,
                          .sequence = request,
                          .num_tokens = rows,
                          .heads = s->cache.num_kv_heads,
                          .head_dim = s->cache.head_dim};
  cli_synthetic_fill(x->synthetic, at, 1.0f, s->cache.dtype, data);
  *out = data;
  return KVR_OK;
}

kvr_status cli_data_prepare(cli_data *x, const cli_shape *shape, uint64_t seed) {
  x->shape = shape;
  if (x->file != NULL) return KVR_OK;
  const size_t num = (size_t)shape->num_requests;
  x->synthetic = malloc(sizeof *x->synthetic);
  x->synthetic_k = calloc(num, sizeof *x->synthetic_k);
  x->synthetic_v = calloc(num, sizeof *x->synthetic_v);
  if (x->synthetic == NULL || x->synthetic_k == NULL || x->synthetic_v == NULL)
    return kvr_fail(KVR_E_OOM, "no host memory for synthetic data");
  cli_synthetic_init(x->synthetic, seed);
  for (int i = 0; i < shape->num_requests; i++) {
    KVR_TRY(make(x, CLI_K, i, &x->synthetic_k[i]));
    KVR_TRY(make(x, CLI_V, i, &x->synthetic_v[i]));
  }
  return KVR_OK;
}

void cli_data_fini(cli_data *x) {
  for (int i = 0; x->shape != NULL && i < x->shape->num_requests; i++) {
    if (x->synthetic_k != NULL) free(x->synthetic_k[i]);
    if (x->synthetic_v != NULL) free(x->synthetic_v[i]);
  }
  free(x->synthetic_k);
  free(x->synthetic_v);
  free(x->synthetic);
  for (int i = 0; i < 3; i++) free(x->aligned[i]);
  cli_safetensors_close(x->file);
  *x = (cli_data){0};
}

/* ---- rows ---- */

static const void *kv_row(const cli_data *x, const cli_tensor *tensor, void *const *synthetic,
                          int request, int row) {
  const size_t bytes = row_bytes(x->shape, x->shape->cache.num_kv_heads);
  if (x->file == NULL) return (const char *)synthetic[request] + (size_t)row * bytes;
  return (const char *)tensor->data + (file_row(x->shape, request) + (size_t)row) * bytes;
}

const void *cli_data_k(const cli_data *x, int request, int row) {
  return kv_row(x, &x->k, x->synthetic_k, request, row);
}

const void *cli_data_v(const cli_data *x, int request, int row) {
  return kv_row(x, &x->v, x->synthetic_v, request, row);
}

void cli_data_q(const cli_data *x, int request, int first, int num, void *dst) {
  const cli_shape *s = x->shape;
  const int row = s->requests[request].num_cached + first;
  if (x->file == NULL) {
    const cli_rows_at at = {CLI_Q, request, row, num, s->num_q_heads, s->cache.head_dim};
    cli_synthetic_fill(x->synthetic, at, CLI_QUERY_SCALE, s->cache.dtype, dst);
    return;
  }
  const size_t bytes = row_bytes(s, s->num_q_heads);
  const size_t at = (file_row(s, request) + (size_t)row) * bytes;
  memcpy(dst, (const char *)x->q.data + at, (size_t)num * bytes);
}

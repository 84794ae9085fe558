/* Verification of a prefill: sampled rows against the double-precision reference, all rows against
 * gather-kv, the cache against the data. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "cli/convert.h"
#include "cli/prefill.h"

/* Multiply-adds that the reference may spend on a job: some ten seconds. Beyond that each row
 * checks only every head_step-th head, in turn, so that all heads are still covered. */
static const double budget = 1e10;

/* ---- which rows ---- */

static kvr_status add_row(cli_sample *s, int request, int token) {
  for (int i = s->num; i-- > 0 && s->request[i] == request;)
    if (s->token[i] == token) return KVR_OK;
  if (s->num == s->cap) {
    const int cap = kvr_max(64, 2 * s->cap);
    int **lists[3] = {&s->request, &s->token, &s->head0};
    for (int i = 0; i < 3; i++) {
      int *more = realloc(*lists[i], (size_t)cap * sizeof *more);
      if (more == NULL) return kvr_fail(KVR_E_OOM, "no host memory for %d sampled rows", cap);
      *lists[i] = more;
    }
    s->cap = cap;
  }
  s->request[s->num] = request;
  s->token[s->num++] = token;
  return KVR_OK;
}

/* First and last row of every head and tail chunk, and num_random others. */
static kvr_status add_rows(cli_prefill_job *job, int request, int num_random) {
  const int S = job->step.requests[request].num_new, parts = 2 * job->shape.cache.num_ranks;
  const int chunk = kvr_max(1, kvr_ceil_div(S, parts));
  for (int first = 0; first < S; first += chunk) {
    KVR_TRY(add_row(&job->sample, request, first));
    KVR_TRY(add_row(&job->sample, request, kvr_min(first + chunk, S) - 1));
  }
  for (int i = 0; i < num_random && S > 0; i++) {
    const uint64_t place = (uint64_t)job->step.index << 40 | (uint64_t)request << 24 | (uint64_t)i;
    const uint64_t bits = cli_hash(job->options->seed * 2 + 1 + cli_hash(place));
    KVR_TRY(add_row(&job->sample, request, (int)(bits % (uint64_t)S)));
  }
  return KVR_OK;
}

static int row_end(const cli_prefill_job *job, int sample) {
  const kvr_request *q = &job->step.requests[job->sample.request[sample]];
  return q->num_cached + (job->shape.causal ? job->sample.token[sample] + 1 : q->num_new);
}

static int row_first(const cli_prefill_job *job, int sample) {
  const kvr_request *q = &job->step.requests[job->sample.request[sample]];
  const int past = q->num_cached + job->sample.token[sample] + 1;
  return job->shape.window > 0 ? kvr_max(0, past - job->shape.window) : 0;
}

static void choose_heads(cli_prefill_job *job) {
  const cli_shape *s = &job->shape;
  cli_sample *sample = &job->sample;
  double cost = 0;
  for (int i = 0; i < sample->num; i++) cost += row_end(job, i);
  cost *= 2.0 * s->cache.head_dim * s->num_q_heads * s->num_steps;
  sample->head_step = (int)fmax(1, fmin(s->num_q_heads, ceil(cost / budget)));
  for (int i = 0; i < sample->num; i++) sample->head0[i] = i % sample->head_step;
}

/* ---- their reference ---- */

static size_t row_bytes(const cli_shape *s) {
  return (size_t)s->num_q_heads * (size_t)s->cache.head_dim * kvr_dtype_size(s->cache.dtype);
}

/* Rows [begin, end) of the sample, all of one request. */
static kvr_status run_reference(cli_prefill_job *job, int begin, int end) {
  const cli_shape *s = &job->shape;
  cli_sample *sample = &job->sample;
  const int request = sample->request[begin], num = end - begin;
  const cli_reference reference = {.num_q_heads = s->num_q_heads,
                                   .num_kv_heads = s->cache.num_kv_heads,
                                   .head_dim = s->cache.head_dim,
                                   .scale = (double)s->k_scale / sqrt(s->cache.head_dim),
                                   .q_scale = (double)s->q_scale,
                                   .soft_cap = (double)s->soft_cap,
                                   .sinks = s->sinks,
                                   .value_scale = (double)s->v_scale,
                                   .dtype = s->cache.dtype,
                                   .k = cli_data_k(&job->data, request, 0),
                                   .v = cli_data_v(&job->data, request, 0)};
  cli_reference_row *rows = calloc((size_t)num, sizeof *rows);
  if (rows == NULL) return kvr_fail(KVR_E_OOM, "no host memory for %d reference rows", num);
  for (int i = 0; i < num; i++) {
    const size_t row = (size_t)job->step.first[request] + (size_t)sample->token[begin + i];
    rows[i] = (cli_reference_row){.q = (const char *)job->step.q + row * row_bytes(s),
                                  .first = row_first(job, begin + i),
                                  .end = row_end(job, begin + i),
                                  .head0 = sample->head0[begin + i],
                                  .head_step = sample->head_step};
  }
  const size_t at = (size_t)begin * (size_t)s->num_q_heads;
  const kvr_status status =
      cli_reference_run(&reference, rows, num, sample->out + at * (size_t)s->cache.head_dim,
                        sample->lse + at);
  free(rows);
  return status;
}

kvr_status cli_sample_choose(cli_prefill_job *job) {
  const cli_shape *s = &job->shape;
  cli_sample *sample = &job->sample;
  const int random = kvr_ceil_div(job->options->verify, kvr_max(1, s->num_steps * s->num_requests));
  sample->num = 0;
  for (int i = 0; i < s->num_requests; i++) KVR_TRY(add_rows(job, i, random));
  choose_heads(job);
  const size_t heads = (size_t)sample->num * (size_t)s->num_q_heads + 1;
  free(sample->out);
  free(sample->lse);
  sample->out = calloc(heads * (size_t)s->cache.head_dim, sizeof *sample->out);
  sample->lse = calloc(heads, sizeof *sample->lse);
  if (sample->out == NULL || sample->lse == NULL)
    return kvr_fail(KVR_E_OOM, "no host memory for %d reference rows", sample->num);
  for (int begin = 0, end = 0; begin < sample->num; begin = end) {
    while (end < sample->num && sample->request[end] == sample->request[begin]) end++;
    KVR_TRY(run_reference(job, begin, end));
  }
  job->verified_rows += sample->num;
  return KVR_OK;
}

void cli_sample_compare(const cli_prefill_job *job, cli_run *run) {
  const cli_shape *s = &job->shape;
  const cli_sample *sample = &job->sample;
  const size_t D = (size_t)s->cache.head_dim, NQ = (size_t)s->num_q_heads;
  for (int i = 0; i < sample->num; i++) {
    const size_t row = (size_t)job->step.first[sample->request[i]] + (size_t)sample->token[i];
    for (size_t h = (size_t)sample->head0[i]; h < NQ; h += (size_t)sample->head_step) {
      const size_t at = row * NQ + h, ref = (size_t)i * NQ + h;
      const cli_compared c = {.out = (const char *)job->step.out +
                                     at * D * kvr_dtype_size(s->out_dtype),
                              .out_dtype = s->out_dtype,
                              .lse = job->step.lse[at],
                              .ref = sample->out + ref * D,
                              .ref_lse = sample->lse[ref],
                              .head_dim = s->cache.head_dim,
                              .max_v = job->max_v,
                              .loosen = cli_loosen(run->bf16_math, s->cache.dtype)};
      cli_compare_row(&c, &run->error);
    }
  }
}

/* ---- against gather-kv, and the cache ---- */

void cli_gather_compare(const cli_prefill_job *job, cli_run *run) {
  enum { PIECE = 512 };
  const cli_shape *s = &job->shape;
  const size_t num =
      (size_t)job->step.num_tokens * (size_t)s->num_q_heads * (size_t)s->cache.head_dim;
  const size_t element = kvr_dtype_size(s->out_dtype);
  float a[PIECE], b[PIECE];
  run->compared = true;
  for (size_t i = 0; i < num; i += PIECE) {
    const size_t len = num - i < PIECE ? num - i : PIECE;
    cli_to_float(s->out_dtype, (const char *)job->step.out + i * element, len, a);
    cli_to_float(s->out_dtype, (const char *)job->step.gather_out + i * element, len, b);
    for (size_t j = 0; j < len; j++) {
      const double off = fabs((double)a[j] - (double)b[j]);
      /* Two values next to each other may round to neighbours. */
      const double extra = off - 2 * cli_rounding(s->out_dtype) * fabs((double)b[j]);
      if (!(extra <= run->gather_error)) run->gather_error = isnan(extra) ? HUGE_VAL : extra;
    }
  }
}

static kvr_status compare_rows(const cli_prefill_job *job, int request, int first, int num, void *k,
                               void *v) {
  const kvr_cache_desc *c = &job->shape.cache;
  const size_t row = (size_t)c->num_kv_heads * (size_t)c->head_dim * kvr_dtype_size(c->dtype);
  KVR_TRY(kvr_cache_read(job->cache, job->ids[request], first, num, k, v));
  for (int i = 0; i < num; i++) {
    const size_t at = (size_t)i * row;
    if (memcmp((char *)k + at, cli_data_k(&job->data, request, first + i), row) != 0 ||
        memcmp((char *)v + at, cli_data_v(&job->data, request, first + i), row) != 0)
      return kvr_fail(KVR_E_VERIFY, "the cache of request %d differs from the data at position %d",
                      request, first + i);
  }
  return KVR_OK;
}

kvr_status cli_cache_compare(const cli_prefill_job *job) {
  enum { ROWS = 1024 };
  const kvr_cache_desc *c = &job->shape.cache;
  const size_t row = (size_t)c->num_kv_heads * (size_t)c->head_dim * kvr_dtype_size(c->dtype);
  void *k = malloc(ROWS * row), *v = malloc(ROWS * row);
  kvr_status status =
      k != NULL && v != NULL ? KVR_OK : kvr_fail(KVR_E_OOM, "no host memory for rows");
  for (int i = 0; i < job->shape.num_requests; i++) {
    const int length = kvr_cache_length(job->cache, job->ids[i]);
    const int want = job->shape.requests[i].num_cached + job->shape.requests[i].num_new;
    if (status == KVR_OK && length != want)
      status = kvr_fail(KVR_E_VERIFY, "the cache holds %d tokens of request %d instead of %d",
                        length, i, want);
    for (int first = 0; first < length && status == KVR_OK; first += ROWS)
      status = compare_rows(job, i, first, kvr_min(ROWS, length - first), k, v);
  }
  free(k);
  free(v);
  return status;
}

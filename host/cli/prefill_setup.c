/* From options to a group, a cache filled with the cached tokens, and the list of strategies. */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "cli/prefill.h"

static kvr_status no_memory(const char *what) {
  return kvr_fail(KVR_E_OOM, "no host memory for %s", what);
}

/* Copies the first name of a comma separated list; returns the rest, NULL after the last. */
static const char *next_name(const char *list, char *name, size_t size) {
  const char *end = strchr(list, ',');
  const size_t len = end != NULL ? (size_t)(end - list) : strlen(list);
  snprintf(name, size, "%.*s", (int)(len < size ? len : size - 1), list);
  return end != NULL ? end + 1 : NULL;
}

kvr_status cli_prefill_shapes(cli_prefill_job *job) {
  const cli_options *o = job->options;
  cli_given_shape given = {0};
  if (o->input != NULL) KVR_TRY(cli_data_open(o->input, &job->data, &given));
  if (o->input != NULL && o->verify > 0) KVR_TRY(cli_data_check_finite(o->input, &job->data));
  KVR_TRY(cli_shape_init(o, &given, &job->shape));
  cli_shape *s = &job->shape;
  kvr_request *requests = calloc((size_t)s->num_requests, sizeof *requests);
  if (requests == NULL) return no_memory("requests");
  for (int i = 0; i < s->num_requests; i++) requests[i] = cli_shape_request(s, i, 0, s->chunk);
  const kvr_problem problem = cli_shape_problem(s, requests);
  const bool all = strcmp(o->strategy, "all") == 0;
  kvr_status status = KVR_OK;
  char name[64];
  for (const char *list = o->strategy; list != NULL && status == KVR_OK;) {
    list = next_name(list, name, sizeof name);
    const kvr_options options = cli_shape_options(o, all ? NULL : name);
    if (strcmp(name, "auto") == 0 && strcmp(o->strategy, "auto") != 0)
      status = kvr_fail(KVR_E_CONFLICT, "auto does not go with other strategies in a list");
    else
      status = kvr_problem_check(&problem, &options);
  }
  free(requests);
  return status;
}

/* `all` is every strategy that can serve a cache. */
static bool serves_cache(const char *name) { return strcmp(name, "current-only") != 0; }

static bool is_listed(const char *list, const char *wanted) {
  char name[64];
  while (list != NULL) {
    list = next_name(list, name, sizeof name);
    if (strcmp(name, wanted) == 0) return true;
  }
  return false;
}

static kvr_status list_runs(cli_prefill_job *job) {
  const char *asked = job->options->strategy;
  const bool all = strcmp(asked, "all") == 0;
  job->runs = calloc((size_t)kvr_num_strategies() + 1, sizeof *job->runs);
  if (job->runs == NULL) return no_memory("strategies");
  if (strcmp(asked, "auto") == 0) job->runs[job->num_runs++].name = asked;
  /* First gather-kv, since the others are compared with its output. */
  for (int other = 0; other < 2; other++)
    for (int i = 0; i < kvr_num_strategies(); i++) {
      const char *name = kvr_strategy_name(i);
      const bool first = strcmp(name, "gather-kv") == 0;
      const bool wanted = all ? serves_cache(name) : is_listed(asked, name);
      if (wanted && first == (other == 0)) job->runs[job->num_runs++].name = name;
    }
  const size_t times = (size_t)job->options->repeat * (size_t)kvr_max(job->shape.num_steps, 1);
  for (int i = 0; i < job->num_runs; i++) {
    cli_run *run = &job->runs[i];
    run->ms = calloc(times, sizeof *run->ms);
    run->chosen = calloc((size_t)job->shape.num_steps + 1, sizeof *run->chosen);
    if (run->ms == NULL || run->chosen == NULL) return no_memory("timings");
  }
  return KVR_OK;
}

/* Most new tokens that a step has, over all requests. */
static int step_tokens(const cli_shape *s) {
  int num = 0;
  for (int i = 0; i < s->num_requests; i++) num += kvr_min(s->chunk, s->requests[i].num_new);
  return num;
}

static bool allocate(size_t rows, size_t row_bytes, void **out) {
  size_t bytes;
  if (!kvr_mul_size(rows, row_bytes, &bytes)) return false;
  return (*out = malloc(bytes > 0 ? bytes : 1)) != NULL;
}

static kvr_status allocate_step(cli_prefill_job *job) {
  const cli_shape *s = &job->shape;
  cli_step *step = &job->step;
  const size_t rows = (size_t)step_tokens(s), element = kvr_dtype_size(s->cache.dtype);
  const size_t q_row = (size_t)s->num_q_heads * (size_t)s->cache.head_dim;
  const size_t kv_row = (size_t)s->cache.num_kv_heads * (size_t)s->cache.head_dim * element;
  const size_t out_row = q_row * kvr_dtype_size(s->out_dtype);
  const size_t lse_row = (size_t)s->num_q_heads * sizeof(float);
  step->requests = calloc((size_t)s->num_requests, sizeof *step->requests);
  step->first = calloc((size_t)s->num_requests, sizeof *step->first);
  void *lse = NULL, *all_lse = NULL;
  bool ok = step->requests != NULL && step->first != NULL &&
            allocate(rows, q_row * element, &step->q) && allocate(rows, kv_row, &step->k) &&
            allocate(rows, kv_row, &step->v) && allocate(rows, out_row, &step->out) &&
            allocate(rows, out_row, &step->gather_out) && allocate(rows, lse_row, &lse);
  step->lse = lse;
  if (ok && job->options->output != NULL) {
    size_t all = 0;
    for (int i = 0; i < s->num_requests; i++) all += (size_t)s->requests[i].num_new;
    ok = allocate(all, out_row, &job->all_out) && allocate(all, lse_row, &all_lse);
    job->all_lse = all_lse;
  }
  return ok ? KVR_OK : no_memory("the rows of a step; use a smaller --chunk");
}

static kvr_status fill_cache(cli_prefill_job *job) {
  const cli_shape *s = &job->shape;
  KVR_TRY(kvr_cache_create(job->group, &s->cache, &job->cache));
  job->ids = calloc((size_t)s->num_requests, sizeof *job->ids);
  if (job->ids == NULL) return no_memory("requests");
  for (int i = 0; i < s->num_requests; i++) {
    const cli_length *q = &s->requests[i];
    KVR_TRY(kvr_cache_add(job->cache, &job->ids[i]));
    KVR_TRY(kvr_cache_reserve(job->cache, job->ids[i], q->num_cached + q->num_new));
    if (q->num_cached > 0)
      KVR_TRY(kvr_cache_append(job->cache, job->ids[i], cli_data_k(&job->data, i, 0),
                               cli_data_v(&job->data, i, 0), q->num_cached));
  }
  return KVR_OK;
}

static void find_max_v(cli_prefill_job *job) {
  const cli_shape *s = &job->shape;
  for (int i = 0; i < s->num_requests; i++) {
    const size_t rows = (size_t)s->requests[i].num_cached + (size_t)s->requests[i].num_new;
    const size_t num = rows * (size_t)s->cache.num_kv_heads * (size_t)s->cache.head_dim;
    const double most = cli_max_abs(s->cache.dtype, cli_data_v(&job->data, i, 0), num);
    job->max_v = fmax(job->max_v, most * fabs((double)job->shape.v_scale));
  }
}

/* With a budget each strategy must fit it alone, so only one session exists at a time. */
static kvr_status open_sessions(cli_prefill_job *job) {
  job->keep_sessions = job->options->memory_budget == 0;
  int num = 0;
  for (int i = 0; i < job->num_runs; i++) {
    cli_run *run = &job->runs[i];
    const kvr_status status = cli_prefill_open_session(job, run);
    if (status != KVR_OK && (status != KVR_E_OOM || job->num_runs == 1)) return status;
    if (status != KVR_OK) snprintf(run->refused, sizeof run->refused, "%s", kvr_error_message());
    num += status == KVR_OK;
    if (!job->keep_sessions) {
      kvr_session_destroy(run->session);
      run->session = NULL;
    }
  }
  return num > 0 ? KVR_OK : kvr_fail(KVR_E_OOM, "no strategy fits: %s", job->runs[0].refused);
}

kvr_status cli_prefill_start(cli_prefill_job *job) {
  const cli_options *o = job->options;
  const kvr_group_desc desc = {.struct_size = sizeof desc,
                               .num_ranks = o->ranks,
                               .devices = o->devices,
                               .copy_queue = o->copy_queue,
                               .memory_budget = o->memory_budget,
                               .timeout = o->timeout};
  KVR_TRY(cli_data_prepare(&job->data, &job->shape, o->seed));
  KVR_TRY(list_runs(job));
  KVR_TRY(allocate_step(job));
  KVR_TRY(kvr_group_create(&desc, &job->group));
  KVR_TRY(fill_cache(job));
  KVR_TRY(open_sessions(job));
  if (o->verify > 0) find_max_v(job);
  if (o->trace != NULL) KVR_TRY(kvr_trace_create(&job->trace));
  if (o->op_log != NULL) KVR_TRY(cli_file_open(o->op_log, &job->op_log));
  return KVR_OK;
}

static void free_sample(cli_sample *sample) {
  free(sample->request);
  free(sample->token);
  free(sample->head0);
  free(sample->out);
  free(sample->lse);
}

static void free_step(cli_step *step) {
  free(step->requests);
  free(step->first);
  free(step->q);
  free(step->k);
  free(step->v);
  free(step->out);
  free(step->lse);
  free(step->gather_out);
}

void cli_prefill_fini(cli_prefill_job *job) {
  for (int i = 0; i < job->num_runs; i++) {
    kvr_session_destroy(job->runs[i].session);
    free(job->runs[i].ms);
    free(job->runs[i].chosen);
  }
  free(job->runs);
  kvr_cache_destroy(job->cache);
  kvr_group_destroy(job->group);
  kvr_trace_destroy(job->trace);
  cli_file_close(&job->op_log, 0);
  free_sample(&job->sample);
  free_step(&job->step);
  free(job->all_out);
  free(job->all_lse);
  free(job->ids);
  cli_data_fini(&job->data);
  cli_shape_fini(&job->shape);
}

/* One step of a prefill: every strategy at the same cached length, on the same cache. */
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "cli/prefill.h"

kvr_status cli_prefill_open_session(cli_prefill_job *job, cli_run *run) {
  const cli_shape *s = &job->shape;
  const cli_options *o = job->options;
  kvr_limits limits = {.struct_size = sizeof limits,
                       .num_q_heads = s->num_q_heads,
                       .max_requests = s->num_requests,
                       .tile = o->tile,
                       .query_tile = o->query_tile,
                       .num_slots = o->slots,
                       .out_dtype = s->out_dtype,
                       .math = o->math};
  if (strcmp(run->name, "auto") != 0) limits.strategies = run->name;
  for (int i = 0; i < s->num_requests; i++) {
    const cli_length *q = &s->requests[i];
    /* A request that is done stays in the steps of longer ones, with all its tokens cached. */
    const int before = kvr_min(q->num_new, kvr_max(0, s->num_steps - 1) * s->chunk);
    limits.max_new_tokens += kvr_min(s->chunk, q->num_new);
    limits.max_context = kvr_max(limits.max_context, q->num_cached + before);
  }
  limits.max_new_tokens = kvr_max(1, limits.max_new_tokens); /* a prompt may be empty */
  KVR_TRY(kvr_session_create(job->group, job->cache, &limits, &run->session));
  for (int r = 0; r < s->cache.num_ranks; r++)
    run->bf16_math |= kvr_session_math(run->session, r) == KVR_MATH_BF16;
  return KVR_OK;
}

/* Fills the step with tokens [done, done + most) of every request. */
static void load_step(cli_prefill_job *job, int index, int done, int most) {
  const cli_shape *s = &job->shape;
  cli_step *step = &job->step;
  const size_t element = kvr_dtype_size(s->cache.dtype);
  const size_t q_row = (size_t)s->num_q_heads * (size_t)s->cache.head_dim * element;
  const size_t kv_row = (size_t)s->cache.num_kv_heads * (size_t)s->cache.head_dim * element;
  step->index = index;
  step->num_tokens = 0;
  for (int i = 0; i < s->num_requests; i++) {
    kvr_request request = cli_shape_request(s, i, done, most);
    request.cache_id = job->ids[i];
    const size_t at = (size_t)step->num_tokens, num = (size_t)request.num_new;
    const int first = request.num_cached - s->requests[i].num_cached;
    cli_data_q(&job->data, i, first, request.num_new, (char *)step->q + at * q_row);
    if (num > 0) {
      memcpy((char *)step->k + at * kv_row, cli_data_k(&job->data, i, request.num_cached),
             num * kv_row);
      memcpy((char *)step->v + at * kv_row, cli_data_v(&job->data, i, request.num_cached),
             num * kv_row);
    }
    step->requests[i] = request;
    step->first[i] = step->num_tokens;
    step->num_tokens += request.num_new;
  }
}

/* Back to the cached lengths of the step. */
static kvr_status rewind_cache(const cli_prefill_job *job) {
  for (int i = 0; i < job->shape.num_requests; i++) {
    const kvr_request *q = &job->step.requests[i];
    if (kvr_cache_length(job->cache, job->ids[i]) > q->num_cached)
      KVR_TRY(kvr_cache_truncate(job->cache, job->ids[i], q->num_cached));
  }
  return KVR_OK;
}

/* Milliseconds from the first start to the last end of a step's ops; elapsed where the device does
 * not tell, or tells what cannot be: some drivers stamp commands when they are handed over. */
static double device_ms(const kvr_trace_record *records, int num, double elapsed) {
  int64_t start = INT64_MAX, end = 0;
  for (int i = 0; i < num; i++) {
    if (records[i].end_ns == 0) continue;
    if (records[i].start_ns < start) start = records[i].start_ns;
    if (records[i].end_ns > end) end = records[i].end_ns;
  }
  const double ms = end > start ? (double)(end - start) * 1e-6 : 0;
  const bool too_short = elapsed > 20 && ms < elapsed / 10; /* more than moving inputs takes */
  return ms > 0 && ms <= elapsed && !too_short ? ms : elapsed;
}

static bool moves_bytes(int kind) {
#define MOVES(name, text, moves) moves,
  static const bool moving[KVR_NUM_OPS] = {KVR_OP_LIST(MOVES)};
#undef MOVES
  return kind >= 0 && kind < KVR_NUM_OPS && moving[kind];
}

static void count_records(cli_run *run, const kvr_plan_info *info, const kvr_trace_record *records,
                          int num) {
  for (int i = 0; i < num; i++)
    if (records[i].launched && moves_bytes(records[i].kind)) run->bytes_moved += records[i].bytes;
  run->bytes_formula += info->bytes_formula;
  run->state_traffic += info->state_traffic_bytes;
  run->launches += info->launches;
  if (info->slot_bytes > run->slot_bytes) run->slot_bytes = info->slot_bytes;
  if (info->state_bytes > run->state_bytes) run->state_bytes = info->state_bytes;
}

static void log_records(FILE *out, const char *strategy, int chunk, const kvr_trace_record *records,
                        int num) {
  for (int i = 0; i < num; i++) {
    const kvr_trace_record *r = &records[i];
    fprintf(
        out,
        "{\"strategy\":\"%s\",\"chunk\":%d,\"op\":%d,\"kind\":\"%s\",\"rank\":%d,\"peer\":%d,"
        "\"queue\":%d,\"request\":%d,\"pass\":%d,\"block\":%d,\"step\":%d,\"slot\":%d,"
        "\"launched\":%d,\"bytes\":%lld,\"state_bytes\":%lld,\"start_ns\":%lld,\"end_ns\":%lld}\n",
        strategy, chunk, r->op, kvr_op_name((kvr_op_kind)r->kind), r->rank, r->peer, r->queue,
        r->request, r->pass, r->block, r->step, r->slot, r->launched, (long long)r->bytes,
        (long long)r->state_bytes, (long long)r->start_ns, (long long)r->end_ns);
  }
}

/* Keeps the records of a run's first pass over a step. */
static kvr_status keep_records(cli_prefill_job *job, cli_run *run, kvr_plan *plan) {
  kvr_plan_info info = {0};
  const kvr_trace_record *records;
  int num;
  KVR_TRY(kvr_plan_describe(plan, &info));
  KVR_TRY(kvr_plan_trace(plan, &records, &num));
  count_records(run, &info, records, num);
  run->chosen[job->step.index] = info.strategy;
  snprintf(run->reason, sizeof run->reason, "%s", info.reason != NULL ? info.reason : "");
  if (job->op_log.stream != NULL)
    log_records(job->op_log.stream, run->name, job->step.index, records, num);
  if (job->trace == NULL) return KVR_OK;
  char label[80];
  snprintf(label, sizeof label, "%s chunk %d", run->name, job->step.index);
  return kvr_trace_add(job->trace, label, records, num);
}

static kvr_status execute(cli_prefill_job *job, cli_run *run, double *ms, kvr_plan **out) {
  const cli_shape *s = &job->shape;
  const cli_step *step = &job->step;
  const kvr_tensor q = {.host = step->q, .dtype = s->cache.dtype};
  const kvr_tensor k = {.host = step->k, .dtype = s->cache.dtype};
  const kvr_tensor v = {.host = step->v, .dtype = s->cache.dtype};
  const kvr_tensor result = {.host = step->out, .dtype = s->out_dtype};
  const kvr_tensor lse = {.host = step->lse, .dtype = KVR_F32};
  const kvr_io io = {.struct_size = sizeof io,
                     .placement = KVR_TOKEN_ORDER,
                     .q = &q,
                     .k = &k,
                     .v = &v,
                     .out = &result,
                     .lse = &lse};
  const kvr_problem problem = cli_shape_problem(s, step->requests);
  const kvr_options options = cli_shape_options(job->options, run->name);
  const double start = cli_seconds();
  kvr_plan *plan;
  KVR_TRY(kvr_plan_create(run->session, &problem, &options, &plan));
  const double planned = cli_seconds();
  kvr_status status = kvr_plan_run(plan, &io);
  const double end = cli_seconds();
  const kvr_trace_record *records = NULL;
  int num = 0;
  if (status == KVR_OK) status = kvr_plan_trace(plan, &records, &num);
  if (status != KVR_OK) {
    kvr_plan_destroy(plan);
    return status;
  }
  *ms = (planned - start) * 1e3 + device_ms(records, num, (end - planned) * 1e3);
  *out = plan;
  return KVR_OK;
}

/* Keeps the step's output of the first run for --output. */
static void keep_output(cli_prefill_job *job) {
  const cli_shape *s = &job->shape;
  const size_t lse_row = (size_t)s->num_q_heads;
  const size_t out_row = lse_row * (size_t)s->cache.head_dim * kvr_dtype_size(s->out_dtype);
  size_t token0 = 0;
  for (int i = 0; i < s->num_requests; i++) {
    const kvr_request *q = &job->step.requests[i];
    const size_t to = token0 + (size_t)(q->num_cached - s->requests[i].num_cached);
    const size_t from = (size_t)job->step.first[i], num = (size_t)q->num_new;
    memcpy((char *)job->all_out + to * out_row, (char *)job->step.out + from * out_row,
           num * out_row);
    memcpy(job->all_lse + to * lse_row, job->step.lse + from * lse_row,
           num * lse_row * sizeof(float));
    token0 += (size_t)s->requests[i].num_new;
  }
}

static void compare(cli_prefill_job *job, cli_run *run) {
  const cli_shape *s = &job->shape;
  const size_t row = (size_t)s->num_q_heads * (size_t)s->cache.head_dim;
  const bool gathers = strcmp(run->name, "gather-kv") == 0;
  if (job->options->verify > 0) cli_sample_compare(job, run);
  if (gathers)
    memcpy(job->step.gather_out, job->step.out,
           (size_t)job->step.num_tokens * row * kvr_dtype_size(s->out_dtype));
  if (strcmp(job->runs[0].name, "gather-kv") == 0 && job->runs[0].refused[0] == '\0')
    cli_gather_compare(job, run);
  const cli_run *first = job->runs;
  while (first->refused[0] != '\0') first++;
  if (job->all_out != NULL && run == first) keep_output(job);
}

static kvr_status run_strategy(cli_prefill_job *job, cli_run *run, int repeat) {
  const bool opened = run->session == NULL;
  kvr_plan *plan = NULL;
  KVR_TRY(rewind_cache(job));
  if (opened) KVR_TRY(cli_prefill_open_session(job, run));
  double *ms = &run->ms[(size_t)repeat * (size_t)job->shape.num_steps + (size_t)job->step.index];
  kvr_status status = execute(job, run, ms, &plan);
  if (status == KVR_OK && repeat == 0) {
    run->peak_bytes = kvr_session_bytes(run->session);
    status = keep_records(job, run, plan);
    compare(job, run);
  }
  kvr_plan_destroy(plan);
  if (!opened) return status;
  kvr_session_destroy(run->session);
  run->session = NULL;
  return status;
}

static kvr_status warm_up_run(cli_prefill_job *job, cli_run *run, int num_tokens) {
  for (int i = 0; i < 2; i++) {
    double ms;
    kvr_plan *plan = NULL;
    load_step(job, 0, i * num_tokens, num_tokens);
    KVR_TRY(execute(job, run, &ms, &plan));
    kvr_plan_destroy(plan);
  }
  load_step(job, 0, 0, num_tokens);
  return rewind_cache(job);
}

/* Two small steps each, so that no device compiles or allocates lazily in the first timed one. */
kvr_status cli_prefill_warm_up(cli_prefill_job *job) {
  const cli_shape *s = &job->shape;
  const int num_tokens = kvr_min(s->chunk, 8 * s->cache.num_ranks);
  for (int i = 0; i < s->num_requests; i++)
    if (s->requests[i].num_new < 2 * num_tokens) return KVR_OK;
  for (int i = 0; i < job->num_runs; i++)
    if (job->runs[i].session != NULL && strcmp(job->runs[i].name, "current-only") != 0)
      KVR_TRY(warm_up_run(job, &job->runs[i], num_tokens));
  return KVR_OK;
}

kvr_status cli_prefill_run_step(cli_prefill_job *job, int index) {
  load_step(job, index, index * job->shape.chunk, job->shape.chunk);
  if (job->options->verify > 0) KVR_TRY(cli_sample_choose(job));
  for (int repeat = 0; repeat < job->options->repeat; repeat++)
    for (int i = 0; i < job->num_runs; i++) {
      cli_run *run = &job->runs[i];
      if (run->refused[0] != '\0') continue;
      const kvr_status status = run_strategy(job, run, repeat);
      if (status != KVR_OK) return kvr_fail_at(status, "%s, chunk %d", run->name, index);
    }
  return KVR_OK;
}

/* kvring prefill: chunked prefill over P ranks, by one strategy, by auto or by all. */
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "cli/prefill.h"

static const char notes[] =
    "Each chunk runs under every strategy at the same cached length, on one cache. TTFT is the\n"
    "sum over chunks of planning (kvr_plan_create) and of the time from the first start to the\n"
    "last end of a device command; building programs and moving inputs and outputs to and from\n"
    "the host are not in it. Errors are relative to max|V|; a result is right if its error is at\n"
    "most 2e-5 max|V| and 1e-3 of the RMS of the reference row (and, from gather-kv, 5e-6\n"
    "max|V|); with products of bf16 numbers 500 times that (2,500 times where the cache is not\n"
    "bf16). --verify checks the first and last row of every rank's head and tail in every\n"
    "chunk, and ROWS random rows besides; when that is long, each row checks some of the heads,\n"
    "in turn. With --input and --cached-tokens L the first L tokens of the file fill the cache.\n";

static kvr_status write_output(const cli_prefill_job *job) {
  const cli_shape *s = &job->shape;
  size_t num = 0;
  for (int i = 0; i < s->num_requests; i++) num += (size_t)s->requests[i].num_new;
  const size_t heads = (size_t)s->num_q_heads;
  const cli_tensor tensors[2] = {{.name = "out",
                                  .dtype = s->out_dtype,
                                  .num_dims = 3,
                                  .shape = {num, heads, (size_t)s->cache.head_dim},
                                  .data = job->all_out},
                                 {.name = "lse",
                                  .dtype = KVR_F32,
                                  .num_dims = 2,
                                  .shape = {num, heads},
                                  .data = job->all_lse}};
  return cli_safetensors_write(job->options->output, tensors, 2);
}

static kvr_status run_steps(cli_prefill_job *job) {
  const cli_shape *s = &job->shape;
  double total = 0, done = 0;
  for (int i = 0; i < s->num_steps; i++) total += i + 1;
  KVR_TRY(cli_prefill_warm_up(job));
  cli_progress_start(&job->progress, "prefill");
  for (int i = 0; i < s->num_steps; i++) {
    KVR_TRY(cli_prefill_run_step(job, i));
    cli_progress_show(&job->progress, done += i + 1, total);
  }
  cli_progress_end(&job->progress);
  return job->options->verify > 0 ? cli_cache_compare(job) : KVR_OK;
}

/* Fails with a message that names the first strategy that is wrong. */
static kvr_status judge(const cli_prefill_job *job) {
  for (int i = 0; i < job->num_runs; i++) {
    const cli_run *run = &job->runs[i];
    if (cli_run_is_right(job, run)) continue;
    if (run->bytes_moved != run->bytes_formula)
      return kvr_fail(KVR_E_VERIFY, "%s moved %lld bytes, the formula says %lld", run->name,
                      (long long)run->bytes_moved, (long long)run->bytes_formula);
    if (run->error.factor > 1)
      return kvr_fail(KVR_E_VERIFY, "%s differs from the reference by %.3g times the tolerance",
                      run->name, run->error.factor);
    return kvr_fail(KVR_E_VERIFY, "%s differs from gather-kv by %.3g times the tolerance",
                    run->name, cli_run_gather_factor(job, run));
  }
  return KVR_OK;
}

/* Reports are written of wrong results too, the output only of right ones. */
static kvr_status write_files(cli_prefill_job *job) {
  const cli_options *o = job->options;
  if (o->trace != NULL) KVR_TRY(kvr_trace_write(job->trace, o->trace));
  if (o->op_log != NULL) KVR_TRY(cli_file_close(&job->op_log, 1));
  if (o->json != NULL) KVR_TRY(cli_prefill_json(job, o->json));
  KVR_TRY(judge(job));
  return o->output != NULL ? write_output(job) : KVR_OK;
}

static kvr_status work(cli_prefill_job *job) {
  KVR_TRY(run_steps(job));
  if (job->options->json == NULL || strcmp(job->options->json, "-") != 0) cli_prefill_print(job);
  return write_files(job);
}

static cli_exit run(const cli_options *options) {
  cli_prefill_job job = {.options = options};
  cli_exit code = CLI_OK;
  kvr_status status = cli_prefill_shapes(&job);
  if (status == KVR_OK) status = cli_prefill_start(&job);
  if (status != KVR_OK)
    code = cli_report("prefill", cli_exit_of(status));
  else if ((status = work(&job)) != KVR_OK) {
    cli_progress_end(&job.progress);
    code = cli_report("prefill", CLI_FAILED);
  }
  if (cli_is_stuck(status))
    cli_file_close(&job.op_log, 0); /* all else stays, see there */
  else
    cli_prefill_fini(&job);
  return code;
}

const cli_command cli_prefill = {"prefill", CLI_CMD_PREFILL,
                                 "Prefill a prompt chunk by chunk over P ranks, and verify it",
                                 notes, run};

/* What a prefill found, as a table and as JSON. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "cli/prefill.h"

/* ---- numbers ---- */

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Median of num values, which are sorted in place; NaN of none. */
static double median(double *values, int num) {
  if (num == 0) return (double)NAN;
  qsort(values, (size_t)num, sizeof *values, by_value);
  return num % 2 != 0 ? values[num / 2] : 0.5 * (values[num / 2 - 1] + values[num / 2]);
}

enum { MAX_REPEAT = 1000 };

static double step_ms(const cli_prefill_job *job, const cli_run *run, int repeat, int step) {
  return run->ms[(size_t)repeat * (size_t)job->shape.num_steps + (size_t)step];
}

static double total_ms(const cli_prefill_job *job, const cli_run *run, int repeat) {
  double sum = 0;
  for (int i = 0; i < job->shape.num_steps; i++) sum += step_ms(job, run, repeat, i);
  return sum;
}

static double ttft_ms(const cli_prefill_job *job, const cli_run *run) {
  double values[MAX_REPEAT];
  for (int i = 0; i < job->options->repeat; i++) values[i] = total_ms(job, run, i);
  return median(values, job->options->repeat);
}

static double chunk_ms(const cli_prefill_job *job, const cli_run *run, int step) {
  double values[MAX_REPEAT];
  for (int i = 0; i < job->options->repeat; i++) values[i] = step_ms(job, run, i, step);
  return median(values, job->options->repeat);
}

/* Median over repeats of the time of a over that of b in the same repeat. */
static double paired_ratio(const cli_prefill_job *job, const cli_run *a, const cli_run *b) {
  double values[MAX_REPEAT];
  for (int i = 0; i < job->options->repeat; i++)
    values[i] = total_ms(job, a, i) / total_ms(job, b, i);
  return median(values, job->options->repeat);
}

/* Visible pairs of query row and key in a step. */
static double num_pairs(const cli_shape *s, const kvr_request *q) {
  const double S = q->num_new, L = q->num_cached;
  if (s->window == 0) return S * L + (s->causal ? S * (S + 1) / 2 : S * S);
  double pairs = 0;
  for (int t = 0; t < q->num_new; t++) {
    const double end = L + (s->causal ? t + 1 : S);
    pairs += end - fmax(0, L + t + 1 - s->window);
  }
  return pairs;
}

/* Floating point operations of the visible pairs of query row and key. */
static double num_flops(const cli_shape *s) {
  double pairs = 0;
  for (int step = 0; step < s->num_steps; step++)
    for (int i = 0; i < s->num_requests; i++) {
      const kvr_request q = cli_shape_request(s, i, step * s->chunk, s->chunk);
      pairs += num_pairs(s, &q);
    }
  return pairs * 4 * s->cache.head_dim * s->num_q_heads;
}

double cli_run_gather_factor(const cli_prefill_job *job, const cli_run *run) {
  if (!run->compared || job->options->verify == 0) return 0;
  /* With bf16 products two strategies round different probabilities. */
  const double loosen = cli_loosen(run->bf16_math, job->shape.cache.dtype);
  const double tolerance = run->bf16_math ? 2e-5 * loosen : 5e-6;
  return job->max_v > 0 ? run->gather_error / (tolerance * job->max_v) : run->gather_error > 0;
}

bool cli_run_is_right(const cli_prefill_job *job, const cli_run *run) {
  if (run->refused[0] != '\0') return true;
  return run->error.factor <= 1 && cli_run_gather_factor(job, run) <= 1 &&
         run->bytes_moved == run->bytes_formula;
}

/* ---- table ---- */

static void print_error(double error, double max_v, bool known) {
  if (known && max_v > 0)
    printf(" %9.1e", error / max_v);
  else
    printf(" %9s", "-");
}

static void print_run(const cli_prefill_job *job, const cli_run *run) {
  const double MIB = 1.0 / (1 << 20);
  double least = HUGE_VAL, most = 0;
  for (int i = 0; i < job->shape.num_steps; i++) {
    const double ms = chunk_ms(job, run, i);
    least = fmin(least, ms);
    most = fmax(most, ms);
  }
  char chunks[40] = "-";
  if (job->shape.num_steps > 0) snprintf(chunks, sizeof chunks, "%.1f..%.1f", least, most);
  printf("%-16s %10.1f %18s", run->name, ttft_ms(job, run), chunks);
  print_error(run->error.max_abs, job->max_v, job->options->verify > 0);
  print_error(run->gather_error, job->max_v, run->compared && job->options->verify > 0);
  printf(" %11.3f %11.3f %-8s %8lld %10.1f %10.1f\n", (double)run->bytes_moved * MIB,
         (double)run->bytes_formula * MIB,
         run->bytes_moved == run->bytes_formula ? "ok" : "MISMATCH", (long long)run->launches,
         (double)run->state_traffic * MIB, (double)run->peak_bytes * MIB);
}

static const cli_run *find_run(const cli_prefill_job *job, const char *name) {
  for (int i = 0; i < job->num_runs; i++)
    if (strcmp(job->runs[i].name, name) == 0 && job->runs[i].refused[0] == '\0')
      return &job->runs[i];
  return NULL;
}

/* Notes on spread and pairs of strategies, when there is more than one run of each. */
static void print_repeats(const cli_prefill_job *job) {
  const cli_run *ring = find_run(job, "ring");
  static const char *const rivals[] = {"ring-two-launch", "gather-kv"};
  if (job->options->repeat < 2) return;
  for (int i = 0; i < job->num_runs; i++) {
    double least = HUGE_VAL, most = 0;
    const cli_run *run = &job->runs[i];
    if (run->refused[0] != '\0') continue;
    for (int k = 0; k < job->options->repeat; k++) {
      least = fmin(least, total_ms(job, run, k));
      most = fmax(most, total_ms(job, run, k));
    }
    printf("%s: %.1f to %.1f ms over %d runs\n", run->name, least, most, job->options->repeat);
  }
  for (int i = 0; i < 2 && ring != NULL; i++) {
    const cli_run *rival = find_run(job, rivals[i]);
    if (rival != NULL)
      printf("ring / %s: %.3f (median of paired ratios)\n", rivals[i],
             paired_ratio(job, ring, rival));
  }
}

static void print_notes(const cli_prefill_job *job) {
  kvr_device_info device;
  for (int i = 0; i < job->num_runs; i++) {
    const cli_run *run = &job->runs[i];
    if (run->refused[0] != '\0') printf("%s: refused: %s\n", run->name, run->refused);
    if (strcmp(run->name, "auto") == 0 && job->shape.num_steps > 0)
      printf("auto took %s for the last chunk: %s\n", run->chosen[job->shape.num_steps - 1],
             run->reason);
  }
  print_repeats(job);
  if (job->num_runs > 0 && job->runs[0].bf16_math)
    printf("Products of bf16 numbers; --math f32 is more exact and slower.\n");
  if (job->options->verify > 0)
    printf("Errors are relative to max|V| = %.3g, over %lld rows%s. LSE off by at most %.1e.\n",
           job->max_v, (long long)job->verified_rows,
           job->sample.head_step > 1 ? " (late chunks: a sample of the heads of each)" : "",
           job->runs[job->num_runs - 1].error.max_lse);
  if (kvr_group_device(job->group, 0, &device) != KVR_OK) return;
  if (strcmp(device.type, "cpu") == 0 && job->shape.cache.num_ranks > 1)
    printf("The %d ranks share the cores of %s: times show total work, not a speed-up by ranks.\n",
           job->shape.cache.num_ranks, device.name);
}

void cli_prefill_print(const cli_prefill_job *job) {
  printf("%-16s %10s %18s %9s %9s %11s %11s %-8s %8s %10s %10s\n", "strategy", "TTFT ms",
         "chunk ms", "err ref", "err g-kv", "moved MiB", "formula", "", "launches", "state MiB",
         "peak MiB");
  for (int i = 0; i < job->num_runs; i++)
    if (job->runs[i].refused[0] == '\0') print_run(job, &job->runs[i]);
  print_notes(job);
}

/* ---- JSON ---- */

static void add_times(const cli_prefill_job *job, const cli_run *run, cJSON *item) {
  cli_json_number(item, "ttft_ms", ttft_ms(job, run));
  cJSON *chunks = cJSON_AddArrayToObject(item, "chunk_ms");
  for (int i = 0; i < job->shape.num_steps; i++)
    cJSON_AddItemToArray(chunks, cJSON_CreateNumber(chunk_ms(job, run, i)));
  cJSON *runs = cJSON_AddArrayToObject(item, "ttft_ms_runs");
  for (int i = 0; i < job->options->repeat; i++)
    cJSON_AddItemToArray(runs, cJSON_CreateNumber(total_ms(job, run, i)));
  cJSON *ratios = cJSON_AddObjectToObject(item, "paired_ratio");
  for (int i = 0; i < job->num_runs; i++)
    if (&job->runs[i] != run && job->runs[i].refused[0] == '\0')
      cli_json_number(ratios, job->runs[i].name, paired_ratio(job, run, &job->runs[i]));
}

static void add_errors(const cli_prefill_job *job, const cli_run *run, cJSON *item) {
  const bool verified = job->options->verify > 0 && job->max_v > 0;
  cli_json_number(item, "max_err_reference",
                  verified ? run->error.max_abs / job->max_v : (double)NAN);
  cli_json_number(item, "max_err_gather_kv",
                  verified && run->compared ? run->gather_error / job->max_v : (double)NAN);
  cli_json_number(item, "max_err_lse", verified ? run->error.max_lse : (double)NAN);
  cli_json_number(item, "tolerance_factor",
                  verified ? fmax(run->error.factor, cli_run_gather_factor(job, run))
                           : (double)NAN);
}

static cJSON *run_json(const cli_prefill_job *job, const cli_run *run) {
  cJSON *item = cJSON_CreateObject();
  cJSON_AddStringToObject(item, "name", run->name);
  cJSON_AddStringToObject(item, "math", run->bf16_math ? "bf16" : "f32");
  add_times(job, run, item);
  add_errors(job, run, item);
  cJSON_AddNumberToObject(item, "bytes_moved", (double)run->bytes_moved);
  cJSON_AddNumberToObject(item, "bytes_formula", (double)run->bytes_formula);
  cJSON_AddNumberToObject(item, "state_traffic_bytes", (double)run->state_traffic);
  cJSON_AddNumberToObject(item, "launches", (double)run->launches);
  cJSON_AddNumberToObject(item, "slot_bytes", (double)run->slot_bytes);
  cJSON_AddNumberToObject(item, "state_bytes", (double)run->state_bytes);
  cJSON_AddNumberToObject(item, "peak_bytes_per_rank", (double)run->peak_bytes);
  cli_json_number(item, "gflops", num_flops(&job->shape) / ttft_ms(job, run) * 1e-6);
  cJSON_AddNullToObject(item, "fraction_of_peak");
  cJSON *chosen = cJSON_AddArrayToObject(item, "strategy_per_chunk");
  for (int i = 0; i < job->shape.num_steps; i++)
    cJSON_AddItemToArray(chosen, cJSON_CreateString(run->chosen[i]));
  cJSON_AddBoolToObject(item, "right", cli_run_is_right(job, run));
  return item;
}

kvr_status cli_prefill_json(const cli_prefill_job *job, const char *path) {
  cJSON *root = cJSON_CreateObject();
  kvr_device_info device;
  if (kvr_group_device(job->group, 0, &device) == KVR_OK) {
    cJSON_AddStringToObject(root, "device", device.name);
    cJSON_AddStringToObject(root, "driver", device.driver);
  }
  cJSON_AddNumberToObject(root, "ranks", job->shape.cache.num_ranks);
  cli_shape_json(job->options, &job->shape, root);
  cJSON_AddNumberToObject(root, "verified_rows", (double)job->verified_rows);
  cli_json_number(root, "max_abs_v", job->max_v);
  cJSON *strategies = cJSON_AddArrayToObject(root, "strategies");
  cJSON *refused = cJSON_AddArrayToObject(root, "refused");
  for (int i = 0; i < job->num_runs; i++) {
    const cli_run *run = &job->runs[i];
    if (run->refused[0] == '\0') {
      cJSON_AddItemToArray(strategies, run_json(job, run));
      continue;
    }
    cJSON *item = cJSON_CreateObject();
    cJSON_AddStringToObject(item, "name", run->name);
    cJSON_AddStringToObject(item, "reason", run->refused);
    cJSON_AddItemToArray(refused, item);
  }
  const kvr_status status = cli_json_write(path, root);
  cJSON_Delete(root);
  return status;
}

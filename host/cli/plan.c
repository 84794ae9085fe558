/* kvring plan: what auto would choose for a step, and what each strategy would cost. No device. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/json.h"
#include "cli/progress.h"
#include "cli/shape.h"

static const char notes[] =
    "The step is the last chunk of the prompt, the one with the most cached tokens.\n"
    "plan ms is what it took to build and verify the schedule just now. predicted_ms in the JSON\n"
    "is null: this version has no cost model.\n";

typedef struct candidate {
  const char *name;
  bool possible;
  char why_not[200];
  kvr_plan_info info;
  double plan_ms; /* to build and verify the schedule */
} candidate;

static void estimate(const kvr_problem *problem, const cli_options *o, candidate *c) {
  const kvr_options options = cli_shape_options(o, c->name);
  c->info = (kvr_plan_info){0};
  const double start = cli_seconds();
  c->possible = kvr_plan_estimate(problem, &options, &c->info) == KVR_OK;
  c->plan_ms = 1e3 * (cli_seconds() - start);
  if (!c->possible) snprintf(c->why_not, sizeof c->why_not, "%s", kvr_error_message());
}

static void print_candidate(const candidate *c, const char *choice) {
  const double MIB = 1.0 / (1 << 20);
  if (!c->possible)
    printf("  %-16s not possible: %s\n", c->name, c->why_not);
  else
    printf("%c %-16s %12.3f %9d %12.3f %12.3f %8.2f\n", strcmp(c->name, choice) == 0 ? '*' : ' ',
           c->name, (double)c->info.bytes_moved * MIB, c->info.launches,
           (double)c->info.state_traffic_bytes * MIB, (double)c->info.peak_bytes * MIB, c->plan_ms);
}

static void print_step(const kvr_problem *p) {
  for (int i = 0; i < p->num_requests; i++)
    printf("request %d: %d new tokens after %d cached ones\n", i, p->requests[i].num_new,
           p->requests[i].num_cached);
  printf("\n  %-16s %12s %9s %12s %12s %8s\n", "strategy", "bytes MiB", "launches", "state MiB",
         "peak MiB", "plan ms");
}

static cJSON *candidate_json(const candidate *c) {
  cJSON *item = cJSON_CreateObject();
  cJSON_AddStringToObject(item, "name", c->name);
  cJSON_AddNullToObject(item, "predicted_ms");
  if (c->possible) {
    cJSON_AddNumberToObject(item, "bytes", (double)c->info.bytes_moved);
    cJSON_AddNumberToObject(item, "peak_bytes", (double)c->info.peak_bytes);
    cJSON_AddNumberToObject(item, "launches", c->info.launches);
    cJSON_AddNumberToObject(item, "state_traffic_bytes", (double)c->info.state_traffic_bytes);
    cJSON_AddNumberToObject(item, "slot_bytes", (double)c->info.slot_bytes);
    cJSON_AddNumberToObject(item, "state_bytes", (double)c->info.state_bytes);
    cJSON_AddNumberToObject(item, "plan_ms", c->plan_ms);
  } else {
    cJSON_AddNullToObject(item, "bytes");
    cJSON_AddNullToObject(item, "peak_bytes");
    cJSON_AddStringToObject(item, "why_not", c->why_not);
  }
  return item;
}

static kvr_status show(const cli_options *o, const cli_shape *shape, const kvr_problem *problem,
                       const char *choice, const char *reason) {
  const bool print = o->json == NULL || strcmp(o->json, "-") != 0;
  cJSON *root = cJSON_CreateObject();
  cJSON_AddStringToObject(root, "choice", choice);
  cJSON_AddStringToObject(root, "reason", reason);
  cli_shape_json(o, shape, root);
  cJSON *list = cJSON_AddArrayToObject(root, "candidates");
  if (print) print_step(problem);
  for (int i = 0; i < kvr_num_strategies(); i++) {
    candidate c = {.name = kvr_strategy_name(i)};
    estimate(problem, o, &c);
    if (print) print_candidate(&c, choice);
    cJSON_AddItemToArray(list, candidate_json(&c));
  }
  if (print) printf("\nchoice: %s: %s\n", choice, reason);
  const kvr_status status = o->json != NULL ? cli_json_write(o->json, root) : KVR_OK;
  cJSON_Delete(root);
  return status;
}

static kvr_status plan(const cli_options *o, const cli_shape *shape, kvr_request *requests) {
  const int last = shape->num_steps > 0 ? (shape->num_steps - 1) * shape->chunk : 0;
  for (int i = 0; i < shape->num_requests; i++)
    requests[i] = cli_shape_request(shape, i, last, shape->chunk);
  const kvr_problem problem = cli_shape_problem(shape, requests);
  const bool chosen_by_us = strcmp(o->strategy, "all") == 0;
  const kvr_options options = cli_shape_options(o, chosen_by_us ? NULL : o->strategy);
  const char *choice;
  char reason[256] = "";
  KVR_TRY(kvr_choose(&problem, &options, o->memory_budget, &choice, reason, sizeof reason));
  return show(o, shape, &problem, choice, reason);
}

static cli_exit run(const cli_options *options) {
  const cli_given_shape no_file = {0};
  cli_shape shape;
  kvr_status status = cli_shape_init(options, &no_file, &shape);
  if (status != KVR_OK) return cli_report("plan", cli_exit_of(status));
  kvr_request *requests = calloc((size_t)shape.num_requests, sizeof *requests);
  cli_exit code = CLI_OK;
  if (requests != NULL)
    status = plan(options, &shape, requests);
  else
    status = kvr_fail(KVR_E_OOM, "no host memory for requests");
  if (status != KVR_OK) code = cli_report("plan", cli_exit_of(status));
  free(requests);
  cli_shape_fini(&shape);
  return code;
}

const cli_command cli_plan = {"plan", CLI_CMD_PLAN,
                              "Show what auto would choose for a step and what each strategy costs",
                              notes, run};

/* kvring check: the correctness suite on the user's own device. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/check.h"
#include "cli/json.h"

static const char notes[] = "A configuration is one strategy in one random case: ranks, map, "
                            "weights, dtype, heads, requests,\n"
                            "pages in random order in a pool of NaN. Right means: every output row "
                            "and LSE agrees with the\n"
                            "double-precision reference, every byte of the cache is as expected, "
                            "and the bytes moved follow\n"
                            "the formula. Negative controls are mistakes made on purpose; each "
                            "must be noticed, by a factor\n"
                            "(error / tolerance) of at least 1, and 50 for other cache contents.\n";

enum {
  QUICK_CONFIGURATIONS = 200,
  FULL_CONFIGURATIONS = 2000,
  FULL_PER_CLASS = 20,
  MAX_CASES = 1000,
  MAX_PRINTED = 20
};

typedef struct suite {
  const cli_options *options;
  check_groups groups;
  check_classes classes;
  check_control controls[CHECK_CONTROLS];
  int cases, passed, failed, skipped;
  double worst; /* largest error / tolerance of what passed */
  bool print;
  cli_progress progress;
} suite;

static int num_configurations(const suite *s) { return s->passed + s->failed + s->skipped; }

/* Strategies that a case is run with: those asked for; current-only only without a cache. */
static bool runs_strategy(const suite *s, const check_case *c, const char *name) {
  const char *asked = s->options->strategy;
  if (strcmp(asked, "auto") != 0 && strcmp(asked, "all") != 0 && strcmp(asked, name) != 0)
    return false;
  if (strcmp(name, "current-only") != 0) return true;
  for (int i = 0; i < c->num_requests; i++)
    if (c->requests[i].num_cached > 0) return false;
  return true;
}

static void print_failure(suite *s, const check_case *c, const char *strategy, const char *text) {
  char described[320];
  if (!s->print || s->failed > MAX_PRINTED) return;
  cli_progress_end(&s->progress);
  check_case_describe(c, described, sizeof described);
  printf("FAILED %s: %s\n  %s\n  repeat: kvring check --seed %llu --only %d --strategy %s%s\n",
         strategy, text, described, (unsigned long long)s->options->seed, c->index, strategy,
         s->options->full ? " --full" : "");
}

static void run_configuration(suite *s, check_trial *trial, const check_case *c, const char *name) {
  check_verdict verdict;
  check_trial_run(trial, name, &verdict);
  if (verdict.outcome == CHECK_PASSED) {
    s->passed++;
    if (verdict.factor > s->worst) s->worst = verdict.factor;
  } else if (verdict.outcome == CHECK_SKIPPED) {
    s->skipped++;
    if (s->print) printf("skipped %s in case %d: %s\n", name, c->index, verdict.text);
    return;
  } else {
    s->failed++;
    print_failure(s, c, name, verdict.text);
  }
  check_classes_count(&s->classes, c, name, verdict.last_step);
}

static void run_case(suite *s, int index) {
  check_case c;
  check_trial trial;
  check_case_generate(s->options->seed, index, !s->options->full, &c);
  const kvr_status opened = check_trial_open(&s->groups, &c, s->options->seed, &trial);
  char why[CHECK_TEXT] = "";
  if (opened != KVR_OK) snprintf(why, sizeof why, "%s", kvr_error_message());
  for (int i = 0; i < kvr_num_strategies(); i++) {
    const char *name = kvr_strategy_name(i);
    if (!runs_strategy(s, &c, name)) continue;
    if (opened == KVR_OK) {
      run_configuration(s, &trial, &c, name);
      continue;
    }
    s->failed++;
    print_failure(s, &c, name, why);
  }
  s->cases++;
  check_trial_close(&trial);
}

static int smallest_class(const suite *s) {
  int least = s->classes.list[0].count;
  for (int i = 1; i < s->classes.num; i++)
    if (s->classes.list[i].count < least) least = s->classes.list[i].count;
  return least;
}

static void run_cases(suite *s) {
  const cli_options *o = s->options;
  const int want = o->full ? FULL_CONFIGURATIONS : QUICK_CONFIGURATIONS;
  cli_progress_start(&s->progress, "check");
  if (o->only >= 0)
    run_case(s, o->only);
  else
    for (int i = 0; i < MAX_CASES; i++) {
      const bool enough = num_configurations(s) >= want;
      if (enough && (!o->full || smallest_class(s) >= FULL_PER_CLASS)) break;
      run_case(s, i);
      cli_progress_show(&s->progress, num_configurations(s), want);
    }
  cli_progress_end(&s->progress);
}

/* ---- results ---- */

static int missed_controls(const suite *s) {
  int num = 0;
  for (int i = 0; i < CHECK_CONTROLS; i++) num += !(s->controls[i].factor >= s->controls[i].needed);
  return num;
}

/* A full run of all strategies must hit every class. */
static bool lacks_coverage(const suite *s) {
  const char *asked = s->options->strategy;
  const bool all = strcmp(asked, "auto") == 0 || strcmp(asked, "all") == 0;
  return s->options->full && s->options->only < 0 && all && smallest_class(s) < FULL_PER_CLASS;
}

static void print_results(const suite *s) {
  printf("\nconfigurations by class:\n");
  for (int i = 0; i < s->classes.num; i++)
    printf("  %-28s %6d\n", s->classes.list[i].name, s->classes.list[i].count);
  printf("\nnegative controls, error / tolerance (must be noticed):\n");
  for (int i = 0; i < CHECK_CONTROLS; i++)
    printf("  %-28s %12.4g  %s\n", s->controls[i].name, s->controls[i].factor,
           s->controls[i].factor >= s->controls[i].needed ? "noticed" : "MISSED");
  printf("\n%d configurations in %d cases: %d passed, %d failed, %d skipped; "
         "worst error %.2f of the tolerance\n",
         num_configurations(s), s->cases, s->passed, s->failed, s->skipped, s->worst);
}

static kvr_status write_json(const suite *s, const char *path) {
  cJSON *root = cJSON_CreateObject();
  cJSON_AddNumberToObject(root, "configurations", num_configurations(s));
  cJSON_AddNumberToObject(root, "passed", s->passed);
  cJSON_AddNumberToObject(root, "failed", s->failed);
  cJSON_AddNumberToObject(root, "skipped", s->skipped);
  cli_json_number(root, "worst_factor", s->worst);
  cJSON *classes = cJSON_AddArrayToObject(root, "classes");
  for (int i = 0; i < s->classes.num; i++) {
    cJSON *item = cJSON_CreateObject();
    cJSON_AddStringToObject(item, "name", s->classes.list[i].name);
    cJSON_AddNumberToObject(item, "count", s->classes.list[i].count);
    cJSON_AddItemToArray(classes, item);
  }
  cJSON *controls = cJSON_AddArrayToObject(root, "negative_controls");
  for (int i = 0; i < CHECK_CONTROLS; i++) {
    cJSON *item = cJSON_CreateObject();
    cJSON_AddStringToObject(item, "name", s->controls[i].name);
    cli_json_number(item, "factor", s->controls[i].factor);
    cJSON_AddItemToArray(controls, item);
  }
  const kvr_status status = cli_json_write(path, root);
  cJSON_Delete(root);
  return status;
}

static kvr_status judge(const suite *s) {
  if (s->failed > 0)
    return kvr_fail(KVR_E_VERIFY, "%d of %d configurations failed", s->failed,
                    num_configurations(s));
  if (missed_controls(s) > 0)
    return kvr_fail(KVR_E_VERIFY, "%d negative controls were not noticed", missed_controls(s));
  if (num_configurations(s) == s->skipped)
    return kvr_fail(KVR_E_VERIFY, "nothing ran: all %d configurations were skipped", s->skipped);
  if (lacks_coverage(s))
    return kvr_fail(KVR_E_VERIFY,
                    "a class has %d configurations, fewer than %d; use another --seed",
                    smallest_class(s), FULL_PER_CLASS);
  return KVR_OK;
}

static kvr_status run_suite(suite *s) {
  const cli_options *o = s->options;
  kvr_group *group;
  check_classes_init(&s->classes);
  KVR_TRY(check_groups_get(&s->groups, 1, false, &group)); /* no device: say so once */
  run_cases(s);
  KVR_TRY(check_controls_run(&s->groups, o->seed, s->controls));
  if (s->print) print_results(s);
  if (o->json != NULL) KVR_TRY(write_json(s, o->json));
  return judge(s);
}

static kvr_status check_options(const cli_options *o) {
  if (o->quick && o->full)
    return kvr_fail(KVR_E_CONFLICT, "--quick and --full exclude each other; leave one out");
  if (strcmp(o->strategy, "auto") == 0 || strcmp(o->strategy, "all") == 0) return KVR_OK;
  for (int i = 0; i < kvr_num_strategies(); i++)
    if (strcmp(o->strategy, kvr_strategy_name(i)) == 0) return KVR_OK;
  return kvr_fail(KVR_E_RANGE, "--strategy is '%.40s'; use all or the name of one strategy",
                  o->strategy);
}

static cli_exit run(const cli_options *options) {
  if (check_options(options) != KVR_OK) return cli_report("check", CLI_USAGE);
  suite *s = calloc(1, sizeof *s);
  cli_exit code = CLI_OK;
  if (s == NULL) {
    (void)kvr_fail(KVR_E_OOM, "no host memory");
    return cli_report("check", CLI_FAILED);
  }
  s->options = options;
  s->groups.devices = options->devices;
  s->print = options->json == NULL || strcmp(options->json, "-") != 0;
  if (run_suite(s) != KVR_OK) code = cli_report("check", CLI_FAILED);
  check_groups_fini(&s->groups);
  free(s);
  return code;
}

const cli_command cli_check = {"check", CLI_CMD_CHECK,
                               "Check every strategy against a double-precision reference", notes,
                               run};

/* What a check found, in words and as JSON. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "cli/check_suite.h"
#include "cli/json.h"

/* ---- failures ---- */

__attribute__((format(printf, 3, 4))) static void append(char *text, size_t size,
                                                         const char *format, ...) {
  const size_t used = strlen(text);
  va_list args;
  va_start(args, format);
  vsnprintf(text + used, size - used, format, args);
  va_end(args);
}

/* The command that runs this configuration alone: a case depends on the seed, its number and
 * whether the suite is a quick one. */
static void write_repeat(const check_suite *s, check_failure *f) {
  const cli_options *o = s->options;
  char *to = f->repeat;
  const size_t size = sizeof f->repeat;
  to[0] = '\0';
  append(to, size, "kvring check%s --seed %llu --only %d --strategy %s",
         check_is_quick(o) ? "" : " --full", (unsigned long long)o->seed, f->index, f->strategy);
  if (o->devices != NULL) append(to, size, " --devices '%.200s'", o->devices);
  if (o->timeout != KVR_DEFAULT_TIMEOUT) append(to, size, " --timeout %g", o->timeout);
}

void check_report_failure(check_suite *s, const check_case *c, const char *strategy,
                          const char *text) {
  if (s->failed > CHECK_FAILURES) return;
  check_failure *f = &s->failures[s->failed - 1];
  f->index = c->index;
  f->strategy = strategy;
  snprintf(f->text, sizeof f->text, "%s", text);
  check_case_describe(c, f->described, sizeof f->described);
  write_repeat(s, f);
  if (!s->print) return;
  cli_progress_end(&s->progress);
  printf("FAILED %s: %s\n  %s\n  repeat: %s\n", strategy, f->text, f->described, f->repeat);
  fflush(stdout);
}

void check_report_skipped(check_suite *s, const check_case *c, const char *strategy,
                          const char *text) {
  if (!s->print) return;
  cli_progress_end(&s->progress);
  printf("skipped %s in case %d: %s\n", strategy, c->index, text);
}

/* ---- in words ---- */

bool check_control_missed(const check_control *control) {
  return !(control->factor >= control->needed);
}

void check_report_print(const check_suite *s) {
  printf("\nconfigurations by class:\n");
  for (int i = 0; i < s->classes.num; i++)
    printf("  %-28s %6d\n", s->classes.list[i].name, s->classes.list[i].count);
  printf("\nnegative controls, error / tolerance (must be noticed):\n");
  for (int i = 0; i < CHECK_CONTROLS; i++)
    printf("  %-28s %12.4g  %s\n", s->controls[i].name, s->controls[i].factor,
           check_control_missed(&s->controls[i]) ? "MISSED" : "noticed");
  printf("\n%d configurations in %d cases: %d passed, %d failed, %d skipped; "
         "worst error %.2f of the tolerance\n",
         check_num_configurations(s), s->cases, s->passed, s->failed, s->skipped, s->worst);
  if (s->options->soak > 0)
    printf("%.1f s, %.1f configurations/s, seed %llu, cases 0 to %d\n", s->seconds,
           check_num_configurations(s) / s->seconds, (unsigned long long)s->options->seed,
           s->cases - 1);
}

/* ---- JSON ---- */

static void add_classes(const check_suite *s, cJSON *root) {
  cJSON *classes = cJSON_AddArrayToObject(root, "classes");
  for (int i = 0; i < s->classes.num; i++) {
    cJSON *item = cJSON_CreateObject();
    cJSON_AddStringToObject(item, "name", s->classes.list[i].name);
    cJSON_AddNumberToObject(item, "count", s->classes.list[i].count);
    cJSON_AddItemToArray(classes, item);
  }
}

static void add_controls(const check_suite *s, cJSON *root) {
  cJSON *controls = cJSON_AddArrayToObject(root, "negative_controls");
  for (int i = 0; i < CHECK_CONTROLS; i++) {
    cJSON *item = cJSON_CreateObject();
    cJSON_AddStringToObject(item, "name", s->controls[i].name);
    cli_json_number(item, "factor", s->controls[i].factor);
    cJSON_AddItemToArray(controls, item);
  }
}

static void add_failures(const check_suite *s, cJSON *root) {
  cJSON *failures = cJSON_AddArrayToObject(root, "failures");
  for (int i = 0; i < s->failed && i < CHECK_FAILURES; i++) {
    const check_failure *f = &s->failures[i];
    cJSON *item = cJSON_CreateObject();
    cJSON_AddNumberToObject(item, "case", f->index);
    cJSON_AddStringToObject(item, "strategy", f->strategy);
    cJSON_AddStringToObject(item, "text", f->text);
    cJSON_AddStringToObject(item, "configuration", f->described);
    cJSON_AddStringToObject(item, "repeat", f->repeat);
    cJSON_AddItemToArray(failures, item);
  }
}

kvr_status check_report_json(const check_suite *s, const char *path) {
  const cli_options *o = s->options;
  cJSON *root = cJSON_CreateObject();
  char seed[24]; /* as text: beyond 2^53 a JSON number would not hold it */
  snprintf(seed, sizeof seed, "%llu", (unsigned long long)o->seed);
  cJSON_AddStringToObject(root, "mode", o->soak > 0 ? "soak" : o->full ? "full" : "quick");
  cJSON_AddStringToObject(root, "seed", seed);
  cJSON_AddNumberToObject(root, "seconds", s->seconds);
  cJSON_AddNumberToObject(root, "cases", s->cases);
  cJSON_AddNumberToObject(root, "configurations", check_num_configurations(s));
  cJSON_AddNumberToObject(root, "passed", s->passed);
  cJSON_AddNumberToObject(root, "failed", s->failed);
  cJSON_AddNumberToObject(root, "skipped", s->skipped);
  cli_json_number(root, "worst_factor", s->worst);
  add_classes(s, root);
  add_controls(s, root);
  add_failures(s, root);
  const kvr_status status = cli_json_write(path, root);
  cJSON_Delete(root);
  return status;
}

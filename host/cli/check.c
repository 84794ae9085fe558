/* kvring check: the correctness suite on the user's own device. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/check_suite.h"

static const char notes[] =
    "A configuration is one strategy in one random case: ranks, map, weights, dtypes, heads,\n"
    "requests, masks and scales, pages in random order in a pool of NaN; or a prefill in chunks\n"
    "with a strategy for each. Right means: every output row and LSE agrees with the\n"
    "double-precision reference, every byte of the cache is as expected, and the bytes moved\n"
    "follow the formula. Negative controls are mistakes made on purpose; each must be noticed, by\n"
    "a factor (error / tolerance) of at least 1, and 50 for most.\n"
    "--soak goes on for so many seconds. A failure comes with the command that repeats it.\n";

enum {
  QUICK_CONFIGURATIONS = 200,
  FULL_CONFIGURATIONS = 2000,
  FULL_PER_CLASS = 20,
  MAX_CASES = 1000,
  NOTE_SECONDS = 30
};

int check_num_configurations(const check_suite *s) { return s->passed + s->failed + s->skipped; }

int check_smallest_class(const check_suite *s) {
  int least = s->classes.list[0].count;
  for (int i = 1; i < s->classes.num; i++)
    if (s->classes.list[i].count < least) least = s->classes.list[i].count;
  return least;
}

/* All strategies, as opposed to one of them? */
static bool asks_for_all(const cli_options *o) {
  return strcmp(o->strategy, "auto") == 0 || strcmp(o->strategy, "all") == 0;
}

/* ---- cases ---- */

/* Strategies that a case is run with: those asked for which can serve its last step. */
static bool runs_strategy(const check_suite *s, const check_case *c, const char *name) {
  const check_case last = check_step_case(c, c->num_steps - 1);
  if (!asks_for_all(s->options) && strcmp(s->options->strategy, name) != 0) return false;
  return check_serves(&last, name);
}

static bool breaks_group(kvr_status status) {
  return status == KVR_E_CL || status == KVR_E_STATE || status == KVR_E_TIMEOUT;
}

static void count(check_suite *s, const check_case *c, const char *name, const check_verdict *v) {
  if (v->outcome == CHECK_SKIPPED) {
    s->skipped++;
    check_report_skipped(s, c, name, v->text);
    return;
  }
  if (v->outcome == CHECK_PASSED) {
    s->passed++;
    if (v->factor > s->worst) s->worst = v->factor;
  } else {
    s->failed++;
    check_report_failure(s, c, name, v->text);
  }
  check_classes_count(&s->classes, c, name, v->last_step);
}

/* Runs all strategies on a trial; the verdict is the last one's. */
static check_verdict run_strategies(check_suite *s, check_trial *trial, const check_case *c,
                                    kvr_status opened) {
  check_verdict v = {0};
  if (opened != KVR_OK) check_verdict_error(&v, opened, "before the step");
  for (int i = 0; i < kvr_num_strategies(); i++) {
    const char *name = kvr_strategy_name(i);
    if (!runs_strategy(s, c, name)) continue;
    if (opened == KVR_OK) check_trial_run(trial, name, &v);
    count(s, c, name, &v);
    if (opened != KVR_OK || breaks_group(v.status)) break; /* the others would fail alike */
  }
  return v;
}

static void run_case(check_suite *s, int index) {
  check_case c;
  check_trial trial;
  check_case_generate(s->options->seed, index, check_is_quick(s->options), &c);
  const kvr_status opened = check_trial_open(&s->groups, &c, s->options->seed, &trial);
  const check_verdict v = run_strategies(s, &trial, &c, opened);
  s->cases++;
  s->stuck = cli_is_stuck(v.status);
  if (s->stuck) return;
  check_trial_close(&trial);
  if (breaks_group(v.status)) check_groups_drop(&s->groups, c.ranks, c.copy_queue);
}

static void run_suite(check_suite *s) {
  const cli_options *o = s->options;
  const int want = o->full ? FULL_CONFIGURATIONS : QUICK_CONFIGURATIONS;
  for (int i = 0; i < MAX_CASES && !s->stuck; i++) {
    const bool enough = check_num_configurations(s) >= want;
    if (enough && (!o->full || check_smallest_class(s) >= FULL_PER_CLASS)) break;
    run_case(s, i);
    cli_progress_show(&s->progress, check_num_configurations(s), want);
  }
}

/* Until the time is over, or so much fails that more would tell nothing. */
static void run_soak(check_suite *s) {
  const double start = cli_seconds(), seconds = s->options->soak;
  double noted = start;
  for (int i = 0; i < INT_MAX && s->failed < CHECK_FAILURES && !s->stuck; i++) {
    const double now = cli_seconds();
    if (now - start >= seconds) break;
    run_case(s, i);
    cli_progress_show(&s->progress, now - start, seconds);
    if (s->progress.terminal || now - noted < NOTE_SECONDS) continue;
    noted = now;
    fprintf(stderr, "check: %.0f of %.0f s, %d configurations, %d failed\n", now - start, seconds,
            check_num_configurations(s), s->failed);
  }
}

static void run_cases(check_suite *s) {
  const double start = cli_seconds();
  cli_progress_start(&s->progress, "check");
  if (s->options->only >= 0)
    run_case(s, s->options->only);
  else if (s->options->soak > 0)
    run_soak(s);
  else
    run_suite(s);
  cli_progress_end(&s->progress);
  s->seconds = cli_seconds() - start;
}

/* ---- verdict ---- */

/* A full run of all strategies must hit every class. */
static bool lacks_coverage(const check_suite *s) {
  const cli_options *o = s->options;
  return o->full && o->only < 0 && asks_for_all(o) && check_smallest_class(s) < FULL_PER_CLASS;
}

/* controls: why the negative controls could not run; empty if they did. */
static kvr_status judge(const check_suite *s, const char *controls) {
  const int num = check_num_configurations(s);
  int missed = 0;
  for (int i = 0; i < CHECK_CONTROLS; i++) missed += check_control_missed(&s->controls[i]);
  if (s->failed > 0)
    return kvr_fail(KVR_E_VERIFY, "%d of %d configurations failed", s->failed, num);
  if (controls[0] != '\0') return kvr_fail(KVR_E_VERIFY, "negative controls: %s", controls);
  if (missed > 0) return kvr_fail(KVR_E_VERIFY, "%d negative controls were not noticed", missed);
  if (num == 0)
    return kvr_fail(KVR_E_VERIFY,
                    "nothing ran: no strategy asked for serves the case; leave --strategy out");
  if (num == s->skipped)
    return kvr_fail(KVR_E_VERIFY, "nothing ran: all %d configurations were skipped", num);
  if (lacks_coverage(s))
    return kvr_fail(KVR_E_VERIFY,
                    "a class has %d configurations, fewer than %d; use another --seed",
                    check_smallest_class(s), FULL_PER_CLASS);
  return KVR_OK;
}

/* Why they could not run goes into why; empty: they did. */
static void run_controls(check_suite *s, char why[CHECK_TEXT]) {
  why[0] = '\0';
  if (s->stuck) {
    strcpy(why, "not run, since the device is stuck");
    return;
  }
  const kvr_status status = check_controls_run(&s->groups, s->options->seed, s->controls);
  if (status != KVR_OK) snprintf(why, CHECK_TEXT, "%s", kvr_error_message());
  s->stuck = cli_is_stuck(status);
}

static kvr_status work(check_suite *s) {
  const cli_options *o = s->options;
  char controls[CHECK_TEXT];
  check_classes_init(&s->classes);
  run_cases(s);
  run_controls(s, controls);
  if (s->print) check_report_print(s);
  if (o->json != NULL) KVR_TRY(check_report_json(s, o->json));
  return judge(s, controls);
}

static kvr_status check_options(const cli_options *o) {
  if (o->quick && o->full)
    return kvr_fail(KVR_E_CONFLICT, "--quick and --full exclude each other; leave one out");
  if (o->soak > 0 && (o->quick || o->full || o->only >= 0))
    return kvr_fail(KVR_E_CONFLICT, "--soak and %s exclude each other; leave one out",
                    o->quick  ? "--quick"
                    : o->full ? "--full"
                              : "--only");
  if (asks_for_all(o)) return KVR_OK;
  for (int i = 0; i < kvr_num_strategies(); i++)
    if (strcmp(o->strategy, kvr_strategy_name(i)) == 0) return KVR_OK;
  return kvr_fail(KVR_E_RANGE, "--strategy is '%.40s'; use all or the name of one strategy",
                  o->strategy);
}

/* One group first: without a device, or with a wrong one, everything would fail the same way. */
static kvr_status open_first(check_suite *s) {
  kvr_group *group;
  return check_groups_get(&s->groups, 1, false, &group);
}

static cli_exit run(const cli_options *options) {
  if (check_options(options) != KVR_OK) return cli_report("check", CLI_USAGE);
  check_suite *s = calloc(1, sizeof *s);
  if (s == NULL) {
    (void)kvr_fail(KVR_E_OOM, "no host memory");
    return cli_report("check", CLI_FAILED);
  }
  s->options = options;
  s->groups = (check_groups){.devices = options->devices, .timeout = options->timeout};
  s->print = options->json == NULL || strcmp(options->json, "-") != 0;
  cli_exit code = cli_exit_of(open_first(s));
  if (code == CLI_OK && work(s) != KVR_OK) code = CLI_FAILED;
  if (code != CLI_OK) cli_report("check", code);
  if (s->stuck) return code; /* all that it has stays, see cli_is_stuck */
  check_groups_fini(&s->groups);
  free(s);
  return code;
}

const cli_command cli_check = {"check", CLI_CMD_CHECK,
                               "Check every strategy against a double-precision reference", notes,
                               run};

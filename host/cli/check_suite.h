/* A run of kvring check: what was counted, and what failed. Shared by check.c and check_report.c.
 */
#ifndef KVR_CLI_CHECK_SUITE_H
#define KVR_CLI_CHECK_SUITE_H

#include "cli/check.h"

enum { CHECK_FAILURES = 20 };

/* The first failures in words, with the command that repeats each. */
typedef struct check_failure {
  int index;
  const char *strategy; /* of the last step (static storage) */
  char text[CHECK_TEXT], described[320], repeat[400];
} check_failure;

typedef struct check_suite {
  const cli_options *options;
  check_groups groups;
  check_classes classes;
  check_control controls[CHECK_CONTROLS];
  int cases, passed, failed, skipped;
  check_failure failures[CHECK_FAILURES];
  double worst;   /* largest error / tolerance of what passed */
  double seconds; /* that the cases took */
  bool stuck;     /* a device hangs: nothing more can run */
  bool print;
  cli_progress progress;
} check_suite;

/* Small cases and few kernels? */
static inline bool check_is_quick(const cli_options *o) { return !o->full && o->soak == 0; }

int check_num_configurations(const check_suite *suite);
/* Configurations of the class that has the fewest. */
int check_smallest_class(const check_suite *suite);

/* check_report.c */
void check_report_failure(check_suite *suite, const check_case *c, const char *strategy,
                          const char *text);
void check_report_skipped(check_suite *suite, const check_case *c, const char *strategy,
                          const char *text);
void check_report_print(const check_suite *suite);
kvr_status check_report_json(const check_suite *suite, const char *path);
bool check_control_missed(const check_control *control);

#endif

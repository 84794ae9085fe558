/* A progress bar on a terminal, for work that takes over a second; silent elsewhere. */
#ifndef KVR_CLI_PROGRESS_H
#define KVR_CLI_PROGRESS_H

#include <stdbool.h>

typedef struct cli_progress {
  const char *title;  /* borrowed */
  double start, last; /* seconds */
  bool terminal, shown;
} cli_progress;

/* Seconds of a clock that only goes forward. */
double cli_seconds(void);

void cli_progress_start(cli_progress *progress, const char *title);
/* done of total units of work are finished. */
void cli_progress_show(cli_progress *progress, double done, double total);
/* Wipes the bar. */
void cli_progress_end(cli_progress *progress);

#endif

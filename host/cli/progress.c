#include "cli/progress.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

double cli_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void cli_progress_start(cli_progress *p, const char *title) {
  const double now = cli_seconds();
  *p = (cli_progress){.title = title, .start = now, .last = now, .terminal = isatty(STDERR_FILENO)};
}

void cli_progress_show(cli_progress *p, double done, double total) {
  enum { WIDTH = 32 };
  const double now = cli_seconds();
  if (!p->terminal || total <= 0 || now - p->start < 1.0 || now - p->last < 0.1) return;
  p->last = now;
  p->shown = true;
  const double part = done < total ? done / total : 1.0;
  char bar[WIDTH + 1];
  for (int i = 0; i < WIDTH; i++) bar[i] = i < (int)(part * WIDTH) ? '#' : '.';
  bar[WIDTH] = '\0';
  fprintf(stderr, "\r%s [%s] %3.0f %%  %.0f s ", p->title, bar, part * 100, now - p->start);
  if (part > 0.02) fprintf(stderr, "of about %.0f s\033[K", (now - p->start) / part);
  fflush(stderr);
}

void cli_progress_end(cli_progress *p) {
  if (p->shown) fputs("\r\033[K", stderr);
  p->shown = false;
}

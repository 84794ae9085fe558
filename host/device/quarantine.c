#include "device/quarantine.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "device/binary_file.h"
#include "kvring/group.h"

enum { PATH_SIZE = 4096 + 128, LINE_SIZE = 512 };
/* Compilers take seconds; who interrupts a trial after this long does not want it again. */
enum { GIVEN_UP_SECONDS = 60 };

static bool sibling(const char *path, const char *ending, char out[PATH_SIZE]) {
  const int n = snprintf(out, PATH_SIZE, "%s%s", path, ending);
  return n > 0 && n < PATH_SIZE;
}

/* ---- refusals ---- */

bool kvr_quarantine_find(const char *path, const char *key, char reason[KVR_REASON_SIZE]) {
  char name[PATH_SIZE], line[LINE_SIZE + 1]; /* its newline */
  if (!sibling(path, ".refused", name)) return false;
  FILE *file = fopen(name, "r");
  if (file == NULL) return false;
  bool found = fgets(line, sizeof line, file) != NULL;
  for (const char *k = key; found && *k != '\0'; k++) found = fgetc(file) == (unsigned char)*k;
  fclose(file);
  if (!found) return false; /* another key with this hash, or a damaged file */
  line[strcspn(line, "\n")] = '\0';
  snprintf(reason, KVR_REASON_SIZE, "%s (to try it again, remove %s)", line, name);
  return true;
}

bool kvr_quarantine_add(const char *path, const char *key, const char *reason) {
  char name[PATH_SIZE], line[LINE_SIZE];
  if (!sibling(path, ".refused", name)) return false;
  snprintf(line, sizeof line, "%s", reason);
  for (char *c = line; *c != '\0'; c++)
    if (*c == '\n' || *c == '\r') *c = ' ';
  kvr_binary_make_dir(path);
  FILE *file = fopen(name, "w");
  if (file == NULL) return false;
  const bool written = fprintf(file, "%s\n%s", line, key) > 0;
  return fclose(file) == 0 && written;
}

/* ---- trials ---- */

/* The trial of this process that a signal would interrupt; trials are rare, one is followed. */
static char followed[PATH_SIZE];
static time_t followed_since;
static atomic_int following;

static time_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec;
}

static void follow(const char *name) {
  int none = 0;
  if (!atomic_compare_exchange_strong(&following, &none, 1)) return;
  snprintf(followed, sizeof followed, "%s", name);
  followed_since = now();
  atomic_store(&following, 2);
}

static void unfollow(const char *name) {
  if (atomic_load(&following) == 2 && strcmp(followed, name) == 0) atomic_store(&following, 0);
}

void kvr_interrupted(void) {
  if (atomic_load(&following) == 2 && now() - followed_since < GIVEN_UP_SECONDS) unlink(followed);
}

/* A lock of the open file: it ends with the process, and other threads wait for it too. */
static void wait_for_lock(int file) {
  while (flock(file, LOCK_EX) != 0 && errno == EINTR) continue;
}

/* Whether the open file is still the one of that name: its holder removes it before letting go. */
static bool is_current(int file, const char *name) {
  struct stat a, b;
  return fstat(file, &a) == 0 && stat(name, &b) == 0 && a.st_ino == b.st_ino;
}

bool kvr_trial_begin(kvr_trial *trial, const char *path) {
  char name[PATH_SIZE];
  *trial = (kvr_trial){.path = path, .file = -1};
  if (!sibling(path, ".trial", name)) return true;
  kvr_binary_make_dir(path);
  for (;;) {
    const int file = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) return true;
    wait_for_lock(file);
    if (!is_current(file, name)) { /* its holder has finished */
      close(file);
      continue;
    }
    char held = 0;
    if (read(file, &held, 1) == 1) { /* its holder has gone without finishing */
      unlink(name);
      close(file);
      return false;
    }
    trial->file = file;
    if (write(file, "1", 1) == 1) follow(name);
    return true;
  }
}

void kvr_trial_end(kvr_trial *trial) {
  char name[PATH_SIZE];
  if (trial->file < 0 || !sibling(trial->path, ".trial", name)) return;
  unfollow(name);
  unlink(name);
  close(trial->file);
  trial->file = -1;
}

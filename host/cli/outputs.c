#include "cli/outputs.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "cli/json.h"

typedef struct named {
  const char *option, *path; /* path may be NULL */
  bool standard;             /* "-" is the standard output */
  bool renamed;              /* the library renames it into place: not for devices */
} named;

static bool same_inode(const struct stat *a, const struct stat *b) {
  return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* Last part of a path, and what its folder is. */
static const char *split(const char *path, struct stat *folder) {
  char text[1024] = ".";
  const char *slash = strrchr(path, '/');
  const size_t len = slash != NULL ? (size_t)(slash - path) + 1 : 0;
  if (len > 0 && len < sizeof text) {
    memcpy(text, path, len);
    text[len] = '\0';
  }
  if (stat(text, folder) != 0) memset(folder, 0, sizeof *folder);
  return slash != NULL ? slash + 1 : path;
}

/* Files that do not exist yet are the same if they would be. */
static bool same_file(const char *a, const char *b) {
  struct stat x, y;
  if (strcmp(a, b) == 0) return true;
  const bool a_exists = stat(a, &x) == 0, b_exists = stat(b, &y) == 0;
  if (a_exists || b_exists) return a_exists && b_exists && same_inode(&x, &y);
  const char *a_name = split(a, &x), *b_name = split(b, &y);
  return strcmp(a_name, b_name) == 0 && same_inode(&x, &y);
}

static kvr_status check_name(const named *n) {
  struct stat info;
  if (n->path[0] == '\0')
    return kvr_fail(KVR_E_RANGE, "--%s is ''; it needs the name of a file", n->option);
  if (strcmp(n->path, "-") == 0)
    return n->standard ? KVR_OK
                       : kvr_fail(KVR_E_RANGE,
                                  "--%s is '-', but only --json may go to the standard output; "
                                  "name a file",
                                  n->option);
  if (stat(n->path, &info) == 0 && S_ISDIR(info.st_mode))
    return kvr_fail(KVR_E_RANGE, "--%s is the folder %s; name a file in it", n->option, n->path);
  if (n->renamed && stat(n->path, &info) == 0 && !S_ISREG(info.st_mode))
    return kvr_fail(KVR_E_RANGE, "--%s is %s, which is no regular file; name one", n->option,
                    n->path);
  return KVR_OK;
}

/* Opens a temporary file beside it, since the folder decides whether that will work. */
static kvr_status check_writable(const named *n) {
  struct stat info;
  cli_file file = {0};
  if (strcmp(n->path, "-") == 0) return KVR_OK;
  if (stat(n->path, &info) == 0 && !S_ISREG(info.st_mode)) {
    if (access(n->path, W_OK) == 0) return KVR_OK;
    return kvr_fail(KVR_E_IO, "cannot write %s: %s", n->path, strerror(errno));
  }
  KVR_TRY(cli_file_open(n->path, &file));
  return cli_file_close(&file, 0);
}

kvr_status cli_outputs_check(const cli_options *o) {
  enum { NUM = 4, READ = 2 };
  const named out[NUM] = {{.option = "output", .path = o->output},
                          {.option = "json", .path = o->json, .standard = true},
                          {.option = "trace", .path = o->trace, .renamed = true},
                          {.option = "op-log", .path = o->op_log}};
  const named in[READ] = {{.option = "input", .path = o->input},
                          {.option = "sinks", .path = o->sinks}};
  for (int i = 0; i < NUM; i++) {
    if (out[i].path == NULL) continue;
    KVR_TRY(check_name(&out[i]));
    for (int k = 0; k < i; k++)
      if (out[k].path != NULL && same_file(out[i].path, out[k].path))
        return kvr_fail(KVR_E_CONFLICT, "--%s and --%s are both %s; use two files", out[k].option,
                        out[i].option, out[i].path);
    for (int k = 0; k < READ; k++)
      if (in[k].path != NULL && same_file(out[i].path, in[k].path))
        return kvr_fail(KVR_E_CONFLICT, "--%s would overwrite %s of --%s; name another file",
                        out[i].option, out[i].path, in[k].option);
  }
  for (int i = 0; i < NUM; i++)
    if (out[i].path != NULL) KVR_TRY(check_writable(&out[i]));
  return KVR_OK;
}

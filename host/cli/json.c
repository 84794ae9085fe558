#include "cli/json.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"

static kvr_status fail_io(const char *path, const char *what) {
  return kvr_fail(KVR_E_IO, "cannot %s %s: %s", what, path, strerror(errno));
}

static void forget(cli_file *file) {
  free(file->path);
  free(file->temporary);
  *file = (cli_file){0};
}

/* Renaming onto a device or a pipe would put a file in its place. */
static int is_special(const char *path) {
  struct stat info;
  return stat(path, &info) == 0 && !S_ISREG(info.st_mode);
}

static FILE *open_stream(cli_file *file) {
  const int standard = strcmp(file->path, "-") == 0;
  file->direct = standard || is_special(file->path);
  if (standard) return stdout;
  return fopen(file->direct ? file->path : file->temporary, "wb");
}

kvr_status cli_file_open(const char *path, cli_file *out) {
  const size_t size = strlen(path) + 32;
  cli_file file = {.path = malloc(size), .temporary = malloc(size)};
  if (file.path == NULL || file.temporary == NULL) {
    forget(&file);
    return kvr_fail(KVR_E_OOM, "no host memory for the name %s", path);
  }
  snprintf(file.path, size, "%s", path);
  snprintf(file.temporary, size, "%s.%ld.tmp", path, (long)getpid());
  file.stream = open_stream(&file);
  if (file.stream == NULL) {
    const kvr_status status = fail_io(path, "write");
    forget(&file);
    return status;
  }
  *out = file;
  return KVR_OK;
}

kvr_status cli_file_close(cli_file *file, int keep) {
  if (file->stream == NULL) return KVR_OK;
  kvr_status status = KVR_OK;
  const int failed = fflush(file->stream) != 0 || ferror(file->stream);
  if (failed) status = fail_io(file->path, "write");
  if (file->stream != stdout && fclose(file->stream) != 0 && status == KVR_OK)
    status = fail_io(file->path, "write");
  const int complete = keep && status == KVR_OK;
  if (!file->direct && complete && rename(file->temporary, file->path) != 0)
    status = fail_io(file->path, "rename the temporary file to");
  if (!file->direct && (!complete || status != KVR_OK)) remove(file->temporary);
  forget(file);
  return status;
}

kvr_status cli_json_write(const char *path, const cJSON *json) {
  char *text = cJSON_Print(json);
  if (text == NULL) return kvr_fail(KVR_E_OOM, "no host memory for the JSON of %s", path);
  cli_file file = {0};
  kvr_status status = cli_file_open(path, &file);
  if (status == KVR_OK) {
    fprintf(file.stream, "%s\n", text);
    status = cli_file_close(&file, 1);
  }
  free(text);
  return status;
}

void cli_json_number(cJSON *object, const char *name, double value) {
  if (isfinite(value))
    cJSON_AddNumberToObject(object, name, value);
  else
    cJSON_AddNullToObject(object, name);
}

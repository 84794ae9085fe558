/* Output files: written under a temporary name and renamed, so never half a file. */
#ifndef KVR_CLI_JSON_H
#define KVR_CLI_JSON_H

#include <cjson/cJSON.h>
#include <stdio.h>

#include "kvring/status.h"

typedef struct cli_file {
  FILE *stream;
  char *path, *temporary; /* owned; path is "-" for the standard output */
  int direct;             /* written in place: the standard output, a device, a pipe */
} cli_file;

/* Opens path for writing; "-" is the standard output. What exists and is no regular file is written
 * in place. Errors: KVR_E_IO naming path and reason. */
kvr_status cli_file_open(const char *path, cli_file *out);
/* Closes; renames into place when keep and everything was written, else removes it.
 * Errors: KVR_E_IO. */
kvr_status cli_file_close(cli_file *file, int keep);

/* Writes a value as indented JSON. Errors: KVR_E_IO, KVR_E_OOM. */
kvr_status cli_json_write(const char *path, const cJSON *json);

/* Numbers that JSON cannot hold (NaN, infinite) become null. */
void cli_json_number(cJSON *object, const char *name, double value);

#endif

/* The command line tool: what its sub-commands share. They use the public API only.
 *
 * Functions fail as the library does: a status and one message (kvr_fail). Only the sub-commands
 * print it, once, and turn it into an exit code. */
#ifndef KVR_CLI_CLI_H
#define KVR_CLI_CLI_H

#include "cli/options.h"
#include "kvring/kvring.h"

typedef enum cli_exit { CLI_OK = 0, CLI_FAILED = 1, CLI_USAGE = 2 } cli_exit;

/* A sub-command: one file and one row of the table in main.c. */
typedef struct cli_command {
  const char *name;
  unsigned id; /* CLI_CMD_* */
  const char *summary;
  const char *notes; /* printed below the options of --help, or NULL */
  cli_exit (*run)(const cli_options *options);
} cli_command;

extern const cli_command cli_devices, cli_doctor, cli_check, cli_plan, cli_prefill;

/* CLI_USAGE for errors that other options avoid, CLI_FAILED for all others. */
cli_exit cli_exit_of(kvr_status status);

/* True for KVR_E_TIMEOUT: a device is stuck. It may still use the memory that it was given, which
 * must not be freed then, and its driver may wait for it at exit: main leaves without either. */
bool cli_is_stuck(kvr_status status);

/* Prints "kvring COMMAND: message" of the last error and returns code. */
cli_exit cli_report(const char *command, cli_exit code);

#endif

/* kvring: the command line tool. A sub-command is one file and one row here. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/outputs.h"
#include "cli/parse.h"

static const cli_command *const commands[] = {&cli_devices, &cli_doctor, &cli_check, &cli_plan,
                                              &cli_prefill};

enum { NUM_COMMANDS = sizeof commands / sizeof commands[0] };

cli_exit cli_report(const char *command, cli_exit code) {
  fflush(stdout);
  fprintf(stderr, "kvring %s: %s\n", command, kvr_error_message());
  return code;
}

cli_exit cli_exit_of(kvr_status status) {
  switch (status) {
  case KVR_OK: return CLI_OK;
  case KVR_E_SHAPE:
  case KVR_E_DTYPE:
  case KVR_E_RANGE:
  case KVR_E_CAPACITY:
  case KVR_E_CONFLICT:
  case KVR_E_LAYOUT: return CLI_USAGE;
  default: return CLI_FAILED;
  }
}

static bool stuck;

bool cli_is_stuck(kvr_status status) {
  stuck |= status == KVR_E_TIMEOUT;
  return status == KVR_E_TIMEOUT;
}

static int leave(cli_exit code) {
  if (!stuck) return (int)code;
  fflush(NULL);
  _Exit((int)code);
}

static void print_usage(FILE *out) {
  fprintf(out, "Usage: kvring COMMAND [OPTIONS]\n\n"
               "Context-parallel attention with a KV cache sharded over ranks.\n\n");
  for (int i = 0; i < NUM_COMMANDS; i++)
    fprintf(out, "  %-9s %s\n", commands[i]->name, commands[i]->summary);
  fprintf(out,
          "\nkvring COMMAND --help lists the options of a command; --version prints %s.\n"
          "Exit codes: 0 success, 1 failed or wrong result, 2 wrong usage.\n",
          kvr_version());
}

static void print_help(const cli_command *command) {
  printf("Usage: kvring %s [OPTIONS]\n\n%s.\n\nOptions [default]:\n", command->name,
         command->summary);
  cli_options_help(stdout, command->id);
  if (command->notes != NULL) printf("\n%s", command->notes);
}

static cli_exit report_unknown(const char *name) {
  const char *names[NUM_COMMANDS];
  for (int i = 0; i < NUM_COMMANDS; i++) names[i] = commands[i]->name;
  const char *near = cli_nearest(name, names, NUM_COMMANDS);
  if (near != NULL)
    fprintf(stderr, "kvring: unknown command '%.40s'; did you mean %s?\n", name, near);
  else
    fprintf(stderr, "kvring: unknown command '%.40s'; kvring --help lists the commands\n", name);
  return CLI_USAGE;
}

static cli_exit run(const cli_command *command, int argc, char **argv) {
  cli_options options;
  if (cli_options_parse(argc, argv, command->id, &options) != KVR_OK)
    return cli_report(command->name, CLI_USAGE);
  if (options.help) {
    print_help(command);
    return CLI_OK;
  }
  const kvr_status status = cli_outputs_check(&options);
  if (status != KVR_OK) return cli_report(command->name, cli_exit_of(status));
  return command->run(&options);
}

/* Ctrl-C while a kernel is tested says nothing about the kernel. */
static void on_interrupt(int number) {
  kvr_interrupted();
  raise(number); /* the handler was reset: ends the process as usual */
}

static void handle_interrupts(void) {
  static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
  struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = (int)SA_RESETHAND};
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
    sigaction(numbers[i], &action, NULL);
}

int main(int argc, char **argv) {
  handle_interrupts();
  const char *name = argc > 1 ? argv[1] : "";
  if (argc < 2 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 ||
      strcmp(name, "help") == 0) {
    print_usage(argc < 2 ? stderr : stdout);
    return argc < 2 ? CLI_USAGE : CLI_OK;
  }
  if (strcmp(name, "--version") == 0) {
    printf("kvring %s\n", kvr_version());
    return CLI_OK;
  }
  for (int i = 0; i < NUM_COMMANDS; i++)
    if (strcmp(commands[i]->name, name) == 0) return leave(run(commands[i], argc - 2, argv + 2));
  return (int)report_unknown(name);
}

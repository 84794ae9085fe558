/* The input is a command line: the first byte chooses the sub-command, lines are its arguments.
 * What is accepted must be within the limits, also as the shapes of a prefill; what is refused must
 * say why. With KVR_FUZZ_CONTROL the target copies an argument without looking at its length. */
#include <limits.h>
#include <math.h>
#include <string.h>

#include "cli/convert.c"
#include "cli/json.c"
#include "cli/options.c"
#include "cli/parse.c"
#include "cli/safetensors.c"
#include "cli/shape.c"
#include "cli/sinks.c"
#include "cli/synthetic.c"
#include "fuzz.h"

enum { MAX_ARGS = 64, MAX_BYTES = 4096 };

static void check_limits(const cli_options *o) {
  HOLDS(o->ranks >= 1 && o->ranks <= 1024);
  HOLDS(o->tokens >= 0 && o->cached_tokens >= 0 && o->chunk >= 1);
  HOLDS(o->page_size >= 1 && o->tile >= 1 && o->query_tile >= 0 && o->slots >= 2);
  HOLDS(o->head_dim >= 1 && o->head_dim <= 512 && o->heads >= 1 && o->kv_heads >= 1);
  HOLDS(kvr_dtype_size(o->dtype) > 0 && kvr_dtype_size(o->out_dtype) > 0);
  HOLDS(o->causal == 0 || o->causal == 1);
  HOLDS(o->window >= 0 && o->soft_cap >= 0 && isfinite((float)o->soft_cap));
  const float scales[3] = {(float)o->q_scale, (float)o->k_scale, (float)o->v_scale};
  for (int i = 0; i < 3; i++) HOLDS(scales[i] != 0.0f && isfinite(1 / scales[i]));
  HOLDS(o->timeout > 0 && o->timeout <= KVR_MAX_TIMEOUT);
  HOLDS((unsigned)o->math < KVR_NUM_MATHS);
  HOLDS(o->repeat >= 1 && o->verify >= 0 && o->soak >= 0 && o->only >= -1);
}

/* The requests of a step, as prefill and plan check them. */
static void check_step(const cli_options *o, const cli_shape *s) {
  kvr_request *requests = calloc((size_t)s->num_requests, sizeof *requests);
  HOLDS(requests != NULL && s->num_requests >= 1);
  for (int i = 0; i < s->num_requests; i++) {
    const cli_length *q = &s->requests[i];
    requests[i] = cli_shape_request(s, i, 0, s->chunk);
    HOLDS(requests[i].num_new <= s->chunk && requests[i].num_new <= q->num_new);
    HOLDS(q->num_new <= INT_MAX - q->num_cached);
  }
  const kvr_problem problem = cli_shape_problem(s, requests);
  const kvr_options options = cli_shape_options(o, NULL);
  (void)kvr_problem_check(&problem, &options);
  free(requests);
}

static void check_shape(cli_options *o, bool from_file) {
  const cli_given_shape given = {from_file ? 11 : 0, 4, 2, 64, KVR_F16};
  cli_shape shape;
  o->sinks = o->sinks != NULL && o->heads < 1000 ? "random" : NULL; /* opens no files */
  if (cli_shape_init(o, &given, &shape) != KVR_OK) {
    HOLDS(kvr_error_message()[0] != '\0');
    return;
  }
  HOLDS(shape.cache.num_pages >= 1 && shape.cache.interleave >= 1);
  check_step(o, &shape);
  cli_shape_fini(&shape);
}

static void run(unsigned command, int argc, char **argv, bool from_file) {
  cli_options o;
  if (cli_options_parse(argc, argv, command, &o) != KVR_OK) {
    HOLDS(kvr_error_message()[0] != '\0');
    return;
  }
  check_limits(&o);
  if (command & (CLI_CMD_PLAN | CLI_CMD_PREFILL)) check_shape(&o, from_file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const unsigned commands[] = {CLI_CMD_PREFILL, CLI_CMD_PLAN, CLI_CMD_CHECK, CLI_CMD_DEVICES,
                                      CLI_CMD_DOCTOR};
  char text[MAX_BYTES + 1];
  char *argv[MAX_ARGS + 1];
  int argc = 0;
  if (size < 1 || size > MAX_BYTES) return 0;
  memcpy(text, data + 1, size - 1);
  text[size - 1] = '\0';
  for (char *word = text; word != NULL && argc < MAX_ARGS;) {
    char *end = strchr(word, '\n');
    if (end != NULL) *end++ = '\0';
    argv[argc++] = word;
    word = end;
  }
  argv[argc] = NULL;
#ifdef KVR_FUZZ_CONTROL
  char word[48];
  strcpy(word, argv[argc - 1]);
  HOLDS(strlen(word) == strlen(argv[argc - 1]));
#endif
  run(commands[data[0] % 5], argc, argv, data[0] >= 128);
  return 0;
}

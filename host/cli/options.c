/* One table of options; parsing and --help both walk it. */
#include "cli/options.h"

#include <limits.h>
#include <string.h>

#include "base/error.h"
#include "cli/parse.h"

typedef enum kind {
  FLAG,
  INT,
  OPTIONAL_INT,
  BYTES,
  SEED,
  CAP,
  SCALE,
  SECONDS,
  DTYPE,
  MATH,
  TEXT
} kind;

typedef struct option {
  const char *name;
  const char *argument; /* as --help shows it; NULL: a flag */
  kind kind;
  size_t offset;        /* into cli_options */
  const char *standard; /* default, parsed like an argument; NULL: zero. OPTIONAL_INT: no `=` */
  int min, max;         /* INT */
  unsigned commands;
  const char *help;
} option;

enum {
  GROUP = CLI_CMD_DEVICES | CLI_CMD_DOCTOR | CLI_CMD_CHECK | CLI_CMD_PREFILL,
  SHAPE = CLI_CMD_PLAN | CLI_CMD_PREFILL,
  RUN = CLI_CMD_PREFILL,
  ALL = GROUP | SHAPE
};

#define AT(field) offsetof(cli_options, field)

static const option table[] = {
    {"ranks", "P", INT, AT(ranks), "4", 1, 1024, SHAPE | CLI_CMD_DEVICES, "ranks"},
    {"devices", "LIST", TEXT, AT(devices), NULL, 0, 0, GROUP,
     "devices that ranks take in turn: PLATFORM.DEVICE or part of a name, /N for N sub-devices"},
    {"copy-queue", NULL, FLAG, AT(copy_queue), NULL, 0, 0, RUN,
     "a second queue per rank for copies"},
    {"memory-budget", "BYTES", BYTES, AT(memory_budget), "0", 0, 0, SHAPE,
     "device memory of a rank, cache included; 0: its share of the device (K, M, G allowed)"},
    {"strategy", "NAME", TEXT, AT(strategy), "auto", 0, 0, SHAPE | CLI_CMD_CHECK,
     "a strategy, several with commas (prefill), all, or auto"},
    {"tokens", "T", INT, AT(tokens), "8192", 0, INT_MAX, SHAPE, "new tokens of the prompt"},
    {"chunk", "CH", INT, AT(chunk), "2048", 1, INT_MAX, SHAPE,
     "new tokens of a request in one step"},
    {"cached-tokens", "L", INT, AT(cached_tokens), "0", 0, INT_MAX, SHAPE,
     "tokens already in the cache; without --tokens one chunk follows"},
    {"requests", "S:L,...", TEXT, AT(requests), NULL, 0, 0, SHAPE,
     "several requests, each of S new tokens after L cached ones"},
    {"page-size", "N", INT, AT(page_size), "16", 1, INT_MAX, SHAPE, "tokens in a page of a rank"},
    {"map", "MAP", TEXT, AT(map), "striped", 0, 0, SHAPE,
     "who stores which position: striped, paged, contiguous, or the interleave in tokens"},
    {"weights", "W,W,...", TEXT, AT(weights), NULL, 0, 0, SHAPE, "share of the cache of each rank"},
    {"heads", "NQ", INT, AT(heads), "8", 1, INT_MAX, SHAPE, "query heads"},
    {"kv-heads", "NKV", INT, AT(kv_heads), "2", 1, INT_MAX, SHAPE, "KV heads"},
    {"head-dim", "D", INT, AT(head_dim), "128", 1, 512, SHAPE, "head dimension"},
    {"dtype", "TYPE", DTYPE, AT(dtype), "f32", 0, 0, SHAPE, "of q, k, v and cache: f32, f16, bf16"},
    {"out-dtype", "TYPE", DTYPE, AT(out_dtype), "f32", 0, 0, SHAPE, "of the output"},
    {"causal", "0|1", INT, AT(causal), "1", 0, 1, SHAPE,
     "1: a token sees new tokens up to itself; 0: all of its chunk"},
    {"tile", "T", INT, AT(tile), "1024", 1, INT_MAX, SHAPE, "KV tokens in a block of the ring"},
    {"query-tile", "R", INT, AT(query_tile), "0", 0, INT_MAX, SHAPE,
     "query rows of a rank per pass of the ring; 0: all"},
    {"slots", "K", INT, AT(slots), "2", 2, 1024, SHAPE, "KV slots per rank"},
    {"repeat", "N", INT, AT(repeat), "1", 1, 1000, RUN,
     "runs of every chunk, strategies interleaved; medians are shown"},
    {"verify", "ROWS", OPTIONAL_INT, AT(verify), "64", 0, INT_MAX, RUN,
     "compare with the double-precision reference: the rows at all edges and ROWS random ones"},
    {"seed", "N", SEED, AT(seed), "1", 0, 0, RUN | CLI_CMD_CHECK, "seed of random data"},
    {"input", "FILE", TEXT, AT(input), NULL, 0, 0, RUN,
     "safetensors with q (T, NQ, D), k and v (T, NKV, D); default: synthetic data"},
    {"output", "FILE", TEXT, AT(output), NULL, 0, 0, RUN,
     "safetensors to write out and lse to (of the first strategy that ran)"},
    {"json", "FILE", TEXT, AT(json), NULL, 0, 0, ALL, "machine-readable result (- for stdout)"},
    {"trace", "FILE", TEXT, AT(trace), NULL, 0, 0, RUN, "Chrome/Perfetto trace of the first run"},
    {"op-log", "FILE", TEXT, AT(op_log), NULL, 0, 0, RUN, "one JSON line per op of the first run"},
    {"quick", NULL, FLAG, AT(quick), NULL, 0, 0, CLI_CMD_CHECK,
     "about 200 configurations (default)"},
    {"full", NULL, FLAG, AT(full), NULL, 0, 0, CLI_CMD_CHECK, "at least 2,000 configurations"},
    {"soak", "SECONDS", INT, AT(soak), NULL, 1, 31536000, CLI_CMD_CHECK,
     "random configurations of the full kind until the time is over"},
    {"only", "K", INT, AT(only), "-1", -1, INT_MAX, CLI_CMD_CHECK,
     "just case K of this seed, as a failure report names it"},
    {"window", "W", INT, AT(window), "0", 0, INT_MAX, SHAPE,
     "sliding window, the row itself included; 0: none"},
    {"soft-cap", "X", CAP, AT(soft_cap), "0", 0, 0, SHAPE,
     "logits become X tanh(logit / X); 0: none"},
    {"sinks", "FILE|random", TEXT, AT(sinks), NULL, 0, 0, SHAPE,
     "attention sinks, a logit per query head: safetensors with sinks (NQ) in F32, or random"},
    {"q-scale", "X", SCALE, AT(q_scale), "1", 0, 0, SHAPE,
     "queries are divided by it and rounded to the cache's type, scores multiplied by it"},
    {"k-scale", "X", SCALE, AT(k_scale), "1", 0, 0, SHAPE, "what keys are multiplied by"},
    {"v-scale", "X", SCALE, AT(v_scale), "1", 0, 0, SHAPE, "what values are multiplied by"},
    {"math", "auto|f32|bf16", MATH, AT(math), "auto", 0, 0, SHAPE,
     "products: auto is bf16 for bf16 caches where faster"},
    {"timeout", "S", SECONDS, AT(timeout), "1800", 0, 0, RUN | CLI_CMD_CHECK,
     "a step is given up when nothing of it completes for so many seconds"},
    {"help", NULL, FLAG, AT(help), NULL, 0, 0, ALL, "this text"},
};

enum { NUM_OPTIONS = sizeof table / sizeof table[0] };
_Static_assert((int)NUM_OPTIONS <= (int)CLI_MAX_OPTIONS, "cli_options.given is too short");

static kvr_status set(const option *o, const char *what, const char *text, cli_options *options) {
  void *field = (char *)options + o->offset;
  switch (o->kind) {
  case FLAG: *(bool *)field = true; return KVR_OK;
  case INT:
  case OPTIONAL_INT: return cli_parse_int(what, text, o->min, o->max, field);
  case BYTES: return cli_parse_bytes(what, text, field);
  case SEED: return cli_parse_seed(what, text, field);
  case CAP: return cli_parse_cap(what, text, field);
  case SCALE: return cli_parse_scale(what, text, field);
  case SECONDS: return cli_parse_seconds(what, text, field);
  case DTYPE: return cli_parse_dtype(what, text, field);
  case MATH: return cli_parse_math(what, text, field);
  default: *(const char **)field = text; return KVR_OK;
  }
}

static kvr_status set_defaults(cli_options *options) {
  memset(options, 0, sizeof *options);
  for (int i = 0; i < NUM_OPTIONS; i++)
    if (table[i].standard != NULL && table[i].kind != OPTIONAL_INT)
      KVR_TRY(set(&table[i], table[i].name, table[i].standard, options));
  return KVR_OK;
}

/* Row of the option that argument names, up to a '=' if it has one; -1 if there is none. */
static int find(const char *name, size_t len) {
  for (int i = 0; i < NUM_OPTIONS; i++)
    if (strlen(table[i].name) == len && memcmp(table[i].name, name, len) == 0) return i;
  return -1;
}

static kvr_status fail_unknown(const char *argument, const char *name, size_t len,
                               unsigned command) {
  const char *candidates[NUM_OPTIONS];
  char word[41] = "";
  int num = 0;
  for (int i = 0; i < NUM_OPTIONS; i++)
    if (table[i].commands & command) candidates[num++] = table[i].name;
  memcpy(word, name, len < 40 ? len : 40);
  const char *near = cli_nearest(word, candidates, num);
  if (near == NULL)
    return kvr_fail(KVR_E_RANGE, "unknown option '%.60s'; --help lists the options", argument);
  return kvr_fail(KVR_E_RANGE, "unknown option '%.60s'; did you mean --%s?", argument, near);
}

/* Parses argv[i] and perhaps its argument; returns how many were used in *used. */
static kvr_status parse_one(int left, char **argv, unsigned command, cli_options *out, int *used) {
  const char *word = argv[0];
  if (strncmp(word, "--", 2) != 0 && strcmp(word, "-h") != 0)
    return kvr_fail(KVR_E_RANGE, "unexpected argument '%.60s'; options start with --", word);
  const char *name = strcmp(word, "-h") == 0 ? "help" : word + 2;
  const char *equals = strchr(name, '=');
  const size_t len = equals != NULL ? (size_t)(equals - name) : strlen(name);
  const int row = find(name, len);
  if (row < 0) return fail_unknown(word, name, len, command);
  const option *o = &table[row];
  if (!(o->commands & command))
    return kvr_fail(KVR_E_RANGE, "--%s is no option of this command; --help lists its options",
                    o->name);
  const char *text = equals != NULL ? equals + 1 : NULL;
  *used = 1;
  if (o->kind == FLAG && text != NULL)
    return kvr_fail(KVR_E_RANGE, "--%s takes no value, but got '%.40s'", o->name, text);
  if (o->kind == OPTIONAL_INT && text == NULL) text = o->standard;
  if (o->kind != FLAG && text == NULL) {
    if (left < 2)
      return kvr_fail(KVR_E_RANGE, "--%s needs a value: --%s %s", o->name, o->name, o->argument);
    text = argv[1];
    if (strncmp(text, "--", 2) == 0)
      return kvr_fail(KVR_E_RANGE, "--%s needs a value, but %.40s follows; write --%s=%s", o->name,
                      text, o->name, o->argument);
    *used = 2;
  }
  char what[48];
  snprintf(what, sizeof what, "--%s", o->name);
  KVR_TRY(set(o, what, text, out));
  out->given[row] = true;
  return KVR_OK;
}

kvr_status cli_options_parse(int argc, char **argv, unsigned command, cli_options *out) {
  KVR_TRY(set_defaults(out));
  for (int i = 0, used = 0; i < argc; i += used)
    KVR_TRY(parse_one(argc - i, argv + i, command, out, &used));
  return KVR_OK;
}

bool cli_options_given(const cli_options *options, const char *name) {
  const int row = find(name, strlen(name));
  return row >= 0 && options->given[row];
}

void cli_options_help(FILE *out, unsigned command) {
  for (int i = 0; i < NUM_OPTIONS; i++) {
    const option *o = &table[i];
    if (!(o->commands & command)) continue;
    char left[64];
    if (o->kind == FLAG)
      snprintf(left, sizeof left, "--%s", o->name);
    else if (o->kind == OPTIONAL_INT)
      snprintf(left, sizeof left, "--%s[=%s]", o->name, o->argument);
    else
      snprintf(left, sizeof left, "--%s %s", o->name, o->argument);
    const bool shows = o->standard != NULL && strcmp(o->standard, "-1") != 0;
    fprintf(out, "  %-22s %s", left, o->help);
    if (shows) fprintf(out, " [%s]", o->standard);
    fputc('\n', out);
  }
}

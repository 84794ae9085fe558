#include "cli/shape.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "cli/parse.h"
#include "cli/sinks.h"

/* An option that repeats what the file says must agree with it. */
static kvr_status agree(const cli_options *o, const char *name, int value, int in_file, int *out) {
  if (cli_options_given(o, name) && value != in_file)
    return kvr_fail(KVR_E_CONFLICT, "--%s is %d, but the input file has %d; leave --%s out", name,
                    value, in_file, name);
  *out = in_file;
  return KVR_OK;
}

static kvr_status take_heads(const cli_options *o, const cli_given_shape *f, cli_shape *s) {
  s->num_q_heads = o->heads;
  s->cache.num_kv_heads = o->kv_heads;
  s->cache.head_dim = o->head_dim;
  s->cache.dtype = o->dtype;
  if (f->num_tokens == 0) return KVR_OK;
  KVR_TRY(agree(o, "heads", o->heads, f->num_q_heads, &s->num_q_heads));
  KVR_TRY(agree(o, "kv-heads", o->kv_heads, f->num_kv_heads, &s->cache.num_kv_heads));
  KVR_TRY(agree(o, "head-dim", o->head_dim, f->head_dim, &s->cache.head_dim));
  if (cli_options_given(o, "dtype") && o->dtype != f->dtype)
    return kvr_fail(KVR_E_CONFLICT, "--dtype is %s, but the input file has %s; leave --dtype out",
                    kvr_dtype_name(o->dtype), kvr_dtype_name(f->dtype));
  s->cache.dtype = f->dtype;
  return KVR_OK;
}

/* Items of a comma separated list. */
static int count_items(const char *text) {
  int num = 1;
  for (; *text != '\0'; text++) num += *text == ',';
  return num;
}

/* Copies the next item of a list, and where the one after it starts (NULL: none). */
static const char *next_item(const char *text, char *item, size_t size) {
  const size_t len = strcspn(text, ",");
  const size_t kept = len < size - 1 ? len : size - 1;
  memcpy(item, text, kept);
  item[kept] = '\0';
  return text[len] == ',' ? text + len + 1 : NULL;
}

static kvr_status parse_request(const char *item, cli_length *out) {
  char first[24];
  const char *colon = strchr(item, ':');
  if (colon == NULL || (size_t)(colon - item) >= sizeof first)
    return kvr_fail(KVR_E_RANGE, "--requests has '%.40s'; write S:L (new tokens : cached tokens)",
                    item);
  memcpy(first, item, (size_t)(colon - item));
  first[colon - item] = '\0';
  KVR_TRY(cli_parse_int("S in --requests", first, 0, INT_MAX, &out->num_new));
  return cli_parse_int("L in --requests", colon + 1, 0, INT_MAX - out->num_new, &out->num_cached);
}

static kvr_status parse_requests(const char *text, cli_shape *s) {
  s->num_requests = count_items(text);
  s->requests = calloc((size_t)s->num_requests, sizeof *s->requests);
  if (s->requests == NULL)
    return kvr_fail(KVR_E_OOM, "no host memory for %d requests", s->num_requests);
  for (int i = 0; text != NULL; i++) {
    char item[64];
    text = next_item(text, item, sizeof item);
    KVR_TRY(parse_request(item, &s->requests[i]));
  }
  return KVR_OK;
}

static kvr_status one_request(const cli_options *o, const cli_given_shape *f, cli_shape *s) {
  s->num_requests = 1;
  s->requests = calloc(1, sizeof *s->requests);
  if (s->requests == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a request");
  const bool one_chunk = o->cached_tokens > 0 && !cli_options_given(o, "tokens");
  s->requests[0] = (cli_length){one_chunk ? o->chunk : o->tokens, o->cached_tokens};
  if (s->requests[0].num_new > INT_MAX - o->cached_tokens)
    return kvr_fail(KVR_E_RANGE, "%d new and %d cached tokens are beyond the limit of %d in all",
                    s->requests[0].num_new, o->cached_tokens, INT_MAX);
  if (f->num_tokens == 0) return KVR_OK;
  if (o->cached_tokens > f->num_tokens)
    return kvr_fail(KVR_E_CONFLICT, "--cached-tokens is %d, but the input file has only %d tokens",
                    o->cached_tokens, f->num_tokens);
  return agree(o, "tokens", o->tokens, f->num_tokens - o->cached_tokens, &s->requests[0].num_new);
}

static kvr_status take_requests(const cli_options *o, const cli_given_shape *f, cli_shape *s) {
  if (o->requests == NULL) return one_request(o, f, s);
  if (cli_options_given(o, "tokens") || cli_options_given(o, "cached-tokens"))
    return kvr_fail(KVR_E_CONFLICT,
                    "--requests gives all lengths; leave --tokens and --cached-tokens out");
  KVR_TRY(parse_requests(o->requests, s));
  long long total = 0;
  for (int i = 0; i < s->num_requests; i++)
    total += (long long)s->requests[i].num_new + s->requests[i].num_cached;
  if (f->num_tokens > 0 && total != f->num_tokens)
    return kvr_fail(KVR_E_CONFLICT, "--requests has %lld tokens in all, but the input file has %d",
                    total, f->num_tokens);
  if (total > INT_MAX)
    return kvr_fail(KVR_E_RANGE, "--requests has %lld tokens in all; the limit is %d", total,
                    INT_MAX);
  return KVR_OK;
}

static kvr_status take_weights(const cli_options *o, cli_shape *s) {
  if (o->weights == NULL) return KVR_OK;
  const int num = count_items(o->weights);
  if (num != o->ranks)
    return kvr_fail(KVR_E_CONFLICT, "--weights has %d numbers, but there are %d ranks", num,
                    o->ranks);
  s->weights = calloc((size_t)num, sizeof *s->weights);
  if (s->weights == NULL) return kvr_fail(KVR_E_OOM, "no host memory for %d weights", num);
  const char *text = o->weights;
  for (int r = 0; text != NULL; r++) {
    char item[24];
    text = next_item(text, item, sizeof item);
    KVR_TRY(cli_parse_int("a number in --weights", item, 0, INT_MAX / 1024, &s->weights[r]));
  }
  s->cache.weights = s->weights;
  return KVR_OK;
}

static kvr_status take_map(const cli_options *o, cli_shape *s) {
  long long total = o->ranks;
  int longest = 1;
  if (s->weights != NULL) {
    total = 0;
    for (int r = 0; r < o->ranks; r++) total += s->weights[r];
  }
  for (int i = 0; i < s->num_requests; i++)
    longest = kvr_max(longest, s->requests[i].num_new + s->requests[i].num_cached);
  if (strcmp(o->map, "striped") == 0)
    s->cache.interleave = 1;
  else if (strcmp(o->map, "paged") == 0)
    s->cache.interleave = o->page_size;
  else if (strcmp(o->map, "contiguous") == 0)
    s->cache.interleave = total > 0 ? (int)((longest + total - 1) / total) : 1;
  else if (o->map[0] >= '0' && o->map[0] <= '9')
    return cli_parse_int("--map", o->map, 1, INT_MAX, &s->cache.interleave);
  else
    return kvr_fail(KVR_E_RANGE,
                    "--map is '%.40s'; use striped, paged, contiguous or the interleave in tokens",
                    o->map);
  return KVR_OK;
}

static void count_pages_and_steps(cli_shape *s) {
  long long pages = 0;
  for (int i = 0; i < s->num_requests; i++) {
    const cli_length *q = &s->requests[i];
    pages += kvr_map_num_pages(&s->cache, q->num_new + q->num_cached);
    s->num_steps = kvr_max(s->num_steps, kvr_ceil_div(q->num_new, s->chunk));
  }
  s->cache.num_pages = pages < 1 ? 1 : pages > INT_MAX ? INT_MAX : (int)pages;
}

static kvr_status fill(const cli_options *o, const cli_given_shape *f, cli_shape *s) {
  s->cache = (kvr_cache_desc){.struct_size = sizeof s->cache,
                              .num_ranks = o->ranks,
                              .page_size = o->page_size,
                              .num_pages = INT_MAX,
                              .interleave = 1};
  s->window = o->window;
  s->soft_cap = (float)o->soft_cap;
  s->q_scale = (float)o->q_scale;
  s->k_scale = (float)o->k_scale;
  s->v_scale = (float)o->v_scale;
  s->out_dtype = o->out_dtype;
  s->causal = o->causal;
  s->chunk = o->chunk;
  KVR_TRY(take_heads(o, f, s));
  KVR_TRY(take_requests(o, f, s));
  KVR_TRY(take_weights(o, s));
  KVR_TRY(take_map(o, s));
  /* Checks the map before it is used to count pages. */
  const kvr_problem map_only = {.struct_size = sizeof map_only,
                                .cache = s->cache,
                                .num_q_heads = s->num_q_heads,
                                .out_dtype = s->out_dtype,
                                .causal = s->causal};
  KVR_TRY(kvr_problem_check(&map_only, NULL));
  KVR_TRY(cli_sinks_load(o->sinks, s->num_q_heads, o->seed, &s->sinks));
  count_pages_and_steps(s);
  return KVR_OK;
}

kvr_status cli_shape_init(const cli_options *options, const cli_given_shape *file, cli_shape *out) {
  memset(out, 0, sizeof *out);
  const kvr_status status = fill(options, file, out);
  if (status != KVR_OK) cli_shape_fini(out);
  return status;
}

void cli_shape_fini(cli_shape *shape) {
  free(shape->weights);
  free(shape->requests);
  free(shape->sinks);
  memset(shape, 0, sizeof *shape);
}

kvr_request cli_shape_request(const cli_shape *s, int request, int done, int most) {
  const cli_length *q = &s->requests[request];
  const int before = kvr_min(done, q->num_new);
  return (kvr_request){.num_new = kvr_min(most, q->num_new - before),
                       .num_cached = q->num_cached + before};
}

kvr_problem cli_shape_problem(const cli_shape *s, const kvr_request *requests) {
  return (kvr_problem){.struct_size = sizeof(kvr_problem),
                       .cache = s->cache,
                       .num_q_heads = s->num_q_heads,
                       .out_dtype = s->out_dtype,
                       .causal = s->causal,
                       .window = s->window,
                       .soft_cap = s->soft_cap,
                       .sinks = s->sinks,
                       .q_scale = s->q_scale,
                       .k_scale = s->k_scale,
                       .v_scale = s->v_scale,
                       .num_requests = s->num_requests,
                       .requests = requests};
}

kvr_options cli_shape_options(const cli_options *o, const char *strategy) {
  return (kvr_options){.struct_size = sizeof(kvr_options),
                       .strategy = strategy,
                       .tile = o->tile,
                       .query_tile = o->query_tile,
                       .num_slots = o->slots};
}

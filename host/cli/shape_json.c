/* The settings of a run, so that its JSON says how to repeat it. */
#include "cli/shape.h"

static void add_cache(const cli_options *o, const kvr_cache_desc *c, cJSON *item) {
  cJSON_AddNumberToObject(item, "ranks", c->num_ranks);
  cJSON_AddNumberToObject(item, "kv_heads", c->num_kv_heads);
  cJSON_AddNumberToObject(item, "head_dim", c->head_dim);
  cJSON_AddStringToObject(item, "dtype", kvr_dtype_name(c->dtype));
  cJSON_AddNumberToObject(item, "page_size", c->page_size);
  cJSON_AddStringToObject(item, "map", o->map);
  cJSON_AddNumberToObject(item, "interleave", c->interleave);
  if (c->weights != NULL)
    cJSON_AddItemToObject(item, "weights", cJSON_CreateIntArray(c->weights, c->num_ranks));
}

static void add_masks(const cli_options *o, const cli_shape *s, cJSON *item) {
  cJSON_AddNumberToObject(item, "causal", s->causal);
  cJSON_AddNumberToObject(item, "window", s->window);
  cJSON_AddNumberToObject(item, "soft_cap", o->soft_cap);
  if (o->sinks != NULL)
    cJSON_AddStringToObject(item, "sinks", o->sinks);
  else
    cJSON_AddNullToObject(item, "sinks");
  cJSON_AddNumberToObject(item, "q_scale", o->q_scale);
  cJSON_AddNumberToObject(item, "k_scale", o->k_scale);
  cJSON_AddNumberToObject(item, "v_scale", o->v_scale);
  cJSON_AddStringToObject(item, "math", kvr_math_name(o->math));
}

void cli_shape_json(const cli_options *o, const cli_shape *s, cJSON *root) {
  cJSON *item = cJSON_AddObjectToObject(root, "settings");
  cJSON *requests = cJSON_AddArrayToObject(item, "requests");
  for (int i = 0; i < s->num_requests; i++) {
    const int lengths[2] = {s->requests[i].num_new, s->requests[i].num_cached};
    cJSON_AddItemToArray(requests, cJSON_CreateIntArray(lengths, 2));
  }
  cJSON_AddNumberToObject(item, "chunk", s->chunk);
  cJSON_AddNumberToObject(item, "heads", s->num_q_heads);
  cJSON_AddStringToObject(item, "out_dtype", kvr_dtype_name(s->out_dtype));
  add_cache(o, &s->cache, item);
  add_masks(o, s, item);
  cJSON_AddNumberToObject(item, "tile", o->tile);
  cJSON_AddNumberToObject(item, "query_tile", o->query_tile);
  cJSON_AddNumberToObject(item, "slots", o->slots);
  cJSON_AddBoolToObject(item, "copy_queue", o->copy_queue);
  cJSON_AddNumberToObject(item, "timeout_s", o->timeout);
  char seed[24]; /* as text: beyond 2^53 a JSON number would not hold it */
  snprintf(seed, sizeof seed, "%llu", (unsigned long long)o->seed);
  cJSON_AddStringToObject(item, "seed", seed);
}

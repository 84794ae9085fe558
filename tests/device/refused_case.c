#include "refused_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "device_case.h"

enum { POOL = REFUSED_PAGES * REFUSED_PAGE * 2 * REFUSED_NKV * REFUSED_D * 4 };

/* What a cache holds, as far as anybody can see. */
typedef struct picture {
  unsigned char pools[REFUSED_P][POOL];
  int lengths[REFUSED_REQUESTS];
  int tables[REFUSED_REQUESTS][REFUSED_PAGES];
  int entries[REFUSED_REQUESTS];
  int free_pages;
} picture;

static refused_world world;
static picture before;

static void take_picture(const refused_world *w, picture *p) {
  memset(p, 0, sizeof *p);
  for (int r = 0; r < REFUSED_P; r++)
    device_ok(kvr_cache_export(w->cache, r, p->pools[r], POOL), "kvr_cache_export");
  for (int i = 0; i < REFUSED_REQUESTS; i++) {
    p->lengths[i] = kvr_cache_length(w->cache, w->ids[i]);
    const int *table = kvr_cache_table(w->cache, w->ids[i], &p->entries[i]);
    for (int e = 0; e < p->entries[i]; e++) p->tables[i][e] = table[e];
  }
  p->free_pages = kvr_cache_num_free_pages(w->cache);
}

kvr_cache_desc refused_desc(void) {
  return (kvr_cache_desc){.struct_size = sizeof(kvr_cache_desc),
                          .num_ranks = REFUSED_P,
                          .num_kv_heads = REFUSED_NKV,
                          .head_dim = REFUSED_D,
                          .page_size = REFUSED_PAGE,
                          .num_pages = REFUSED_PAGES,
                          .interleave = 1};
}

kvr_limits refused_limits(void) {
  return (kvr_limits){.struct_size = sizeof(kvr_limits),
                      .num_q_heads = REFUSED_NQ,
                      .max_new_tokens = REFUSED_NEW,
                      .max_context = 9,
                      .max_requests = 2,
                      .tile = 3,
                      .strategies = "ring,gather-kv,gather-q"};
}

void refused_reset(refused_world *w) {
  w->requests[0] = (kvr_request){.num_new = REFUSED_NEW, .num_cached = 5, .cache_id = w->ids[0]};
  w->requests[1] = (kvr_request){.num_new = 0, .num_cached = 9, .cache_id = w->ids[1]};
  w->requests[2] = (kvr_request){.num_new = 0, .num_cached = 0, .cache_id = w->ids[2]};
  w->problem = (kvr_problem){.struct_size = sizeof w->problem,
                             .cache = refused_desc(),
                             .num_q_heads = REFUSED_NQ,
                             .causal = 1,
                             .num_requests = 1,
                             .requests = w->requests};
  w->options = (kvr_options){.struct_size = sizeof w->options, .strategy = "ring", .tile = 3};
}

static void add_request(refused_world *w, int i, int tokens, int room) {
  float rows[9 * REFUSED_NKV * REFUSED_D];
  for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) rows[k] = (float)(k + (size_t)i) / 8;
  device_ok(kvr_cache_add(w->cache, &w->ids[i]), "kvr_cache_add");
  device_ok(kvr_cache_reserve(w->cache, w->ids[i], room), "kvr_cache_reserve");
  device_ok(kvr_cache_append(w->cache, w->ids[i], rows, rows, tokens), "kvr_cache_append");
}

refused_world *refused_open(void) {
  refused_world *w = &world;
  unsigned char pool[POOL];
  if (w->group != NULL) {
    refused_reset(w);
    return w;
  }
  const kvr_cache_desc desc = refused_desc();
  const kvr_limits limits = refused_limits();
  w->group = device_group(REFUSED_P, 0);
  device_ok(kvr_cache_create(w->group, &desc, &w->cache), "kvr_cache_create");
  for (int i = 0; i < POOL; i++) pool[i] = (unsigned char)(i * 7);
  for (int r = 0; r < REFUSED_P; r++)
    device_ok(kvr_cache_import(w->cache, r, pool, POOL), "kvr_cache_import");
  add_request(w, 0, 5, 16);
  add_request(w, 1, 9, 16);
  add_request(w, 2, 0, 8);
  device_ok(kvr_session_create(w->group, w->cache, &limits, &w->session), "kvr_session_create");
  take_picture(w, &before);
  refused_reset(w);
  return w;
}

int refused_close(void **state) {
  (void)state;
  kvr_session_destroy(world.session);
  kvr_cache_destroy(world.cache);
  kvr_group_destroy(world.group);
  world = (refused_world){0};
  return 0;
}

void refused_expect(refused_world *w, kvr_status got, kvr_status want, refused_words words) {
  static picture now;
  if (got != want)
    fail_msg("%s: got %s, want %s: %s", words.list[0], kvr_status_name(got), kvr_status_name(want),
             kvr_error_message());
  for (int i = 0; i < 3 && words.list[i] != NULL; i++)
    if (strstr(kvr_error_message(), words.list[i]) == NULL)
      fail_msg("message '%s' does not say '%s'", kvr_error_message(), words.list[i]);
  take_picture(w, &now);
  assert_memory_equal(&now, &before, sizeof now);
  refused_reset(w);
}

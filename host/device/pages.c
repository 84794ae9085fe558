#include "device/pages.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

static kvr_status no_memory(void) { return kvr_fail(KVR_E_OOM, "no host memory for block tables"); }

kvr_status kvr_pages_init(kvr_pages *p, int num_pages) {
  memset(p, 0, sizeof *p);
  p->free_list = malloc((size_t)num_pages * sizeof *p->free_list);
  p->refs = calloc((size_t)num_pages, sizeof *p->refs);
  if (p->free_list == NULL || p->refs == NULL) {
    kvr_pages_fini(p);
    return no_memory();
  }
  p->num_pages = p->num_free = num_pages;
  for (int i = 0; i < num_pages; i++) p->free_list[i] = num_pages - 1 - i; /* page 0 goes first */
  return KVR_OK;
}

void kvr_pages_fini(kvr_pages *p) {
  for (int i = 0; i < p->num_sequences; i++) free(p->sequences[i].table);
  free(p->sequences);
  free(p->free_list);
  free(p->refs);
  memset(p, 0, sizeof *p);
}

kvr_status kvr_pages_find(const kvr_pages *p, int id, kvr_sequence **out) {
  if (id < 0 || id >= p->num_sequences || !p->sequences[id].used)
    return kvr_fail(KVR_E_RANGE, "cache request %d does not exist; kvr_cache_add makes one", id);
  *out = &p->sequences[id];
  return KVR_OK;
}

kvr_status kvr_pages_add(kvr_pages *p, int *out_id) {
  int id = 0;
  while (id < p->num_sequences && p->sequences[id].used) id++;
  if (id == p->num_sequences) {
    kvr_sequence *moved =
        realloc(p->sequences, ((size_t)p->num_sequences + 1) * sizeof *p->sequences);
    if (moved == NULL) return no_memory();
    p->sequences = moved;
    p->num_sequences++;
  }
  p->sequences[id] = (kvr_sequence){.used = true};
  *out_id = id;
  return KVR_OK;
}

static kvr_status make_room(kvr_sequence *s, int num_entries) {
  if (num_entries <= s->cap_pages) return KVR_OK;
  const int larger = num_entries > INT_MAX / 2 ? num_entries : 2 * num_entries;
  int *moved = realloc(s->table, (size_t)larger * sizeof *moved);
  if (moved == NULL) return no_memory();
  s->table = moved;
  s->cap_pages = larger;
  return KVR_OK;
}

kvr_status kvr_pages_reserve(kvr_pages *p, int id, int num_entries) {
  kvr_sequence *s = NULL;
  KVR_TRY(kvr_pages_find(p, id, &s));
  const int need = num_entries - s->num_pages;
  if (need > p->num_free)
    return kvr_fail(KVR_E_CAPACITY,
                    "cache request %d needs %d more pages, %d of %d are free; release requests or "
                    "create the cache with more pages",
                    id, need, p->num_free, p->num_pages);
  KVR_TRY(make_room(s, num_entries));
  while (s->num_pages < num_entries) {
    const int page = p->free_list[--p->num_free];
    p->refs[page] = 1;
    s->table[s->num_pages++] = page;
  }
  return KVR_OK;
}

/* Drops one use of every page; unused ones become free. */
static void give_back(kvr_pages *p, kvr_sequence *s) {
  for (int i = s->num_pages - 1; i >= 0; i--)
    if (--p->refs[s->table[i]] == 0) p->free_list[p->num_free++] = s->table[i];
  s->num_pages = 0;
}

static void take(kvr_pages *p, int page) {
  p->refs[page]++;
  for (int i = 0; i < p->num_free; i++)
    if (p->free_list[i] == page) {
      memmove(&p->free_list[i], &p->free_list[i + 1],
              (size_t)(--p->num_free - i) * sizeof *p->free_list);
      return;
    }
}

static bool has_page(const kvr_sequence *s, int page) {
  for (int i = 0; i < s->num_pages; i++)
    if (s->table[i] == page) return true;
  return false;
}

/* In range, named once, and free or this request's own. */
static kvr_status check_table(const kvr_pages *p, int id, const int *table, int num_entries) {
  const kvr_sequence *s = &p->sequences[id];
  char *named = calloc((size_t)p->num_pages, 1);
  if (named == NULL) return no_memory();
  kvr_status status = KVR_OK;
  for (int i = 0; i < num_entries && status == KVR_OK; i++) {
    const int page = table[i];
    if (page < 0 || page >= p->num_pages)
      status =
          kvr_fail(KVR_E_TABLE, "entry %d of the block table is page %d; the pool has %d pages", i,
                   page, p->num_pages);
    else if (named[page])
      status =
          kvr_fail(KVR_E_TABLE, "entry %d of the block table names page %d a second time", i, page);
    else if (p->refs[page] > (has_page(s, page) ? 1 : 0))
      status = kvr_fail(KVR_E_TABLE,
                        "entry %d of the block table is page %d, which another request uses; "
                        "kvr_cache_share shares pages",
                        i, page);
    else
      named[page] = 1;
  }
  free(named);
  return status;
}

kvr_status kvr_pages_set_table(kvr_pages *p, int id, const int *table, int num_entries) {
  kvr_sequence *s = NULL;
  KVR_TRY(kvr_pages_find(p, id, &s));
  if (s->length > 0 && (num_entries < s->num_pages ||
                        memcmp(table, s->table, (size_t)s->num_pages * sizeof *table) != 0))
    return kvr_fail(KVR_E_STATE,
                    "cache request %d holds %d tokens; a new block table may only add entries to "
                    "its %d",
                    id, s->length, s->num_pages);
  KVR_TRY(check_table(p, id, table, num_entries));
  KVR_TRY(make_room(s, num_entries));
  give_back(p, s);
  for (int i = 0; i < num_entries; i++) {
    take(p, table[i]);
    s->table[i] = table[i];
  }
  s->num_pages = num_entries;
  return KVR_OK;
}

kvr_status kvr_pages_share(kvr_pages *p, int id, int num_entries, int *out_id) {
  kvr_sequence *from = NULL;
  KVR_TRY(kvr_pages_find(p, id, &from));
  int to_id = -1;
  KVR_TRY(kvr_pages_add(p, &to_id));
  from = &p->sequences[id]; /* the array may have moved */
  kvr_sequence *to = &p->sequences[to_id];
  const kvr_status status = make_room(to, num_entries);
  if (status != KVR_OK) {
    to->used = false;
    return status;
  }
  for (int i = 0; i < num_entries; i++) {
    to->table[i] = from->table[i];
    p->refs[to->table[i]]++;
  }
  to->num_pages = num_entries;
  *out_id = to_id;
  return KVR_OK;
}

kvr_status kvr_pages_release(kvr_pages *p, int id) {
  kvr_sequence *s = NULL;
  KVR_TRY(kvr_pages_find(p, id, &s));
  give_back(p, s);
  free(s->table);
  *s = (kvr_sequence){0};
  return KVR_OK;
}

#include "core/pages.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

static kvr_status fail_memory(void) {
  return kvr_fail(KVR_E_OOM, "no host memory for block tables");
}

kvr_status kvr_pages_init(kvr_pages *pages, int num_pages) {
  *pages = (kvr_pages){.num_pages = num_pages};
  pages->users = calloc((size_t)num_pages, sizeof *pages->users);
  pages->free = calloc((size_t)num_pages, sizeof *pages->free);
  if (pages->users == NULL || pages->free == NULL) {
    kvr_pages_fini(pages);
    return fail_memory();
  }
  for (int i = 0; i < num_pages; i++) pages->free[i] = num_pages - 1 - i;
  pages->num_free = num_pages;
  return KVR_OK;
}

void kvr_pages_fini(kvr_pages *pages) {
  for (int i = 0; i < pages->num_tables; i++) free(pages->tables[i].entries);
  free(pages->tables);
  free(pages->users);
  free(pages->free);
  *pages = (kvr_pages){0};
}

/* ---- requests ---- */

kvr_status kvr_pages_add(kvr_pages *pages, int *out_id) {
  if (pages->next_id == INT_MAX)
    return kvr_fail(KVR_E_CAPACITY, "the cache has had %d requests: create a new one", INT_MAX);
  if (pages->num_tables == pages->cap_tables) {
    const int larger = pages->cap_tables < 8 ? 8 : pages->cap_tables + pages->cap_tables / 2;
    kvr_table *grown = realloc(pages->tables, (size_t)larger * sizeof *grown);
    if (grown == NULL) return fail_memory();
    pages->tables = grown;
    pages->cap_tables = larger;
  }
  pages->tables[pages->num_tables++] = (kvr_table){.id = pages->next_id};
  *out_id = pages->next_id++;
  return KVR_OK;
}

static int compare_id(const void *id, const void *table) {
  const int a = *(const int *)id, b = ((const kvr_table *)table)->id;
  return (a > b) - (a < b);
}

kvr_table *kvr_pages_find(const kvr_pages *pages, int id) {
  if (pages->num_tables == 0) return NULL;
  return bsearch(&id, pages->tables, (size_t)pages->num_tables, sizeof *pages->tables, compare_id);
}

static kvr_status reserve_entries(kvr_table *table, int num_entries) {
  if (num_entries <= table->cap_entries) return KVR_OK;
  int *grown = realloc(table->entries, (size_t)num_entries * sizeof *grown);
  if (grown == NULL) return fail_memory();
  table->entries = grown;
  table->cap_entries = num_entries;
  return KVR_OK;
}

/* ---- free pages ---- */

static void take(kvr_pages *pages, kvr_table *table) {
  const int page = pages->free[--pages->num_free];
  pages->users[page] = 1;
  table->entries[table->num_entries++] = page;
}

static void give_back(kvr_pages *pages, int page) {
  if (--pages->users[page] == 0) pages->free[pages->num_free++] = page;
}

/* Backwards: the next request that takes the pages gets them in the same order. */
static void give_back_all(kvr_pages *pages, kvr_table *table) {
  while (table->num_entries > 0) give_back(pages, table->entries[--table->num_entries]);
}

/* Takes pages that have got users out of the free list. */
static void drop_used(kvr_pages *pages) {
  int kept = 0;
  for (int i = 0; i < pages->num_free; i++)
    if (pages->users[pages->free[i]] == 0) pages->free[kept++] = pages->free[i];
  pages->num_free = kept;
}

kvr_status kvr_pages_grow(kvr_pages *pages, kvr_table *table, int num_entries) {
  const int more = num_entries - table->num_entries;
  if (more <= 0) return KVR_OK;
  if (more > pages->num_free)
    return kvr_fail(
        KVR_E_CAPACITY,
        "cache request %d needs %d more pages, %d of %d are free: release requests or make "
        "num_pages larger",
        table->id, more, pages->num_free, pages->num_pages);
  KVR_TRY(reserve_entries(table, num_entries));
  while (table->num_entries < num_entries) take(pages, table);
  return KVR_OK;
}

/* ---- tables of the caller ---- */

/* Whether the table may have these pages. own (num_pages) is 1 where the table has the page now;
 * pages get 2 when they are named. */
static kvr_status check_entries(const kvr_pages *pages, const int *entries, int num_entries,
                                char *own) {
  for (int i = 0; i < num_entries; i++) {
    const int page = entries[i];
    if (page < 0 || page >= pages->num_pages)
      return kvr_fail(KVR_E_TABLE, "entry %d is page %d; the pool has pages 0 to %d", i, page,
                      pages->num_pages - 1);
    if (own[page] == 2)
      return kvr_fail(KVR_E_TABLE, "entry %d is page %d, which the table names before", i, page);
    if (own[page] == 0 && pages->users[page] > 0)
      return kvr_fail(
          KVR_E_TABLE,
          "entry %d is page %d, which another request uses: only kvr_cache_share shares", i, page);
    own[page] = 2;
  }
  return KVR_OK;
}

kvr_status kvr_pages_set(kvr_pages *pages, kvr_table *table, const int *entries, int num_entries) {
  char *own = calloc((size_t)pages->num_pages, 1);
  if (own == NULL) return fail_memory();
  for (int i = 0; i < table->num_entries; i++) own[table->entries[i]] = 1;
  kvr_status status = check_entries(pages, entries, num_entries, own);
  free(own);
  if (status == KVR_OK) status = reserve_entries(table, num_entries);
  if (status != KVR_OK) return status;
  give_back_all(pages, table);
  for (int i = 0; i < num_entries; i++) {
    table->entries[i] = entries[i];
    pages->users[entries[i]]++;
  }
  table->num_entries = num_entries;
  drop_used(pages);
  return KVR_OK;
}

/* ---- sharing ---- */

kvr_status kvr_pages_share(kvr_pages *pages, int id, int num_entries, int *out_id) {
  int copy_id = -1;
  KVR_TRY(kvr_pages_add(pages, &copy_id));
  const kvr_table *from = kvr_pages_find(pages, id);
  kvr_table *copy = kvr_pages_find(pages, copy_id);
  const kvr_status status = reserve_entries(copy, num_entries);
  if (status != KVR_OK) {
    kvr_pages_release(pages, copy);
    return status;
  }
  for (int i = 0; i < num_entries; i++) pages->users[copy->entries[i] = from->entries[i]]++;
  copy->num_entries = num_entries;
  *out_id = copy_id;
  return KVR_OK;
}

int kvr_pages_find_shared(const kvr_pages *pages, const kvr_table *table, int from) {
  for (int i = from; i < table->num_entries; i++)
    if (pages->users[table->entries[i]] > 1) return i;
  return -1;
}

void kvr_pages_release(kvr_pages *pages, kvr_table *table) {
  give_back_all(pages, table);
  free(table->entries);
  const int index = (int)(table - pages->tables);
  pages->num_tables--;
  memmove(table, table + 1, (size_t)(pages->num_tables - index) * sizeof *table);
}

/* Pages of a pool and the block tables of requests. Plain data: no OpenCL in it.
 *
 * A page is free (0 users) or belongs to 1 or more requests (more only by kvr_pages_share). Free
 * pages are handed out last in, first out. Ids of requests grow and are never used again, so that a
 * stale id is noticed. */
#ifndef KVR_CORE_PAGES_H
#define KVR_CORE_PAGES_H

#include <stdbool.h>

#include "kvring/status.h"

/* A request: its block table, and what the cache keeps with it. */
typedef struct kvr_table {
  int id;
  int num_entries, cap_entries;
  int *entries; /* (num_entries) pages */
  int length;   /* [tokens] */
  bool held;    /* by a step in flight, which writes behind the length */
} kvr_table;

typedef struct kvr_pages {
  int num_pages;
  int *users; /* (num_pages) requests that hold the page */
  int *free;  /* (num_free) stack of free pages */
  int num_free;
  kvr_table *tables; /* (num_tables) ids ascending */
  int num_tables, cap_tables;
  int next_id;
} kvr_pages;

/* All pages free; page 0 is handed out first. Errors: KVR_E_OOM. */
kvr_status kvr_pages_init(kvr_pages *pages, int num_pages);
void kvr_pages_fini(kvr_pages *pages);

/* A new request without pages. Errors: KVR_E_OOM, KVR_E_CAPACITY after 2^31 - 1 requests. */
kvr_status kvr_pages_add(kvr_pages *pages, int *out_id);
/* Borrowed until a request is added or released; NULL for an unknown id. */
kvr_table *kvr_pages_find(const kvr_pages *pages, int id);

/* Lengthens the table to num_entries; shorter is no change. All or nothing.
 * Errors: KVR_E_CAPACITY naming pages needed and free, KVR_E_OOM. */
kvr_status kvr_pages_grow(kvr_pages *pages, kvr_table *table, int num_entries);
/* Replaces the table. Pages that it leaves become free when nobody else has them.
 * Errors: KVR_E_TABLE for a page out of range, named twice, or of another request; KVR_E_OOM. */
kvr_status kvr_pages_set(kvr_pages *pages, kvr_table *table, const int *entries, int num_entries);
/* A new request that shares the first num_entries pages of id, which exists and has that many.
 * Errors: as kvr_pages_add. */
kvr_status kvr_pages_share(kvr_pages *pages, int id, int num_entries, int *out_id);
/* First entry at or after `from` whose page another request has too; -1: none. */
int kvr_pages_find_shared(const kvr_pages *pages, const kvr_table *table, int from);
/* Frees the pages that nobody else has and forgets the request. */
void kvr_pages_release(kvr_pages *pages, kvr_table *table);

#endif

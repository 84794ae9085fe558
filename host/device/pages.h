/* Pages and block tables: which page of the pools holds which local tokens of which request. The
 * same page number means the same place in every rank's pool. Pure bookkeeping, no OpenCL. */
#ifndef KVR_DEVICE_PAGES_H
#define KVR_DEVICE_PAGES_H

#include <stdbool.h>

#include "kvring/status.h"

/* A request of the cache. */
typedef struct kvr_sequence {
  bool used;
  bool failed; /* a step failed in a way that may have spoiled its tokens */
  int length;  /* [tokens] */
  int shared;  /* tokens shared with another request; they must not be forgotten one-sidedly */
  int num_pages, cap_pages;
  int *table; /* (num_pages) block table */
} kvr_sequence;

typedef struct kvr_pages {
  int num_pages;
  int num_free;
  int *free_list; /* (num_free) last freed, first taken */
  int *refs;      /* (num_pages) requests that use a page; 0: free */
  int num_sequences;
  kvr_sequence *sequences;
} kvr_pages;

kvr_status kvr_pages_init(kvr_pages *pages, int num_pages);
void kvr_pages_fini(kvr_pages *pages);

/* A new empty request. */
kvr_status kvr_pages_add(kvr_pages *pages, int *out_id);
/* Finds a request. Errors: KVR_E_RANGE naming the id. */
kvr_status kvr_pages_find(const kvr_pages *pages, int id, kvr_sequence **out);
/* Makes the block table at least num_entries long. Errors: KVR_E_CAPACITY; nothing is taken then.
 */
kvr_status kvr_pages_reserve(kvr_pages *pages, int id, int num_entries);
/* Takes the caller's table. Errors: KVR_E_TABLE, KVR_E_STATE if the request has tokens. */
kvr_status kvr_pages_set_table(kvr_pages *pages, int id, const int *table, int num_entries);
/* A new request whose table begins with the first num_entries pages of id. */
kvr_status kvr_pages_share(kvr_pages *pages, int id, int num_entries, int *out_id);
/* Gives the pages of a request back and forgets it. */
kvr_status kvr_pages_release(kvr_pages *pages, int id);

#endif

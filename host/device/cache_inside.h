/* What the files of the cache share: its fields. */
#ifndef KVR_DEVICE_CACHE_INSIDE_H
#define KVR_DEVICE_CACHE_INSIDE_H

#include "core/pages.h"
#include "device/cache.h"

struct kvr_cache {
  kvr_group *group;
  kvr_cache_desc desc; /* weights: the copy below */
  int *weights;        /* (num_ranks) or NULL */
  kvr_pages pages;
  size_t row_bytes, page_bytes, bytes; /* bytes: the pool of one rank */
  int pages_per_buffer, num_buffers;   /* the last buffer may hold fewer pages */
  cl_mem *buffers;                     /* (num_ranks, num_buffers) */
};

/* The request of an id (borrowed until one is added or released), with the errors that every
 * function on requests has in common: KVR_E_NULL for no cache, KVR_E_RANGE for an unknown id. */
kvr_status kvr_cache_find(const kvr_cache *cache, int id, kvr_table **out);

#endif

/* The inside of a cache, for the layers above device. */
#ifndef KVR_DEVICE_CACHE_H
#define KVR_DEVICE_CACHE_H

#include <stdbool.h>

#include "device/group.h"
#include "kvring/cache.h"

/* Buffers that the pool of every rank is split over, >= 1. */
int kvr_cache_num_buffers(const kvr_cache *cache);
/* Buffer i of a rank (borrowed): it holds pages [page_first, page_first + page_count). */
cl_mem kvr_cache_buffer(const kvr_cache *cache, int rank, int i, int *page_first, int *page_count);
/* Whether mem is one of the pools' buffers. */
bool kvr_cache_owns(const kvr_cache *cache, cl_mem mem);

/* Whether a step may append to the request. Errors: KVR_E_RANGE for an unknown id, KVR_E_STATE
 * when a step in flight writes to it, or when the next token would go into a page that another
 * request shares (a truncated one can get there). */
kvr_status kvr_cache_check(const kvr_cache *cache, int id);
/* A step that writes to the request begins: until kvr_cache_let_go no other one may, and its pages
 * and length stay as they are. */
void kvr_cache_hold(kvr_cache *cache, int id);
void kvr_cache_let_go(kvr_cache *cache, int id);
/* Sets the length after a step has written its tokens. */
void kvr_cache_commit(kvr_cache *cache, int id, int num_tokens);

#endif

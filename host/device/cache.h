/* The inside of a KV cache, for the executor and the API. */
#ifndef KVR_DEVICE_CACHE_H
#define KVR_DEVICE_CACHE_H

#include "device/group.h"
#include "device/pages.h"
#include "kvring/cache.h"

/* A pool that exceeds the largest allocation lies in several buffers of whole pages. */
int kvr_cache_num_buffers(const kvr_cache *cache);
/* Buffer i of a rank's pool, with the pages it holds (borrowed). */
cl_mem kvr_cache_buffer(const kvr_cache *cache, int rank, int i, int *page_first, int *page_count);
bool kvr_cache_owns(const kvr_cache *cache, cl_mem mem);

/* KVR_OK if the request exists and has not failed. Errors: KVR_E_RANGE, KVR_E_STATE. */
kvr_status kvr_cache_check(const kvr_cache *cache, int id);
/* After a step: the request now holds num_tokens tokens. */
void kvr_cache_commit(kvr_cache *cache, int id, int num_tokens);
/* After a failure that may have spoiled tokens: steps and reads are refused from now on. */
void kvr_cache_mark_failed(kvr_cache *cache, int id);

#endif

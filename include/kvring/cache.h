/* The KV cache: one pool of pages per rank, block tables per request.
 *
 * A cache row is (2 * num_kv_heads, head_dim) with heads as K0 V0 K1 V1 ...; entry i of a request's
 * block table is the page that holds its local tokens [i * page_size, (i + 1) * page_size) on every
 * rank (same page number, each rank's own pool). */
#ifndef KVRING_CACHE_H
#define KVRING_CACHE_H

#include "kvring/group.h"
#include "kvring/problem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvr_cache kvr_cache;

/* Allocates the pools (split over several buffers where the device's largest allocation is
 * smaller). The group is borrowed, the description copied. Owned; release with kvr_cache_destroy.
 * Errors: KVR_E_NULL, KVR_E_SHAPE, KVR_E_DTYPE, KVR_E_RANGE, KVR_E_LAYOUT (ranks
 * of the group), KVR_E_OOM (budget), KVR_E_CL. */
KVR_API kvr_status kvr_cache_create(kvr_group *group, const kvr_cache_desc *desc, kvr_cache **out);
KVR_API void kvr_cache_destroy(kvr_cache *cache); /* accepts NULL */

/* The description, owned by the cache (borrowed). */
KVR_API const kvr_cache_desc *kvr_cache_describe(const kvr_cache *cache);

/* A new request without tokens or pages; its id is the cache_id of kvr_request. Ids are never
 * used again: all functions refuse the id of a released request with KVR_E_RANGE. */
KVR_API kvr_status kvr_cache_add(kvr_cache *cache, int *out_id);
/* Makes room for num_tokens tokens in all, from the free pages of the pool.
 * Errors: KVR_E_CAPACITY naming pages needed and free; nothing is taken then. */
KVR_API kvr_status kvr_cache_reserve(kvr_cache *cache, int id, int num_tokens);
/* Uses the caller's block table (num_entries) (copied). Such pages are the caller's to manage; they
 * leave the free list. Pages that the request has now, shared ones too, may be named again; those
 * that are not go back. Tokens of the request are then what the named pages hold. Errors:
 * KVR_E_TABLE for a page out of range, named twice, or in use by another request; KVR_E_CAPACITY
 * for fewer entries than the request's tokens need; KVR_E_RANGE for more than the pool's pages;
 * entries past what num_tokens of later steps need are never read, so pass only used ones. */
KVR_API kvr_status kvr_cache_set_table(kvr_cache *cache, int id, const int *table, int num_entries);
/* A new request that shares the first num_tokens tokens of id. num_tokens must fill whole pages on
 * every rank. Errors: KVR_E_RANGE naming the nearest smaller length that does. */
KVR_API kvr_status kvr_cache_share(kvr_cache *cache, int id, int num_tokens, int *out_id);
/* Gives the pages back and forgets the request. */
KVR_API kvr_status kvr_cache_release(kvr_cache *cache, int id);

/* Tokens in the cache [tokens]; -1 for an unknown id. */
KVR_API int kvr_cache_length(const kvr_cache *cache, int id);
/* Forgets tokens past num_tokens (no page is freed). Where the next token would go into a page that
 * another request shares, appends and steps give KVR_E_STATE until one of the two is released.
 * Errors: KVR_E_RANGE when it is longer than now. */
KVR_API kvr_status kvr_cache_truncate(kvr_cache *cache, int id, int num_tokens);
KVR_API int kvr_cache_num_free_pages(const kvr_cache *cache);
/* Block table of a request (borrowed, valid until it changes) and its number of entries. */
KVR_API const int *kvr_cache_table(const kvr_cache *cache, int id, int *num_entries);

/* Appends num_tokens rows from the host without attention: k, v (num_tokens, num_kv_heads,
 * head_dim) dense, in the cache's dtype. Blocking. Errors: KVR_E_NULL, KVR_E_RANGE, KVR_E_CAPACITY,
 * KVR_E_STATE (see kvr_cache_truncate), KVR_E_CL, and as all that follow KVR_E_TIMEOUT. */
KVR_API kvr_status kvr_cache_append(kvr_cache *cache, int id, const void *k, const void *v,
                                    int num_tokens);
/* Reads rows of positions [first, first + num_tokens) back in position order, bit-exact:
 * k, v (num_tokens, num_kv_heads, head_dim). Blocking. */
KVR_API kvr_status kvr_cache_read(const kvr_cache *cache, int id, int first, int num_tokens,
                                  void *k, void *v);
/* Raw bytes of one rank's whole pool, (num_pages, page_size, 2 * num_kv_heads, head_dim), from or
 * to the host; for tests and checkpoints. Blocking. Errors: KVR_E_RANGE when size differs.
 *
 * These four wait for steps in flight as well. After KVR_E_TIMEOUT (see kvr_group_desc.timeout) the
 * device may still read or write the memory of an export or import. */
KVR_API kvr_status kvr_cache_export(const kvr_cache *cache, int rank, void *bytes, size_t size);
KVR_API kvr_status kvr_cache_import(kvr_cache *cache, int rank, const void *bytes, size_t size);
/* Bytes of one rank's pool. */
KVR_API size_t kvr_cache_bytes(const kvr_cache *cache);

#ifdef __cplusplus
}
#endif
#endif

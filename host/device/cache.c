#include "device/cache_inside.h"

#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "core/layout.h"
#include "core/validate.h"

/* ---- creation ---- */

static kvr_status count_bytes(kvr_cache *c) {
  const kvr_cache_desc *d = &c->desc;
  const size_t heads = 2 * (size_t)d->num_kv_heads, head = (size_t)d->head_dim;
  if (kvr_mul_size(heads, head, &c->row_bytes) &&
      kvr_mul_size(c->row_bytes, kvr_dtype_size(d->dtype), &c->row_bytes) &&
      kvr_mul_size(c->row_bytes, (size_t)d->page_size, &c->page_bytes) &&
      kvr_mul_size(c->page_bytes, (size_t)d->num_pages, &c->bytes) && c->page_bytes > 0)
    return KVR_OK;
  return kvr_fail(KVR_E_RANGE,
                  "a pool of %d pages of %d tokens has none or more bytes than can be counted",
                  d->num_pages, d->page_size);
}

/* Whole pages per buffer, the same on every rank: the device with the smallest buffers decides. */
static kvr_status split_pool(kvr_cache *c) {
  size_t max_alloc = SIZE_MAX;
  for (int r = 0; r < c->group->num_ranks; r++)
    if (c->group->ranks[r].max_alloc < max_alloc) max_alloc = c->group->ranks[r].max_alloc;
  if (c->page_bytes > max_alloc)
    return kvr_fail(KVR_E_OOM,
                    "a page of %d tokens has %zu bytes, the largest allocation is %zu: use a "
                    "smaller page_size",
                    c->desc.page_size, c->page_bytes, max_alloc);
  const size_t fit = max_alloc / c->page_bytes;
  c->pages_per_buffer = fit < (size_t)c->desc.num_pages ? (int)fit : c->desc.num_pages;
  c->num_buffers = kvr_ceil_div(c->desc.num_pages, c->pages_per_buffer);
  return KVR_OK;
}

static kvr_status copy_weights(kvr_cache *c) {
  const size_t size = (size_t)c->desc.num_ranks * sizeof *c->weights;
  if (c->desc.weights == NULL) return KVR_OK;
  c->weights = malloc(size);
  if (c->weights == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a cache");
  memcpy(c->weights, c->desc.weights, size);
  c->desc.weights = c->weights;
  return KVR_OK;
}

static int pages_of_buffer(const kvr_cache *c, int i) {
  return kvr_min(c->pages_per_buffer, c->desc.num_pages - i * c->pages_per_buffer);
}

static size_t bytes_of_buffer(const kvr_cache *c, int i) {
  return (size_t)pages_of_buffer(c, i) * c->page_bytes;
}

static kvr_status allocate_pools(kvr_cache *c) {
  c->buffers = calloc((size_t)c->desc.num_ranks * (size_t)c->num_buffers, sizeof(cl_mem));
  if (c->buffers == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a cache");
  for (int r = 0; r < c->desc.num_ranks; r++)
    for (int i = 0; i < c->num_buffers; i++)
      KVR_TRY(kvr_group_alloc(c->group, r, bytes_of_buffer(c, i), "KV cache",
                              &c->buffers[r * c->num_buffers + i]));
  return KVR_OK;
}

static kvr_status init(kvr_cache *c, kvr_group *group, const kvr_cache_desc *desc) {
  c->group = group;
  c->desc = *desc;
  KVR_TRY(copy_weights(c));
  KVR_TRY(count_bytes(c));
  KVR_TRY(split_pool(c));
  KVR_TRY(allocate_pools(c)); /* the budget refuses sizes whose lists of pages are large, too */
  return kvr_pages_init(&c->pages, desc->num_pages);
}

kvr_status kvr_cache_create(kvr_group *group, const kvr_cache_desc *desc, kvr_cache **out) {
  if (group == NULL || desc == NULL || out == NULL)
    return kvr_fail(KVR_E_NULL, "group, desc or out is NULL");
  *out = NULL;
  KVR_TRY(kvr_cache_desc_check(desc));
  if (desc->num_ranks != group->num_ranks)
    return kvr_fail(KVR_E_LAYOUT, "the cache has num_ranks %d, its group has %d ranks",
                    desc->num_ranks, group->num_ranks);
  kvr_cache *c = calloc(1, sizeof *c);
  if (c == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a cache");
  const kvr_status status = init(c, group, desc);
  if (status != KVR_OK) {
    kvr_cache_destroy(c);
    return status;
  }
  *out = c;
  return KVR_OK;
}

void kvr_cache_destroy(kvr_cache *c) {
  if (c == NULL) return;
  for (int r = 0; c->buffers != NULL && r < c->desc.num_ranks; r++)
    for (int i = 0; i < c->num_buffers; i++)
      kvr_group_free(c->group, r, c->buffers[r * c->num_buffers + i], bytes_of_buffer(c, i));
  free(c->buffers);
  kvr_pages_fini(&c->pages);
  free(c->weights);
  free(c);
}

/* ---- questions ---- */

const kvr_cache_desc *kvr_cache_describe(const kvr_cache *c) { return c == NULL ? NULL : &c->desc; }

size_t kvr_cache_bytes(const kvr_cache *c) { return c == NULL ? 0 : c->bytes; }

int kvr_cache_num_free_pages(const kvr_cache *c) { return c == NULL ? 0 : c->pages.num_free; }

int kvr_cache_num_buffers(const kvr_cache *c) { return c->num_buffers; }

cl_mem kvr_cache_buffer(const kvr_cache *c, int rank, int i, int *page_first, int *page_count) {
  *page_first = i * c->pages_per_buffer;
  *page_count = pages_of_buffer(c, i);
  return c->buffers[rank * c->num_buffers + i];
}

bool kvr_cache_owns(const kvr_cache *c, cl_mem mem) {
  for (int i = 0; i < c->desc.num_ranks * c->num_buffers; i++)
    if (c->buffers[i] == mem) return true;
  return false;
}

/* ---- requests ---- */

kvr_status kvr_cache_find(const kvr_cache *c, int id, kvr_table **out) {
  if (c == NULL) return kvr_fail(KVR_E_NULL, "cache is NULL");
  *out = kvr_pages_find(&c->pages, id);
  if (*out != NULL) return KVR_OK;
  return kvr_fail(KVR_E_RANGE, "the cache has no request %d: it was released or never added", id);
}

static kvr_status find_idle(const kvr_cache *c, int id, kvr_table **out) {
  KVR_TRY(kvr_cache_find(c, id, out));
  if (!(*out)->held) return KVR_OK;
  return kvr_fail(KVR_E_STATE, "a step in flight writes to cache request %d; wait for it first",
                  id);
}

kvr_status kvr_cache_add(kvr_cache *c, int *out_id) {
  if (c == NULL || out_id == NULL) return kvr_fail(KVR_E_NULL, "cache or out_id is NULL");
  return kvr_pages_add(&c->pages, out_id);
}

kvr_status kvr_cache_reserve(kvr_cache *c, int id, int num_tokens) {
  kvr_table *t = NULL;
  KVR_TRY(kvr_cache_find(c, id, &t));
  if (num_tokens < 0)
    return kvr_fail(KVR_E_RANGE, "num_tokens is %d; it must not be negative", num_tokens);
  return kvr_pages_grow(&c->pages, t, kvr_map_num_pages(&c->desc, num_tokens));
}

kvr_status kvr_cache_set_table(kvr_cache *c, int id, const int *table, int num_entries) {
  kvr_table *t = NULL;
  KVR_TRY(find_idle(c, id, &t));
  if (num_entries < 0 || num_entries > c->desc.num_pages)
    return kvr_fail(KVR_E_RANGE, "num_entries is %d; a table of this cache has 0 to %d",
                    num_entries, c->desc.num_pages);
  if (table == NULL && num_entries > 0) return kvr_fail(KVR_E_NULL, "table is NULL");
  const int need = kvr_map_num_pages(&c->desc, t->length);
  if (num_entries < need)
    return kvr_fail(
        KVR_E_CAPACITY,
        "the table has %d entries, the %d tokens of cache request %d need %d: truncate it "
        "first",
        num_entries, t->length, id, need);
  return kvr_pages_set(&c->pages, t, table, num_entries);
}

kvr_status kvr_cache_release(kvr_cache *c, int id) {
  kvr_table *t = NULL;
  KVR_TRY(find_idle(c, id, &t));
  kvr_pages_release(&c->pages, t);
  return KVR_OK;
}

int kvr_cache_length(const kvr_cache *c, int id) {
  const kvr_table *t = c == NULL ? NULL : kvr_pages_find(&c->pages, id);
  return t == NULL ? -1 : t->length;
}

const int *kvr_cache_table(const kvr_cache *c, int id, int *num_entries) {
  const kvr_table *t = c == NULL ? NULL : kvr_pages_find(&c->pages, id);
  if (num_entries != NULL) *num_entries = t == NULL ? 0 : t->num_entries;
  return t == NULL ? NULL : t->entries;
}

kvr_status kvr_cache_truncate(kvr_cache *c, int id, int num_tokens) {
  kvr_table *t = NULL;
  KVR_TRY(find_idle(c, id, &t));
  if (num_tokens < 0 || num_tokens > t->length)
    return kvr_fail(KVR_E_RANGE, "num_tokens is %d; cache request %d has %d tokens", num_tokens, id,
                    t->length);
  t->length = num_tokens;
  return KVR_OK;
}

static void set_held(kvr_cache *c, int id, bool held) {
  kvr_table *t = kvr_pages_find(&c->pages, id);
  if (t != NULL) t->held = held;
}

void kvr_cache_hold(kvr_cache *c, int id) { set_held(c, id, true); }

void kvr_cache_let_go(kvr_cache *c, int id) { set_held(c, id, false); }

void kvr_cache_commit(kvr_cache *c, int id, int num_tokens) {
  kvr_table *t = kvr_pages_find(&c->pages, id);
  if (t != NULL) t->length = num_tokens;
}

/* ---- sharing ---- */

/* Pages that num_tokens tokens fill completely on every rank, or -1 if they do not. Ranks that
 * store nothing never write either. Every rank must have the same number of rows: a rank with fewer
 * would append its next token into a shared page. */
static int whole_pages(const kvr_cache_desc *d, int num_tokens) {
  int rows = -1;
  for (int r = 0; r < d->num_ranks; r++) {
    if (kvr_map_weight(d, r) == 0) continue;
    const int count = kvr_map_count(d, num_tokens, r);
    if (count % d->page_size != 0 || (rows >= 0 && count != rows)) return -1;
    rows = count;
  }
  return rows / d->page_size;
}

kvr_status kvr_cache_share(kvr_cache *c, int id, int num_tokens, int *out_id) {
  kvr_table *t = NULL;
  if (out_id == NULL) return kvr_fail(KVR_E_NULL, "out_id is NULL");
  KVR_TRY(kvr_cache_find(c, id, &t));
  if (num_tokens < 0 || num_tokens > t->length)
    return kvr_fail(KVR_E_RANGE, "num_tokens is %d; cache request %d has %d tokens", num_tokens, id,
                    t->length);
  const int num_pages = whole_pages(&c->desc, num_tokens);
  if (num_pages < 0) {
    int fit = num_tokens - 1;
    while (whole_pages(&c->desc, fit) < 0) fit--;
    return kvr_fail(KVR_E_RANGE,
                    "%d tokens do not fill whole pages of %d tokens on every rank; the nearest "
                    "smaller length that does is %d",
                    num_tokens, c->desc.page_size, fit);
  }
  KVR_TRY(kvr_pages_share(&c->pages, id, num_pages, out_id));
  kvr_cache_commit(c, *out_id, num_tokens);
  return KVR_OK;
}

/* First entry of the table that a token after the first num_tokens could be written to. */
static int first_open_entry(const kvr_cache_desc *d, int num_tokens) {
  int rows = INT_MAX;
  for (int r = 0; r < d->num_ranks; r++)
    if (kvr_map_weight(d, r) > 0) rows = kvr_min(rows, kvr_map_count(d, num_tokens, r));
  return rows / d->page_size;
}

kvr_status kvr_cache_check(const kvr_cache *c, int id) {
  kvr_table *t = NULL;
  KVR_TRY(find_idle(c, id, &t));
  const int shared = kvr_pages_find_shared(&c->pages, t, first_open_entry(&c->desc, t->length));
  if (shared < 0) return KVR_OK;
  return kvr_fail(
      KVR_E_STATE,
      "cache request %d was truncated to %d tokens, so that entry %d of its table would be "
      "written, but another request shares that page: release one of them",
      id, t->length, shared);
}

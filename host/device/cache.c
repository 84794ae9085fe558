#include "device/cache.h"

#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "core/layout.h"
#include "core/validate.h"
#include "device/cl_error.h"

struct kvr_cache {
  kvr_group *group; /* borrowed */
  kvr_cache_desc desc;
  int *weights; /* copy behind desc.weights, or NULL */
  size_t row_bytes, page_bytes;
  int pages_per_buffer, num_buffers;
  cl_mem *buffers; /* (num_ranks, num_buffers) */
  kvr_pages pages;
};

/* ---- creation ---- */

static int buffer_pages(const kvr_cache *c, int i) {
  return kvr_min(c->pages_per_buffer, c->desc.num_pages - i * c->pages_per_buffer);
}

static kvr_status copy_desc(kvr_cache *c, const kvr_cache_desc *desc) {
  c->desc = *desc;
  c->desc.weights = NULL;
  if (desc->weights == NULL) return KVR_OK;
  const size_t size = (size_t)desc->num_ranks * sizeof *c->weights;
  c->weights = malloc(size);
  if (c->weights == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a cache");
  memcpy(c->weights, desc->weights, size);
  c->desc.weights = c->weights;
  return KVR_OK;
}

static kvr_status measure(kvr_cache *c) {
  const kvr_cache_desc *d = &c->desc;
  size_t max_alloc = SIZE_MAX, pool;
  c->row_bytes = 2 * (size_t)d->num_kv_heads * (size_t)d->head_dim * kvr_dtype_size(d->dtype);
  if (!kvr_mul_size(c->row_bytes, (size_t)d->page_size, &c->page_bytes) ||
      !kvr_mul_size(c->page_bytes, (size_t)d->num_pages, &pool))
    return kvr_fail(KVR_E_RANGE, "%d pages of %d tokens of %zu bytes are too many bytes",
                    d->num_pages, d->page_size, c->row_bytes);
  for (int r = 0; r < c->group->num_ranks; r++)
    if (c->group->ranks[r].max_alloc < max_alloc) max_alloc = c->group->ranks[r].max_alloc;
  if (c->page_bytes > max_alloc)
    return kvr_fail(
        KVR_E_OOM,
        "one page needs %zu bytes, the device allows %zu in one allocation; use a smaller "
        "page_size",
        c->page_bytes, max_alloc);
  const size_t most = max_alloc / c->page_bytes;
  c->pages_per_buffer = most < (size_t)d->num_pages ? (int)most : d->num_pages;
  c->num_buffers = kvr_ceil_div(d->num_pages, c->pages_per_buffer);
  return KVR_OK;
}

static kvr_status allocate(kvr_cache *c) {
  const size_t n = (size_t)c->group->num_ranks * (size_t)c->num_buffers;
  c->buffers = calloc(n, sizeof(cl_mem));
  if (c->buffers == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a cache");
  for (int r = 0; r < c->group->num_ranks; r++)
    for (int i = 0; i < c->num_buffers; i++)
      KVR_TRY(kvr_group_alloc(c->group, r, (size_t)buffer_pages(c, i) * c->page_bytes, "KV cache",
                              &c->buffers[r * c->num_buffers + i]));
  return kvr_pages_init(&c->pages, c->desc.num_pages);
}

static kvr_status init(kvr_cache *c, const kvr_cache_desc *desc) {
  KVR_TRY(copy_desc(c, desc));
  KVR_TRY(measure(c));
  return allocate(c);
}

kvr_status kvr_cache_create(kvr_group *group, const kvr_cache_desc *desc, kvr_cache **out) {
  if (group == NULL || desc == NULL || out == NULL)
    return kvr_fail(KVR_E_NULL, "group, desc or out is NULL");
  *out = NULL;
  KVR_TRY(kvr_cache_desc_check(desc));
  if (desc->num_ranks != group->num_ranks)
    return kvr_fail(KVR_E_LAYOUT, "the cache has %d ranks, the group %d", desc->num_ranks,
                    group->num_ranks);
  kvr_cache *c = calloc(1, sizeof *c);
  if (c == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a cache");
  c->group = group;
  const kvr_status status = init(c, desc);
  if (status != KVR_OK) {
    kvr_cache_destroy(c);
    return status;
  }
  *out = c;
  return KVR_OK;
}

void kvr_cache_destroy(kvr_cache *c) {
  if (c == NULL) return;
  for (int r = 0; c->buffers != NULL && r < c->group->num_ranks; r++)
    for (int i = 0; i < c->num_buffers; i++)
      kvr_group_free(c->group, r, c->buffers[r * c->num_buffers + i],
                     (size_t)buffer_pages(c, i) * c->page_bytes);
  free(c->buffers);
  free(c->weights);
  kvr_pages_fini(&c->pages);
  free(c);
}

const kvr_cache_desc *kvr_cache_describe(const kvr_cache *c) { return c != NULL ? &c->desc : NULL; }

size_t kvr_cache_bytes(const kvr_cache *c) {
  return c != NULL ? (size_t)c->desc.num_pages * c->page_bytes : 0;
}

int kvr_cache_num_buffers(const kvr_cache *c) { return c->num_buffers; }

cl_mem kvr_cache_buffer(const kvr_cache *c, int rank, int i, int *page_first, int *page_count) {
  *page_first = i * c->pages_per_buffer;
  *page_count = buffer_pages(c, i);
  return c->buffers[rank * c->num_buffers + i];
}

bool kvr_cache_owns(const kvr_cache *c, cl_mem mem) {
  for (int i = 0; i < c->group->num_ranks * c->num_buffers; i++)
    if (c->buffers[i] == mem) return true;
  return false;
}

/* ---- requests ---- */

static kvr_status need_cache(const kvr_cache *c) {
  return c != NULL ? KVR_OK : kvr_fail(KVR_E_NULL, "cache is NULL");
}

kvr_status kvr_cache_add(kvr_cache *c, int *out_id) {
  KVR_TRY(need_cache(c));
  if (out_id == NULL) return kvr_fail(KVR_E_NULL, "out_id is NULL");
  return kvr_pages_add(&c->pages, out_id);
}

kvr_status kvr_cache_reserve(kvr_cache *c, int id, int num_tokens) {
  KVR_TRY(need_cache(c));
  if (num_tokens < 0)
    return kvr_fail(KVR_E_RANGE, "num_tokens is %d; it must not be negative", num_tokens);
  return kvr_pages_reserve(&c->pages, id, kvr_map_num_pages(&c->desc, num_tokens));
}

kvr_status kvr_cache_set_table(kvr_cache *c, int id, const int *table, int num_entries) {
  KVR_TRY(need_cache(c));
  if (num_entries < 0 || num_entries > c->desc.num_pages)
    return kvr_fail(KVR_E_RANGE, "num_entries is %d; a table of this cache has 0 to %d",
                    num_entries, c->desc.num_pages);
  if (table == NULL && num_entries > 0) return kvr_fail(KVR_E_NULL, "table is NULL");
  return kvr_pages_set_table(&c->pages, id, table, num_entries);
}

/* True if the first num_tokens tokens fill whole pages, the same number of them, on every rank that
 * has any: then nobody writes into a shared page later. */
static bool fills_pages(const kvr_cache_desc *d, int num_tokens) {
  const int entries = kvr_map_num_pages(d, num_tokens);
  for (int r = 0; r < d->num_ranks; r++) {
    const bool stores = kvr_map_weight(d, r) > 0;
    if (stores && kvr_map_count(d, num_tokens, r) != entries * d->page_size) return false;
  }
  return true;
}

kvr_status kvr_cache_share(kvr_cache *c, int id, int num_tokens, int *out_id) {
  KVR_TRY(need_cache(c));
  if (out_id == NULL) return kvr_fail(KVR_E_NULL, "out_id is NULL");
  KVR_TRY(kvr_cache_check(c, id));
  const int length = kvr_cache_length(c, id);
  if (num_tokens < 0 || num_tokens > length)
    return kvr_fail(KVR_E_RANGE, "cannot share %d tokens of cache request %d, which holds %d",
                    num_tokens, id, length);
  if (!fills_pages(&c->desc, num_tokens)) {
    int smaller = num_tokens;
    while (!fills_pages(&c->desc, smaller)) smaller--; /* 0 tokens always do */
    return kvr_fail(
        KVR_E_RANGE,
        "%d tokens do not fill whole pages on every rank; the nearest smaller length is %d",
        num_tokens, smaller);
  }
  KVR_TRY(kvr_pages_share(&c->pages, id, kvr_map_num_pages(&c->desc, num_tokens), out_id));
  c->pages.sequences[*out_id].length = c->pages.sequences[*out_id].shared = num_tokens;
  kvr_sequence *from = &c->pages.sequences[id];
  from->shared = kvr_max(from->shared, num_tokens);
  return KVR_OK;
}

kvr_status kvr_cache_release(kvr_cache *c, int id) {
  KVR_TRY(need_cache(c));
  return kvr_pages_release(&c->pages, id);
}

int kvr_cache_length(const kvr_cache *c, int id) {
  kvr_sequence *s = NULL;
  return c != NULL && kvr_pages_find(&c->pages, id, &s) == KVR_OK ? s->length : -1;
}

kvr_status kvr_cache_truncate(kvr_cache *c, int id, int num_tokens) {
  kvr_sequence *s = NULL;
  KVR_TRY(need_cache(c));
  KVR_TRY(kvr_pages_find(&c->pages, id, &s));
  if (num_tokens < s->shared || num_tokens > s->length)
    return kvr_fail(KVR_E_RANGE,
                    "cache request %d holds %d tokens, %d of them shared; it cannot be cut to %d",
                    id, s->length, s->shared, num_tokens);
  s->length = num_tokens;
  return KVR_OK;
}

int kvr_cache_num_free_pages(const kvr_cache *c) { return c != NULL ? c->pages.num_free : 0; }

const int *kvr_cache_table(const kvr_cache *c, int id, int *num_entries) {
  kvr_sequence *s = NULL;
  if (c == NULL || num_entries == NULL || kvr_pages_find(&c->pages, id, &s) != KVR_OK) return NULL;
  *num_entries = s->num_pages;
  return s->table;
}

kvr_status kvr_cache_check(const kvr_cache *c, int id) {
  kvr_sequence *s = NULL;
  KVR_TRY(kvr_pages_find(&c->pages, id, &s));
  if (!s->failed) return KVR_OK;
  return kvr_fail(KVR_E_STATE, "cache request %d was spoiled by a failed step; release it", id);
}

void kvr_cache_commit(kvr_cache *c, int id, int num_tokens) {
  kvr_sequence *s = NULL;
  if (kvr_pages_find(&c->pages, id, &s) == KVR_OK) s->length = num_tokens;
}

void kvr_cache_mark_failed(kvr_cache *c, int id) {
  kvr_sequence *s = NULL;
  if (kvr_pages_find(&c->pages, id, &s) == KVR_OK) s->failed = true;
}

/* ---- rows from and to the host ---- */

/* A run of local tokens of one rank that is contiguous in a pool buffer. */
typedef struct span {
  cl_mem mem;
  size_t offset;
  int local, num;
} span;

/* The longest such run that starts at a local token and ends before `end`. */
static span span_at(const kvr_cache *c, const kvr_sequence *s, int rank, int local, int end) {
  const int page_size = c->desc.page_size, row = local % page_size;
  const int page = s->table[local / page_size], buffer = page / c->pages_per_buffer;
  const size_t page_in_buffer = (size_t)(page % c->pages_per_buffer);
  return (span){.mem = c->buffers[rank * c->num_buffers + buffer],
                .offset = page_in_buffer * c->page_bytes + (size_t)row * c->row_bytes,
                .local = local,
                .num = kvr_min(page_size - row, end - local)};
}

/* Copies between cache rows (K0 V0 K1 V1 ..) and arrays (heads, dim) of K and V. */
static void swap_row(const kvr_cache *c, unsigned char *row, unsigned char *k, unsigned char *v,
                     bool to_row) {
  const size_t head = c->row_bytes / 2 / (size_t)c->desc.num_kv_heads;
  for (int h = 0; h < c->desc.num_kv_heads; h++) {
    const size_t at = (size_t)h * head;
    memcpy(to_row ? row + 2 * at : k + at, to_row ? k + at : row + 2 * at, head);
    memcpy(to_row ? row + 2 * at + head : v + at, to_row ? v + at : row + 2 * at + head, head);
  }
}

typedef struct transfer {
  const kvr_cache *cache;
  const kvr_sequence *sequence;
  int first, num;       /* positions */
  unsigned char *k, *v; /* (num, num_kv_heads, head_dim) */
  bool write;
  unsigned char *rows; /* one page */
} transfer;

static void swap_span(const transfer *t, int rank, const span *s) {
  const size_t width = t->cache->row_bytes / 2;
  for (int i = 0; i < s->num; i++) {
    const int position = kvr_map_position(&t->cache->desc, rank, s->local + i);
    const size_t at = (size_t)(position - t->first) * width;
    swap_row(t->cache, t->rows + (size_t)i * t->cache->row_bytes, t->k + at, t->v + at, t->write);
  }
}

static kvr_status move_span(const transfer *t, int rank, const span *s) {
  const cl_command_queue queue = t->cache->group->ranks[rank].queue;
  const size_t bytes = (size_t)s->num * t->cache->row_bytes;
  if (t->write) {
    swap_span(t, rank, s);
    KVR_CL(clEnqueueWriteBuffer,
           (queue, s->mem, CL_TRUE, s->offset, bytes, t->rows, 0, NULL, NULL));
  } else {
    KVR_CL(clEnqueueReadBuffer, (queue, s->mem, CL_TRUE, s->offset, bytes, t->rows, 0, NULL, NULL));
    swap_span(t, rank, s);
  }
  return KVR_OK;
}

static kvr_status move_rank(const transfer *t, int rank) {
  const kvr_cache_desc *d = &t->cache->desc;
  const int end = kvr_map_count(d, t->first + t->num, rank);
  for (int local = kvr_map_count(d, t->first, rank); local < end;) {
    const span s = span_at(t->cache, t->sequence, rank, local, end);
    KVR_TRY(move_span(t, rank, &s));
    local += s.num;
  }
  return KVR_OK;
}

static kvr_status move_all(transfer *t) {
  kvr_status status = KVR_OK;
  t->rows = malloc(t->cache->page_bytes);
  if (t->rows == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a page");
  for (int r = 0; r < t->cache->desc.num_ranks && status == KVR_OK; r++) status = move_rank(t, r);
  free(t->rows);
  return status;
}

kvr_status kvr_cache_append(kvr_cache *c, int id, const void *k, const void *v, int num_tokens) {
  kvr_sequence *s = NULL;
  KVR_TRY(need_cache(c));
  KVR_TRY(kvr_cache_check(c, id));
  KVR_TRY(kvr_pages_find(&c->pages, id, &s));
  if (num_tokens < 0 || num_tokens > INT32_MAX - s->length)
    return kvr_fail(KVR_E_RANGE, "cannot append %d tokens to %d", num_tokens, s->length);
  if (num_tokens == 0) return KVR_OK;
  if (k == NULL || v == NULL) return kvr_fail(KVR_E_NULL, "k or v is NULL");
  const int need = kvr_map_num_pages(&c->desc, s->length + num_tokens);
  if (need > s->num_pages)
    return kvr_fail(KVR_E_CAPACITY,
                    "%d tokens need %d entries in the block table of cache request %d, it has %d; "
                    "reserve more",
                    s->length + num_tokens, need, id, s->num_pages);
  /* The transfer only reads k and v when it writes rows. */
  transfer t = {.cache = c,
                .sequence = s,
                .first = s->length,
                .num = num_tokens,
                .k = (unsigned char *)(uintptr_t)k,
                .v = (unsigned char *)(uintptr_t)v,
                .write = true};
  KVR_TRY(move_all(&t));
  s->length += num_tokens;
  return KVR_OK;
}

kvr_status kvr_cache_read(const kvr_cache *c, int id, int first, int num_tokens, void *k, void *v) {
  kvr_sequence *s = NULL;
  KVR_TRY(need_cache(c));
  KVR_TRY(kvr_cache_check(c, id));
  KVR_TRY(kvr_pages_find(&c->pages, id, &s));
  if (first < 0 || num_tokens < 0 || num_tokens > s->length - first)
    return kvr_fail(KVR_E_RANGE, "cannot read tokens [%d, %lld); cache request %d holds %d", first,
                    (long long)first + num_tokens, id, s->length);
  if (num_tokens == 0) return KVR_OK;
  if (k == NULL || v == NULL) return kvr_fail(KVR_E_NULL, "k or v is NULL");
  transfer t = {
      .cache = c, .sequence = s, .first = first, .num = num_tokens, .k = k, .v = v, .write = false};
  return move_all(&t);
}

static kvr_status check_pool(const kvr_cache *c, int rank, const void *bytes, size_t size) {
  KVR_TRY(need_cache(c));
  if (bytes == NULL) return kvr_fail(KVR_E_NULL, "bytes is NULL");
  if (rank < 0 || rank >= c->desc.num_ranks)
    return kvr_fail(KVR_E_RANGE, "rank is %d; the cache has %d ranks", rank, c->desc.num_ranks);
  if (size != kvr_cache_bytes(c))
    return kvr_fail(KVR_E_RANGE, "size is %zu; a pool has %zu bytes", size, kvr_cache_bytes(c));
  return KVR_OK;
}

kvr_status kvr_cache_export(const kvr_cache *c, int rank, void *bytes, size_t size) {
  KVR_TRY(check_pool(c, rank, bytes, size));
  for (int i = 0; i < c->num_buffers; i++) {
    int first, count;
    const cl_mem mem = kvr_cache_buffer(c, rank, i, &first, &count);
    KVR_CL(clEnqueueReadBuffer,
           (c->group->ranks[rank].queue, mem, CL_TRUE, 0, (size_t)count * c->page_bytes,
            (char *)bytes + (size_t)first * c->page_bytes, 0, NULL, NULL));
  }
  return KVR_OK;
}

kvr_status kvr_cache_import(kvr_cache *c, int rank, const void *bytes, size_t size) {
  KVR_TRY(check_pool(c, rank, bytes, size));
  for (int i = 0; i < c->num_buffers; i++) {
    int first, count;
    const cl_mem mem = kvr_cache_buffer(c, rank, i, &first, &count);
    KVR_CL(clEnqueueWriteBuffer,
           (c->group->ranks[rank].queue, mem, CL_TRUE, 0, (size_t)count * c->page_bytes,
            (const char *)bytes + (size_t)first * c->page_bytes, 0, NULL, NULL));
  }
  return KVR_OK;
}

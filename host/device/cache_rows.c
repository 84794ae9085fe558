/* Rows of a cache from and to the host: tokens of a request, and whole pools. */
#include "device/cache_inside.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "core/layout.h"
#include "device/cl_error.h"
#include "device/watch.h"

/* Rows go through the host in blocks of about this size. */
enum { STAGING_BYTES = 4 << 20 };

/* ---- transfers ---- */

/* Bytes of a rank's buffer from or to the host; one of from and to is NULL. */
typedef struct transfer {
  int rank;
  cl_mem buffer;
  size_t offset, size;
  const void *from;
  void *to;
} transfer;

static kvr_status enqueue(cl_command_queue queue, const transfer *t, cl_event *event) {
  if (t->from != NULL)
    KVR_CL(clEnqueueWriteBuffer,
           (queue, t->buffer, CL_FALSE, t->offset, t->size, t->from, 0, NULL, event));
  else
    KVR_CL(clEnqueueReadBuffer,
           (queue, t->buffer, CL_FALSE, t->offset, t->size, t->to, 0, NULL, event));
  return KVR_OK;
}

static kvr_status enqueue_and_wait(kvr_group *group, const transfer *t) {
  const cl_command_queue queue = group->ranks[t->rank].queue;
  cl_event event;
  KVR_TRY(enqueue(queue, t, &event));
  const cl_int code = clFlush(queue);
  kvr_status status = kvr_watch_event(group, event, NULL, NULL);
  if (status == KVR_OK) status = kvr_cl_check(code, "clFlush");
  clReleaseEvent(event);
  return status;
}

/* Blocking. After a timeout the host's memory may still be read or written. */
static kvr_status perform(const kvr_cache *c, const transfer *t) {
  KVR_TRY(kvr_group_check_moving(c->group));
  const kvr_status status = enqueue_and_wait(c->group, t);
  if (status != KVR_OK) kvr_fail_at(status, "rank %d: KV cache", t->rank);
  if (status == KVR_E_TIMEOUT) kvr_group_explain_stuck(c->group);
  return status;
}

/* ---- rows of a request ---- */

/* Rows of consecutive positions of one request on the host. */
typedef struct rows {
  const kvr_cache *cache;
  const kvr_table *table;
  int first;               /* position of row 0 of k and v */
  size_t head;             /* bytes of one head of K or V */
  const char *k_in, *v_in; /* append: from here; NULL for read */
  char *k_out, *v_out;     /* read: to here */
  char *staging;           /* (staging_rows, row_bytes) */
  int staging_rows;
} rows;

/* K and V of local rows [local, local + num) of a rank, from the caller's arrays into staging. */
static void gather(const rows *m, int rank, int local, int num) {
  const size_t heads = (size_t)m->cache->desc.num_kv_heads;
  char *to = m->staging;
  for (int i = 0; i < num; i++) {
    const int position = kvr_map_position(&m->cache->desc, rank, local + i);
    const size_t from = (size_t)(position - m->first) * heads * m->head;
    for (size_t h = 0; h < heads; h++, to += 2 * m->head) {
      memcpy(to, m->k_in + from + h * m->head, m->head);
      memcpy(to + m->head, m->v_in + from + h * m->head, m->head);
    }
  }
}

/* The reverse. */
static void scatter(const rows *m, int rank, int local, int num) {
  const size_t heads = (size_t)m->cache->desc.num_kv_heads;
  const char *from = m->staging;
  for (int i = 0; i < num; i++) {
    const int position = kvr_map_position(&m->cache->desc, rank, local + i);
    const size_t to = (size_t)(position - m->first) * heads * m->head;
    for (size_t h = 0; h < heads; h++, from += 2 * m->head) {
      memcpy(m->k_out + to + h * m->head, from, m->head);
      memcpy(m->v_out + to + h * m->head, from + m->head, m->head);
    }
  }
}

/* Rows from local index `local` on (at most max) that lie one after another in one buffer. */
static int run_length(const rows *m, int local, int max) {
  const kvr_cache *c = m->cache;
  const int page_size = c->desc.page_size, per_buffer = c->pages_per_buffer;
  int entry = local / page_size, len = page_size - local % page_size;
  while (len < max) {
    const int page = m->table->entries[entry], next = m->table->entries[entry + 1];
    if (next != page + 1 || next % per_buffer == 0) break;
    len = page_size <= INT_MAX - len ? len + page_size : INT_MAX;
    entry++;
  }
  return kvr_min(len, max);
}

static kvr_status move_run(const rows *m, int rank, int local, int num) {
  const kvr_cache *c = m->cache;
  const int page = m->table->entries[local / c->desc.page_size];
  const cl_mem buffer = c->buffers[rank * c->num_buffers + page / c->pages_per_buffer];
  const size_t offset = (size_t)(page % c->pages_per_buffer) * c->page_bytes +
                        (size_t)(local % c->desc.page_size) * c->row_bytes;
  const size_t size = (size_t)num * c->row_bytes;
  const bool in = m->k_in != NULL;
  const transfer t = {.rank = rank,
                      .buffer = buffer,
                      .offset = offset,
                      .size = size,
                      .from = in ? m->staging : NULL,
                      .to = in ? NULL : m->staging};
  if (in) gather(m, rank, local, num);
  KVR_TRY(perform(c, &t));
  if (!in) scatter(m, rank, local, num);
  return KVR_OK;
}

/* A rank's part of positions [first, end): a contiguous range of local rows. */
static kvr_status move_rank(const rows *m, int rank, int end) {
  const kvr_cache_desc *d = &m->cache->desc;
  const int last = kvr_map_count(d, end, rank);
  for (int local = kvr_map_count(d, m->first, rank), num; local < last; local += num) {
    num = run_length(m, local, kvr_min(last - local, m->staging_rows));
    KVR_TRY(move_run(m, rank, local, num));
  }
  return KVR_OK;
}

static kvr_status move(rows *m, int num_tokens) {
  const kvr_cache *c = m->cache;
  m->head = (size_t)c->desc.head_dim * kvr_dtype_size(c->desc.dtype);
  m->staging_rows =
      kvr_clip((int)((size_t)STAGING_BYTES / c->row_bytes), 1, kvr_max(1, num_tokens));
  m->staging = malloc((size_t)m->staging_rows * c->row_bytes);
  if (m->staging == NULL) return kvr_fail(KVR_E_OOM, "no host memory to move cache rows");
  kvr_status status = KVR_OK;
  for (int r = 0; r < c->desc.num_ranks && status == KVR_OK; r++)
    status = move_rank(m, r, m->first + num_tokens);
  kvr_group_free_host(c->group, m->staging);
  return status;
}

kvr_status kvr_cache_append(kvr_cache *c, int id, const void *k, const void *v, int num_tokens) {
  kvr_table *t = NULL;
  KVR_TRY(kvr_cache_find(c, id, &t));
  if (num_tokens < 0 || num_tokens > INT_MAX - t->length)
    return kvr_fail(KVR_E_RANGE, "num_tokens is %d; cache request %d may have 0 to %d more",
                    num_tokens, id, INT_MAX - t->length);
  if (num_tokens == 0) return KVR_OK;
  if (k == NULL || v == NULL) return kvr_fail(KVR_E_NULL, "k or v is NULL");
  KVR_TRY(kvr_cache_check(c, id));
  const int need = kvr_map_num_pages(&c->desc, t->length + num_tokens);
  if (need > t->num_entries)
    return kvr_fail(KVR_E_CAPACITY,
                    "%d tokens need %d entries in the block table of cache request %d, it has %d: "
                    "reserve more",
                    t->length + num_tokens, need, id, t->num_entries);
  rows m = {.cache = c, .table = t, .first = t->length, .k_in = k, .v_in = v};
  KVR_TRY(move(&m, num_tokens));
  t->length += num_tokens;
  return KVR_OK;
}

kvr_status kvr_cache_read(const kvr_cache *c, int id, int first, int num_tokens, void *k, void *v) {
  kvr_table *t = NULL;
  KVR_TRY(kvr_cache_find(c, id, &t));
  if (first < 0 || num_tokens < 0 || first > t->length || num_tokens > t->length - first)
    return kvr_fail(KVR_E_RANGE,
                    "positions %d to %lld are asked for; cache request %d has %d tokens", first,
                    (long long)first + num_tokens - 1, id, t->length);
  if (num_tokens == 0) return KVR_OK;
  if (k == NULL || v == NULL) return kvr_fail(KVR_E_NULL, "k or v is NULL");
  rows m = {.cache = c, .table = t, .first = first, .k_out = k, .v_out = v};
  return move(&m, num_tokens);
}

/* ---- whole pools ---- */

static kvr_status check_pool(const kvr_cache *c, int rank, const void *bytes, size_t size) {
  if (c == NULL || bytes == NULL) return kvr_fail(KVR_E_NULL, "cache or bytes is NULL");
  KVR_TRY(kvr_group_check_rank(c->group, rank));
  if (size != c->bytes)
    return kvr_fail(KVR_E_RANGE, "size is %zu; the pool of a rank has %zu bytes", size, c->bytes);
  return KVR_OK;
}

kvr_status kvr_cache_export(const kvr_cache *c, int rank, void *bytes, size_t size) {
  KVR_TRY(check_pool(c, rank, bytes, size));
  for (int i = 0; i < c->num_buffers; i++) {
    int first, count;
    const cl_mem buffer = kvr_cache_buffer(c, rank, i, &first, &count);
    const transfer t = {.rank = rank,
                        .buffer = buffer,
                        .size = (size_t)count * c->page_bytes,
                        .to = (char *)bytes + (size_t)first * c->page_bytes};
    KVR_TRY(perform(c, &t));
  }
  return KVR_OK;
}

kvr_status kvr_cache_import(kvr_cache *c, int rank, const void *bytes, size_t size) {
  KVR_TRY(check_pool(c, rank, bytes, size));
  for (int i = 0; i < c->num_buffers; i++) {
    int first, count;
    const cl_mem buffer = kvr_cache_buffer(c, rank, i, &first, &count);
    const transfer t = {.rank = rank,
                        .buffer = buffer,
                        .size = (size_t)count * c->page_bytes,
                        .from = (const char *)bytes + (size_t)first * c->page_bytes};
    KVR_TRY(perform(c, &t));
  }
  return KVR_OK;
}

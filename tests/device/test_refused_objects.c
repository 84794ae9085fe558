/* Groups, caches and sessions that cannot be made, and calls on a cache that are refused: the
 * status, a message with the value, the limit and what to do, no new object, and a cache that stays
 * as it was. */
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device/cache.h"
#include "device_case.h"
#include "refused_case.h"

/* ---- groups ---- */

static kvr_status group_of(refused_world *w, kvr_group_desc desc) {
  kvr_group *group = (kvr_group *)w;
  const kvr_status status = kvr_group_create(&desc, &group);
  assert_null(group);
  return status;
}

static void groups_are_refused(void **state) {
  (void)state;
  refused_world *w = refused_open();
  const kvr_group_desc good = {.struct_size = sizeof good, .num_ranks = 2};
  kvr_group_desc d = good;
  REFUSED(w, (d.num_ranks = 0, group_of(w, d)), KVR_E_RANGE, "num_ranks is 0", "between 1 and");
  REFUSED(w, (d.num_ranks = -3, group_of(w, d)), KVR_E_RANGE, "num_ranks is -3", "between 1 and");
  REFUSED(w, (d.num_ranks = 4097, group_of(w, d)), KVR_E_RANGE, "num_ranks is 4097", "4096");
  d = good;
  REFUSED(w, (d.struct_size = 0, group_of(w, d)), KVR_E_SHAPE, "struct_size is 0", "expects",
          "set it to sizeof");
  d = good;
  REFUSED(w, (d.copy_queue = -1, group_of(w, d)), KVR_E_RANGE, "copy_queue is -1", "0 or 1");
  d = good;
  REFUSED(w, (d.timeout = -1, group_of(w, d)), KVR_E_RANGE, "timeout is -1", "between 0");
  REFUSED(w, (d.timeout = (double)NAN, group_of(w, d)), KVR_E_RANGE, "timeout is", "between 0");
  d = good;
  REFUSED(w, (d.devices = "no such device", group_of(w, d)), KVR_E_RANGE, "'no such device'");
}

/* ---- caches ---- */

static kvr_status cache_of(refused_world *w, kvr_cache_desc desc) {
  kvr_cache *cache = (kvr_cache *)w;
  const kvr_status status = kvr_cache_create(w->group, &desc, &cache);
  assert_null(cache);
  return status;
}

static void caches_are_refused(void **state) {
  (void)state;
  refused_world *w = refused_open();
  kvr_cache_desc d = refused_desc();
  kvr_cache *cache;
  REFUSED(w, kvr_cache_create(NULL, &d, &cache), KVR_E_NULL, "group");
  REFUSED(w, kvr_cache_create(w->group, NULL, &cache), KVR_E_NULL, "desc");
  REFUSED(w, kvr_cache_create(w->group, &d, NULL), KVR_E_NULL, "out");
  REFUSED(w, (d.num_ranks = 3, cache_of(w, d)), KVR_E_LAYOUT, "num_ranks 3", "group has 2 ranks");
  d = refused_desc();
  REFUSED(w, (d.dtype = (kvr_dtype)7, cache_of(w, d)), KVR_E_DTYPE, "dtype is 7", "KVR_F16");
  d = refused_desc();
  REFUSED(w, (d.page_size = 0, cache_of(w, d)), KVR_E_RANGE, "page_size is 0", "at least 1");
  d = refused_desc();
  REFUSED(w, (d.head_dim = 513, cache_of(w, d)), KVR_E_RANGE, "head_dim is 513", "limit is 512");
  d = refused_desc();
  d.num_pages = INT_MAX, d.page_size = INT_MAX, d.num_kv_heads = 1 << 19, d.head_dim = 511;
  REFUSED(w, cache_of(w, d), KVR_E_RANGE, "2147483647 pages of 2147483647 tokens");
}

/* Pages of 256 bytes, on groups that have less. */
static void pools_beyond_the_memory_are_refused(void **state) {
  (void)state;
  refused_world *w = refused_open();
  const kvr_group_desc tight = {.struct_size = sizeof tight,
                                .num_ranks = REFUSED_P,
                                .devices = getenv("KVRING_TEST_DEVICES"),
                                .memory_budget = 2047};
  const kvr_cache_desc d = refused_desc();
  kvr_group *group;
  kvr_cache *cache = (kvr_cache *)w;
  size_t now, peak, budget;
  device_ok(kvr_group_create(&tight, &group), "kvr_group_create");
  REFUSED(w, kvr_cache_create(group, &d, &cache), KVR_E_OOM, "needs 2048 bytes", "of 2047",
          "raise memory_budget");
  assert_null(cache);
  device_ok(kvr_group_memory(group, 0, &now, &peak, &budget), "kvr_group_memory");
  assert_int_equal(now, 0);
  kvr_group_destroy(group);

  setenv("KVRING_MAX_ALLOC", "255", 1);
  group = device_group(REFUSED_P, 0);
  unsetenv("KVRING_MAX_ALLOC");
  cache = (kvr_cache *)w;
  REFUSED(w, kvr_cache_create(group, &d, &cache), KVR_E_OOM, "has 256 bytes",
          "largest allocation is 255", "smaller page_size");
  assert_null(cache);
  device_ok(kvr_group_memory(group, 0, &now, &peak, &budget), "kvr_group_memory");
  assert_int_equal(peak, 0); /* refused before anything was allocated */
  kvr_group_destroy(group);
}

/* ---- calls on a cache ---- */

static float rows[32 * REFUSED_NKV * REFUSED_D];

static void appends_are_refused(void **state) {
  (void)state;
  refused_world *w = refused_open();
  kvr_cache *c = w->cache;
  const int a = w->ids[0];
  REFUSED(w, kvr_cache_append(c, a, rows, rows, -1), KVR_E_RANGE, "num_tokens is -1", "0 to");
  REFUSED(w, kvr_cache_append(c, a, rows, rows, INT_MAX), KVR_E_RANGE, "num_tokens is 2147483647",
          "0 to 2147483642 more");
  REFUSED(w, kvr_cache_append(c, a, rows, rows, 12), KVR_E_CAPACITY, "17 tokens need 3 entries",
          "it has 2", "reserve more");
  REFUSED(w, kvr_cache_append(c, a, NULL, rows, 1), KVR_E_NULL, "k or v is NULL");
  REFUSED(w, kvr_cache_append(c, a, rows, NULL, 1), KVR_E_NULL, "k or v is NULL");
  REFUSED(w, kvr_cache_append(NULL, a, rows, rows, 1), KVR_E_NULL, "cache is NULL");
  REFUSED(w, kvr_cache_append(c, 99, rows, rows, 1), KVR_E_RANGE, "no request 99");
}

static void pages_are_refused(void **state) {
  (void)state;
  refused_world *w = refused_open();
  kvr_cache *c = w->cache;
  const int a = w->ids[0];
  int entries, copy = 77, outside[] = {0, 0, REFUSED_PAGES}, twice[2], taken[3];
  const int *table = kvr_cache_table(c, a, &entries);
  memcpy(outside, table, 2 * sizeof *table);
  memcpy(taken, table, 2 * sizeof *table);
  taken[2] = kvr_cache_table(c, w->ids[1], &entries)[0];
  twice[0] = twice[1] = table[0];
  REFUSED(w, kvr_cache_set_table(c, a, outside, 3), KVR_E_TABLE, "entry 2 is page 8",
          "pages 0 to 7");
  outside[2] = -2;
  REFUSED(w, kvr_cache_set_table(c, a, outside, 3), KVR_E_TABLE, "entry 2 is page -2",
          "pages 0 to 7");
  REFUSED(w, kvr_cache_set_table(c, a, twice, 2), KVR_E_TABLE, "entry 1", "names before");
  REFUSED(w, kvr_cache_set_table(c, a, taken, 3), KVR_E_TABLE, "entry 2", "another request uses",
          "kvr_cache_share");
  REFUSED(w, kvr_cache_set_table(c, a, taken, 0), KVR_E_CAPACITY, "table has 0 entries",
          "5 tokens of cache request 0 need 1", "truncate it first");
  REFUSED(w, kvr_cache_set_table(c, a, taken, -1), KVR_E_RANGE, "num_entries is -1", "0 to 8");
  REFUSED(w, kvr_cache_set_table(c, a, NULL, 2), KVR_E_NULL, "table is NULL");
  REFUSED(w, kvr_cache_reserve(c, a, -1), KVR_E_RANGE, "num_tokens is -1", "must not be negative");
  REFUSED(w, kvr_cache_reserve(c, a, 48), KVR_E_CAPACITY, "needs 4 more pages", "3 of 8 are free",
          "make num_pages larger");
  REFUSED(w, kvr_cache_share(c, a, 3, &copy), KVR_E_RANGE, "3 tokens do not fill",
          "nearest smaller length that does is 0");
  REFUSED(w, kvr_cache_share(c, a, 6, &copy), KVR_E_RANGE, "num_tokens is 6", "has 5 tokens");
  REFUSED(w, kvr_cache_share(c, a, 0, NULL), KVR_E_NULL, "out_id is NULL");
  assert_int_equal(copy, 77);
  REFUSED(w, kvr_cache_truncate(c, a, 6), KVR_E_RANGE, "num_tokens is 6", "has 5 tokens");
  REFUSED(w, kvr_cache_truncate(c, a, -1), KVR_E_RANGE, "num_tokens is -1", "has 5 tokens");
  REFUSED(w, kvr_cache_release(c, 99), KVR_E_RANGE, "no request 99", "released or never added");
  REFUSED(w, kvr_cache_add(c, NULL), KVR_E_NULL, "out_id is NULL");
  assert_int_equal(kvr_cache_length(c, 99), -1);
}

static void reads_are_refused(void **state) {
  (void)state;
  static float k[9 * REFUSED_NKV * REFUSED_D];
  static unsigned char pool[4096];
  refused_world *w = refused_open();
  kvr_cache *c = w->cache;
  const size_t size = kvr_cache_bytes(c);
  k[0] = 77;
  REFUSED(w, kvr_cache_read(c, w->ids[0], 4, 2, k, k), KVR_E_RANGE, "positions 4 to 5",
          "has 5 tokens");
  REFUSED(w, kvr_cache_read(c, w->ids[0], -1, 1, k, k), KVR_E_RANGE, "positions -1", "has 5");
  REFUSED(w, kvr_cache_read(c, w->ids[0], 0, -1, k, k), KVR_E_RANGE, "has 5 tokens");
  REFUSED(w, kvr_cache_read(c, w->ids[0], INT_MAX, INT_MAX, k, k), KVR_E_RANGE, "4294967293");
  REFUSED(w, kvr_cache_read(c, w->ids[0], 0, 1, NULL, k), KVR_E_NULL, "k or v is NULL");
  assert_true(k[0] == 77);
  REFUSED(w, kvr_cache_export(c, 2, pool, size), KVR_E_RANGE, "rank is 2", "ranks 0 to 1");
  REFUSED(w, kvr_cache_import(c, -1, pool, size), KVR_E_RANGE, "rank is -1", "ranks 0 to 1");
  REFUSED(w, kvr_cache_import(c, 0, pool, size + 1), KVR_E_RANGE, "size is 2049", "has 2048 bytes");
  REFUSED(w, kvr_cache_import(c, 0, NULL, size), KVR_E_NULL, "bytes is NULL");
}

/* A page that two requests share may not be written: not by a step either. */
static void shared_pages_are_refused_by_steps(void **state) {
  (void)state;
  refused_world *w = refused_open();
  kvr_plan *plan = (kvr_plan *)w;
  int copy;
  device_ok(kvr_cache_share(w->cache, w->ids[1], 8, &copy), "kvr_cache_share");
  device_ok(kvr_cache_truncate(w->cache, copy, 7), "kvr_cache_truncate");
  w->requests[0] = (kvr_request){.num_new = 1, .num_cached = 7, .cache_id = copy};
  assert_int_equal(kvr_plan_create(w->session, &w->problem, &w->options, &plan), KVR_E_STATE);
  assert_null(plan);
  assert_non_null(strstr(kvr_error_message(), "another request shares that page"));
  assert_non_null(strstr(kvr_error_message(), "release one of them"));
  device_ok(kvr_cache_release(w->cache, copy), "kvr_cache_release");
  REFUSED(w, kvr_cache_release(w->cache, copy), KVR_E_RANGE, "released or never added");
}

/* ---- sessions ---- */

static kvr_status session_of(refused_world *w, kvr_limits limits) {
  kvr_session *session = (kvr_session *)w;
  const kvr_status status = kvr_session_create(w->group, w->cache, &limits, &session);
  assert_null(session);
  return status;
}

static void limits_are_refused(void **state) {
  (void)state;
  refused_world *w = refused_open();
  kvr_limits l;
#define LIMIT(change, ...) REFUSED(w, (l = refused_limits(), change, session_of(w, l)), __VA_ARGS__)
  LIMIT(l.struct_size = 2, KVR_E_SHAPE, "kvr_limits.struct_size is 2", "expects");
  LIMIT(l.num_q_heads = 5, KVR_E_SHAPE, "num_q_heads 5", "num_kv_heads 2");
  LIMIT(l.num_q_heads = 0, KVR_E_SHAPE, "num_q_heads 0", "num_kv_heads 2");
  LIMIT(l.max_new_tokens = 0, KVR_E_RANGE, "max_new_tokens 0", "must allow a new token");
  LIMIT(l.max_requests = 0, KVR_E_RANGE, "max_requests 0", "must allow a new token and a request");
  LIMIT(l.max_context = -1, KVR_E_RANGE, "max_context -1");
  LIMIT(l.max_rows = -1, KVR_E_RANGE, "max_rows -1");
  LIMIT(l.max_context = INT_MAX, KVR_E_RANGE, "max_context 2147483647", "max_new_tokens 2",
        "beyond 2147483647 tokens");
  LIMIT(l.out_dtype = (kvr_dtype)5, KVR_E_DTYPE, "out_dtype is 5", "KVR_F16");
  LIMIT(l.tile = -1, KVR_E_RANGE, "tile is -1", "positive", "0 for 1024");
  LIMIT(l.query_tile = -1, KVR_E_RANGE, "query_tile is -1", "0 for all rows");
  LIMIT(l.num_slots = 1, KVR_E_RANGE, "num_slots is 1", "at least 2");
  LIMIT(l.strategies = "ring,rign", KVR_E_RANGE, "unknown strategy 'rign'", "use auto, ring");
  LIMIT(l.strategies = "ring,,gather-q", KVR_E_RANGE, "unknown strategy ''");
  LIMIT((l.tile = 1 << 30, l.num_slots = 4096), KVR_E_OOM, "strategy ring needs",
        "memory budget leaves", "raise it");
#undef LIMIT
}

static void sessions_are_refused(void **state) {
  (void)state;
  refused_world *w = refused_open();
  const kvr_limits limits = refused_limits();
  kvr_session *session = (kvr_session *)w;
  REFUSED(w, kvr_session_create(NULL, w->cache, &limits, &session), KVR_E_NULL, "group");
  REFUSED(w, kvr_session_create(w->group, NULL, &limits, &session), KVR_E_NULL, "cache");
  REFUSED(w, kvr_session_create(w->group, w->cache, NULL, &session), KVR_E_NULL, "limits");
  REFUSED(w, kvr_session_create(w->group, w->cache, &limits, NULL), KVR_E_NULL, "out");
  kvr_group *other = device_group(3, 0);
  REFUSED(w, kvr_session_create(other, w->cache, &limits, &session), KVR_E_LAYOUT,
          "cache has 2 ranks", "group 3");
  assert_null(session);
  kvr_group_destroy(other);
  assert_int_equal(kvr_session_bytes(NULL), 0);
}

/* ---- what auto takes where memory is short ---- */

static const char *chosen(kvr_session *session, const refused_world *w, const char *reason) {
  static const kvr_options any = {.struct_size = sizeof any, .tile = 3};
  kvr_plan *plan;
  kvr_plan_info info;
  device_ok(kvr_plan_create(session, &w->problem, &any, &plan), "kvr_plan_create");
  device_ok(kvr_plan_describe(plan, &info), "kvr_plan_describe");
  if (strstr(info.reason, reason) == NULL)
    fail_msg("reason '%s' does not say '%s'", info.reason, reason);
  const char *name = info.strategy;
  kvr_plan_destroy(plan);
  return name;
}

/* From context * 2 KV heads = 2 * new tokens * 4 heads on, queries are cheaper to move than KV.
 * A session without the buffers for that takes the ring, and says so. */
static void auto_takes_the_ring_where_gather_q_is_refused(void **state) {
  (void)state;
  refused_world *w = refused_open();
  kvr_limits limits = refused_limits();
  kvr_session *ring;
  limits.strategies = "ring";
  device_ok(kvr_session_create(w->group, w->cache, &limits, &ring), "kvr_session_create");
  w->requests[0] = (kvr_request){.num_new = 2, .num_cached = 9, .cache_id = w->ids[1]};
  assert_string_equal(chosen(w->session, w, "= 18 >= "), "gather-q");
  assert_string_equal(chosen(ring, w, "refuse gather-q"), "ring");
  refused_reset(w); /* 5 * 2 < 2 * 2 * 4 */
  assert_string_equal(chosen(w->session, w, "context 5 < 16384"), "ring");
  w->requests[0] = (kvr_request){.num_new = 1, .num_cached = 5, .cache_id = w->ids[0]};
  assert_string_equal(chosen(w->session, w, "= 10 >= "), "gather-q");
  refused_reset(w);
  REFUSED(w, KVR_OK, KVR_OK, NULL); /* planning changed nothing */
  kvr_session_destroy(ring);
}

/* Budgets from what the ring alone needs on: a session of all strategies exists under each, since
 * it leaves out what does not fit, and auto takes only what is there. */
static void every_budget_that_fits_the_ring_gives_a_session(void **state) {
  (void)state;
  refused_world *w = refused_open();
  kvr_limits limits = refused_limits();
  kvr_session *ring;
  limits.strategies = "ring";
  device_ok(kvr_session_create(w->group, w->cache, &limits, &ring), "kvr_session_create");
  const size_t least = kvr_session_bytes(ring) + kvr_cache_bytes(w->cache);
  kvr_session_destroy(ring);
  limits.strategies = NULL;
  for (size_t budget = least - 1; budget < least + 6000; budget += budget < least ? 1 : 52) {
    const kvr_group_desc tight = {.struct_size = sizeof tight,
                                  .num_ranks = REFUSED_P,
                                  .devices = getenv("KVRING_TEST_DEVICES"),
                                  .memory_budget = budget};
    const kvr_cache_desc desc = refused_desc();
    kvr_group *group;
    kvr_cache *cache;
    kvr_session *session;
    device_ok(kvr_group_create(&tight, &group), "kvr_group_create");
    device_ok(kvr_cache_create(group, &desc, &cache), "kvr_cache_create");
    const kvr_status status = kvr_session_create(group, cache, &limits, &session);
    if (status != (budget < least ? KVR_E_OOM : KVR_OK))
      fail_msg("budget %zu of at least %zu: %s", budget, least, kvr_error_message());
    kvr_session_destroy(session);
    kvr_cache_destroy(cache);
    kvr_group_destroy(group);
  }
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(groups_are_refused),
      cmocka_unit_test(caches_are_refused),
      cmocka_unit_test(pools_beyond_the_memory_are_refused),
      cmocka_unit_test(appends_are_refused),
      cmocka_unit_test(pages_are_refused),
      cmocka_unit_test(reads_are_refused),
      cmocka_unit_test(shared_pages_are_refused_by_steps),
      cmocka_unit_test(limits_are_refused),
      cmocka_unit_test(sessions_are_refused),
      cmocka_unit_test(every_budget_that_fits_the_ring_gives_a_session),
      cmocka_unit_test(auto_takes_the_ring_where_gather_q_is_refused),
  };
  return cmocka_run_group_tests(tests, NULL, refused_close);
}

/* The KV cache: pages, tables, sharing, split pools, rows from and to the host. */
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device_case.h"

enum { P = 3, NKV = 2, D = 5, PAGE = 4, PAGES = 12, MOST = 120 };

static kvr_cache_desc desc_of(kvr_dtype dtype, int interleave, const int *weights) {
  return (kvr_cache_desc){.struct_size = sizeof(kvr_cache_desc),
                          .num_ranks = P,
                          .num_kv_heads = NKV,
                          .head_dim = D,
                          .page_size = PAGE,
                          .num_pages = PAGES,
                          .interleave = interleave,
                          .weights = weights,
                          .dtype = dtype};
}

static uint16_t k_rows[MOST][NKV][D], v_rows[MOST][NKV][D], k_back[MOST][NKV][D],
    v_back[MOST][NKV][D];

static void fill_rows(void) {
  for (int i = 0; i < MOST * NKV * D; i++) {
    (&k_rows[0][0][0])[i] = (uint16_t)(2 * i + 1);
    (&v_rows[0][0][0])[i] = (uint16_t)(40000 + i);
  }
}

/* Appends in pieces, reads back in other pieces. */
static void round_trip(kvr_cache *cache, int id, int tokens) {
  device_ok(kvr_cache_reserve(cache, id, tokens), "kvr_cache_reserve");
  for (int at = 0; at < tokens; at += 7)
    device_ok(kvr_cache_append(cache, id, k_rows[at], v_rows[at],
                               tokens - at < 7 ? tokens - at : 7),
              "kvr_cache_append");
  assert_int_equal(kvr_cache_length(cache, id), tokens);
  for (int at = 0; at < tokens; at += 11)
    device_ok(kvr_cache_read(cache, id, at, tokens - at < 11 ? tokens - at : 11, k_back[at],
                             v_back[at]),
              "kvr_cache_read");
  assert_memory_equal(k_back, k_rows, (size_t)tokens * sizeof *k_rows);
  assert_memory_equal(v_back, v_rows, (size_t)tokens * sizeof *v_rows);
}

static void test_rows_survive(void **state) {
  kvr_group *group = *state;
  static const int weights[P] = {1, 0, 2};
  const int interleaves[] = {1, PAGE, 3, 1000};
  for (int i = 0; i < 8; i++) {
    const kvr_cache_desc desc = desc_of(KVR_BF16, interleaves[i % 4], i < 4 ? NULL : weights);
    kvr_cache *cache;
    int a, b;
    device_ok(kvr_cache_create(group, &desc, &cache), "kvr_cache_create");
    device_ok(kvr_cache_add(cache, &a), "kvr_cache_add");
    device_ok(kvr_cache_add(cache, &b), "kvr_cache_add");
    round_trip(cache, a, 17);
    round_trip(cache, b, 20);
    kvr_cache_destroy(cache);
  }
}

/* A pool in buffers of two pages gives the same rows: a page of 4 rows has 160 bytes. */
static void test_split_pools(void **state) {
  (void)state;
  const kvr_cache_desc desc = desc_of(KVR_BF16, 1, NULL);
  kvr_cache *cache;
  int id;
  setenv("KVRING_MAX_ALLOC", "400", 1);
  kvr_group *group = device_group(P, 0);
  unsetenv("KVRING_MAX_ALLOC");
  device_ok(kvr_cache_create(group, &desc, &cache), "kvr_cache_create");
  assert_int_equal(kvr_cache_num_buffers(cache), PAGES / 2);
  device_ok(kvr_cache_add(cache, &id), "kvr_cache_add");
  round_trip(cache, id, MOST);
  kvr_cache_destroy(cache);
  setenv("KVRING_MAX_ALLOC", "100", 1);
  kvr_group *tiny = device_group(P, 0);
  unsetenv("KVRING_MAX_ALLOC");
  assert_int_equal(kvr_cache_create(tiny, &desc, &cache), KVR_E_OOM); /* not even one page */
  assert_null(cache);
  kvr_group_destroy(tiny);
  kvr_group_destroy(group);
}

static void test_pages_are_taken_and_given_back(void **state) {
  kvr_group *group = *state;
  const kvr_cache_desc desc = desc_of(KVR_F32, 1, NULL);
  kvr_cache *cache;
  int a, b;
  device_ok(kvr_cache_create(group, &desc, &cache), "kvr_cache_create");
  device_ok(kvr_cache_add(cache, &a), "kvr_cache_add");
  device_ok(kvr_cache_reserve(cache, a, 10 * P * PAGE), "kvr_cache_reserve");
  assert_int_equal(kvr_cache_num_free_pages(cache), 2);
  device_ok(kvr_cache_add(cache, &b), "kvr_cache_add");
  assert_int_equal(kvr_cache_reserve(cache, b, 3 * P * PAGE), KVR_E_CAPACITY);
  assert_non_null(strstr(kvr_error_message(), "needs 3 more pages, 2 of 12"));
  assert_int_equal(kvr_cache_num_free_pages(cache), 2); /* nothing was taken */
  int entries;
  const int first = kvr_cache_table(cache, a, &entries)[0];
  device_ok(kvr_cache_release(cache, a), "kvr_cache_release");
  assert_int_equal(kvr_cache_num_free_pages(cache), PAGES);
  device_ok(kvr_cache_reserve(cache, b, 1), "kvr_cache_reserve");
  assert_int_equal(kvr_cache_table(cache, b, &entries)[0], first); /* last freed, first taken */
  kvr_cache_destroy(cache);
}

/* The id of a released request is refused, also after another one was added. */
static void test_stale_ids_are_refused(void **state) {
  kvr_group *group = *state;
  const kvr_cache_desc desc = desc_of(KVR_BF16, 1, NULL);
  kvr_cache *cache;
  int a, b, copy, entries;
  device_ok(kvr_cache_create(group, &desc, &cache), "kvr_cache_create");
  device_ok(kvr_cache_add(cache, &a), "kvr_cache_add");
  round_trip(cache, a, 5);
  device_ok(kvr_cache_release(cache, a), "kvr_cache_release");
  device_ok(kvr_cache_add(cache, &b), "kvr_cache_add");
  assert_int_not_equal(a, b);
  round_trip(cache, b, 5);
  assert_int_equal(kvr_cache_length(cache, a), -1);
  assert_null(kvr_cache_table(cache, a, &entries));
  assert_int_equal(kvr_cache_reserve(cache, a, 9), KVR_E_RANGE);
  assert_int_equal(kvr_cache_set_table(cache, a, (int[]){7}, 1), KVR_E_RANGE);
  assert_int_equal(kvr_cache_share(cache, a, 0, &copy), KVR_E_RANGE);
  assert_int_equal(kvr_cache_append(cache, a, k_rows, v_rows, 1), KVR_E_RANGE);
  assert_int_equal(kvr_cache_read(cache, a, 0, 1, k_back, v_back), KVR_E_RANGE);
  assert_int_equal(kvr_cache_truncate(cache, a, 0), KVR_E_RANGE);
  assert_int_equal(kvr_cache_release(cache, a), KVR_E_RANGE);
  assert_non_null(strstr(kvr_error_message(), "released or never added"));
  assert_int_equal(kvr_cache_length(cache, b), 5);
  kvr_cache_destroy(cache);
}

static void test_tables_are_checked(void **state) {
  kvr_group *group = *state;
  const kvr_cache_desc desc = desc_of(KVR_F32, 1, NULL);
  kvr_cache *cache;
  int a, b;
  device_ok(kvr_cache_create(group, &desc, &cache), "kvr_cache_create");
  device_ok(kvr_cache_add(cache, &a), "kvr_cache_add");
  device_ok(kvr_cache_add(cache, &b), "kvr_cache_add");
  const struct {
    int table[3], num;
    kvr_status want;
    const char *word;
  } cases[] = {{{3, PAGES, 0}, 2, KVR_E_TABLE, "page 12; the pool has pages 0 to 11"},
               {{-2, 0, 0}, 1, KVR_E_TABLE, "page -2"},
               {{4, 5, 4}, 3, KVR_E_TABLE, "page 4, which the table names before"},
               {{4, 5, INT_MAX}, 2, KVR_OK, ""}}; /* entries past num are never looked at */
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_int_equal(kvr_cache_set_table(cache, a, cases[i].table, cases[i].num), cases[i].want);
    if (cases[i].want != KVR_OK) assert_non_null(strstr(kvr_error_message(), cases[i].word));
  }
  assert_int_equal(kvr_cache_set_table(cache, b, (int[]){5}, 1), KVR_E_TABLE); /* a uses it */
  assert_int_equal(kvr_cache_set_table(cache, b, (int[]){6}, PAGES + 1), KVR_E_RANGE);
  assert_int_equal(kvr_cache_set_table(cache, b, NULL, 1), KVR_E_NULL);
  device_ok(kvr_cache_append(cache, a, k_rows, v_rows, 1), "kvr_cache_append");
  assert_int_equal(kvr_cache_set_table(cache, a, NULL, 0), KVR_E_CAPACITY); /* it has a token */
  assert_non_null(strstr(kvr_error_message(), "the table has 0 entries, the 1 tokens"));
  device_ok(kvr_cache_set_table(cache, a, (int[]){4, 5, 9}, 3), "adding entries");
  assert_int_equal(kvr_cache_num_free_pages(cache), PAGES - 3);
  kvr_cache_destroy(cache);
}

static void test_prefix_sharing(void **state) {
  kvr_group *group = *state;
  const kvr_cache_desc desc = desc_of(KVR_BF16, 1, NULL);
  const int prefix = 2 * P * PAGE;
  kvr_cache *cache;
  int a, b;
  device_ok(kvr_cache_create(group, &desc, &cache), "kvr_cache_create");
  device_ok(kvr_cache_add(cache, &a), "kvr_cache_add");
  round_trip(cache, a, prefix + 5);
  assert_int_equal(kvr_cache_share(cache, a, prefix + 3, &b), KVR_E_RANGE);
  assert_non_null(strstr(kvr_error_message(), "nearest smaller length that does is 24"));
  assert_int_equal(kvr_cache_share(cache, a, prefix + 6, &b), KVR_E_RANGE);
  device_ok(kvr_cache_share(cache, a, prefix, &b), "kvr_cache_share");
  assert_int_equal(kvr_cache_num_free_pages(cache), PAGES - 3);
  device_ok(kvr_cache_reserve(cache, b, prefix + 8), "kvr_cache_reserve");
  device_ok(kvr_cache_append(cache, b, k_rows[60], v_rows[60], 8), "kvr_cache_append");
  device_ok(kvr_cache_read(cache, b, 0, prefix + 8, k_back, v_back), "kvr_cache_read");
  assert_memory_equal(k_back, k_rows, (size_t)prefix * sizeof *k_rows);
  assert_memory_equal(k_back[prefix], k_rows[60], 8 * sizeof *k_rows);
  device_ok(kvr_cache_read(cache, a, 0, prefix + 5, k_back, v_back), "kvr_cache_read");
  assert_memory_equal(k_back, k_rows, (size_t)(prefix + 5) * sizeof *k_rows); /* a is untouched */
  device_ok(kvr_cache_release(cache, a), "kvr_cache_release");
  assert_int_equal(kvr_cache_num_free_pages(cache), PAGES - 3); /* b keeps the prefix */
  device_ok(kvr_cache_release(cache, b), "kvr_cache_release");
  assert_int_equal(kvr_cache_num_free_pages(cache), PAGES);
  kvr_cache_destroy(cache);
}

/* Two requests with a common prefix of 2 pages; the first has 5 tokens more. */
static kvr_cache *shared_cache(kvr_group *group, int prefix, int *a, int *b) {
  const kvr_cache_desc desc = desc_of(KVR_BF16, 1, NULL);
  kvr_cache *cache;
  device_ok(kvr_cache_create(group, &desc, &cache), "kvr_cache_create");
  device_ok(kvr_cache_add(cache, a), "kvr_cache_add");
  round_trip(cache, *a, prefix + 5);
  device_ok(kvr_cache_share(cache, *a, prefix, b), "kvr_cache_share");
  return cache;
}

/* Truncating into shared pages is fine, writing there is not while both requests live. */
static void test_shared_pages_are_never_written(void **state) {
  const int prefix = 2 * P * PAGE;
  int a, b;
  kvr_cache *cache = shared_cache(*state, prefix, &a, &b);
  assert_int_equal(kvr_cache_truncate(cache, a, prefix + 6), KVR_E_RANGE);
  device_ok(kvr_cache_truncate(cache, a, prefix), "kvr_cache_truncate");
  device_ok(kvr_cache_append(cache, a, k_rows[60], v_rows[60], 1), "after the shared pages");
  device_ok(kvr_cache_truncate(cache, a, prefix - 1), "kvr_cache_truncate");
  assert_int_equal(kvr_cache_check(cache, a), KVR_E_STATE); /* what a step asks */
  assert_int_equal(kvr_cache_append(cache, a, k_rows[60], v_rows[60], 1), KVR_E_STATE);
  assert_non_null(strstr(kvr_error_message(), "entry 1 of its table"));
  assert_int_equal(kvr_cache_length(cache, a), prefix - 1);
  device_ok(kvr_cache_read(cache, b, 0, prefix, k_back, v_back), "kvr_cache_read");
  assert_memory_equal(k_back, k_rows, (size_t)prefix * sizeof *k_rows);
  assert_memory_equal(v_back, v_rows, (size_t)prefix * sizeof *v_rows);
  device_ok(kvr_cache_release(cache, b), "kvr_cache_release");
  device_ok(kvr_cache_check(cache, a), "kvr_cache_check");
  device_ok(kvr_cache_append(cache, a, k_rows[60], v_rows[60], 1), "nobody shares it now");
  kvr_cache_destroy(cache);
}

/* The caller's table goes on after the shared pages, which both requests name. */
static void test_shared_tables_can_be_extended(void **state) {
  const int prefix = 2 * P * PAGE;
  int a, b, entries;
  kvr_cache *cache = shared_cache(*state, prefix, &a, &b);
  const int *shared = kvr_cache_table(cache, b, &entries);
  assert_int_equal(entries, 2);
  const int table[3] = {shared[0], shared[1], PAGES - 1};
  device_ok(kvr_cache_set_table(cache, b, table, 3), "kvr_cache_set_table");
  assert_int_equal(kvr_cache_num_free_pages(cache), PAGES - 4);
  device_ok(kvr_cache_append(cache, b, k_rows[60], v_rows[60], P * PAGE), "kvr_cache_append");
  device_ok(kvr_cache_read(cache, b, 0, prefix + P * PAGE, k_back, v_back), "kvr_cache_read");
  assert_memory_equal(k_back, k_rows, (size_t)prefix * sizeof *k_rows);
  assert_memory_equal(k_back[prefix], k_rows[60], (size_t)(P * PAGE) * sizeof *k_rows);
  device_ok(kvr_cache_read(cache, a, 0, prefix + 5, k_back, v_back), "kvr_cache_read");
  assert_memory_equal(k_back, k_rows, (size_t)(prefix + 5) * sizeof *k_rows);
  assert_int_equal(kvr_cache_set_table(cache, b, table, 2), KVR_E_CAPACITY); /* tokens in 3 */
  device_ok(kvr_cache_truncate(cache, b, prefix), "kvr_cache_truncate");
  device_ok(kvr_cache_set_table(cache, b, table, 2), "kvr_cache_set_table");
  assert_int_equal(kvr_cache_num_free_pages(cache), PAGES - 3);
  kvr_cache_destroy(cache);
}

static void test_bad_arguments(void **state) {
  kvr_group *group = *state;
  kvr_cache_desc desc = desc_of(KVR_BF16, 1, NULL);
  kvr_cache *cache = NULL;
  int id;
  static unsigned char pool[PAGES * PAGE * 2 * NKV * D * 2];
  assert_int_equal(kvr_cache_create(NULL, &desc, &cache), KVR_E_NULL);
  desc.num_ranks = P + 1;
  assert_int_equal(kvr_cache_create(group, &desc, &cache), KVR_E_LAYOUT);
  desc.num_ranks = P;
  desc.num_pages = INT_MAX;
  assert_int_equal(kvr_cache_create(group, &desc, &cache), KVR_E_OOM);
  desc.num_pages = PAGES;
  device_ok(kvr_cache_create(group, &desc, &cache), "kvr_cache_create");
  assert_int_equal(kvr_cache_add(cache, NULL), KVR_E_NULL);
  device_ok(kvr_cache_add(cache, &id), "kvr_cache_add");
  assert_int_equal(kvr_cache_share(cache, id, 0, NULL), KVR_E_NULL);
  assert_int_equal(kvr_cache_append(cache, id, k_rows, v_rows, 1), KVR_E_CAPACITY);
  assert_int_equal(kvr_cache_append(cache, id, k_rows, v_rows, -1), KVR_E_RANGE);
  device_ok(kvr_cache_reserve(cache, id, 4), "kvr_cache_reserve");
  assert_int_equal(kvr_cache_append(cache, id, NULL, v_rows, 1), KVR_E_NULL);
  assert_int_equal(kvr_cache_read(cache, id, 0, 1, k_back, v_back), KVR_E_RANGE);
  assert_int_equal(kvr_cache_export(cache, P, pool, sizeof pool), KVR_E_RANGE);
  assert_int_equal(kvr_cache_export(cache, 0, pool, sizeof pool - 1), KVR_E_RANGE);
  device_ok(kvr_cache_export(cache, 0, pool, sizeof pool), "kvr_cache_export");
  assert_int_equal(kvr_cache_bytes(cache), sizeof pool);
  kvr_cache_destroy(cache);
}

static int open_group(void **state) {
  *state = device_group(P, 0);
  fill_rows();
  return 0;
}

static int close_group(void **state) {
  kvr_group_destroy(*state);
  return 0;
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_rows_survive),
      cmocka_unit_test(test_split_pools),
      cmocka_unit_test(test_pages_are_taken_and_given_back),
      cmocka_unit_test(test_stale_ids_are_refused),
      cmocka_unit_test(test_tables_are_checked),
      cmocka_unit_test(test_prefix_sharing),
      cmocka_unit_test(test_shared_pages_are_never_written),
      cmocka_unit_test(test_shared_tables_can_be_extended),
      cmocka_unit_test(test_bad_arguments),
  };
  return cmocka_run_group_tests(tests, open_group, close_group);
}

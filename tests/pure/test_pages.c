/* Pages and block tables. Pages are plain data, but live beside the cache in the layer that needs
 * OpenCL; this program links without OpenCL, so it compiles them itself. */
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "device/pages.c" /* NOLINT(bugprone-suspicious-include) */
#include "pure_case.h"

enum { PAGES = 8 };

#define assert_message(part) assert_non_null(strstr(kvr_error_message(), part))

static int open_pages(void **state) {
  static kvr_pages pages;
  *state = &pages;
  return kvr_pages_init(&pages, PAGES) == KVR_OK ? 0 : -1;
}

static int close_pages(void **state) {
  kvr_pages_fini(*state);
  return 0;
}

static int new_request(kvr_pages *pages) {
  int id = -1;
  assert_int_equal(kvr_pages_add(pages, &id), KVR_OK);
  return id;
}

static const kvr_sequence *find(const kvr_pages *pages, int id) {
  kvr_sequence *s = NULL;
  assert_int_equal(kvr_pages_find(pages, id, &s), KVR_OK);
  return s;
}

/* ---- what must hold at any time ---- */

/* NULL, or what is wrong: a page is free or has as many users as there are tables that name it. */
static const char *find_fault(const kvr_pages *pages) {
  int users[PAGES] = {0}, free_pages[PAGES] = {0};
  for (int i = 0; i < pages->num_sequences; i++) {
    const kvr_sequence *s = &pages->sequences[i];
    if (!s->used && s->num_pages > 0) return "a forgotten request has pages";
    for (int e = 0; e < s->num_pages; e++) {
      if (s->table[e] < 0 || s->table[e] >= PAGES) return "an entry is out of range";
      users[s->table[e]]++;
    }
  }
  for (int i = 0; i < pages->num_free; i++) free_pages[pages->free_list[i]]++;
  for (int page = 0; page < PAGES; page++) {
    if (users[page] != pages->refs[page]) return "a count of users is wrong";
    if (free_pages[page] != (users[page] == 0)) return "the free list is wrong";
  }
  return NULL;
}

static void check(const kvr_pages *pages) {
  const char *fault = find_fault(pages);
  if (fault != NULL) fail_msg("%s", fault);
}

/* The check itself must notice. */
static void test_faults_are_found(void **state) {
  kvr_pages *pages = *state;
  const int id = new_request(pages);
  assert_int_equal(kvr_pages_reserve(pages, id, 3), KVR_OK);
  assert_null(find_fault(pages));
  pages->refs[0]++; /* a leak */
  assert_non_null(find_fault(pages));
  pages->refs[0]--;
  pages->num_free--; /* a lost page */
  assert_non_null(find_fault(pages));
  pages->free_list[pages->num_free++] = 0; /* a page that is in use */
  assert_non_null(find_fault(pages));
  pages->free_list[pages->num_free - 1] = 3;
  pages->num_free = 5;
  for (int i = 0; i < 5; i++) pages->free_list[i] = PAGES - 1 - i;
  assert_null(find_fault(pages));
}

/* ---- one thing at a time ---- */

static void test_reserve_takes_all_or_nothing(void **state) {
  kvr_pages *pages = *state;
  const int a = new_request(pages), b = new_request(pages);
  assert_int_equal(kvr_pages_reserve(pages, a, 5), KVR_OK);
  for (int i = 0; i < 5; i++) assert_int_equal(find(pages, a)->table[i], i);
  assert_int_equal(kvr_pages_reserve(pages, a, 2), KVR_OK); /* never shorter */
  assert_int_equal(find(pages, a)->num_pages, 5);
  assert_int_equal(kvr_pages_reserve(pages, b, 4), KVR_E_CAPACITY);
  assert_message("needs 4 more pages, 3 of 8 are free");
  assert_int_equal(find(pages, b)->num_pages, 0);
  assert_int_equal(pages->num_free, 3);
  assert_int_equal(kvr_pages_reserve(pages, b, INT_MAX), KVR_E_CAPACITY);
  assert_int_equal(kvr_pages_reserve(pages, b, 3), KVR_OK);
  assert_int_equal(pages->num_free, 0);
  assert_int_equal(kvr_pages_reserve(pages, b, 3), KVR_OK); /* it needs none */
  check(pages);
}

static void test_last_freed_is_first_taken(void **state) {
  kvr_pages *pages = *state;
  const int a = new_request(pages), b = new_request(pages);
  assert_int_equal(kvr_pages_reserve(pages, a, 3), KVR_OK);
  assert_int_equal(kvr_pages_reserve(pages, b, 2), KVR_OK);
  assert_int_equal(kvr_pages_release(pages, a), KVR_OK);
  check(pages);
  assert_int_equal(kvr_pages_reserve(pages, b, 5), KVR_OK);
  const int want[5] = {3, 4, 0, 1, 2};
  assert_memory_equal(find(pages, b)->table, want, sizeof want);
  check(pages);
}

static void test_unknown_requests(void **state) {
  kvr_pages *pages = *state;
  const int a = new_request(pages);
  assert_int_equal(kvr_pages_release(pages, a), KVR_OK);
  const int ids[] = {a, -1, 7, INT_MIN, INT_MAX}, entry = 0;
  for (size_t i = 0; i < sizeof ids / sizeof ids[0]; i++) {
    int copy;
    assert_int_equal(kvr_pages_reserve(pages, ids[i], 1), KVR_E_RANGE);
    assert_int_equal(kvr_pages_set_table(pages, ids[i], &entry, 1), KVR_E_RANGE);
    assert_int_equal(kvr_pages_share(pages, ids[i], 0, &copy), KVR_E_RANGE);
    assert_int_equal(kvr_pages_release(pages, ids[i]), KVR_E_RANGE);
  }
  check(pages);
}

static void test_tables_of_the_caller(void **state) {
  kvr_pages *pages = *state;
  const int a = new_request(pages), b = new_request(pages);
  assert_int_equal(kvr_pages_set_table(pages, a, (int[]){5, 0, 7}, 3), KVR_OK);
  check(pages);
  assert_int_equal(kvr_pages_reserve(pages, b, 2), KVR_OK); /* goes round the caller's pages */
  assert_int_equal(find(pages, b)->table[0], 1);
  assert_int_equal(find(pages, b)->table[1], 2);
  assert_int_equal(kvr_pages_set_table(pages, a, (int[]){7, 3}, 2), KVR_OK); /* own and free */
  assert_int_equal(pages->num_free, 4);
  check(pages);
  static const struct {
    int table[3];
    const char *part;
  } wrong[] = {{{3, 4, PAGES}, "entry 2"},
               {{-1, 3, 4}, "page -1"},
               {{4, 3, 4}, "second time"},
               {{4, 2, 3}, "page 2, which another request uses"}};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    assert_int_equal(kvr_pages_set_table(pages, a, wrong[i].table, 3), KVR_E_TABLE);
    assert_message(wrong[i].part);
    assert_int_equal(find(pages, a)->num_pages, 2); /* as before */
    assert_int_equal(find(pages, a)->table[0], 7);
    check(pages);
  }
  assert_int_equal(kvr_pages_set_table(pages, a, (int[]){0}, 0), KVR_OK);
  assert_int_equal(pages->num_free, 6);
  check(pages);
}

static void test_shared_pages_live_as_long_as_a_user(void **state) {
  kvr_pages *pages = *state;
  int b = -1, c = -1;
  const int a = new_request(pages);
  assert_int_equal(kvr_pages_reserve(pages, a, 4), KVR_OK);
  assert_int_equal(kvr_pages_share(pages, a, 2, &b), KVR_OK);
  assert_int_equal(kvr_pages_share(pages, b, 1, &c), KVR_OK);
  assert_int_equal(pages->num_free, 4); /* sharing takes none */
  assert_memory_equal(find(pages, b)->table, find(pages, a)->table, 2 * sizeof(int));
  assert_int_equal(kvr_pages_release(pages, a), KVR_OK);
  assert_int_equal(pages->num_free, 6);
  check(pages);
  assert_int_equal(kvr_pages_set_table(pages, new_request(pages), (int[]){0}, 1), KVR_E_TABLE);
  assert_int_equal(kvr_pages_release(pages, b), KVR_OK);
  assert_int_equal(pages->num_free, 7); /* c has page 0 */
  assert_int_equal(kvr_pages_release(pages, c), KVR_OK);
  assert_int_equal(pages->num_free, PAGES);
  check(pages);
}

/* ---- anything, in any order ---- */

static int num_requests(const kvr_pages *pages) {
  int num = 0;
  for (int i = 0; i < pages->num_sequences; i++) num += pages->sequences[i].used;
  return num;
}

/* At most 6 requests, so that ids 0 to 5 reach all of them. */
static void random_step(kvr_pages *pages, uint64_t *random) {
  const int id = case_between(random, 0, 5), n = case_between(random, 0, 4);
  int table[4], copy;
  kvr_sequence *s = NULL;
  switch (case_between(random, 0, 4)) {
  case 0:
    if (num_requests(pages) < 6) kvr_pages_add(pages, &copy);
    break;
  case 1: kvr_pages_reserve(pages, id, n); break;
  case 2:
    for (int i = 0; i < 4; i++) table[i] = case_between(random, -1, PAGES);
    kvr_pages_set_table(pages, id, table, n);
    break;
  case 3:
    if (num_requests(pages) < 6 && kvr_pages_find(pages, id, &s) == KVR_OK && n <= s->num_pages)
      kvr_pages_share(pages, id, n, &copy);
    break;
  default: kvr_pages_release(pages, id);
  }
}

static void test_random_steps(void **state) {
  kvr_pages *pages = *state;
  uint64_t random = 11;
  for (int i = 0; i < 20000; i++) {
    random_step(pages, &random);
    check(pages);
  }
  for (int id = 0; id < pages->num_sequences; id++)
    if (pages->sequences[id].used) kvr_pages_release(pages, id);
  assert_int_equal(pages->num_free, PAGES);
}

#define PAGES_TEST(test) cmocka_unit_test_setup_teardown(test, open_pages, close_pages)

int main(void) {
  const struct CMUnitTest tests[] = {
      PAGES_TEST(test_faults_are_found),
      PAGES_TEST(test_reserve_takes_all_or_nothing),
      PAGES_TEST(test_last_freed_is_first_taken),
      PAGES_TEST(test_unknown_requests),
      PAGES_TEST(test_tables_of_the_caller),
      PAGES_TEST(test_shared_pages_live_as_long_as_a_user),
      PAGES_TEST(test_random_steps),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

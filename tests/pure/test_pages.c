/* Pages and block tables. */
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "base/error.h"
#include "core/pages.h"
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

static kvr_table *find(const kvr_pages *pages, int id) {
  kvr_table *table = kvr_pages_find(pages, id);
  assert_non_null(table);
  return table;
}

static kvr_status grow(kvr_pages *pages, int id, int num_entries) {
  return kvr_pages_grow(pages, find(pages, id), num_entries);
}

static kvr_status set(kvr_pages *pages, int id, const int *entries, int num_entries) {
  return kvr_pages_set(pages, find(pages, id), entries, num_entries);
}

static void release(kvr_pages *pages, int id) { kvr_pages_release(pages, find(pages, id)); }

/* ---- what must hold at any time ---- */

/* NULL, or what is wrong: a page is free or has as many users as there are tables that name it. */
static const char *find_fault(const kvr_pages *pages) {
  int users[PAGES] = {0}, free_pages[PAGES] = {0};
  for (int i = 0; i < pages->num_tables; i++) {
    const kvr_table *t = &pages->tables[i];
    if (t->id >= pages->next_id || (i > 0 && t->id <= t[-1].id)) return "ids are out of order";
    for (int e = 0; e < t->num_entries; e++) {
      if (t->entries[e] < 0 || t->entries[e] >= PAGES) return "an entry is out of range";
      users[t->entries[e]]++;
    }
  }
  for (int i = 0; i < pages->num_free; i++) free_pages[pages->free[i]]++;
  for (int page = 0; page < PAGES; page++) {
    if (users[page] != pages->users[page]) return "a count of users is wrong";
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
  assert_int_equal(grow(pages, id, 3), KVR_OK);
  assert_null(find_fault(pages));
  pages->users[0]++; /* a leak */
  assert_non_null(find_fault(pages));
  pages->users[0]--;
  pages->num_free--; /* a lost page */
  assert_non_null(find_fault(pages));
  pages->free[pages->num_free++] = 0; /* a page that is in use */
  assert_non_null(find_fault(pages));
  pages->free[pages->num_free - 1] = 3;
  pages->num_free = 5;
  for (int i = 0; i < 5; i++) pages->free[i] = PAGES - 1 - i;
  assert_null(find_fault(pages));
}

/* ---- one thing at a time ---- */

static void test_grow_takes_all_or_nothing(void **state) {
  kvr_pages *pages = *state;
  const int a = new_request(pages), b = new_request(pages);
  assert_int_equal(grow(pages, a, 5), KVR_OK);
  for (int i = 0; i < 5; i++) assert_int_equal(find(pages, a)->entries[i], i);
  assert_int_equal(grow(pages, a, 2), KVR_OK); /* never shorter */
  assert_int_equal(find(pages, a)->num_entries, 5);
  assert_int_equal(grow(pages, b, 4), KVR_E_CAPACITY);
  assert_message("needs 4 more pages, 3 of 8 are free");
  assert_int_equal(find(pages, b)->num_entries, 0);
  assert_int_equal(pages->num_free, 3);
  assert_int_equal(grow(pages, b, INT_MAX), KVR_E_CAPACITY);
  assert_int_equal(grow(pages, b, 3), KVR_OK);
  assert_int_equal(pages->num_free, 0);
  assert_int_equal(grow(pages, b, 3), KVR_OK); /* it needs none */
  check(pages);
}

static void test_last_freed_is_first_taken(void **state) {
  kvr_pages *pages = *state;
  const int a = new_request(pages), b = new_request(pages);
  assert_int_equal(grow(pages, a, 3), KVR_OK);
  assert_int_equal(grow(pages, b, 2), KVR_OK);
  release(pages, a);
  check(pages);
  assert_int_equal(grow(pages, b, 5), KVR_OK);
  const int want[5] = {3, 4, 0, 1, 2};
  assert_memory_equal(find(pages, b)->entries, want, sizeof want);
  check(pages);
}

static void test_ids_are_never_used_again(void **state) {
  kvr_pages *pages = *state;
  const int a = new_request(pages), b = new_request(pages), c = new_request(pages);
  release(pages, b);
  release(pages, c);
  const int ids[] = {b, c, c + 1, -1, INT_MIN, INT_MAX};
  for (size_t i = 0; i < sizeof ids / sizeof ids[0]; i++)
    assert_null(kvr_pages_find(pages, ids[i]));
  assert_int_equal(find(pages, a)->id, a);
  const int d = new_request(pages);
  assert_true(d > c);
  assert_null(kvr_pages_find(pages, c));
  pages->next_id = INT_MAX;
  int id = -1;
  assert_int_equal(kvr_pages_add(pages, &id), KVR_E_CAPACITY);
  assert_int_equal(id, -1);
  check(pages);
}

static void test_tables_of_the_caller(void **state) {
  kvr_pages *pages = *state;
  const int a = new_request(pages), b = new_request(pages);
  assert_int_equal(set(pages, a, (int[]){5, 0, 7}, 3), KVR_OK);
  check(pages);
  assert_int_equal(grow(pages, b, 2), KVR_OK); /* goes round the caller's pages */
  assert_int_equal(find(pages, b)->entries[0], 1);
  assert_int_equal(find(pages, b)->entries[1], 2);
  assert_int_equal(set(pages, a, (int[]){7, 3}, 2), KVR_OK); /* own and free */
  assert_int_equal(pages->num_free, 4);
  check(pages);
  static const struct {
    int table[3];
    const char *part;
  } wrong[] = {{{3, 4, PAGES}, "entry 2 is page 8; the pool has pages 0 to 7"},
               {{-1, 3, 4}, "page -1"},
               {{4, 3, 4}, "page 4, which the table names before"},
               {{4, 2, 3}, "page 2, which another request uses"}};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    assert_int_equal(set(pages, a, wrong[i].table, 3), KVR_E_TABLE);
    assert_message(wrong[i].part);
    assert_int_equal(find(pages, a)->num_entries, 2); /* as before */
    assert_int_equal(find(pages, a)->entries[0], 7);
    check(pages);
  }
  assert_int_equal(set(pages, a, (int[]){0}, 0), KVR_OK);
  assert_int_equal(pages->num_free, 6);
  check(pages);
}

static void test_shared_pages_live_as_long_as_a_user(void **state) {
  kvr_pages *pages = *state;
  int b = -1, c = -1;
  const int a = new_request(pages);
  assert_int_equal(grow(pages, a, 4), KVR_OK);
  assert_int_equal(kvr_pages_share(pages, a, 2, &b), KVR_OK);
  assert_int_equal(kvr_pages_share(pages, b, 1, &c), KVR_OK);
  assert_int_equal(pages->num_free, 4); /* sharing takes none */
  assert_memory_equal(find(pages, b)->entries, find(pages, a)->entries, 2 * sizeof(int));
  release(pages, a);
  assert_int_equal(pages->num_free, 6);
  check(pages);
  assert_int_equal(set(pages, new_request(pages), (int[]){0}, 1), KVR_E_TABLE);
  release(pages, b);
  assert_int_equal(pages->num_free, 7); /* c has page 0 */
  release(pages, c);
  assert_int_equal(pages->num_free, PAGES);
  check(pages);
}

static void test_shared_entries_are_found(void **state) {
  kvr_pages *pages = *state;
  int b = -1;
  const int a = new_request(pages);
  assert_int_equal(grow(pages, a, 4), KVR_OK);
  assert_int_equal(kvr_pages_find_shared(pages, find(pages, a), 0), -1);
  assert_int_equal(kvr_pages_share(pages, a, 2, &b), KVR_OK);
  assert_int_equal(kvr_pages_find_shared(pages, find(pages, a), 0), 0);
  assert_int_equal(kvr_pages_find_shared(pages, find(pages, b), 1), 1);
  assert_int_equal(kvr_pages_find_shared(pages, find(pages, a), 2), -1);
  assert_int_equal(kvr_pages_find_shared(pages, find(pages, b), 9), -1);
  assert_int_equal(set(pages, b, (int[]){0, 1, 6}, 3), KVR_OK); /* keeps what it shares */
  assert_int_equal(pages->users[1], 2);
  check(pages);
  assert_int_equal(set(pages, b, (int[]){7, 1}, 2), KVR_OK); /* leaves page 0 to a */
  assert_int_equal(kvr_pages_find_shared(pages, find(pages, a), 0), 1);
  check(pages);
  release(pages, a);
  assert_int_equal(kvr_pages_find_shared(pages, find(pages, b), 0), -1);
  check(pages);
}

/* ---- anything, in any order ---- */

/* Of at most 6 requests. */
static void random_step(kvr_pages *pages, uint64_t *random) {
  const int n = case_between(random, 0, 4);
  int entries[4], copy;
  if (pages->num_tables == 0) kvr_pages_add(pages, &copy);
  kvr_table *table = &pages->tables[case_between(random, 0, pages->num_tables - 1)];
  switch (case_between(random, 0, 4)) {
  case 0:
    if (pages->num_tables < 6) kvr_pages_add(pages, &copy);
    break;
  case 1: kvr_pages_grow(pages, table, n); break;
  case 2:
    for (int i = 0; i < 4; i++) entries[i] = case_between(random, -1, PAGES);
    kvr_pages_set(pages, table, entries, n);
    break;
  case 3:
    if (pages->num_tables < 6 && n <= table->num_entries)
      kvr_pages_share(pages, table->id, n, &copy);
    break;
  default: kvr_pages_release(pages, table);
  }
}

static void test_random_steps(void **state) {
  kvr_pages *pages = *state;
  uint64_t random = 11;
  for (int i = 0; i < 20000; i++) {
    random_step(pages, &random);
    check(pages);
  }
  while (pages->num_tables > 0) kvr_pages_release(pages, pages->tables);
  assert_int_equal(pages->num_free, PAGES);
}

#define PAGES_TEST(test) cmocka_unit_test_setup_teardown(test, open_pages, close_pages)

int main(void) {
  const struct CMUnitTest tests[] = {
      PAGES_TEST(test_faults_are_found),
      PAGES_TEST(test_grow_takes_all_or_nothing),
      PAGES_TEST(test_last_freed_is_first_taken),
      PAGES_TEST(test_ids_are_never_used_again),
      PAGES_TEST(test_tables_of_the_caller),
      PAGES_TEST(test_shared_pages_live_as_long_as_a_user),
      PAGES_TEST(test_shared_entries_are_found),
      PAGES_TEST(test_random_steps),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

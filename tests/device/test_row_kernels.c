/* kvr_stage and kvr_cache_write, bit for bit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "cl_fixture.h"
#include "shared.h"

/* Row movers: a pool in two buffers, shuffled pages, and tables whose unused entries are wild. */

enum { PAGE = 4, PAGES = 8, TABLE = 10, HALF_POOL = PAGES / 2 * PAGE, MOVED = 21, LOCAL0 = 3 };
static const int table_entries[TABLE] = {5, 2, 7, 0, 6, 3, 1 << 30, -5, 1 << 30, -1};

static void fill_words(uint16_t *p, int rows, int words, int tag) {
  for (int i = 0; i < rows * words; i++) p[i] = (uint16_t)(i * 7 + tag * 4099);
}

static void stage_case(int words) {
  uint16_t *pool[2], *slot = calloc((size_t)((MOVED + 4) * words), 2);
  uint16_t *want = calloc((size_t)((MOVED + 4) * words), 2);
  cl_kernel k = build_kernel("rows.cl", "kvr_stage", "");
  fill_words(slot, MOVED + 4, words, 9);
  fill_words(want, MOVED + 4, words, 9);
  cl_mem table = upload(table_entries, sizeof table_entries);
  cl_mem to = upload(slot, (size_t)((MOVED + 4) * words) * 2);
  for (int half = 0; half < 2; half++) {
    pool[half] = calloc((size_t)(HALF_POOL * words), 2);
    fill_words(pool[half], HALF_POOL, words, half + 1);
    cl_mem mems[3] = {upload(pool[half], (size_t)(HALF_POOL * words) * 2), table, to};
    const kvr_rows_args a = {.num_rows = MOVED,
                             .buffer_row = 2,
                             .local0 = LOCAL0,
                             .page_size = PAGE,
                             .page_first = half * PAGES / 2,
                             .page_count = PAGES / 2,
                             .row_words = words};
    launch(k, 3, mems, &a, sizeof a, MOVED + (size_t)half, (size_t)(1 + 2 * half), 1);
    clReleaseMemObject(mems[0]);
  }
  for (int i = 0; i < MOVED; i++) {
    const int x = LOCAL0 + i, row = table_entries[x / PAGE] * PAGE + x % PAGE;
    memcpy(want + (2 + i) * words, pool[row / HALF_POOL] + row % HALF_POOL * words,
           (size_t)words * 2);
  }
  download(to, slot, (size_t)((MOVED + 4) * words) * 2);
  assert_memory_equal(slot, want, (size_t)((MOVED + 4) * words) * 2);
  clReleaseMemObject(table);
  clReleaseMemObject(to);
  clReleaseKernel(k);
  for (int half = 0; half < 2; half++) free(pool[half]);
  free(slot);
  free(want);
}

static void test_stage(void **state) {
  (void)state;
  stage_case(1);
  stage_case(59);
  stage_case(256);
}

static void test_cache_write(void **state) {
  (void)state;
  enum { WORDS = 37, ROWS = 30 };
  static uint16_t rows[(ROWS + 3) * WORDS], pool[2][HALF_POOL * WORDS], want[2][HALF_POOL * WORDS];
  fill_words(rows, ROWS + 3, WORDS, 5);
  cl_kernel k = build_kernel("rows.cl", "kvr_cache_write", "");
  cl_mem table = upload(table_entries, sizeof table_entries), from = upload(rows, sizeof rows);
  /* Two chunks of new tokens; weights 1, 2, 1 and interleave 3, rank 1 */
  kvr_rows_args a = {.num_rows = ROWS,
                     .buffer_row = 3,
                     .page_size = PAGE,
                     .page_count = PAGES / 2,
                     .row_words = WORDS,
                     .split = 11,
                     .t0 = 0,
                     .t1 = 16,
                     .num_cached = 7,
                     .interleave = 3,
                     .total_weight = 4,
                     .weight = 2,
                     .weight_before = 1};
  for (int half = 0; half < 2; half++) {
    fill_words(pool[half], HALF_POOL, WORDS, half + 1);
    fill_words(want[half], HALF_POOL, WORDS, half + 1);
    cl_mem mems[3] = {from, upload(pool[half], sizeof pool[half]), table};
    a.page_first = half * PAGES / 2;
    launch(k, 3, mems, &a, sizeof a, ROWS, 1, 1);
    download(mems[1], pool[half], sizeof pool[half]);
    clReleaseMemObject(mems[1]);
  }
  int written = 0;
  for (int i = 0; i < ROWS; i++) {
    const int g = 7 + (i < 11 ? i : 16 + i - 11), o = g % 12;
    if (o < 3 || o >= 9) continue;
    const int x = g / 12 * 6 + o - 3, row = table_entries[x / PAGE] * PAGE + x % PAGE;
    memcpy(want[row / HALF_POOL] + row % HALF_POOL * WORDS, rows + (3 + i) * WORDS, WORDS * 2);
    written++;
  }
  assert_true(written > 10);
  assert_memory_equal(pool, want, sizeof pool);
  clReleaseMemObject(table);
  clReleaseMemObject(from);
  clReleaseKernel(k);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_stage),
      cmocka_unit_test(test_cache_write),
  };
  return cmocka_run_group_tests(tests, setup_device, teardown_device);
}

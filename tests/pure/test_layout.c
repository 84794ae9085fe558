/* Who stores which position and who attends which token: numbers by hand, and bijections. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/layout.h"
#include "pure_case.h"
#include "shared.h"

static kvr_cache_desc desc_of(int P, int interleave, const int *weights) {
  return (kvr_cache_desc){.struct_size = sizeof(kvr_cache_desc),
                          .num_ranks = P,
                          .num_kv_heads = 1,
                          .head_dim = 1,
                          .page_size = 4,
                          .num_pages = 1 << 20,
                          .interleave = interleave,
                          .weights = weights};
}

static void expect_shares(int tokens, int P, int interleave, const int *want) {
  const kvr_cache_desc desc = desc_of(P, interleave, NULL);
  for (int r = 0; r < P; r++) assert_int_equal(kvr_map_count(&desc, tokens, r), want[r]);
}

static void test_shares_by_hand(void **state) {
  (void)state;
  expect_shares(18, 4, 4, (int[]){6, 4, 4, 4});
  expect_shares(33, 4, 4, (int[]){9, 8, 8, 8});
  expect_shares(29, 3, 4, (int[]){12, 9, 8});
  expect_shares(7, 3, 1, (int[]){3, 2, 2});
  expect_shares(1, 8, 1, (int[]){1, 0, 0, 0, 0, 0, 0, 0});
  expect_shares(1002, 4, 1, (int[]){251, 251, 250, 250});
  expect_shares(1000, 4, 16, (int[]){256, 256, 248, 240});
  expect_shares(37, 4, 1, (int[]){10, 9, 9, 9});
  expect_shares(37, 4, 4, (int[]){12, 9, 8, 8});
}

/* Page-interleaved: token 29 with P = 3 and pages of 4 is in global page 7 = rank 1, local page 2,
 * row 1. */
static void test_page_interleaved_ownership(void **state) {
  (void)state;
  const kvr_cache_desc desc = desc_of(3, 4, NULL);
  assert_int_equal(kvr_map_owner(&desc, 29), 1);
  assert_int_equal(kvr_map_local(&desc, 29), 2 * 4 + 1);
}

static void check_bijection(const kvr_cache_desc *desc, int tokens) {
  const int P = desc->num_ranks;
  int *next = calloc((size_t)P, sizeof *next), total = 0;
  assert_non_null(next);
  for (int g = 0; g < tokens; g++) {
    const int r = kvr_map_owner(desc, g), m = kvr_map_local(desc, g);
    assert_true(r >= 0 && r < P);
    assert_int_equal(m, next[r]); /* shares are dense and in order of position */
    next[r]++;
    assert_int_equal(kvr_map_position(desc, r, m), g);
    for (int other = 0; other < P; other++) {
      const int local =
          kvr_local_index(g, desc->interleave, kvr_map_total_weight(desc),
                          kvr_map_weight(desc, other), kvr_map_weight_before(desc, other));
      assert_int_equal(local, other == r ? m : -1); /* the kernels' own formula */
    }
  }
  for (int r = 0; r < P; r++) {
    assert_int_equal(kvr_map_count(desc, tokens, r), next[r]);
    total += next[r];
  }
  assert_int_equal(total, tokens);
  free(next);
}

static void test_map_is_a_bijection(void **state) {
  (void)state;
  static const int weights[] = {2, 0, 1, 3, 0, 1, 5, 2};
  for (int P = 1; P <= 8; P++)
    for (int k = 0; k < 6; k++) {
      const int interleaves[] = {1, 2, 4, 5, 100, 2147483647};
      const kvr_cache_desc equal = desc_of(P, interleaves[k], NULL);
      const kvr_cache_desc weighted = desc_of(P, interleaves[k], weights);
      check_bijection(&equal, 1000);
      check_bijection(&weighted, 1000);
    }
}

static void test_table_covers_the_longest_share(void **state) {
  (void)state;
  const int weights[] = {1, 3};
  const kvr_cache_desc striped = desc_of(4, 1, NULL), weighted = desc_of(2, 1, weights);
  assert_int_equal(kvr_map_num_pages(&striped, 0), 0);
  assert_int_equal(kvr_map_num_pages(&striped, 16), 1);
  assert_int_equal(kvr_map_num_pages(&striped, 17), 2);
  assert_int_equal(kvr_map_num_pages(&weighted, 16), 3); /* rank 1 has 12 of 16 tokens */
}

/* ---- head and tail rows ---- */

static void check_rows(const kvr_problem *p) {
  kvr_layout l;
  assert_int_equal(kvr_layout_init(p, &l), KVR_OK);
  for (int i = 0; i < l.num_requests; i++) {
    const int S = p->requests[i].num_new, P = l.num_ranks;
    const int C = kvr_request_chunk(&p->requests[i], P);
    char *seen = calloc((size_t)S + 1, 1);
    assert_non_null(seen);
    for (int r = 0; r < P; r++) {
      const kvr_rows rows = *kvr_layout_rows(&l, i, r);
      for (int j = 0; j < rows.num; j++) {
        const int t = kvr_rows_token(rows, j), c = t / C;
        assert_true(t >= 0 && t < S);
        assert_int_equal(c < P ? c : 2 * P - 1 - c, r); /* the zigzag rule */
        assert_int_equal(c < P, j < rows.split);
        assert_false(seen[t]);
        seen[t] = 1;
      }
      for (int a = 0; a <= rows.num; a++) { /* slices name the same tokens */
        const kvr_rows slice = kvr_rows_slice(rows, a, a + 3);
        for (int j = 0; j < slice.num; j++)
          assert_int_equal(kvr_rows_token(slice, j), kvr_rows_token(rows, a + j));
      }
    }
    for (int t = 0; t < S; t++) assert_true(seen[t]);
    free(seen);
  }
  kvr_layout_fini(&l);
}

static void test_every_token_is_one_row(void **state) {
  (void)state;
  for (int P = 1; P <= 8; P++)
    for (int S = 0; S <= 4 * P + 3; S++)
      for (int extra = -1; extra <= 2; extra++) {
        const kvr_request request = {.num_new = S,
                                     .chunk = extra < 0
                                                  ? 0
                                                  : (S + 2 * P - 1) / (2 * P) + extra + (S == 0)};
        const kvr_problem p = {.cache = desc_of(P, 1, NULL),
                               .num_requests = 1,
                               .requests = &request};
        check_rows(&p);
      }
}

static void test_rows_of_two_requests_by_hand(void **state) {
  (void)state;
  const kvr_request requests[] = {{.num_new = 13037}, {.num_new = 3347}};
  const kvr_problem p = {.cache = desc_of(2, 1, NULL), .num_requests = 2, .requests = requests};
  kvr_layout l;
  assert_int_equal(kvr_request_chunk(&requests[0], 2), 3260);
  assert_int_equal(kvr_request_chunk(&requests[1], 2), 837);
  assert_int_equal(kvr_layout_init(&p, &l), KVR_OK);
  assert_int_equal(kvr_layout_rows(&l, 1, 1)->first, 6520);
  assert_int_equal(l.rank_rows[1], 6520 + 1674);
  assert_int_equal(l.rank_rows[0] + l.rank_rows[1], 13037 + 3347);
  kvr_layout_fini(&l);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_shares_by_hand),
      cmocka_unit_test(test_page_interleaved_ownership),
      cmocka_unit_test(test_map_is_a_bijection),
      cmocka_unit_test(test_table_covers_the_longest_share),
      cmocka_unit_test(test_every_token_is_one_row),
      cmocka_unit_test(test_rows_of_two_requests_by_hand),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

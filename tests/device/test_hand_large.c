/* Offsets that do not fit 32 bits: pages far into a large pool, and tokens far apart in the
 * caller's memory. Little of that memory is ever touched; where it cannot be had, the test says so.
 */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "device/cache.h"
#include "hand_case.h"

/* ---- tokens 2^30 floats apart: the third begins 2^33 bytes on ---- */

enum { D = 4, NQ = 2, NEW = 4 };
static const size_t apart = (size_t)1 << 30;

/* One tensor with q, k, v and out of a token side by side, as one projection writes them. */
enum { Q_AT = 0, K_AT = NQ * D, V_AT = K_AT + D, OUT_AT = V_AT + D };

static void put_tokens(float *base, const pure_case *c) {
  for (int t = 0; t < NEW; t++) {
    float *token = base + (size_t)t * apart;
    for (int i = 0; i < NQ * D; i++) token[Q_AT + i] = (float)c->q[t * NQ * D + i];
    for (int i = 0; i < D; i++) token[K_AT + i] = (float)c->k[t * D + i];
    for (int i = 0; i < D; i++) token[V_AT + i] = (float)c->v[t * D + i];
  }
}

static void run_apart(pure_case *c, device_run *run, float *base, const char *strategy) {
  const kvr_tensor q = {.host = base, .offset = Q_AT, .token_stride = apart};
  const kvr_tensor k = {.host = base, .offset = K_AT, .token_stride = apart};
  const kvr_tensor v = {.host = base, .offset = V_AT, .token_stride = apart};
  const kvr_tensor out = {.host = base, .offset = OUT_AT, .token_stride = apart};
  const kvr_tensor lse = {.host = run->lse};
  const kvr_io io = {.struct_size = sizeof io, .q = &q, .k = &k, .v = &v, .out = &out, .lse = &lse};
  kvr_options options = c->options;
  options.strategy = strategy;
  kvr_plan *plan;
  device_run_rewind(run, c);
  device_ok(kvr_plan_create(run->session, &c->problem, &options, &plan), strategy);
  device_ok(kvr_plan_run(plan, &io), strategy);
  kvr_plan_destroy(plan);
  for (int t = 0; t < NEW; t++)
    memcpy(run->out + t * NQ * D, base + (size_t)t * apart + OUT_AT, NQ * D * sizeof(float));
}

static void token_strides_beyond_32_bits_are_followed(void **state) {
  (void)state;
  const size_t bytes = (NEW * apart + 64) * sizeof(float);
  float *base =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    print_message("skipped: no address space of %zu bytes\n", bytes);
    skip();
  }
  for (int i = 0; i < HAND_NUM_RANKS; i++) {
    pure_case c = hand_case(hand_ranks[i], 9, NEW, NQ, 1, D);
    hand_fill(&c, hand_scrambled_query, hand_scrambled, hand_scrambled_value);
    device_run run = {0};
    device_run_init(&run, &c, hand_group(hand_ranks[i]), "all");
    put_tokens(base, &c);
    for (int s = 0; s + 1 < kvr_num_strategies(); s++) {
      run_apart(&c, &run, base, kvr_strategy_name(s));
      assert_true(device_run_error(&run, &c) < 2e-5);
      assert_true(device_pools_are_right(&run, &c));
    }
    device_run_fini(&run, &c);
    case_free(&c);
  }
  munmap(base, bytes);
}

/* ---- pages beyond 2^31 elements ---- */

/* 2 * 8 heads of 128 halves, 16 tokens: 32,768 elements to a page, 2^31 before page 65,536. */
enum { PAGE = 16, NKV = 8, WIDE = 128, PAGES = 65538, TOKENS = 20 };

static uint16_t key_rows[3][TOKENS * NKV * WIDE], back[2][TOKENS * NKV * WIDE];

/* Halves between 1 and 2, either sign. */
static void fill_rows(void) {
  uint64_t random = 9;
  for (int set = 0; set < 3; set++)
    for (int i = 0; i < TOKENS * NKV * WIDE; i++)
      key_rows[set][i] = (uint16_t)(0x3c00 | (case_random(&random) & 0x83ff));
}

static void expect_page_elements(void) {
  const size_t page = (size_t)2 * NKV * WIDE * PAGE;
  assert_true(page == 32768);
  assert_true(page * 8192 == 268435456);
  assert_true(page * 65535 == 2147450880);
  assert_true(page * 65536 == 2147483648); /* one too many for an int */
}

/* A request of 16 tokens in a page, and room for 4 more in another. */
static int add_request(kvr_cache *cache, int page, int next, const uint16_t *rows) {
  const int table[2] = {page, next};
  int id;
  device_ok(kvr_cache_add(cache, &id), "kvr_cache_add");
  device_ok(kvr_cache_set_table(cache, id, table, 2), "kvr_cache_set_table");
  device_ok(kvr_cache_append(cache, id, rows, rows, PAGE), "kvr_cache_append");
  return id;
}

static void expect_rows(const kvr_cache *cache, int id, const uint16_t *rows, int num) {
  const size_t bytes = (size_t)num * NKV * WIDE * sizeof *rows;
  device_ok(kvr_cache_read(cache, id, 0, num, back[0], back[1]), "kvr_cache_read");
  assert_memory_equal(back[0], rows, bytes);
  assert_memory_equal(back[1], rows, bytes);
}

/* Appends four tokens of a request, and returns their output. */
static void step(kvr_session *session, int id, const uint16_t *rows, float *out) {
  const kvr_cache_desc desc = {.struct_size = sizeof desc,
                               .num_ranks = 1,
                               .num_kv_heads = NKV,
                               .head_dim = WIDE,
                               .page_size = PAGE,
                               .num_pages = PAGES,
                               .interleave = 1,
                               .dtype = KVR_F16};
  const kvr_request request = {.num_new = TOKENS - PAGE, .num_cached = PAGE, .cache_id = id};
  const kvr_problem problem = {.struct_size = sizeof problem,
                               .cache = desc,
                               .num_q_heads = NKV,
                               .causal = 1,
                               .num_requests = 1,
                               .requests = &request};
  const kvr_options options = {.struct_size = sizeof options, .strategy = "ring", .tile = 16};
  void *fresh = (void *)(uintptr_t)(rows + PAGE * NKV * WIDE);
  const kvr_tensor in = {.host = fresh, .dtype = KVR_F16}, result = {.host = out};
  const kvr_io io = {.struct_size = sizeof io, .q = &in, .k = &in, .v = &in, .out = &result};
  kvr_plan *plan;
  device_ok(kvr_plan_create(session, &problem, &options, &plan), "kvr_plan_create");
  device_ok(kvr_plan_run(plan, &io), "kvr_plan_run");
  kvr_plan_destroy(plan);
}

/* The same data at both ends of the pool give the same answer; other data in between stays: an
 * offset that wrapped at 2^31 or 2^32 would land on it. */
static void check_far_pages(kvr_group *group, kvr_cache *cache) {
  static float near_out[(TOKENS - PAGE) * NKV * WIDE], far_out[(TOKENS - PAGE) * NKV * WIDE];
  const kvr_limits limits = {.struct_size = sizeof limits,
                             .num_q_heads = NKV,
                             .max_new_tokens = TOKENS - PAGE,
                             .max_context = PAGE,
                             .max_requests = 1,
                             .tile = 16,
                             .strategies = "ring"};
  kvr_session *session;
  fill_rows();
  const int near = add_request(cache, 0, 2, key_rows[0]);
  const int first = add_request(cache, 1, 3, key_rows[1]);
  const int last = add_request(cache, 65535, 32768, key_rows[2]);
  const int far = add_request(cache, PAGES - 1, PAGES - 2, key_rows[0]);
  device_ok(kvr_session_create(group, cache, &limits, &session), "kvr_session_create");
  step(session, near, key_rows[0], near_out);
  step(session, far, key_rows[0], far_out);
  assert_memory_equal(near_out, far_out, sizeof near_out);
  assert_true(isfinite(near_out[0]) && near_out[0] != 0.0f);
  step(session, last, key_rows[2], far_out);
  assert_memory_not_equal(near_out, far_out, sizeof near_out);
  expect_rows(cache, near, key_rows[0], TOKENS);
  expect_rows(cache, first, key_rows[1], PAGE);
  expect_rows(cache, last, key_rows[2], TOKENS);
  expect_rows(cache, far, key_rows[0], TOKENS);
  kvr_session_destroy(session);
}

static void pages_beyond_32_bits_are_found_or_refused(void **state) {
  (void)state;
  const kvr_cache_desc desc = {.struct_size = sizeof desc,
                               .num_ranks = 1,
                               .num_kv_heads = NKV,
                               .head_dim = WIDE,
                               .page_size = PAGE,
                               .num_pages = PAGES,
                               .interleave = 1,
                               .dtype = KVR_F16};
  kvr_group *group = hand_group(1);
  kvr_cache *cache;
  expect_page_elements();
  const kvr_status status = kvr_cache_create(group, &desc, &cache);
  if (status == KVR_OK) {
    print_message("a pool of %zu bytes in %d buffers\n", kvr_cache_bytes(cache),
                  kvr_cache_num_buffers(cache));
    check_far_pages(group, cache);
  } else {
    print_message("refused: %s\n", kvr_error_message());
    assert_true(status == KVR_E_OOM || status == KVR_E_CL);
    assert_null(cache);
  }
  kvr_cache_destroy(cache);
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(token_strides_beyond_32_bits_are_followed),
      cmocka_unit_test(pages_beyond_32_bits_are_found_or_refused),
  };
  return cmocka_run_group_tests(tests, NULL, hand_close);
}

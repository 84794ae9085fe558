/* Steps that are refused, when they are planned or when they are run: the status, a message with
 * the value, the limit and what to do, and a cache that stays as it was. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device/cache.h"
#include "device_case.h"
#include "kvring/opencl.h"
#include "refused_case.h"

/* Plans the world's step; *out must become NULL. */
static kvr_status plan_step(refused_world *w) {
  kvr_plan *plan = (kvr_plan *)w;
  const kvr_status status = kvr_plan_create(w->session, &w->problem, &w->options, &plan);
  if (status != KVR_OK)
    assert_null(plan);
  else
    kvr_plan_destroy(plan);
  return status;
}

/* ---- planning ---- */

static void a_good_step_is_planned(void **state) {
  (void)state;
  refused_world *w = refused_open();
  REFUSED(w, plan_step(w), KVR_OK, NULL);
  kvr_plan *plan;
  REFUSED(w, kvr_plan_create(NULL, &w->problem, NULL, &plan), KVR_E_NULL, "session");
  REFUSED(w, kvr_plan_create(w->session, NULL, NULL, &plan), KVR_E_NULL, "problem");
  REFUSED(w, kvr_plan_create(w->session, &w->problem, NULL, NULL), KVR_E_NULL, "out");
  REFUSED(w, (w->problem.window = -1, plan_step(w)), KVR_E_RANGE, "window is -1", "0 for none");
}

/* The problem describes another cache than the session has. */
static void other_caches_are_refused(void **state) {
  (void)state;
  static const int weights[] = {1, 2};
  refused_world *w = refused_open();
  kvr_cache_desc *d = &w->problem.cache;
  REFUSED(w, (d->num_ranks = 3, plan_step(w)), KVR_E_LAYOUT, "num_ranks 3", "the session's has 2");
  REFUSED(w, (d->num_kv_heads = 4, plan_step(w)), KVR_E_LAYOUT, "num_kv_heads 4", "has 2");
  REFUSED(w, (d->head_dim = 8, plan_step(w)), KVR_E_LAYOUT, "head_dim 8", "has 4");
  REFUSED(w, (d->page_size = 5, plan_step(w)), KVR_E_LAYOUT, "page_size 5", "has 4");
  REFUSED(w, (d->num_pages = 9, plan_step(w)), KVR_E_LAYOUT, "num_pages 9", "has 8");
  REFUSED(w, (d->interleave = 4, plan_step(w)), KVR_E_LAYOUT, "interleave 4", "has 1");
  REFUSED(w, (d->dtype = KVR_F16, plan_step(w)), KVR_E_LAYOUT, "dtype 1", "has 0");
  REFUSED(w, (d->weights = weights, plan_step(w)), KVR_E_LAYOUT, "other weights",
          "describe the same cache");
}

static void steps_beyond_the_limits_are_refused(void **state) {
  (void)state;
  refused_world *w = refused_open();
  REFUSED(w, (w->problem.num_q_heads = 8, plan_step(w)), KVR_E_SHAPE, "num_q_heads is 8", "for 4",
          "create another one");
  REFUSED(w, (w->problem.num_requests = 3, plan_step(w)), KVR_E_CAPACITY, "3 requests",
          "limit is 2", "raise max_requests");
  REFUSED(w, (w->requests[0].num_new = 3, plan_step(w)), KVR_E_CAPACITY, "needs 3 rows",
          "limits allow 2", "raise the limits");
  REFUSED(w, (w->options.tile = 4, plan_step(w)), KVR_E_CAPACITY, "4 rows in each of 2 SLOT",
          "3 rows in 2", "raise the limits");
  REFUSED(w, (w->options.num_slots = 3, plan_step(w)), KVR_E_CAPACITY, "3 SLOT buffers",
          "3 rows in 2", "raise the limits");
  REFUSED(w, (w->options.strategy = "rotate-q", plan_step(w)), KVR_E_OOM, "strategy rotate-q",
          "the limits' strategies", "memory budget");
}

static void a_wider_output_than_the_sessions_is_refused(void **state) {
  (void)state;
  refused_world *w = refused_open();
  kvr_limits limits = refused_limits();
  kvr_session *session;
  kvr_plan *plan = (kvr_plan *)w;
  limits.out_dtype = KVR_F16;
  device_ok(kvr_session_create(w->group, w->cache, &limits, &session), "kvr_session_create");
  REFUSED(w, kvr_plan_create(session, &w->problem, &w->options, &plan), KVR_E_CAPACITY,
          "out_dtype f32", "limit f16", "raise it");
  assert_null(plan);
  kvr_session_destroy(session);
}

static void requests_that_do_not_fit_the_cache_are_refused(void **state) {
  (void)state;
  refused_world *w = refused_open();
  REFUSED(w, (w->requests[0].num_cached = 4, plan_step(w)), KVR_E_STATE, "num_cached is 4",
          "holds 5 tokens", "use that");
  REFUSED(w, (w->requests[0].num_cached = 6, plan_step(w)), KVR_E_STATE, "num_cached is 6",
          "holds 5 tokens", "use that");
  REFUSED(w, (w->requests[0].cache_id = 99, plan_step(w)), KVR_E_RANGE, "no request 99",
          "released or never added");
  REFUSED(w, (w->requests[0].cache_id = -1, plan_step(w)), KVR_E_RANGE, "no request -1");
  w->problem.num_requests = 2;
  w->requests[1] = w->requests[0];
  REFUSED(w, plan_step(w), KVR_E_CONFLICT, "requests 0 and 1", "both cache request 0",
          "has each once");
}

/* ---- block tables ---- */

typedef struct table_case {
  int page_size, num_pages, entries, cached, fresh;
  const char *need, *have;
} table_case;

/* One rank: a request with a table of `entries`, and cached tokens as far as they fit. */
static void expect_short_table(const table_case *t) {
  kvr_group *group = device_group(1, 0);
  kvr_cache_desc desc = refused_desc();
  kvr_limits limits = refused_limits();
  kvr_cache *cache;
  kvr_session *session;
  kvr_plan *plan = (kvr_plan *)group;
  int id, table[8];
  float *rows = calloc((size_t)t->cached + 1, REFUSED_NKV * REFUSED_D * sizeof *rows);
  assert_non_null(rows);
  desc.num_ranks = 1, desc.page_size = t->page_size, desc.num_pages = t->num_pages;
  limits.max_context = 100, limits.max_new_tokens = 64;
  for (int i = 0; i < t->entries; i++) table[i] = t->num_pages - 1 - i;
  device_ok(kvr_cache_create(group, &desc, &cache), "kvr_cache_create");
  device_ok(kvr_cache_add(cache, &id), "kvr_cache_add");
  device_ok(kvr_cache_set_table(cache, id, table, t->entries), "kvr_cache_set_table");
  device_ok(kvr_cache_append(cache, id, rows, rows, t->cached), "kvr_cache_append");
  device_ok(kvr_session_create(group, cache, &limits, &session), "kvr_session_create");
  const kvr_request request = {.num_new = t->fresh, .num_cached = t->cached, .cache_id = id};
  const kvr_problem problem = {.struct_size = sizeof problem,
                               .cache = desc,
                               .num_q_heads = REFUSED_NQ,
                               .causal = 1,
                               .num_requests = 1,
                               .requests = &request};
  const kvr_options options = {.struct_size = sizeof options, .tile = 3};
  const kvr_status want = t->need != NULL ? KVR_E_CAPACITY : KVR_OK;
  assert_int_equal(kvr_plan_create(session, &problem, &options, &plan), want);
  if (t->need != NULL) {
    assert_null(plan);
    assert_non_null(strstr(kvr_error_message(), t->need));
    assert_non_null(strstr(kvr_error_message(), t->have));
    assert_non_null(strstr(kvr_error_message(), "reserve more"));
    assert_int_equal(kvr_cache_append(cache, id, rows, rows, t->fresh), KVR_E_CAPACITY);
    assert_non_null(strstr(kvr_error_message(), t->have));
  }
  assert_int_equal(kvr_cache_length(cache, id), t->cached);
  kvr_plan_destroy(plan);
  kvr_session_destroy(session);
  kvr_cache_destroy(cache);
  kvr_group_destroy(group);
  free(rows);
}

/* A last page that would have to hold more tokens than a page has. */
static void more_tokens_than_the_pages_hold_are_refused(void **state) {
  (void)state;
  expect_short_table(&(table_case){16, 4, 2, 32, 1, "33 tokens need 3 entries", "it has 2"});
  expect_short_table(&(table_case){16, 4, 2, 30, 3, "33 tokens need 3 entries", "it has 2"});
  expect_short_table(&(table_case){16, 4, 2, 31, 1, NULL, NULL}); /* 32 tokens fit */
  expect_short_table(&(table_case){16, 4, 1, 0, 0, NULL, NULL});
}

static void a_block_table_one_entry_short_is_refused(void **state) {
  (void)state;
  expect_short_table(&(table_case){16, 6, 4, 64, 1, "65 tokens need 5 entries", "it has 4"});
  expect_short_table(&(table_case){16, 6, 4, 1, 64, "65 tokens need 5 entries", "it has 4"});
  expect_short_table(&(table_case){16, 6, 5, 64, 1, NULL, NULL});
}

/* ---- running ---- */

enum { MOST = 64 };
typedef struct arrays {
  float q[MOST], k[MOST], v[MOST], out[MOST], lse[MOST];
  kvr_tensor tensors[5]; /* the same in order, in host memory */
  kvr_io io;
} arrays;

static const char *const names[] = {"q", "k", "v", "out", "lse"};

static void reset_arrays(arrays *a) {
  float *const host[] = {a->q, a->k, a->v, a->out, a->lse};
  for (int i = 0; i < MOST; i++) a->out[i] = a->lse[i] = 77;
  for (int n = 0; n < 5; n++) a->tensors[n] = (kvr_tensor){.host = host[n]};
  a->io = (kvr_io){.struct_size = sizeof a->io,
                   .q = &a->tensors[0],
                   .k = &a->tensors[1],
                   .v = &a->tensors[2],
                   .out = &a->tensors[3],
                   .lse = &a->tensors[4]};
}

/* Runs a good plan with bad arrays: no output may be written either. */
static void expect_run(refused_world *w, arrays *a, kvr_status want, refused_words words) {
  kvr_plan *plan;
  device_ok(kvr_plan_create(w->session, &w->problem, &w->options, &plan), "kvr_plan_create");
  refused_expect(w, kvr_plan_run(plan, &a->io), want, words);
  for (int i = 0; i < MOST; i++) assert_true(a->out[i] == 77 && a->lse[i] == 77);
  kvr_plan_destroy(plan);
  reset_arrays(a);
}
#define REFUSED_RUN(w, a, change, status, ...)                                                     \
  do {                                                                                             \
    change;                                                                                        \
    expect_run(w, a, status, (refused_words){{__VA_ARGS__}});                                      \
  } while (0)

static void missing_arrays_are_refused(void **state) {
  (void)state;
  static arrays a;
  refused_world *w = refused_open();
  kvr_plan *plan;
  reset_arrays(&a);
  REFUSED_RUN(w, &a, a.io.q = NULL, KVR_E_NULL, "io->q is NULL");
  REFUSED_RUN(w, &a, a.io.k = NULL, KVR_E_NULL, "io->k is NULL");
  REFUSED_RUN(w, &a, a.io.v = NULL, KVR_E_NULL, "io->v is NULL");
  REFUSED_RUN(w, &a, a.io.out = NULL, KVR_E_NULL, "io->out is NULL");
  for (int n = 0; n < 5; n++)
    REFUSED_RUN(w, &a, a.tensors[n].host = NULL, KVR_E_NULL, names[n], "either host memory or");
  REFUSED_RUN(w, &a, a.io.struct_size = 1, KVR_E_SHAPE, "kvr_io.struct_size is 1", "expects");
  REFUSED_RUN(w, &a, a.io.placement = (kvr_placement)-1, KVR_E_RANGE, "placement is -1",
              "KVR_TOKEN_ORDER or KVR_RANK_ORDER");
  device_ok(kvr_plan_create(w->session, &w->problem, &w->options, &plan), "kvr_plan_create");
  REFUSED(w, kvr_plan_run(NULL, &a.io), KVR_E_NULL, "plan");
  REFUSED(w, kvr_plan_run(plan, NULL), KVR_E_NULL, "io is NULL");
  REFUSED(w, kvr_plan_enqueue(plan, &a.io, 2, NULL, NULL), KVR_E_NULL, "num_waits is 2");
  REFUSED(w, kvr_plan_wait(plan), KVR_E_STATE, "not in flight", "enqueue it first");
  kvr_plan_destroy(plan);
}

static void other_types_and_strides_are_refused(void **state) {
  (void)state;
  static arrays a;
  refused_world *w = refused_open();
  reset_arrays(&a);
  for (int n = 0; n < 5; n++) {
    const size_t heads = n == 1 || n == 2 ? REFUSED_NKV : REFUSED_NQ;
    const size_t dim = n == 4 ? 1 : REFUSED_D;
    REFUSED_RUN(w, &a, a.tensors[n].dtype = KVR_F16, KVR_E_DTYPE, names[n], "is f16", "needs f32");
    REFUSED_RUN(w, &a, a.tensors[n].dtype = (kvr_dtype)9, KVR_E_DTYPE, names[n], "needs f32");
    if (dim > 1)
      REFUSED_RUN(w, &a, a.tensors[n].head_stride = dim - 1, KVR_E_LAYOUT, names[n],
                  "head_stride must be at least 4");
    REFUSED_RUN(w, &a, a.tensors[n].token_stride = heads * dim - 1, KVR_E_LAYOUT, names[n],
                "at least heads * head_stride");
    REFUSED_RUN(w, &a,
                (a.tensors[n].head_stride = dim + 1,
                 a.tensors[n].token_stride = heads * (dim + 1) + 1),
                KVR_E_LAYOUT, names[n], "token_stride a multiple");
  }
}

/* ---- buffers ---- */

static cl_mem make_buffer(cl_context context, size_t floats) {
  cl_int code;
  const cl_mem mem = clCreateBuffer(context, CL_MEM_READ_WRITE, floats * 4, NULL, &code);
  assert_int_equal(code, CL_SUCCESS);
  return mem;
}

static void buffers_that_are_too_small_are_refused(void **state) {
  (void)state;
  static arrays a;
  refused_world *w = refused_open();
  cl_context context;
  reset_arrays(&a);
  device_ok(kvr_group_context(w->group, 0, &context), "kvr_group_context");
  for (int n = 0; n < 5; n++) {
    const size_t heads = n == 1 || n == 2 ? REFUSED_NKV : REFUSED_NQ;
    const size_t size = REFUSED_NEW * heads * (n == 4 ? 1 : REFUSED_D);
    const cl_mem small = make_buffer(context, size - 1), exact = make_buffer(context, size);
    REFUSED_RUN(w, &a, (a.tensors[n].host = NULL, a.tensors[n].mem = small), KVR_E_SHAPE, names[n],
                "bytes of its buffer, which has");
    REFUSED_RUN(w, &a,
                (a.tensors[n].host = NULL, a.tensors[n].mem = exact, a.tensors[n].offset = 1),
                KVR_E_SHAPE, names[n], "bytes of its buffer, which has");
    REFUSED_RUN(w, &a,
                (a.tensors[n].host = NULL, a.tensors[n].mem = exact,
                 a.tensors[n].offset = SIZE_MAX / 4 + 1), /* 0 bytes on, if that wrapped */
                KVR_E_SHAPE, names[n], "bytes of its buffer, which has");
    REFUSED_RUN(w, &a,
                (a.tensors[n].host = NULL, a.tensors[n].mem = exact,
                 a.tensors[n].offset = SIZE_MAX / 4 + 1), /* 0 bytes on, if that wrapped */
                KVR_E_SHAPE, names[n], "bytes of its buffer, which has");
    REFUSED_RUN(w, &a, a.tensors[n].mem = exact, KVR_E_NULL, names[n], "either host memory or");
    clReleaseMemObject(small);
    clReleaseMemObject(exact);
  }
}

/* Input or output inside the cache would be read while it is written. */
static void buffers_of_the_cache_are_refused(void **state) {
  (void)state;
  static arrays a;
  refused_world *w = refused_open();
  reset_arrays(&a);
  for (int n = 0; n < 5; n++)
    for (int r = 0; r < REFUSED_P; r++) {
      int first, count;
      const cl_mem pool = kvr_cache_buffer(w->cache, r, 0, &first, &count);
      REFUSED_RUN(w, &a, (a.tensors[n].host = NULL, a.tensors[n].mem = pool), KVR_E_CONFLICT,
                  names[n], "KV cache", "pass another buffer");
    }
}

static void buffers_of_another_context_are_refused(void **state) {
  (void)state;
  static arrays a;
  refused_world *w = refused_open();
  kvr_group *other = device_group(1, 0);
  cl_context context;
  reset_arrays(&a);
  device_ok(kvr_group_context(other, 0, &context), "kvr_group_context");
  for (int n = 0; n < 3; n++) {
    const cl_mem mem = make_buffer(context, MOST);
    REFUSED_RUN(w, &a, (a.tensors[n].host = NULL, a.tensors[n].mem = mem), KVR_E_CL, "CL_INVALID_");
    clReleaseMemObject(mem);
  }
  kvr_group_destroy(other);
}

/* ---- states ---- */

/* What would pull pages or lengths from under a step in flight. */
static void expect_held(refused_world *w, kvr_session *session, kvr_plan *earlier, arrays *a) {
  kvr_plan *plan;
  const int id = w->ids[0];
  assert_int_equal(kvr_cache_release(w->cache, id), KVR_E_STATE);
  assert_int_equal(kvr_cache_truncate(w->cache, id, 1), KVR_E_STATE);
  assert_int_equal(kvr_cache_set_table(w->cache, id, NULL, 0), KVR_E_STATE);
  assert_int_equal(kvr_cache_append(w->cache, id, a->k, a->v, 1), KVR_E_STATE);
  assert_non_null(strstr(kvr_error_message(), "writes to cache request"));
  assert_int_equal(kvr_plan_create(session, &w->problem, &w->options, &plan), KVR_E_STATE);
  assert_int_equal(kvr_plan_run(earlier, &a->io), KVR_E_STATE);
}

static void a_busy_session_refuses_and_changes_nothing(void **state) {
  (void)state;
  static arrays a;
  refused_world *w = refused_open();
  kvr_plan *plan, *other, *elsewhere;
  kvr_session *second;
  cl_context context;
  cl_int code;
  const kvr_limits limits = refused_limits();
  reset_arrays(&a);
  device_ok(kvr_group_context(w->group, 0, &context), "kvr_group_context");
  const cl_event start = clCreateUserEvent(context, &code);
  device_ok(kvr_session_create(w->group, w->cache, &limits, &second), "kvr_session_create");
  device_ok(kvr_plan_create(w->session, &w->problem, &w->options, &plan), "kvr_plan_create");
  device_ok(kvr_plan_create(w->session, &w->problem, &w->options, &other), "kvr_plan_create");
  device_ok(kvr_plan_create(second, &w->problem, &w->options, &elsewhere), "kvr_plan_create");
  device_ok(kvr_plan_enqueue(plan, &a.io, 1, &start, NULL), "kvr_plan_enqueue");
  assert_int_equal(kvr_plan_run(other, &a.io), KVR_E_STATE);
  assert_non_null(strstr(kvr_error_message(), "wait for it first"));
  assert_int_equal(kvr_cache_length(w->cache, w->ids[0]), 5);
  expect_held(w, second, elsewhere, &a);
  clSetUserEventStatus(start, -1); /* the step fails instead of writing */
  assert_int_not_equal(kvr_plan_wait(plan), KVR_OK);
  REFUSED(w, kvr_plan_run(plan, &a.io), KVR_E_STATE, "failed before", "create a new one");
  clReleaseEvent(start);
  kvr_plan_destroy(elsewhere);
  kvr_session_destroy(second);
  kvr_plan_destroy(plan);
  kvr_plan_destroy(other);
}

/* A table that is long enough when the step is planned may not be when it is run. */
static void a_table_that_got_shorter_since_planning_is_refused(void **state) {
  (void)state;
  static arrays a;
  refused_world *w = refused_open();
  kvr_plan *plan;
  int entries, id;
  reset_arrays(&a);
  device_ok(kvr_cache_add(w->cache, &id), "kvr_cache_add");
  device_ok(kvr_cache_reserve(w->cache, id, 2), "kvr_cache_reserve");
  w->requests[0] = (kvr_request){.num_new = 2, .num_cached = 0, .cache_id = id};
  device_ok(kvr_plan_create(w->session, &w->problem, &w->options, &plan), "kvr_plan_create");
  device_ok(kvr_cache_set_table(w->cache, id, NULL, 0), "kvr_cache_set_table");
  assert_int_equal(kvr_plan_run(plan, &a.io), KVR_E_CAPACITY);
  assert_non_null(strstr(kvr_error_message(), "2 tokens need 1 entries"));
  assert_non_null(strstr(kvr_error_message(), "it has 0; reserve more"));
  assert_true(a.out[0] == 77);
  kvr_cache_table(w->cache, id, &entries);
  assert_int_equal(entries, 0);
  kvr_plan_destroy(plan);
  device_ok(kvr_cache_release(w->cache, id), "kvr_cache_release");
  REFUSED(w, KVR_OK, KVR_OK, NULL);
}

static void questions_about_plans_are_checked(void **state) {
  (void)state;
  refused_world *w = refused_open();
  kvr_plan *plan;
  kvr_plan_info info;
  const kvr_trace_record *records;
  int request, token, num;
  device_ok(kvr_plan_create(w->session, &w->problem, &w->options, &plan), "kvr_plan_create");
  REFUSED(w, kvr_plan_describe(NULL, &info), KVR_E_NULL, "plan");
  REFUSED(w, kvr_plan_describe(plan, NULL), KVR_E_NULL, "out");
  REFUSED(w, kvr_plan_trace(plan, &records, &num), KVR_E_STATE, "has not run to its end");
  REFUSED(w, kvr_plan_trace(plan, NULL, &num), KVR_E_NULL, "out");
  REFUSED(w, kvr_plan_row_token(plan, 0, 1, &request, &token), KVR_E_RANGE, "row 1 of rank 0",
          "has 1 rows");
  REFUSED(w, kvr_plan_row_token(plan, -1, 0, &request, &token), KVR_E_RANGE, "rank -1");
  REFUSED(w, kvr_plan_row_token(plan, 0, 0, NULL, &token), KVR_E_NULL, "request");
  assert_int_equal(kvr_plan_num_rows(plan, 2), 0);
  assert_int_equal(kvr_plan_num_rows(NULL, 0), 0);
  kvr_plan_destroy(plan);
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_good_step_is_planned),
      cmocka_unit_test(other_caches_are_refused),
      cmocka_unit_test(steps_beyond_the_limits_are_refused),
      cmocka_unit_test(a_wider_output_than_the_sessions_is_refused),
      cmocka_unit_test(requests_that_do_not_fit_the_cache_are_refused),
      cmocka_unit_test(more_tokens_than_the_pages_hold_are_refused),
      cmocka_unit_test(a_block_table_one_entry_short_is_refused),
      cmocka_unit_test(missing_arrays_are_refused),
      cmocka_unit_test(other_types_and_strides_are_refused),
      cmocka_unit_test(buffers_that_are_too_small_are_refused),
      cmocka_unit_test(buffers_of_the_cache_are_refused),
      cmocka_unit_test(buffers_of_another_context_are_refused),
      cmocka_unit_test(a_table_that_got_shorter_since_planning_is_refused),
      cmocka_unit_test(questions_about_plans_are_checked),
      cmocka_unit_test(a_busy_session_refuses_and_changes_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, refused_close);
}

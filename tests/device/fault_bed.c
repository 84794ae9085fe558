#include "fault_bed.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { P = BED_P, NQ = BED_NQ, NKV = BED_NKV, D = BED_D };
static const double tolerance = 2e-5;

static void make_problem(fault_bed *b) {
  const int cached = strcmp(b->strategy, "current-only") != 0;
  b->c.problem = (kvr_problem){.struct_size = sizeof b->c.problem,
                               .cache = {.struct_size = sizeof b->c.problem.cache,
                                         .num_ranks = P,
                                         .num_kv_heads = NKV,
                                         .head_dim = D,
                                         .page_size = 3,
                                         .num_pages = 100,
                                         .interleave = 1},
                               .num_q_heads = NQ,
                               .causal = 1,
                               .num_requests = 2};
  b->c.requests[0] = (kvr_request){.num_new = 7, .num_cached = 20 * cached};
  b->c.requests[1] = (kvr_request){.num_new = 4, .num_cached = 5 * cached};
  b->c.options =
      (kvr_options){.struct_size = sizeof b->c.options, .tile = BED_TILE, .num_slots = 2};
  device_case_fill(&b->c, 7);
}

static kvr_group *make_group(const bed_desc *desc) {
  kvr_group *group;
  const kvr_group_desc d = {.struct_size = sizeof d,
                            .num_ranks = P,
                            .devices = getenv("KVRING_TEST_DEVICES"),
                            .copy_queue = desc->copy_queue,
                            .timeout = desc->timeout};
  device_ok(kvr_group_create(&d, &group), "kvr_group_create");
  return group;
}

void bed_init(fault_bed *b, const bed_desc *desc) {
  const char *strategies =
      desc->session_strategies != NULL ? desc->session_strategies : desc->strategy;
  memset(b, 0, sizeof *b);
  b->strategy = desc->strategy;
  make_problem(b);
  b->group = make_group(desc);
  device_run_init(&b->run, &b->c, b->group, strategies);
  b->limits = (kvr_limits){.struct_size = sizeof b->limits,
                           .num_q_heads = NQ,
                           .max_new_tokens = 11,
                           .max_context = 20,
                           .max_requests = 2,
                           .max_rows = 11,
                           .tile = BED_TILE,
                           .num_slots = 2,
                           .strategies = strategies};
}

void bed_fini(fault_bed *b) {
  device_run_fini(&b->run, &b->c);
  kvr_group_destroy(b->group);
  case_free(&b->c);
}

/* ---- tensors ---- */

static kvr_tensor make_tensor(const fault_bed *b, io_kind kind, const double *x, size_t heads,
                              size_t dim) {
  const size_t rows = (size_t)b->c.num_tokens * heads, stride = dim + (kind == IO_STRIDED ? 3 : 0);
  kvr_tensor t = {.host = calloc(rows * stride, sizeof(float)), .head_stride = stride};
  float *host = t.host;
  assert_non_null(host);
  for (size_t i = 0; x != NULL && i < rows * dim; i++)
    host[i / dim * stride + i % dim] = (float)x[i];
  if (kind != IO_BUFFERS) return t;
  cl_int code;
  t.mem = clCreateBuffer(b->group->ranks[0].context, CL_MEM_COPY_HOST_PTR,
                         rows * stride * sizeof(float), host, &code);
  assert_int_equal(code, CL_SUCCESS);
  free(host);
  t.host = NULL;
  return t;
}

bed_tensors bed_make_tensors(const fault_bed *b, io_kind kind) {
  return (bed_tensors){.q = make_tensor(b, kind, b->c.q, NQ, D),
                       .k = make_tensor(b, kind, b->c.k, NKV, D),
                       .v = make_tensor(b, kind, b->c.v, NKV, D),
                       .out = make_tensor(b, kind, NULL, NQ, D),
                       .lse = make_tensor(b, kind, NULL, NQ, 1)};
}

static void free_tensor(kvr_tensor *t) {
  if (t->mem != NULL) clReleaseMemObject(t->mem);
  free(t->host);
}

void bed_free_tensors(bed_tensors *t) {
  free_tensor(&t->q);
  free_tensor(&t->k);
  free_tensor(&t->v);
  free_tensor(&t->out);
  free_tensor(&t->lse);
}

kvr_io bed_io(const bed_tensors *t) {
  return (kvr_io){.struct_size = sizeof(kvr_io),
                  .q = &t->q,
                  .k = &t->k,
                  .v = &t->v,
                  .out = &t->out,
                  .lse = &t->lse};
}

static void fetch(const fault_bed *b, const kvr_tensor *t, size_t heads, size_t dim, float *to) {
  const size_t rows = (size_t)b->c.num_tokens * heads;
  const float *host = t->host;
  if (t->mem != NULL)
    assert_int_equal(clEnqueueReadBuffer(b->group->ranks[0].queue, t->mem, CL_TRUE, 0,
                                         rows * dim * sizeof(float), to, 0, NULL, NULL),
                     CL_SUCCESS);
  for (size_t i = 0; host != NULL && i < rows * dim; i++)
    to[i] = host[i / dim * t->head_stride + i % dim];
}

void bed_fetch(fault_bed *b, const bed_tensors *t) {
  fetch(b, &t->out, NQ, D, b->run.out);
  fetch(b, &t->lse, NQ, 1, b->run.lse);
}

/* ---- plans and sessions ---- */

kvr_plan *bed_make_plan(fault_bed *b) {
  kvr_options options = b->c.options;
  kvr_plan *plan;
  options.strategy = b->strategy;
  device_ok(kvr_plan_create(b->run.session, &b->c.problem, &options, &plan), "kvr_plan_create");
  return plan;
}

kvr_schedule *bed_make_schedule(const fault_bed *b) {
  const kvr_strategy *strategy;
  kvr_schedule *schedule;
  device_ok(kvr_strategy_find(b->strategy, &strategy), "kvr_strategy_find");
  device_ok(kvr_strategy_schedule(strategy, &b->c.problem, &b->c.options, &schedule),
            "kvr_strategy_schedule");
  return schedule;
}

void bed_replace_session(fault_bed *b) {
  kvr_session_destroy(b->run.session);
  b->run.session = NULL;
  device_ok(kvr_session_create(b->group, b->run.cache, &b->limits, &b->run.session),
            "kvr_session_create");
}

size_t bed_allocated(const fault_bed *b) {
  size_t sum = 0, now;
  for (int r = 0; r < P; r++) {
    device_ok(kvr_group_memory(b->group, r, &now, NULL, NULL), "kvr_group_memory");
    sum += now;
  }
  return sum;
}

/* ---- what must hold ---- */

void bed_expect_objects(const cl_objects *before, const char *what) {
  const cl_objects *now = &faults.live;
  if (memcmp(now, before, sizeof *now) != 0)
    fail_msg("%s: events %+d, buffers %+d, kernels %+d, programs %+d, queues %+d, contexts %+d",
             what, now->events - before->events, now->buffers - before->buffers,
             now->kernels - before->kernels, now->programs - before->programs,
             now->queues - before->queues, now->contexts - before->contexts);
}

/* Rows above the lengths may hold anything after a failed step: they are taken as they were. */
static void forget_new_rows(const fault_bed *b, int rank, unsigned char *now) {
  const kvr_cache_desc *d = &b->c.problem.cache;
  const size_t row_bytes = sizeof(float) * 2 * NKV * D;
  for (int i = 0; i < b->c.problem.num_requests; i++) {
    const int *table = kvr_cache_table(b->run.cache, b->run.ids[i], NULL);
    for (int t = 0; t < b->c.requests[i].num_new; t++) {
      const int g = b->c.requests[i].num_cached + t, m = kvr_map_local(d, g);
      if (kvr_map_owner(d, g) != rank) continue;
      const size_t row =
          (size_t)table[m / d->page_size] * (size_t)d->page_size + (size_t)(m % d->page_size);
      memcpy(now + row * row_bytes, b->run.pools[rank] + row * row_bytes, row_bytes);
    }
  }
}

void bed_expect_cache_untouched(const fault_bed *b, const char *what) {
  const size_t bytes = kvr_cache_bytes(b->run.cache);
  unsigned char *now = malloc(bytes);
  assert_non_null(now);
  for (int i = 0; i < b->c.problem.num_requests; i++)
    if (kvr_cache_length(b->run.cache, b->run.ids[i]) != b->c.requests[i].num_cached)
      fail_msg("%s: request %d has another length", what, i);
  for (int r = 0; r < P; r++) {
    device_ok(kvr_cache_export(b->run.cache, r, now, bytes), "kvr_cache_export");
    forget_new_rows(b, r, now);
    if (memcmp(now, b->run.pools[r], bytes) != 0) fail_msg("%s: rank %d: cache bytes", what, r);
  }
  free(now);
}

void bed_expect_right_step(fault_bed *b, const char *what) {
  if (device_run_step(&b->run, &b->c, b->strategy) != KVR_OK)
    fail_msg("the step after %s: %s", what, kvr_error_message());
  const double error = device_run_error(&b->run, &b->c);
  if (!(error < tolerance)) fail_msg("the step after %s: error %g", what, error);
  device_run_rewind(&b->run, &b->c);
}

void bed_expect_message(const char *text, const char *what) {
  if (strstr(kvr_error_message(), text) == NULL)
    fail_msg("%s: message '%s' does not say '%s'", what, kvr_error_message(), text);
}

/* Threads of one process: with groups of their own, or with sessions of one group. */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device_case.h"

enum { NUM_THREADS = 8, NUM_RUNS = 150 };
static const double tolerance = 2e-5;

/* cmocka's assertions belong to its own thread: others say what went wrong in `why`. */
typedef struct worker {
  pthread_t thread;
  int index;
  pure_case c;
  kvr_group *group;
  device_run run;
  pthread_barrier_t *ready;
  char why[256];
} worker;

static void run_step(worker *w, const char *strategy) {
  device_run_rewind(&w->run, &w->c);
  if (device_run_step(&w->run, &w->c, strategy) != KVR_OK) {
    snprintf(w->why, sizeof w->why, "%s: %s", strategy, kvr_error_message());
    return;
  }
  const double error = device_run_error(&w->run, &w->c);
  if (!(error < tolerance)) snprintf(w->why, sizeof w->why, "%s: error %g", strategy, error);
}

/* Messages belong to a thread: each asks for a strategy of another name. */
static void fail_plan(worker *w) {
  char name[32];
  kvr_options options = w->c.options;
  kvr_plan *plan;
  snprintf(name, sizeof name, "strategy-of-%d", w->index);
  options.strategy = name;
  if (kvr_plan_create(w->run.session, &w->c.problem, &options, &plan) == KVR_OK ||
      strstr(kvr_error_message(), name) == NULL)
    snprintf(w->why, sizeof w->why, "%s: message %s", name, kvr_error_message());
}

static void *run_steps(void *data) {
  worker *w = data;
  for (int i = 0; i < NUM_RUNS && w->why[0] == '\0'; i++) {
    run_step(w, kvr_strategy_name((i + w->index) % (kvr_num_strategies() - 1)));
    if (w->why[0] == '\0') fail_plan(w);
  }
  return NULL;
}

static void start(worker *w, void *(*body)(void *)) {
  assert_int_equal(pthread_create(&w->thread, NULL, body, w), 0);
}

static void join(worker *w) {
  pthread_join(w->thread, NULL);
  if (w->why[0] != '\0') fail_msg("thread %d: %s", w->index, w->why);
}

/* ---- sessions, caches and groups of their own ---- */

/* Without a group the thread makes one. Everything is created here; steps begin when all threads
 * have it: PoCL 3.1 allows no session with wider launches than all before it while others run. */
static void *create_and_run(void *data) {
  worker *w = data;
  const bool own_group = w->group == NULL;
  if (own_group) w->group = device_group(w->c.problem.cache.num_ranks, w->index % 2);
  device_run_init(&w->run, &w->c, w->group, "all");
  pthread_barrier_wait(w->ready);
  run_steps(w);
  if (w->why[0] == '\0' && !device_pools_are_right(&w->run, &w->c))
    snprintf(w->why, sizeof w->why, "wrong cache bytes");
  pthread_barrier_wait(w->ready);
  device_run_fini(&w->run, &w->c);
  if (own_group) kvr_group_destroy(w->group);
  return NULL;
}

/* Eight shapes; of P ranks (0: any number). */
static void run_workers(kvr_group *group, int P) {
  static worker workers[NUM_THREADS];
  pthread_barrier_t ready;
  uint64_t seed = 400;
  pthread_barrier_init(&ready, NULL, NUM_THREADS);
  for (int i = 0; i < NUM_THREADS; i++) {
    worker *w = &workers[i];
    *w = (worker){.index = i, .group = group, .ready = &ready};
    for (;; case_free(&w->c)) {
      device_case_init(&w->c, seed++, (kvr_dtype)(i % KVR_NUM_DTYPES));
      if (P == 0 || w->c.problem.cache.num_ranks == P) break;
    }
  }
  for (int i = 0; i < NUM_THREADS; i++) start(&workers[i], create_and_run);
  for (int i = 0; i < NUM_THREADS; i++) join(&workers[i]);
  for (int i = 0; i < NUM_THREADS; i++) case_free(&workers[i].c);
  pthread_barrier_destroy(&ready);
}

static void test_groups_of_their_own(void **state) {
  (void)state;
  run_workers(NULL, 0);
}

static void test_sessions_of_one_group(void **state) {
  (void)state;
  kvr_group *group = device_group(3, 1);
  run_workers(group, 3);
  for (int r = 0; r < 3; r++) {
    size_t now, peak, budget;
    device_ok(kvr_group_memory(group, r, &now, &peak, &budget), "kvr_group_memory");
    assert_int_equal(now, 0); /* threads have counted right */
    assert_true(peak > 0);
  }
  kvr_group_destroy(group);
}

/* ---- sessions on one cache, a request for each ---- */

typedef struct part {
  pthread_t thread;
  const pure_case *c;
  const device_run *run;
  kvr_session *session;
  int request;
  double error;
  kvr_status status;
} part;

static float *floats(const double *x, size_t n) {
  float *to = malloc((n + 1) * sizeof *to);
  for (size_t i = 0; to != NULL && i < n; i++) to[i] = (float)x[i];
  return to;
}

static double largest_error(const float *got, const double *want, size_t n) {
  double worst = 0;
  for (size_t i = 0; i < n; i++) {
    const double error = fabs((double)got[i] - want[i]);
    worst = fmax(worst, isnan(error) ? 1e300 : error);
  }
  return worst;
}

/* One step of one request, whose tokens begin at token `first` of the case. */
static kvr_status run_part(part *p, size_t first) {
  const kvr_problem *all = &p->c->problem;
  const size_t D = (size_t)all->cache.head_dim, NQ = (size_t)all->num_q_heads;
  const size_t NKV = (size_t)all->cache.num_kv_heads;
  const kvr_request *request = &p->c->requests[p->request];
  const size_t n = (size_t)request->num_new;
  kvr_problem problem = *all;
  kvr_options options = p->c->options;
  problem.requests = request;
  problem.num_requests = 1;
  options.strategy = "ring";
  const kvr_tensor q = {.host = floats(p->c->q + first * NQ * D, n * NQ * D)};
  const kvr_tensor k = {.host = floats(p->c->k + first * NKV * D, n * NKV * D)};
  const kvr_tensor v = {.host = floats(p->c->v + first * NKV * D, n * NKV * D)};
  const kvr_tensor out = {.host = floats(p->c->q, n * NQ * D)};
  const kvr_io io = {.struct_size = sizeof io, .q = &q, .k = &k, .v = &v, .out = &out};
  kvr_plan *plan = NULL;
  kvr_status status = kvr_plan_create(p->session, &problem, &options, &plan);
  if (status == KVR_OK) status = kvr_plan_run(plan, &io);
  kvr_plan_destroy(plan);
  p->error = fmax(p->error, largest_error(out.host, p->c->want_out + first * NQ * D, n * NQ * D));
  free(q.host);
  free(k.host);
  free(v.host);
  free(out.host);
  return status;
}

static void *run_parts(void *data) {
  part *p = data;
  size_t first = 0;
  for (int i = 0; i < p->request; i++) first += (size_t)p->c->requests[i].num_new;
  for (int i = 0; i < NUM_RUNS && p->status == KVR_OK; i++) {
    kvr_cache_truncate(p->run->cache, p->run->ids[p->request],
                       p->c->requests[p->request].num_cached);
    p->status = run_part(p, first);
  }
  return NULL;
}

static pure_case shared_case(void) {
  pure_case c = {.problem = {.struct_size = sizeof c.problem,
                             .cache = {.struct_size = sizeof c.problem.cache,
                                       .num_ranks = 3,
                                       .num_kv_heads = 2,
                                       .head_dim = 5,
                                       .page_size = 3,
                                       .num_pages = 100,
                                       .interleave = 1},
                             .num_q_heads = 4,
                             .causal = 1,
                             .num_requests = 2},
                 .options = {.struct_size = sizeof c.options, .tile = 5, .num_slots = 2}};
  c.requests[0] = (kvr_request){.num_new = 9, .num_cached = 30};
  c.requests[1] = (kvr_request){.num_new = 6, .num_cached = 22};
  return c;
}

static kvr_session *second_session(kvr_group *group, kvr_cache *cache) {
  kvr_session *session;
  const kvr_limits limits = {.struct_size = sizeof limits,
                             .num_q_heads = 4,
                             .max_new_tokens = 15,
                             .max_context = 30,
                             .max_requests = 1,
                             .strategies = "ring"};
  device_ok(kvr_session_create(group, cache, &limits, &session), "kvr_session_create");
  return session;
}

static void test_sessions_on_one_cache(void **state) {
  (void)state;
  pure_case c = shared_case();
  device_run run = {0};
  part parts[2];
  device_case_fill(&c, 3);
  kvr_group *group = device_group(3, 0);
  device_run_init(&run, &c, group, "ring");
  kvr_session *const sessions[2] = {run.session, second_session(group, run.cache)};
  for (int i = 0; i < 2; i++) {
    parts[i] = (part){.c = &c, .run = &run, .session = sessions[i], .request = i};
    assert_int_equal(pthread_create(&parts[i].thread, NULL, run_parts, &parts[i]), 0);
  }
  for (int i = 0; i < 2; i++) pthread_join(parts[i].thread, NULL);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(parts[i].status, KVR_OK);
    assert_true(parts[i].error < 1e-4);
  }
  assert_true(device_pools_are_right(&run, &c));
  kvr_session_destroy(sessions[1]);
  device_run_fini(&run, &c);
  kvr_group_destroy(group);
  case_free(&c);
}

/* ---- a control ---- */

/* Steps on data of which one value differs are seen. */
static void test_other_data_are_noticed(void **state) {
  (void)state;
  worker w = {.index = 0};
  device_case_init(&w.c, 400, KVR_F32);
  w.group = device_group(w.c.problem.cache.num_ranks, 0);
  device_run_init(&w.run, &w.c, w.group, "all");
  run_step(&w, "ring");
  assert_string_equal(w.why, "");
  w.c.v[0] += 10; /* seen by its own token */
  run_step(&w, "ring");
  assert_string_not_equal(w.why, "");
  device_run_fini(&w.run, &w.c);
  kvr_group_destroy(w.group);
  case_free(&w.c);
}

/* ---- the first calls of a process ---- */

static void *list_devices(void *data) {
  kvr_device_info *infos;
  int *num = data;
  if (kvr_device_list(&infos, num) == KVR_OK)
    free(infos);
  else
    *num = -1;
  return NULL;
}

/* Drivers set themselves up in the first calls; here they come from all threads at once. */
static bool first_calls_agree(void) {
  pthread_t threads[NUM_THREADS];
  int nums[NUM_THREADS];
  bool agree = true;
  for (int i = 0; i < NUM_THREADS; i++)
    if (pthread_create(&threads[i], NULL, list_devices, &nums[i]) != 0) return false;
  for (int i = 0; i < NUM_THREADS; i++) pthread_join(threads[i], NULL);
  for (int i = 1; i < NUM_THREADS; i++) agree = agree && nums[i] == nums[0];
  return agree;
}

int main(void) {
  if (!first_calls_agree()) {
    fprintf(stderr, "threads found different devices in their first calls\n");
    return 1;
  }
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_groups_of_their_own),
      cmocka_unit_test(test_sessions_of_one_group),
      cmocka_unit_test(test_sessions_on_one_cache),
      cmocka_unit_test(test_other_data_are_noticed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

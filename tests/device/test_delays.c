/* Devices that start commands late: after random delays, or only once their queue is flushed. The
 * answers stay the same, bit for bit. cl_faults.h keeps commands from starting. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fault_bed.h"

enum { NUM_SEEDS = 200, NUM_CONTROLS = 20 };
static const double tolerance = 2e-5;

static size_t out_bytes(const fault_bed *b) {
  return (size_t)b->c.num_tokens * BED_NQ * BED_D * sizeof(float);
}

static cl_command_queue queue_of(const fault_bed *b, int rank, int queue) {
  return queue == 0 ? b->group->ranks[rank].queue : b->group->ranks[rank].copy_queue;
}

/* A bed with the answer of an undisturbed step. */
typedef struct trial {
  fault_bed bed;
  float *first;
} trial;

static void trial_init(trial *t, const char *strategy, int copy_queue, double timeout) {
  bed_init(&t->bed,
           &(bed_desc){.strategy = strategy, .copy_queue = copy_queue, .timeout = timeout});
  t->first = malloc(out_bytes(&t->bed));
  assert_non_null(t->first);
  device_ok(device_run_step(&t->bed.run, &t->bed.c, strategy), strategy);
  assert_true(device_run_error(&t->bed.run, &t->bed.c) < tolerance);
  memcpy(t->first, t->bed.run.out, out_bytes(&t->bed));
  device_run_rewind(&t->bed.run, &t->bed.c);
}

static void trial_fini(trial *t) {
  free(t->first);
  bed_fini(&t->bed);
}

/* Runs the step again; whether it gave the same bits. */
static bool same_again(trial *t) {
  fault_bed *b = &t->bed;
  device_run_rewind(&b->run, &b->c);
  device_ok(device_run_step(&b->run, &b->c, b->strategy), b->strategy);
  return memcmp(t->first, b->run.out, out_bytes(b)) == 0;
}

/* ---- random delays ---- */

static bool same_when_delayed(trial *t, uint64_t seed) {
  const int copy = t->bed.group->has_copy_queues;
  const int queue = case_between(&(uint64_t){seed}, 0, BED_P * (1 + copy) - 1);
  fault_delay(queue_of(&t->bed, queue % BED_P, queue / BED_P), seed);
  const bool same = same_again(t);
  fault_delay_end();
  return same;
}

static void test_random_delays(void **state) {
  (void)state;
  const int beds = 2 * kvr_num_strategies();
  for (int i = 0; i < beds; i++) {
    trial t;
    trial_init(&t, kvr_strategy_name(i / 2), i % 2, 0);
    for (int seed = i; seed < NUM_SEEDS; seed += beds)
      if (!same_when_delayed(&t, (uint64_t)seed))
        fail_msg("%s, %d queues, seed %d: other bits", t.bed.strategy, 1 + i % 2, seed);
    trial_fini(&t);
  }
}

/* The race on purpose is one that ThreadSanitizer reports. */
#ifdef __SANITIZE_THREAD__
enum { IS_WATCHED = 1 };
#else
enum { IS_WATCHED = 0 };
#endif

/* Commands that wait for no other queue give other answers under delays. Not so current-only: rows
 * that come too late are still there from the step before. */
static void test_lost_waits_are_noticed(void **state) {
  (void)state;
  if (IS_WATCHED) skip();
  for (int i = 0; i + 1 < kvr_num_strategies(); i++) {
    trial t;
    int noticed = 0;
    trial_init(&t, kvr_strategy_name(i), 1, 0);
    faults.lost_waits = true;
    for (int seed = 0; seed < NUM_CONTROLS; seed++)
      noticed += !same_when_delayed(&t, (uint64_t)seed);
    faults.lost_waits = false;
    if (noticed == 0) fail_msg("%s: lost waits were not noticed", t.bed.strategy);
    trial_fini(&t);
  }
}

/* ---- devices that collect commands until a flush ---- */

static void test_commands_start_at_flushes(void **state) {
  (void)state;
  for (int i = 0; i < 2 * kvr_num_strategies(); i++) {
    trial t;
    trial_init(&t, kvr_strategy_name(i / 2), i % 2, 20.0);
    fault_hold(true);
    for (int k = 0; k < 3; k++) assert_true(same_again(&t));
    fault_hold(false);
    trial_fini(&t);
  }
}

static void destroy_stuck(fault_bed *b) {
  kvr_session_destroy(b->run.session);
  kvr_cache_destroy(b->run.cache);
  kvr_group_destroy(b->group);
  b->run.session = NULL;
  b->run.cache = NULL;
  b->group = NULL;
  fault_release_left();
}

/* A step on a device that collects commands, when some flush does nothing (faults.deaf_queue or
 * lost_flush are set): it is right or gives up in time. Returns whether it gave up; ends the trial.
 */
static bool gives_up(trial *t, const char *what) {
  fault_bed *b = &t->bed;
  bed_tensors tensors = bed_make_tensors(b, IO_DENSE);
  const kvr_io io = bed_io(&tensors);
  kvr_plan *plan = bed_make_plan(b);
  fault_hold(true);
  const kvr_status status = kvr_plan_run(plan, &io);
  faults.lost_flush = 0;
  faults.deaf_queue = NULL;
  if (status == KVR_E_TIMEOUT)
    bed_expect_message("rank ", what);
  else
    device_ok(status, what);
  kvr_plan_destroy(plan);
  fault_hold(false); /* lets a stuck group go */
  if (status == KVR_E_TIMEOUT) destroy_stuck(b);
  bed_fetch(b, &tensors);
  assert_memory_equal(t->first, b->run.out, out_bytes(b)); /* in the end */
  bed_free_tensors(&tensors);
  trial_fini(t);
  return status == KVR_E_TIMEOUT;
}

static const double limit = 0.4; /* s */

static void test_lost_flushes_are_noticed(void **state) {
  (void)state;
  for (int queue = 0; queue < 2 * BED_P; queue++) {
    trial t;
    trial_init(&t, "ring", 1, limit);
    faults.deaf_queue = queue_of(&t.bed, queue % BED_P, queue / BED_P);
    if (!gives_up(&t, "a deaf queue")) fail_msg("queue %d: lost flushes were not noticed", queue);
  }
}

/* At the end of a step every queue is flushed; one flush lost there is one too many. */
static void test_the_last_flushes_count(void **state) {
  (void)state;
  int noticed = 0;
  for (int last = 0; last < 2 * BED_P; last++) {
    trial t;
    trial_init(&t, "ring", 1, limit);
    fault_arm(0, 0, CL_SUCCESS);
    assert_true(same_again(&t));
    device_run_rewind(&t.bed.run, &t.bed.c);
    faults.lost_flush = fault_count(1u << FAULT_clFlush) - last;
    noticed += gives_up(&t, "one of the last flushes");
  }
  assert_true(noticed >= BED_P); /* outputs come from every compute queue */
}

static void test_no_flush_is_lost(void **state) {
  (void)state;
  trial t;
  trial_init(&t, "ring", 1, limit);
  assert_false(gives_up(&t, "no lost flush"));
}

int main(void) {
  device_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_delays),
      cmocka_unit_test(test_lost_waits_are_noticed),
      cmocka_unit_test(test_commands_start_at_flushes),
      cmocka_unit_test(test_lost_flushes_are_noticed),
      cmocka_unit_test(test_the_last_flushes_count),
      cmocka_unit_test(test_no_flush_is_lost),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

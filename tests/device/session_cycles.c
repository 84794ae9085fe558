#include "session_cycles.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "fault_bed.h"

/* A plan with another output type builds kernels in the session. */
static void plan_other_type(fault_bed *b) {
  kvr_problem problem = b->c.problem;
  kvr_options options = b->c.options;
  kvr_plan *plan;
  problem.out_dtype = KVR_F16;
  options.strategy = b->strategy;
  device_ok(kvr_plan_create(b->run.session, &problem, &options, &plan), "kvr_plan_create");
  kvr_plan_destroy(plan);
}

static void cycle(fault_bed *b, int i) {
  const size_t bytes = bed_allocated(b);
  bed_replace_session(b);
  bed_expect_right_step(b, "a new session");
  if (i == 1) plan_other_type(b);
  assert_int_equal(bed_allocated(b), bytes);
}

void session_cycles(int num) {
  const cl_objects none = faults.live;
  for (int s = 0; s < kvr_num_strategies(); s++) {
    fault_bed b;
    bed_init(&b, &(bed_desc){.strategy = kvr_strategy_name(s), .copy_queue = s % 2});
    bed_replace_session(&b); /* of the same limits as those to come */
    const cl_objects before = faults.live;
    for (int i = 0; i * kvr_num_strategies() < num; i++) {
      cycle(&b, i);
      if (i != 1) bed_expect_objects(&before, b.strategy); /* the session has more kernels then */
    }
    bed_fini(&b);
    bed_expect_objects(&none, "the end");
  }
}

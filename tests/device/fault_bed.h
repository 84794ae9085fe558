/* A small step of two requests to break things in, and what must hold afterwards. For programs that
 * are linked behind cl_faults.h. */
#ifndef KVR_TESTS_DEVICE_FAULT_BED_H
#define KVR_TESTS_DEVICE_FAULT_BED_H

#include "cl_faults.h"
#include "device_case.h"
#include "strategy/strategy.h"

enum { BED_P = 3, BED_NQ = 4, BED_NKV = 2, BED_D = 16, BED_TILE = 5 };

typedef struct fault_bed {
  pure_case c;
  kvr_group *group;
  device_run run;
  kvr_limits limits;
  const char *strategy;
} fault_bed;

typedef struct bed_desc {
  const char *strategy;
  const char *session_strategies; /* NULL: the same */
  int copy_queue;
  double timeout; /* 0: default */
} bed_desc;

void bed_init(fault_bed *bed, const bed_desc *desc);
void bed_fini(fault_bed *bed);

/* Tensors of a step. Strided ones have a gap after every head. */
typedef enum io_kind { IO_DENSE, IO_STRIDED, IO_BUFFERS } io_kind;
typedef struct bed_tensors {
  kvr_tensor q, k, v, out, lse;
} bed_tensors;

bed_tensors bed_make_tensors(const fault_bed *bed, io_kind kind);
void bed_free_tensors(bed_tensors *tensors);
kvr_io bed_io(const bed_tensors *tensors); /* borrows */
/* Outputs of a step into bed->run. */
void bed_fetch(fault_bed *bed, const bed_tensors *tensors);

kvr_plan *bed_make_plan(fault_bed *bed);
/* The schedule of such a plan (owned). */
kvr_schedule *bed_make_schedule(const fault_bed *bed);
void bed_replace_session(fault_bed *bed);
/* Device bytes of all ranks. */
size_t bed_allocated(const fault_bed *bed);

/* Fail the test unless ...; what says after what. */
void bed_expect_objects(const cl_objects *before, const char *what); /* ... nothing leaked */
/* ... lengths and all bytes below them are as they were. */
void bed_expect_cache_untouched(const fault_bed *bed, const char *what);
/* ... the next step is right. */
void bed_expect_right_step(fault_bed *bed, const char *what);
/* ... the message of this thread contains a text. */
void bed_expect_message(const char *text, const char *what);

#endif

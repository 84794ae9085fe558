/* Random small steps on a device: the cases of pure_case, rounded to a storage type. */
#ifndef KVR_TESTS_DEVICE_CASE_H
#define KVR_TESTS_DEVICE_CASE_H

#include "api/session.h"
#include "pure_case.h"

/* Ends the test program with 77 and a message if there is no OpenCL device; KVRING_TEST_DEVICES
 * names other devices than the default. */
void device_require(void);
/* A group of P ranks, or failure. */
kvr_group *device_group(int num_ranks, int copy_queue);
void device_ok(kvr_status status, const char *what);

/* A random case whose data are rounded to dtype, with the answer computed from the rounded data. */
void device_case_init(pure_case *c, uint64_t seed, kvr_dtype dtype);

/* Fills a case whose problem, requests and options are set, rounded likewise. */
void device_case_fill(pure_case *c, uint64_t seed);

/* What a case needs on a device. The whole pool is NaN but for the cached tokens; pages are
 * shuffled. */
typedef struct device_run {
  /* set before device_run_init: */
  int spare_tokens; /* by which the session's limits exceed the case */
  bool auto_math;   /* bf16 products where the library prefers them; else f32 */
  kvr_cache *cache;
  kvr_session *session;
  int ids[CASE_MAX_REQUESTS];
  unsigned char *pools[CASE_MAX_RANKS]; /* bytes before the step */
  float *out, *lse;                     /* after it, token order */
  kvr_trace_record *records;
  int num_records;
  int64_t bytes_formula;
} device_run;

void device_run_init(device_run *run, pure_case *c, kvr_group *group, const char *strategies);
/* Puts lengths back to before the step. */
void device_run_rewind(device_run *run, pure_case *c);
/* Plans and runs one step in token order. */
kvr_status device_run_step(device_run *run, pure_case *c, const char *strategy);
void device_run_fini(device_run *run, pure_case *c);

/* Largest error of output and LSE over max |V|; NaN counts as 1e300. */
double device_run_error(const device_run *run, const pure_case *c);
/* 1 if every byte of every pool is as before but for the new tokens' rows, which are exact. */
int device_pools_are_right(const device_run *run, const pure_case *c);

#endif

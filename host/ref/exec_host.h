/* Reference executor: walks a schedule on the host, in double precision and without OpenCL. */
#ifndef KVR_REF_EXEC_HOST_H
#define KVR_REF_EXEC_HOST_H

#include "schedule/schedule.h"

/* Inputs and outputs in token order; all dense. */
typedef struct kvr_host_io {
  const double *q; /* (tokens, NQ, D) */
  const double *k; /* (tokens, NKV, D) */
  const double *v;
  double *out;    /* (tokens, NQ, D) */
  double *lse;    /* (tokens, NQ), natural log */
  double **cache; /* (requests, ranks): rows of a rank's share by local index, (.., 2 NKV, D), with
                     room for the step's new tokens */
} kvr_host_io;

/* Runs every op. order_seed 0: in schedule order; else in a random order that the dependencies
 * allow. Errors: KVR_E_OOM; KVR_E_VERIFY if dependencies leave no op ready. */
kvr_status kvr_exec_host_run(const kvr_schedule *schedule, const kvr_host_io *io,
                             uint64_t order_seed);

#endif

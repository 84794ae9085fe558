/* The inside of a session, shared by the files of the API. */
#ifndef KVR_API_SESSION_H
#define KVR_API_SESSION_H

#include "exec/exec_cl.h"
#include "strategy/strategy.h"

struct kvr_session {
  kvr_group *group; /* borrowed */
  kvr_cache *cache; /* borrowed */
  kvr_exec *exec;
  int num_q_heads, max_requests, max_table_entries;
  kvr_dtype out_dtype;
  kvr_footprint footprint;
  unsigned strategies; /* bit i: kvr_strategy_get(i) may be used */
  unsigned built;      /* bit t: kernels for output type t */
  kvr_plan *in_flight;
};

/* Builds the kernels for an output type, unless they are there. */
kvr_status kvr_session_build(kvr_session *session, kvr_dtype out_dtype);

#endif

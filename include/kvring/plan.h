/* Sessions and plans: buffers for steps of bounded size, and one step bound to them.
 *
 * Threads. A session and its plans belong to one thread at a time, and so does a cache while its
 * requests change. Besides, threads may work at the same time: in groups of their own, with
 * sessions of one group, and on one cache in steps that have no request in common. On PoCL 3.1,
 * create a session whose limits exceed those of all before it while no step is in flight in the
 * process: a kernel launched wider than before, while others run, can end the process there. */
#ifndef KVRING_PLAN_H
#define KVRING_PLAN_H

#include <stdint.h>

#include "kvring/cache.h"
#include "kvring/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvr_session kvr_session;
typedef struct kvr_plan kvr_plan;

/* The largest step a session must be able to run. Everything on the device is allocated from these,
 * once, when the session is created. */
typedef struct kvr_limits {
  size_t struct_size; /* sizeof(kvr_limits) */
  int num_q_heads;
  int max_new_tokens;     /* all requests of a step together */
  int max_context;        /* longest num_cached of one request */
  int max_requests;       /* in one step */
  int max_rows;           /* query rows of one rank; 0: what default chunks need */
  int tile;               /* largest options.tile; 0: 1024 */
  int query_tile;         /* largest options.query_tile; 0: all rows */
  int num_slots;          /* largest options.num_slots; 0: 2 */
  kvr_dtype out_dtype;    /* widest output type */
  kvr_math math;          /* of steps; BF16 where no device offers it is an error */
  const char *strategies; /* comma separated names, NULL or "all": all that fit the budget */
} kvr_limits;

typedef enum kvr_placement {
  KVR_TOKEN_ORDER, /* one tensor: tokens of request 0, then of request 1, ... */
  KVR_RANK_ORDER   /* one tensor per rank: the rank's rows, see kvr_plan_row_token */
} kvr_placement;

/* A tensor (tokens, heads, head_dim) in host memory or in an OpenCL buffer. */
typedef struct kvr_tensor {
  void *host;          /* host memory, or NULL (borrowed) */
  void *mem;           /* cl_mem of the group's context, or NULL (borrowed) */
  size_t offset;       /* first element [elements] */
  size_t token_stride; /* [elements]; 0: dense */
  size_t head_stride;  /* [elements]; 0: head_dim */
  kvr_dtype dtype;     /* q, k, v: the cache's; out: the problem's; lse: KVR_F32 */
} kvr_tensor;

/* Inputs and outputs of a step: one tensor each for KVR_TOKEN_ORDER, num_ranks tensors each for
 * KVR_RANK_ORDER. q, out (tokens, num_q_heads, head_dim); k, v (tokens, num_kv_heads, head_dim);
 * lse (tokens, num_q_heads, 1), natural log, optional (NULL). Borrowed until the step is done. */
typedef struct kvr_io {
  size_t struct_size; /* sizeof(kvr_io) */
  kvr_placement placement;
  const kvr_tensor *q, *k, *v;
  const kvr_tensor *out, *lse;
} kvr_io;

typedef struct kvr_plan_info {
  const char *strategy; /* name (static storage) */
  const char *reason;   /* why auto chose it, or "asked for" (borrowed from the plan) */
  int num_ops;
  int launches;                /* attention and merge launches, all ranks */
  int64_t bytes_moved;         /* between ranks, from the schedule [bytes] */
  int64_t bytes_formula;       /* the same from the closed formula */
  int64_t state_traffic_bytes; /* (m, l, acc), output and LSE read and written by launches */
  size_t slot_bytes;           /* per rank */
  size_t state_bytes;          /* per rank */
  size_t peak_bytes;           /* per rank, without the cache */
} kvr_plan_info;

/* Allocates every buffer that steps within the limits need and builds the kernels.
 * group and cache are borrowed and must outlive the session. Owned; release with
 * kvr_session_destroy. Errors: KVR_E_NULL, KVR_E_SHAPE, KVR_E_RANGE, KVR_E_OOM naming bytes needed
 * and budget, KVR_E_UNSUPPORTED (no kernel is right on a device, or none with that math), KVR_E_CL.
 */
KVR_API kvr_status kvr_session_create(kvr_group *group, kvr_cache *cache, const kvr_limits *limits,
                                      kvr_session **out);
KVR_API void kvr_session_destroy(kvr_session *session); /* accepts NULL */
/* Device bytes of one rank's buffers, without the cache. */
KVR_API size_t kvr_session_bytes(const kvr_session *session);
/* What long launches of a rank compute with: KVR_MATH_F32 or KVR_MATH_BF16; AUTO for no session or
 * rank. */
KVR_API kvr_math kvr_session_math(const kvr_session *session, int rank);

/* Plans one step: chooses a strategy, builds and verifies its schedule. Nothing is enqueued.
 *
 *   session  ranks, cache and buffers to run on; must outlive the plan (borrowed)
 *   problem  shapes and lengths [tokens] (copied)
 *   options  NULL for defaults (copied)
 *   out      the new plan, NULL on failure; release with kvr_plan_destroy (owned)
 *
 * Errors: those of kvr_problem_check; KVR_E_LAYOUT if the problem's cache differs from the
 * session's; KVR_E_CAPACITY beyond the limits or a block table too short (needed and present
 * entries); KVR_E_STATE if num_cached is not the request's length; KVR_E_OOM if the memory gate
 * refuses the strategy that was asked for. */
KVR_API kvr_status kvr_plan_create(kvr_session *session, const kvr_problem *problem,
                                   const kvr_options *options, kvr_plan **out);
KVR_API void kvr_plan_destroy(kvr_plan *plan); /* accepts NULL; waits if in flight */
KVR_API kvr_status kvr_plan_describe(const kvr_plan *plan, kvr_plan_info *out);

/* Rows of a rank, and the request and token (index among its new tokens) of one of them. */
KVR_API int kvr_plan_num_rows(const kvr_plan *plan, int rank);
KVR_API kvr_status kvr_plan_row_token(const kvr_plan *plan, int rank, int row, int *request,
                                      int *token);

/* Runs the step and waits. On success the cache has grown by the new tokens; on failure its lengths
 * are unchanged and no byte below them was touched. A plan may run once per cache length.
 * Errors: KVR_E_NULL, KVR_E_DTYPE, KVR_E_LAYOUT (strides), KVR_E_CONFLICT (input inside the cache),
 * KVR_E_STATE (session busy, or lengths moved on), KVR_E_CL naming rank, op and call; KVR_E_TIMEOUT
 * naming the op that did not end and what it waits for: the device may still read and write the
 * tensors of the step, so they must stay, and the group is lost (see kvr_group_desc.timeout). */
KVR_API kvr_status kvr_plan_run(kvr_plan *plan, const kvr_io *io);

/* Trace of the last run: records of all ops in schedule order (borrowed from the plan). */
KVR_API kvr_status kvr_plan_trace(const kvr_plan *plan, const kvr_trace_record **out, int *num);

/* What a step would need and cost, without a device: builds and verifies the schedule.
 * info->reason is NULL. peak_bytes is for a session whose limits are exactly this step. */
KVR_API kvr_status kvr_plan_estimate(const kvr_problem *problem, const kvr_options *options,
                                     kvr_plan_info *info);

/* The strategy auto would take under a per-rank budget (0: unlimited), and why.
 * reason (reason_size) receives a sentence. Errors: those of kvr_problem_check, KVR_E_OOM. */
KVR_API kvr_status kvr_choose(const kvr_problem *problem, const kvr_options *options, size_t budget,
                              const char **out_name, char *reason, size_t reason_size);

/* Merges two partial results over disjoint keys into one, on the host:
 * out (rows, dim), lse (rows), natural log. A partial with lse = -inf is not read, so it may hold
 * NaN. out_a/lse_a may alias out/lse. Source: SPEC of online softmax merging, e.g.
 * arXiv:2501.01005. */
KVR_API kvr_status kvr_merge_states(const float *out_a, const float *lse_a, const float *out_b,
                                    const float *lse_b, int rows, int dim, float *out, float *lse);

#ifdef __cplusplus
}
#endif
#endif

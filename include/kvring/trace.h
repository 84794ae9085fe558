/* Trace: one record per op of a step, the same for real, reference and simulated runs. */
#ifndef KVRING_TRACE_H
#define KVRING_TRACE_H

#include <stdint.h>

#include "kvring/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, "text", moves bytes between ranks) */
#define KVR_OP_LIST(X)                                                                             \
  X(STAGE, "stage", 0)                 /* own cache pages -> slot */                               \
  X(STAGE_NEW, "stage_new", 0)         /* own new KV rows -> slot */                               \
  X(HOP, "hop", 1)                     /* slot or lane -> the same on the next rank */             \
  X(GATHER, "gather", 1)               /* rows of one rank -> gathered buffer of another */        \
  X(SEND_STATE, "send_state", 1)       /* partial (m, l, acc) -> owner of the rows */              \
  X(COPY, "copy", 0)                   /* inside one rank */                                       \
  X(ATTEND, "attend", 0)               /* one launch of kvr_attend */                              \
  X(MERGE_STATES, "merge_states", 0)   /* (m, l, acc) of all ranks -> output */                    \
  X(MERGE_OUTPUTS, "merge_outputs", 0) /* two (output, LSE) -> output */                           \
  X(CACHE_WRITE, "cache_write", 0)     /* new KV rows -> own cache pages */

#define KVR_OP_ENUM(name, text, moves) KVR_OP_##name,
typedef enum kvr_op_kind { KVR_OP_LIST(KVR_OP_ENUM) KVR_NUM_OPS } kvr_op_kind;
#undef KVR_OP_ENUM

KVR_API const char *kvr_op_name(kvr_op_kind kind);

/* Times are nanoseconds of one clock per group; both 0 when unknown. */
typedef struct kvr_trace_record {
  int op;              /* index in the schedule */
  int kind;            /* kvr_op_kind */
  int rank;            /* whose queue ran it */
  int peer;            /* copies between ranks: the source rank; else -1 */
  int queue;           /* 0: compute queue, 1: copy queue */
  int request;         /* index in the problem */
  int pass;            /* pass of the ring over a tile of query rows */
  int block;           /* KV block, or -1 */
  int step;            /* virtual step v of the pass, or -1 */
  int slot;            /* destination slot, or -1 */
  int launched;        /* 1: a kernel ran or bytes moved; 0: a marker */
  int64_t bytes;       /* bytes moved between ranks */
  int64_t state_bytes; /* bytes of (m, l, acc), output and LSE read and written */
  int64_t start_ns;
  int64_t end_ns;
} kvr_trace_record;

/* Collects records over many steps and writes a Chrome/Perfetto trace (JSON): one process per rank,
 * one track per queue, hops as flow arrows. */
typedef struct kvr_trace kvr_trace;

/* The new trace is owned; release with kvr_trace_destroy. */
KVR_API kvr_status kvr_trace_create(kvr_trace **out);
KVR_API void kvr_trace_destroy(kvr_trace *trace);
/* Appends records (copied); label names the step, e.g. "chunk 3" (copied). */
KVR_API kvr_status kvr_trace_add(kvr_trace *trace, const char *label,
                                 const kvr_trace_record *records, int num_records);
/* Errors: KVR_E_IO naming the path. Written to a temporary name first: never half a file. */
KVR_API kvr_status kvr_trace_write(const kvr_trace *trace, const char *path);

#ifdef __cplusplus
}
#endif
#endif

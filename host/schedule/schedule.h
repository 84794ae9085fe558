/* Schedule: what a step does, as data. A strategy appends ops; every op names the buffer rows that
 * it reads and writes, and the dependencies between ops follow from that:
 *
 *   read after write, write after read, write after write, and one copy at a time per link.
 *
 * Nobody writes a wait list by hand. Executors on devices, on the host and in simulated time walk
 * the same schedule. Dependencies always point to earlier ops, so appending order is a valid order.
 */
#ifndef KVR_SCHEDULE_SCHEDULE_H
#define KVR_SCHEDULE_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/layout.h"
#include "kvring/trace.h"
#include "shared.h"

/* X(name, row unit). A rank's buffers; several pieces of one kind are told apart by ref.index. */
#define KVR_BUFFER_LIST(X)                                                                         \
  X(NONE, NOTHING)                                                                                 \
  X(CACHE, KV)         /* pages of the KV cache; index = request */                                \
  X(SLOT, KV)          /* ring slots; index = slot */                                              \
  X(CURRENT, KV)       /* new KV of all requests in token order; index = rank it came from */      \
  X(NEW, KV)           /* new KV of the rank's own rows (rotate-all) */                            \
  X(GATHERED, KV)      /* gather-kv: all shares of one request; index = rank it came from */       \
  X(Q, Q)              /* queries of the rank's own rows */                                        \
  X(Q_ALL, Q)          /* gather-q: queries of all ranks; index = rank they came from */           \
  X(STATE, STATE)      /* (m, l, acc) of own rows; index = lane */                                 \
  X(PARTIAL, STATE)    /* gather-q: (m, l, acc) of all rows over the own share; index = owner */   \
  X(RECEIVED, STATE)   /* gather-q: partials of own rows; index = rank they came from */           \
  X(LANE_Q, Q)         /* rotate-q: travelling queries; index = 2 * lane + slot */                 \
  X(LANE_STATE, STATE) /* rotate-q: travelling (m, l, acc); index = 2 * lane + slot */             \
  X(PART_OUT, F32_OUT) /* ring-two-launch: normalised partials; index = 0 ring, 1 current */       \
  X(PART_LSE, LSE)                                                                                 \
  X(OUT, OUT)                                                                                      \
  X(LSE, LSE)                                                                                      \
  X(LINK, NOTHING) /* no memory: the link into this rank; index = rank it comes from */

#define KVR_BUFFER_ENUM(name, unit) KVR_BUF_##name,
typedef enum kvr_buffer { KVR_BUFFER_LIST(KVR_BUFFER_ENUM) KVR_NUM_BUFFERS } kvr_buffer;
#undef KVR_BUFFER_ENUM

const char *kvr_buffer_name(kvr_buffer buffer);

enum { KVR_ALL = -1 }; /* ref.index: every piece of the buffer */

/* Rows [row, row + rows) of one piece of a buffer. */
typedef struct kvr_ref {
  kvr_buffer buffer;
  int rank;
  int index;
  int row;
  int rows;
} kvr_ref;

typedef struct kvr_op {
  kvr_op_kind kind;
  int rank; /* whose queue runs it */
  int peer; /* source rank of a copy between ranks; else -1 */
  int request;
  int pass;      /* which tile of query rows */
  int block;     /* KV block, or -1 */
  int step;      /* virtual step v of the pass, or -1 */
  bool launch;   /* false: a marker with the same dependencies */
  kvr_ref src;   /* copies, stage, cache write: rows read; attend: region A (ring); merges: parts */
  kvr_ref dst;   /* rows written; attend: OUT or PART_OUT with attend.finish, else unused */
  kvr_ref q;     /* attend: query rows */
  kvr_ref cur;   /* attend: region B (new KV) */
  kvr_ref state; /* attend, merge_states: (m, l, acc) */
  int local0;    /* stage: local cache index of the first row */
  int split, t0, t1;       /* cache write: new tokens of the source rows (two runs) */
  kvr_attend_args attend;  /* without scale and head counts, which executors fill in */
  int64_t bytes;           /* moved between ranks */
  int64_t state_bytes;     /* of (m, l, acc), output and LSE read and written by a launch */
  int first_dep, num_deps; /* into schedule.deps */
} kvr_op;

/* Bytes of one row in each unit of KVR_BUFFER_LIST. */
typedef struct kvr_row_bytes {
  size_t kv, q, state, out, f32_out, lse;
} kvr_row_bytes;

/* Rules a test may drop to see that the verifier and the executors notice. */
typedef enum kvr_drop {
  KVR_DROP_NOTHING = 0,
  KVR_DROP_READ_AFTER_WRITE = 1,
  KVR_DROP_WRITE_AFTER_READ = 2,
  KVR_DROP_WRITE_AFTER_WRITE = 4,
  KVR_DROP_LINK = 8
} kvr_drop;

typedef struct kvr_access {
  int resource;
  bool write;
} kvr_access;

/* Who used a resource last. */
typedef struct kvr_ledger_entry {
  int writer; /* op, or -1 */
  int num_readers, cap_readers;
  int *readers;
} kvr_ledger_entry;

/* Ops of one step: schedules of this length take gigabytes and seconds. */
enum { KVR_MAX_OPS = 1 << 22 };

typedef struct kvr_schedule {
  kvr_problem problem; /* requests and weights are copies owned by the schedule */
  kvr_options options; /* resolved */
  const char *strategy;
  kvr_layout layout;
  kvr_row_bytes row_bytes;
  kvr_buffer new_kv; /* where executors put the new KV: CURRENT or NEW */
  int num_ops, cap_ops;
  kvr_op *ops;
  int num_deps, cap_deps;
  int *deps;
  int cap_marks;
  int *marks;                     /* (ops): 1 + the last op that was made to depend on this one */
  int *num_blocks, *first_block;  /* (num_requests) see the functions of these names */
  int resource0[KVR_NUM_BUFFERS]; /* first resource of a buffer on rank 0 */
  int pieces[KVR_NUM_BUFFERS];    /* pieces per rank, as the ledger counts them */
  int num_resources;
  kvr_ledger_entry *ledger; /* (num_resources) */
  kvr_access *scratch;      /* accesses of the op being appended */
  unsigned drop;            /* kvr_drop */
} kvr_schedule;

/* An empty schedule for a valid problem and resolved options (both copied). */
kvr_status kvr_schedule_create(const kvr_problem *problem, const kvr_options *options,
                               kvr_schedule **out);
void kvr_schedule_destroy(kvr_schedule *schedule); /* accepts NULL */

/* Appends an op (copied), derives its dependencies, bytes and state traffic. Errors: KVR_E_OOM. */
kvr_status kvr_schedule_append(kvr_schedule *schedule, const kvr_op *op);

/* Resources that an op reads and writes, into out (kvr_schedule_max_accesses entries). */
int kvr_op_accesses(const kvr_schedule *schedule, const kvr_op *op, kvr_access *out);
int kvr_schedule_max_accesses(const kvr_schedule *schedule);

/* Memory of a reference within its buffer: slots, lanes and parts are separate; the pieces of every
 * other buffer are rows of one memory. */
static inline int kvr_ref_memory(kvr_ref ref) {
  switch (ref.buffer) {
  case KVR_BUF_SLOT:
  case KVR_BUF_LANE_Q:
  case KVR_BUF_LANE_STATE:
  case KVR_BUF_PART_OUT:
  case KVR_BUF_PART_LSE: return ref.index == KVR_ALL ? 0 : ref.index;
  default: return 0;
  }
}

kvr_row_bytes kvr_problem_row_bytes(const kvr_problem *problem);
size_t kvr_buffer_row_bytes(const kvr_row_bytes *row_bytes, kvr_buffer buffer);
static inline const int *kvr_op_deps(const kvr_schedule *s, const kvr_op *op) {
  return s->deps + op->first_dep;
}

/* Passes of a request: tiles of query_tile rows, the same number on every rank. */
int kvr_schedule_num_passes(const kvr_schedule *schedule, int request);
/* Rows of a rank in a pass. */
kvr_rows kvr_schedule_pass_rows(const kvr_schedule *schedule, int request, int pass, int rank);
/* Ring blocks of a request's cached tokens (0 if it has none). */
int kvr_schedule_num_blocks(const kvr_schedule *schedule, int request);
/* First position that new token t can see: 0 without a window. */
int kvr_schedule_first_position(const kvr_schedule *schedule, int request, int token);
/* First ring block that holds a token which some new token can see; the number of blocks if there
 * is none. The same on every rank, since it decides which ring steps exist. */
int kvr_schedule_first_block(const kvr_schedule *schedule, int request);
/* Cached tokens in block b of a rank's share. */
int kvr_schedule_block_len(const kvr_schedule *schedule, int request, int rank, int block);

typedef struct kvr_totals {
  int launches; /* attention and merges */
  int64_t bytes_moved;
  int64_t state_bytes;
} kvr_totals;
kvr_totals kvr_schedule_totals(const kvr_schedule *schedule);

/* The trace record of an op, without times. */
kvr_trace_record kvr_op_record(const kvr_schedule *schedule, int op);

#endif

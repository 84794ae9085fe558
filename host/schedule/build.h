/* The moves that strategies are made of. Each appends the ops of one kind of move. */
#ifndef KVR_SCHEDULE_BUILD_H
#define KVR_SCHEDULE_BUILD_H

#include "schedule/schedule.h"

/* Where an op stands: request and pass, and block and step where they mean something (else -1). */
typedef struct kvr_at {
  int request, pass, block, step;
} kvr_at;

kvr_ref kvr_make_ref(kvr_buffer buffer, int rank, int index, int row, int rows);
static inline kvr_ref kvr_no_ref(void) { return (kvr_ref){.buffer = KVR_BUF_NONE}; }

/* Every rank receives the new KV of all others: (P - 1) times all new rows in bytes. */
kvr_status kvr_build_gather_current(kvr_schedule *s);
/* Local tokens [local0, local0 + dst.rows) of rank dst.rank's share, from its pages to dst. */
kvr_status kvr_build_stage(kvr_schedule *s, kvr_at at, kvr_ref dst, int local0);
/* A copy between ranks (kind HOP, GATHER or SEND_STATE), or inside one (COPY, STAGE_NEW). */
kvr_status kvr_build_copy(kvr_schedule *s, kvr_op_kind kind, kvr_at at, kvr_ref src, kvr_ref dst);
/* The new tokens of src's rows (two runs), as far as the rank owns them (owned > 0), to its pages.
 */
kvr_status kvr_build_cache_write(kvr_schedule *s, kvr_at at, kvr_ref src, kvr_rows tokens,
                                 int owned);
/* Orders every use of a rank's buffer before this against every one after it. Pieces of a buffer
 * may lie elsewhere in the next pass or request, where one piece's rows are another's: ops that use
 * single pieces do not wait for each other by themselves. */
kvr_status kvr_build_fence(kvr_schedule *s, kvr_at at, kvr_buffer buffer, int rank);
/* Every rank stores its new tokens of every request, from the gathered new KV. */
kvr_status kvr_build_cache_writes(kvr_schedule *s);

/* One attention launch over cached rows `ring` and then new rows `cur`; either may be empty. */
typedef struct kvr_attend {
  kvr_at at;
  kvr_rows rows; /* which rows, for their tokens; first is not used */
  kvr_ref q;
  kvr_ref state;
  kvr_ref ring;                  /* rows = 0: no cached rows */
  kvr_ref cur;                   /* rows = 0: no new rows */
  int shard, local0;             /* cached rows: whose share, and the first one's local index */
  int key_split, key_t0, key_t1; /* tokens of the new rows */
  bool sinks;                    /* a launch that starts a state counts the attention sinks */
  bool carry_in;
  bool finish;
  kvr_ref dst; /* with finish */
} kvr_attend;
/* A launch without rows, or without keys and without anything to write, becomes a marker. */
kvr_status kvr_build_attend(kvr_schedule *s, const kvr_attend *a);

/* Fills in cur and key_* so that the launch covers all new tokens that its rows can see. */
void kvr_attend_current(const kvr_schedule *s, int rank, kvr_attend *a);
/* The launch parts that are the same for every attend of a rank's own rows in a pass. */
kvr_attend kvr_attend_own(const kvr_schedule *s, kvr_at at, int rank);
/* Every rank's rows of a pass against the new tokens alone, straight to the output. */
kvr_status kvr_build_attend_current(kvr_schedule *s, kvr_at at);
/* A merge of a rank's rows of a pass into its output (kind MERGE_STATES or MERGE_OUTPUTS); src
 * holds the parts. */
kvr_status kvr_build_merge(kvr_schedule *s, kvr_op_kind kind, kvr_at at, int rank, kvr_ref src,
                           kvr_ref state);
/* Output rows of a rank's pass. */
kvr_ref kvr_out_ref(const kvr_schedule *s, int request, int pass, int rank);

#endif

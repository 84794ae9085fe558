/* One set of buffers for any number of launches of kvr_attend, and a double reference for them that
 * calls the kernel's own kvr_visible. */
#ifndef KVR_TESTS_DEVICE_ATTEND_CASE_H
#define KVR_TESTS_DEVICE_ATTEND_CASE_H

#include "cl_fixture.h"
#include "shared.h"

enum { Q_ROW = 3, STATE_ROW = 2, RING_ROW = 1, CUR_ROW = 5, MORE = 2 }; /* rows around the used */

typedef struct shape {
  int head_dim, group, num_kv_heads, kv_dtype, out_dtype, row_tile;
} shape;

typedef enum mistake { NO_MISTAKE, CAP_AFTER_MASK, SINK_PER_LAUNCH } mistake;

typedef struct attend_case {
  shape s;
  kvr_attend_args a;
  int num_q, num_ring, num_cur; /* rows of the buffers */
  void *q, *ring, *cur;
  float *state, *lse, *sinks; /* every third sink is -inf */
  void *out;
  int skip_token; /* rows of tokens from here on are not compared */
  double loosen;  /* tolerance factor */
  mistake wrong;  /* that the reference makes */
} attend_case;

/* Which kernel cases run. */
typedef struct kernel_kind {
  const char *name; /* of a variant; NULL: attend.cl with the row tile of the case */
  int products;     /* of a bf16 variant, see attend_bf16.cl */
} kernel_kind;
extern kernel_kind tested;
/* Runs the group of tests for every kind that this CPU has. */
int run_for_every_kind(int (*run)(void));

/* One run of rows and new keys from token 0, all visible, nothing carried. */
kvr_attend_args plain_args(shape s, int num_rows, int ring_end, int num_new);
/* Head and tail chunks of rows and keys, cached keys before them. */
kvr_attend_args two_run_args(shape s);

/* Random rows within the used range, NaN around it. */
attend_case make_case(shape s, kvr_attend_args a, float amplitude);
void free_case(attend_case *c);
void run_case(attend_case *c, int num_launches, const kvr_attend_args *launches);

/* Elements of a row of q. */
size_t row_width(const attend_case *c);
/* Where key x of a launch lies: element offset of its K row of KV head h in *from. */
size_t key_offset(const attend_case *c, const kvr_attend_args *a, int x, int h, const void **from);

/* Largest error of output and LSE relative to the tolerance: right up to 1. */
double compare(const attend_case *c, int num_launches, const kvr_attend_args *launches);
/* Runs, compares and looks for writes outside the used rows. */
void expect_right(attend_case *c, int num_launches, const kvr_attend_args *launches);

#endif

#include "schedule/build.h"

#include <limits.h>

#include "base/arith.h"
#include "base/error.h"

kvr_ref kvr_make_ref(kvr_buffer buffer, int rank, int index, int row, int rows) {
  return (kvr_ref){.buffer = buffer, .rank = rank, .index = index, .row = row, .rows = rows};
}

static kvr_op make_op(kvr_op_kind kind, kvr_at at, int rank) {
  return (kvr_op){.kind = kind,
                  .rank = rank,
                  .peer = -1,
                  .request = at.request,
                  .pass = at.pass,
                  .block = at.block,
                  .step = at.step,
                  .launch = true};
}

kvr_status kvr_build_copy(kvr_schedule *s, kvr_op_kind kind, kvr_at at, kvr_ref src, kvr_ref dst) {
  kvr_op op = make_op(kind, at, dst.rank);
  op.peer = src.rank != dst.rank ? src.rank : -1;
  op.launch = dst.rows > 0;
  op.src = src;
  op.dst = dst;
  return kvr_schedule_append(s, &op);
}

/* One run (head or tail) of rank `from`'s new rows, into the same token-order place on rank `to`.
 */
static kvr_status gather_run(kvr_schedule *s, int request, int from, int to, int token, int num) {
  if (num == 0) return KVR_OK;
  const int row = s->layout.token0[request] + token;
  const kvr_at at = {request, 0, -1, -1};
  return kvr_build_copy(s, KVR_OP_GATHER, at, kvr_make_ref(KVR_BUF_CURRENT, from, from, row, num),
                        kvr_make_ref(KVR_BUF_CURRENT, to, from, row, num));
}

kvr_status kvr_build_gather_current(kvr_schedule *s) {
  const int P = s->layout.num_ranks;
  for (int i = 0; i < s->layout.num_requests; i++)
    for (int k = 1; k < P; k++) /* distance outside: every link is used once before any again */
      for (int to = 0; to < P; to++) {
        const int from = (to + P - k) % P;
        const kvr_rows rows = *kvr_layout_rows(&s->layout, i, from);
        KVR_TRY(gather_run(s, i, from, to, rows.t0, rows.split));
        KVR_TRY(gather_run(s, i, from, to, rows.t1, rows.num - rows.split));
      }
  return KVR_OK;
}

kvr_status kvr_build_stage(kvr_schedule *s, kvr_at at, kvr_ref dst, int local0) {
  kvr_op op = make_op(KVR_OP_STAGE, at, dst.rank);
  op.launch = dst.rows > 0;
  op.src = kvr_make_ref(KVR_BUF_CACHE, dst.rank, at.request, local0, dst.rows);
  op.dst = dst;
  op.local0 = local0;
  return kvr_schedule_append(s, &op);
}

kvr_status kvr_build_fence(kvr_schedule *s, kvr_at at, kvr_buffer buffer, int rank) {
  return kvr_build_copy(s, KVR_OP_COPY, at, kvr_make_ref(KVR_BUF_NONE, rank, 0, 0, 0),
                        kvr_make_ref(buffer, rank, KVR_ALL, 0, 0));
}

kvr_status kvr_build_cache_write(kvr_schedule *s, kvr_at at, kvr_ref src, kvr_rows tokens,
                                 int owned) {
  kvr_op op = make_op(KVR_OP_CACHE_WRITE, at, src.rank);
  op.src = src;
  op.dst = kvr_make_ref(KVR_BUF_CACHE, src.rank, at.request,
                        kvr_layout_share(&s->layout, at.request, src.rank), owned);
  op.split = tokens.split;
  op.t0 = tokens.t0;
  op.t1 = tokens.t1;
  return kvr_schedule_append(s, &op);
}

kvr_status kvr_build_cache_writes(kvr_schedule *s) {
  for (int i = 0; i < s->layout.num_requests; i++) {
    const kvr_request *request = &s->problem.requests[i];
    const kvr_rows all = {.num = request->num_new, .split = request->num_new};
    for (int r = 0; r < s->layout.num_ranks; r++) {
      const int owned =
          kvr_map_count(&s->problem.cache, request->num_cached + request->num_new, r) -
          kvr_layout_share(&s->layout, i, r);
      const kvr_ref src = kvr_make_ref(KVR_BUF_CURRENT, r, KVR_ALL, s->layout.token0[i], all.num);
      if (owned > 0) KVR_TRY(kvr_build_cache_write(s, (kvr_at){i, 0, -1, -1}, src, all, owned));
    }
  }
  return KVR_OK;
}

/* Where cached rows stand in the request; only a window asks for it. */
static void set_positions(const kvr_schedule *s, const kvr_attend *a, kvr_attend_args *args) {
  const kvr_cache_desc *cache = &s->problem.cache;
  if (s->problem.window == 0) return;
  args->window = s->problem.window;
  args->num_cached = s->problem.requests[a->at.request].num_cached;
  if (a->ring.rows == 0) return;
  args->key_local0 = a->local0;
  args->interleave = cache->interleave;
  args->total_weight = kvr_map_total_weight(cache);
  args->weight = kvr_map_weight(cache, a->shard);
  args->weight_before = kvr_map_weight_before(cache, a->shard);
}

kvr_status kvr_build_attend(kvr_schedule *s, const kvr_attend *a) {
  kvr_op op = make_op(KVR_OP_ATTEND, a->at, a->state.rank);
  const int num_keys = a->ring.rows + a->cur.rows;
  op.launch = a->rows.num > 0 && (num_keys > 0 || a->finish || !a->carry_in);
  op.src = a->ring;
  op.q = a->q;
  op.cur = a->cur.rows > 0 ? a->cur : kvr_no_ref();
  op.state = a->state;
  op.dst = a->finish ? a->dst : kvr_no_ref();
  op.attend = (kvr_attend_args){.num_rows = a->rows.num,
                                .q_row = a->q.row,
                                .state_row = a->state.row,
                                .row_split = a->rows.split,
                                .row_t0 = a->rows.t0,
                                .row_t1 = a->rows.t1,
                                .ring_row = a->ring.row,
                                .ring_end = a->ring.rows,
                                .cur_row = a->cur.row,
                                .kv_end = num_keys,
                                .key_split = a->key_split,
                                .key_t0 = a->key_t0,
                                .key_t1 = a->key_t1,
                                .causal = s->problem.causal,
                                .carry_in = a->carry_in,
                                .finish = a->finish,
                                .use_sinks = a->sinks && s->problem.sinks != NULL};
  set_positions(s, a, &op.attend);
  return kvr_schedule_append(s, &op);
}

void kvr_attend_current(const kvr_schedule *s, int rank, kvr_attend *a) {
  const int i = a->at.request;
  const int end = s->problem.causal ? kvr_rows_token_end(a->rows) : s->problem.requests[i].num_new;
  a->cur =
      kvr_make_ref(KVR_BUF_CURRENT, rank, KVR_ALL, s->layout.token0[i], a->rows.num > 0 ? end : 0);
  a->key_split = INT_MAX;
  a->key_t0 = a->key_t1 = 0;
}

kvr_attend kvr_attend_own(const kvr_schedule *s, kvr_at at, int rank) {
  const kvr_rows rows = kvr_schedule_pass_rows(s, at.request, at.pass, rank);
  return (kvr_attend){.at = at,
                      .rows = rows,
                      .q = kvr_make_ref(KVR_BUF_Q, rank, 0, rows.first, rows.num),
                      .state = kvr_make_ref(KVR_BUF_STATE, rank, KVR_ALL, 0, rows.num),
                      .sinks = true};
}

kvr_ref kvr_out_ref(const kvr_schedule *s, int request, int pass, int rank) {
  const kvr_rows rows = kvr_schedule_pass_rows(s, request, pass, rank);
  return kvr_make_ref(KVR_BUF_OUT, rank, 0, rows.first, rows.num);
}

kvr_status kvr_build_attend_current(kvr_schedule *s, kvr_at at) {
  for (int r = 0; r < s->layout.num_ranks; r++) {
    kvr_attend a = kvr_attend_own(s, at, r);
    kvr_attend_current(s, r, &a);
    a.finish = true;
    a.dst = kvr_out_ref(s, at.request, at.pass, r);
    KVR_TRY(kvr_build_attend(s, &a));
  }
  return KVR_OK;
}

kvr_status kvr_build_merge(kvr_schedule *s, kvr_op_kind kind, kvr_at at, int rank, kvr_ref src,
                           kvr_ref state) {
  kvr_op op = make_op(kind, at, rank);
  op.src = src;
  op.state = state;
  op.dst = kvr_out_ref(s, at.request, at.pass, rank);
  op.launch = op.dst.rows > 0;
  return kvr_schedule_append(s, &op);
}

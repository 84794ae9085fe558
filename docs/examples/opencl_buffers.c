/* Inputs and outputs in the caller's OpenCL buffers, one per rank, ordered by events: the step
 * starts when the caller's uploads are done, and the caller reads each rank's output when that rank
 * is done. */
#include <kvring/kvring.h>
#include <kvring/opencl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 3, HEADS = 2, KV_HEADS = 1, DIM = 32, TOKENS = 50 };
enum { Q_ROW = HEADS * DIM, KV_ROW = KV_HEADS * DIM };

static void check(kvr_status status) {
  if (status == KVR_OK) return;
  fprintf(stderr, "%s: %s\n", kvr_status_name(status), kvr_error_message());
  exit(1);
}

static void check_cl(cl_int code) {
  if (code == CL_SUCCESS) return;
  fprintf(stderr, "OpenCL error %d\n", (int)code);
  exit(1);
}

/* What one rank brings: its rows in rank order, in buffers of its own. */
typedef struct rank_data {
  int num_rows;
  float q[TOKENS * Q_ROW], k[TOKENS * KV_ROW], v[TOKENS * KV_ROW], out[TOKENS * Q_ROW];
  cl_mem mem[4];
} rank_data;

static rank_data ranks[RANKS];

/* All keys equal and V[t] = t: the output of token t is the mean of 0..t, t / 2. */
static void fill(const kvr_plan *plan, int r) {
  rank_data *data = &ranks[r];
  data->num_rows = kvr_plan_num_rows(plan, r);
  for (int row = 0; row < data->num_rows; row++) {
    int request, token;
    check(kvr_plan_row_token(plan, r, row, &request, &token));
    for (int i = 0; i < Q_ROW; i++) data->q[row * Q_ROW + i] = 1.0f;
    for (int i = 0; i < KV_ROW; i++) data->v[row * KV_ROW + i] = (float)token;
  }
}

static cl_event upload(kvr_group *group, int r) {
  rank_data *data = &ranks[r];
  cl_context context;
  cl_command_queue queue;
  cl_int code;
  cl_event event;
  check(kvr_group_context(group, r, &context));
  check(kvr_group_queue(group, r, &queue));
  const size_t sizes[4] = {sizeof data->q, sizeof data->k, sizeof data->v, sizeof data->out};
  float *const arrays[4] = {data->q, data->k, data->v, data->out};
  for (int i = 0; i < 4; i++) {
    data->mem[i] = clCreateBuffer(context, CL_MEM_READ_WRITE, sizes[i], NULL, &code);
    check_cl(code);
    check_cl(clEnqueueWriteBuffer(queue, data->mem[i], CL_FALSE, 0, sizes[i], arrays[i], 0, NULL,
                                  i == 3 ? &event : NULL)); /* the queue is in order */
  }
  return event;
}

/* Reads a rank's output after its event; returns the largest error. */
static float read_rank(kvr_group *group, const kvr_plan *plan, int r, cl_event done) {
  rank_data *data = &ranks[r];
  cl_command_queue queue;
  float worst = 0.0f;
  check(kvr_group_queue(group, r, &queue));
  check_cl(clEnqueueReadBuffer(queue, data->mem[3], CL_TRUE, 0, sizeof data->out, data->out, 1,
                               &done, NULL));
  for (int row = 0; row < data->num_rows; row++) {
    int request, token;
    check(kvr_plan_row_token(plan, r, row, &request, &token));
    for (int i = 0; i < Q_ROW; i++)
      worst = fmaxf(worst, fabsf(data->out[row * Q_ROW + i] - (float)token / 2.0f));
  }
  return worst;
}

static float run(kvr_group *group, kvr_plan *plan) {
  kvr_tensor tensors[4][RANKS];
  cl_event uploads[RANKS], done[RANKS];
  float worst = 0.0f;
  for (int r = 0; r < RANKS; r++) {
    fill(plan, r);
    uploads[r] = upload(group, r);
    for (int i = 0; i < 4; i++) tensors[i][r] = (kvr_tensor){.mem = ranks[r].mem[i]};
  }
  const kvr_io io = {.struct_size = sizeof io,
                     .placement = KVR_RANK_ORDER,
                     .q = tensors[0],
                     .k = tensors[1],
                     .v = tensors[2],
                     .out = tensors[3]};
  check(kvr_plan_enqueue(plan, &io, RANKS, uploads, done));
  for (int r = 0; r < RANKS; r++) worst = fmaxf(worst, read_rank(group, plan, r, done[r]));
  check(kvr_plan_wait(plan)); /* checks every op, and the cache has grown */
  for (int r = 0; r < RANKS; r++) {
    clReleaseEvent(uploads[r]);
    clReleaseEvent(done[r]);
    for (int i = 0; i < 4; i++) clReleaseMemObject(ranks[r].mem[i]);
    printf("rank %d: %d rows\n", r, ranks[r].num_rows);
  }
  return worst;
}

int main(void) {
  kvr_group *group;
  kvr_cache *cache;
  kvr_session *session;
  kvr_plan *plan;
  kvr_request request = {.num_new = TOKENS};
  const kvr_group_desc group_desc = {.struct_size = sizeof group_desc,
                                     .num_ranks = RANKS,
                                     .copy_queue = 1};
  check(kvr_group_create(&group_desc, &group));
  const kvr_cache_desc desc = {.struct_size = sizeof desc,
                               .num_ranks = RANKS,
                               .num_kv_heads = KV_HEADS,
                               .head_dim = DIM,
                               .page_size = 8,
                               .num_pages = 4,
                               .interleave = 8}; /* page-interleaved */
  check(kvr_cache_create(group, &desc, &cache));
  check(kvr_cache_add(cache, &request.cache_id));
  check(kvr_cache_reserve(cache, request.cache_id, TOKENS));
  const kvr_limits limits = {.struct_size = sizeof limits,
                             .num_q_heads = HEADS,
                             .max_new_tokens = TOKENS,
                             .max_requests = 1};
  check(kvr_session_create(group, cache, &limits, &session));
  const kvr_problem problem = {.struct_size = sizeof problem,
                               .cache = desc,
                               .num_q_heads = HEADS,
                               .causal = 1,
                               .num_requests = 1,
                               .requests = &request};
  check(kvr_plan_create(session, &problem, NULL, &plan));
  const float worst = run(group, plan);
  printf("largest error %g, %d tokens in the cache\n", (double)worst,
         kvr_cache_length(cache, request.cache_id));
  const int ok = worst < 1e-4f && kvr_cache_length(cache, request.cache_id) == TOKENS;
  kvr_plan_destroy(plan);
  kvr_session_destroy(session);
  kvr_cache_destroy(cache);
  kvr_group_destroy(group);
  return ok ? 0 : 1;
}

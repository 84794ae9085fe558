/* What one step computes: shapes, lengths and masks. Plain data, no device in it.
 *
 * A step takes num_new new tokens of each request, attends them to the num_cached tokens already in
 * the sharded cache and to each other, and appends their K and V to the cache. */
#ifndef KVRING_PROBLEM_H
#define KVRING_PROBLEM_H

#include <stddef.h>

#include "kvring/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kvr_dtype { KVR_F32, KVR_F16, KVR_BF16, KVR_NUM_DTYPES } kvr_dtype;

/* Bytes of one element; 0 for a number that is no dtype. */
KVR_API size_t kvr_dtype_size(kvr_dtype dtype);
/* "f32", "f16", "bf16" (static storage); "?" otherwise. */
KVR_API const char *kvr_dtype_name(kvr_dtype dtype);

/* What the products of attention are made of. Sums, scores and state are f32 in any case. */
typedef enum kvr_math {
  KVR_MATH_AUTO, /* BF16 for bf16 caches where the device is faster at it, else F32 */
  KVR_MATH_F32,  /* f32 products: results within 2e-5 of max|V| */
  KVR_MATH_BF16, /* K, V, queries and probabilities rounded to bf16: relative RMS error about 2e-3
                  */
  KVR_NUM_MATHS
} kvr_math;

/* "auto", "f32", "bf16" (static storage); "?" otherwise. */
KVR_API const char *kvr_math_name(kvr_math math);

/* Shape of a KV cache sharded over ranks.
 *
 * One map says who owns which position: with W = sum of weights, positions repeat in cycles of
 * interleave * W tokens, and rank r owns interleave * weights[r] consecutive ones of each cycle.
 *   interleave = 1              token-striped
 *   interleave = page_size      page-interleaved
 *   interleave >= capacity / P  contiguous */
typedef struct kvr_cache_desc {
  size_t struct_size; /* sizeof(kvr_cache_desc) */
  int num_ranks;      /* P >= 1 */
  int num_kv_heads;   /* NKV >= 1 */
  int head_dim;       /* D in 1..512 */
  int page_size;      /* tokens per page of one rank, >= 1 */
  int num_pages;      /* pages in the pool of each rank, >= 1 */
  int interleave;     /* >= 1 [tokens] */
  const int *weights; /* (num_ranks), >= 0, not all 0; NULL: all 1 (borrowed) */
  kvr_dtype dtype;    /* of cache rows and of q, k, v */
} kvr_cache_desc;

/* One request in a step. */
typedef struct kvr_request {
  int num_new;    /* S: new tokens of this step, >= 0 */
  int num_cached; /* L: tokens of this request already in the cache, >= 0 */
  int chunk;      /* C: tokens in one of the 2 P head/tail chunks; 0: ceil(S / 2P), at least 1 */
  int cache_id;   /* request in the kvr_cache; ignored by functions without a cache */
} kvr_request;

typedef struct kvr_problem {
  size_t struct_size; /* sizeof(kvr_problem) */
  kvr_cache_desc cache;
  int num_q_heads;             /* NQ, a multiple of num_kv_heads */
  kvr_dtype out_dtype;         /* of the output; LSE is always f32 */
  int causal;                  /* 1: a row sees new tokens up to its own; 0: all new tokens */
  float scale;                 /* softmax scale; 0: 1 / sqrt(head_dim) */
  int window;                  /* sliding window incl. the row itself [tokens]; 0: none */
  float soft_cap;              /* s -> cap * tanh(s / cap), after the scale; 0: none */
  const float *sinks;          /* (num_q_heads) logits of attention sinks: one more softmax column
                                  per head, without a value; -inf or NULL: none (borrowed) */
  float q_scale;               /* q is divided by it and rounded to the cache's dtype; 0: 1 */
  float k_scale, v_scale;      /* what stored keys and values are multiplied by; 0: 1 */
  int num_requests;            /* >= 0 */
  const kvr_request *requests; /* (num_requests) (borrowed) */
} kvr_problem;

/* How to run it. Zero means the default. */
typedef struct kvr_options {
  size_t struct_size;   /* sizeof(kvr_options) */
  const char *strategy; /* NULL or "auto": chosen, see kvr_plan_info.reason (borrowed) */
  int tile;             /* KV tokens in one ring block; 0: 1024 */
  int query_tile;       /* query rows of a rank attended per pass of the ring; 0: all */
  int num_slots;        /* KV slots per rank, >= 2; 0: 2 */
} kvr_options;

/* Checks every rule on shapes, lengths and options; writes nothing.
 * Errors: KVR_E_NULL, KVR_E_SHAPE, KVR_E_DTYPE, KVR_E_RANGE, KVR_E_CAPACITY, KVR_E_UNSUPPORTED. */
KVR_API kvr_status kvr_problem_check(const kvr_problem *problem, const kvr_options *options);

/* Owner rank and local index of position g, and back. The description must be valid. */
KVR_API int kvr_map_owner(const kvr_cache_desc *cache, int position);
KVR_API int kvr_map_local(const kvr_cache_desc *cache, int position);
KVR_API int kvr_map_position(const kvr_cache_desc *cache, int rank, int local);
/* Tokens that rank owns among the first num_tokens positions. */
KVR_API int kvr_map_count(const kvr_cache_desc *cache, int num_tokens, int rank);
/* Entries a block table needs for num_tokens tokens: the longest share in pages. */
KVR_API int kvr_map_num_pages(const kvr_cache_desc *cache, int num_tokens);

/* Number of strategies, and the name of the i-th ("ring", "gather-kv", ...); NULL past the end. */
KVR_API int kvr_num_strategies(void);
KVR_API const char *kvr_strategy_name(int index);

#ifdef __cplusplus
}
#endif
#endif

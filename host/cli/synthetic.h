/* Random data that depends on nothing but its coordinates: value = f(seed, tensor, token, head,
 * dim). However a prompt is cut into chunks, the same token gets the same rows. */
#ifndef KVR_CLI_SYNTHETIC_H
#define KVR_CLI_SYNTHETIC_H

#include <stdint.h>

#include "kvring/problem.h"

enum { CLI_NORMAL_BINS = 4096 };

typedef enum cli_tensor_id { CLI_Q, CLI_K, CLI_V, CLI_SINKS } cli_tensor_id;

typedef struct cli_synthetic {
  uint64_t seed;
  float quantile[CLI_NORMAL_BINS + 1]; /* of the standard normal distribution */
} cli_synthetic;

void cli_synthetic_init(cli_synthetic *synthetic, uint64_t seed);

/* Fills dst (num_tokens, heads, head_dim) with scale * N(0, 1), rounded to dtype. sequence tells
 * requests apart. */
typedef struct cli_rows_at {
  cli_tensor_id tensor;
  int sequence;
  int first_token, num_tokens;
  int heads, head_dim;
} cli_rows_at;
void cli_synthetic_fill(const cli_synthetic *synthetic, cli_rows_at at, float scale,
                        kvr_dtype dtype, void *dst);

/* The hash behind it (splitmix64's finaliser), for other counter-based choices. */
static inline uint64_t cli_hash(uint64_t x) {
  x ^= x >> 30;
  x *= UINT64_C(0xbf58476d1ce4e5b9);
  x ^= x >> 27;
  x *= UINT64_C(0x94d049bb133111eb);
  return x ^ x >> 31;
}

#endif

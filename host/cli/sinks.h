/* Attention sinks: a logit per query head, from a file or random. */
#ifndef KVR_CLI_SINKS_H
#define KVR_CLI_SINKS_H

#include <stdint.h>

#include "kvring/status.h"

/* from is a safetensors file that has `sinks` (num_q_heads) in F32, or "random": from the seed;
 * NULL gives NULL. *out is owned: release with free(). Errors: KVR_E_IO (file, tensor),
 * KVR_E_SHAPE, KVR_E_DTYPE, KVR_E_RANGE (NaN or infinite; -inf is a head without a sink),
 * KVR_E_OOM. */
kvr_status cli_sinks_load(const char *from, int num_q_heads, uint64_t seed, float **out);

#endif

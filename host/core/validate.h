/* Every rule on shapes, lengths and options that needs no device. Nothing is ever written. */
#ifndef KVR_CORE_VALIDATE_H
#define KVR_CORE_VALIDATE_H

#include "kvring/problem.h"

/* Head dims above this would need more private memory per work-item than devices have. */
enum { KVR_MAX_HEAD_DIM = 512, KVR_MAX_RANKS = 4096 };
enum { KVR_DEFAULT_TILE = 1024, KVR_DEFAULT_SLOTS = 2 };

kvr_status kvr_cache_desc_check(const kvr_cache_desc *cache);
/* Everything but the strategy. */
kvr_status kvr_problem_validate(const kvr_problem *problem);
/* options may be NULL; strategy names are the registry's business. */
kvr_status kvr_options_validate(const kvr_options *options);

/* What dot(q, k) is multiplied by: the softmax scale (or its default) times the scale of stored
 * keys. */
double kvr_problem_score_scale(const kvr_problem *problem);
/* The scale of stored values. */
double kvr_problem_value_scale(const kvr_problem *problem);

/* Options with every default filled in; strategy stays as given. query_tile 0 becomes INT_MAX. */
kvr_options kvr_options_resolve(const kvr_options *options);

#endif

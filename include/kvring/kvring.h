/* kvring: context-parallel attention with a rank-sharded, paged KV cache. Everything but OpenCL
 * interoperation, which is in kvring/opencl.h. */
#ifndef KVRING_KVRING_H
#define KVRING_KVRING_H

#include "kvring/cache.h"
#include "kvring/group.h"
#include "kvring/plan.h"
#include "kvring/problem.h"
#include "kvring/status.h"
#include "kvring/trace.h"

#endif

/* The inside of a group, for the layers above device. */
#ifndef KVR_DEVICE_GROUP_H
#define KVR_DEVICE_GROUP_H

#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 120
#endif
#include <CL/cl.h>

#include <stdatomic.h>
#include <stdbool.h>

#include "device/device_select.h"
#include "kvring/group.h"

typedef struct kvr_rank {
  cl_device_id device; /* a root device or a sub-device (then released with the group) */
  cl_context context;  /* shared by all ranks of a group for now; belongs to the rank by design */
  cl_command_queue queue;
  cl_command_queue copy_queue;   /* equal to queue when the group has no copy queues */
  size_t max_alloc, budget;      /* largest single buffer, all buffers [bytes] */
  atomic_size_t allocated, peak; /* [bytes] */
} kvr_rank;

struct kvr_group {
  int num_ranks;
  kvr_rank *ranks; /* (num_ranks) */
  bool has_copy_queues;
  double timeout; /* [seconds] > 0 */
  void (*notice)(void *user, const char *text);
  void *notice_user;
  /* watch.h: a command did not end in time */
  atomic_bool is_stuck;
  char why_stuck[1024];
  /* private to group.c below */
  kvr_device_info *infos; /* (num_ranks) */
  kvr_places places;      /* rank r runs on place r % num; owns the sub-devices */
};

/* KVR_E_RANGE unless rank is one of the group. */
kvr_status kvr_group_check_rank(const kvr_group *group, int rank);

/* Tells the user one sentence, see kvr_group_desc.notice. */
__attribute__((format(printf, 2, 3))) void kvr_group_notice(const kvr_group *group,
                                                            const char *format, ...);

/* Allocates one buffer on a rank and counts it; bytes = 0 gives NULL. what names it in messages.
 * Errors: KVR_E_OOM naming bytes, budget or largest allocation, and the fix; KVR_E_CL;
 * KVR_E_STATE when the group is stuck. Threads may allocate and free at the same time. */
kvr_status kvr_group_alloc(kvr_group *group, int rank, size_t bytes, const char *what, cl_mem *out);
/* Accepts NULL. bytes as allocated. A buffer of a stuck group is left to the driver. */
void kvr_group_free(kvr_group *group, int rank, cl_mem mem, size_t bytes);

#endif

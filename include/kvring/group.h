/* Groups: which device each rank runs on. A rank is a place: one in-order queue (and optionally a
 * copy queue) on a device; several ranks may share one device. */
#ifndef KVRING_GROUP_H
#define KVRING_GROUP_H

#include <stddef.h>

#include "kvring/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvr_group kvr_group;

typedef struct kvr_group_desc {
  size_t struct_size; /* sizeof(kvr_group_desc) */
  int num_ranks;      /* P >= 1 */
  /* Devices as a comma separated list; ranks take them in turn. NULL or "": the first usable
   * device of the first platform that has one. One entry is PLATFORM.DEVICE (indices as printed by
   * `kvring devices`), or part of a device or platform name, optionally followed by "/N": that
   * device cut into N sub-devices of equal size ("/0": one per rank). All must share one platform.
   */
  const char *devices;
  int copy_queue;       /* 1: a second in-order queue per rank for copies */
  size_t memory_budget; /* bytes each rank may allocate, cache included; 0: the device's memory
                           divided by the ranks that share it */
  double timeout;       /* [seconds] a step gives up (KVR_E_TIMEOUT) when nothing of it completes
                           for so long; 0: KVR_DEFAULT_TIMEOUT. Commands that the device never
                           ends hold its queues, so the group is lost then: everything on it gives
                           KVR_E_STATE, and destroying it and what belongs to it leaves its OpenCL
                           objects to the driver, which may wait for those commands */
  /* Told, once each, what a user should know although nothing failed, such as a kernel variant that
   * this device cannot run. text is a sentence, valid during the call. NULL: stderr. */
  void (*notice)(void *notice_user, const char *text);
  void *notice_user;
} kvr_group_desc;

/* [seconds] Single launches can take minutes on slow devices, so the default is generous. */
#define KVR_DEFAULT_TIMEOUT 1800.0
#define KVR_MAX_TIMEOUT 1e6

typedef struct kvr_device_info {
  char platform[128];
  char name[128];
  char driver[128];
  char version[64];  /* CL_DEVICE_VERSION */
  char type[16];     /* "cpu", "gpu", "accelerator", "other" */
  char why_not[128]; /* empty: usable; else the reason */
  int platform_index, device_index;
  int compute_units;
  size_t memory_bytes, max_alloc_bytes, local_bytes, max_work_group;
} kvr_device_info;

/* For handlers of SIGINT, SIGTERM and the like (async-signal-safe). Kernels are tested before their
 * first use on a device, and a process that ends meanwhile counts against the kernel; after this
 * call it does not, unless the test has lasted for more than a minute, as those that hang do. */
KVR_API void kvr_interrupted(void);

/* Creates contexts and queues. Owned; release with kvr_group_destroy.
 * Errors: KVR_E_NULL, KVR_E_RANGE (ranks; unknown device, naming what exists), KVR_E_UNSUPPORTED
 * (no platform, device unusable, devices of two platforms), KVR_E_CL. */
KVR_API kvr_status kvr_group_create(const kvr_group_desc *desc, kvr_group **out);
/* Accepts NULL. Caches and sessions on it must be destroyed first. */
KVR_API void kvr_group_destroy(kvr_group *group);

KVR_API int kvr_group_num_ranks(const kvr_group *group);
/* Description of the device of a rank; `slice` text such as "sub-device 1 of 4" is in name. */
KVR_API kvr_status kvr_group_device(const kvr_group *group, int rank, kvr_device_info *out);
/* Bytes allocated by a rank now, the most since creation, and its budget. */
KVR_API kvr_status kvr_group_memory(const kvr_group *group, int rank, size_t *now, size_t *peak,
                                    size_t *budget);

/* All devices of all platforms. *out is owned: release with free(). *num may be 0.
 * Errors: KVR_E_UNSUPPORTED when there is no OpenCL platform at all. */
KVR_API kvr_status kvr_device_list(kvr_device_info **out, int *num);

#ifdef __cplusplus
}
#endif
#endif

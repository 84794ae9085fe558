/* All OpenCL devices of the machine, and why each is usable or not. */
#ifndef KVR_DEVICE_DEVICE_LIST_H
#define KVR_DEVICE_DEVICE_LIST_H

#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 120
#endif
#include <CL/cl.h>

#include "kvring/group.h"

typedef struct kvr_device {
  cl_platform_id platform;
  cl_device_id id; /* a root device: never released */
  kvr_device_info info;
} kvr_device;

typedef struct kvr_devices {
  int num;
  kvr_device *devices; /* (num), by platform, then by device */
} kvr_devices;

/* Asks every platform. Release with kvr_devices_fini.
 * Errors: KVR_E_UNSUPPORTED when there is no platform, KVR_E_OOM. */
kvr_status kvr_devices_init(kvr_devices *devices);
void kvr_devices_fini(kvr_devices *devices);

#endif

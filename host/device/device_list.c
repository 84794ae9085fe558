#include "device/device_list.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "device/cl_error.h"
#include "device/driver_lock.h"

/* ---- one device ---- */

/* Texts and numbers a driver does not give stay empty and 0. */
static void get_text(cl_device_id device, cl_device_info name, char *text, size_t size) {
  char all[1024] = "";
  if (clGetDeviceInfo(device, name, sizeof all, all, NULL) != CL_SUCCESS) all[0] = '\0';
  snprintf(text, size, "%.*s", (int)size - 1, all + strspn(all, " "));
}

static cl_ulong get_ulong(cl_device_id device, cl_device_info name) {
  cl_ulong value = 0;
  return clGetDeviceInfo(device, name, sizeof value, &value, NULL) == CL_SUCCESS ? value : 0;
}

static cl_uint get_uint(cl_device_id device, cl_device_info name) {
  cl_uint value = 0;
  return clGetDeviceInfo(device, name, sizeof value, &value, NULL) == CL_SUCCESS ? value : 0;
}

static size_t get_size(cl_device_id device, cl_device_info name) {
  size_t value = 0;
  return clGetDeviceInfo(device, name, sizeof value, &value, NULL) == CL_SUCCESS ? value : 0;
}

static const char *type_name(cl_device_id device) {
  const cl_ulong type = get_ulong(device, CL_DEVICE_TYPE);
  if (type & CL_DEVICE_TYPE_CPU) return "cpu";
  if (type & CL_DEVICE_TYPE_GPU) return "gpu";
  return type & CL_DEVICE_TYPE_ACCELERATOR ? "accelerator" : "other";
}

/* Why the device cannot run our kernels, or "". */
static void judge(cl_device_id device, kvr_device_info *info) {
  char profile[64];
  int major = 0, minor = 0;
  get_text(device, CL_DEVICE_PROFILE, profile, sizeof profile);
  const int num = sscanf(info->version, "OpenCL %d.%d", &major, &minor);
  const char *why = "";
  if (!get_uint(device, CL_DEVICE_AVAILABLE))
    why = "the driver says it is not available";
  else if (!get_uint(device, CL_DEVICE_COMPILER_AVAILABLE))
    why = "its driver has no compiler";
  else if (strcmp(profile, "FULL_PROFILE") != 0)
    why = "it has the embedded profile, not the full one";
  else if (num != 2 || 10 * major + minor < 12)
    why = "it has an OpenCL version below 1.2";
  else if (!get_uint(device, CL_DEVICE_ENDIAN_LITTLE))
    why = "it is big-endian";
  snprintf(info->why_not, sizeof info->why_not, "%s", why);
}

static void describe(cl_platform_id platform, kvr_device *d) {
  kvr_device_info *info = &d->info;
  char name[1024] = "";
  if (clGetPlatformInfo(platform, CL_PLATFORM_NAME, sizeof name, name, NULL) == CL_SUCCESS)
    snprintf(info->platform, sizeof info->platform, "%.*s", (int)sizeof info->platform - 1, name);
  get_text(d->id, CL_DEVICE_NAME, info->name, sizeof info->name);
  get_text(d->id, CL_DRIVER_VERSION, info->driver, sizeof info->driver);
  get_text(d->id, CL_DEVICE_VERSION, info->version, sizeof info->version);
  snprintf(info->type, sizeof info->type, "%s", type_name(d->id));
  info->compute_units = (int)get_uint(d->id, CL_DEVICE_MAX_COMPUTE_UNITS);
  info->memory_bytes = (size_t)get_ulong(d->id, CL_DEVICE_GLOBAL_MEM_SIZE);
  info->max_alloc_bytes = (size_t)get_ulong(d->id, CL_DEVICE_MAX_MEM_ALLOC_SIZE);
  info->local_bytes = (size_t)get_ulong(d->id, CL_DEVICE_LOCAL_MEM_SIZE);
  info->max_work_group = get_size(d->id, CL_DEVICE_MAX_WORK_GROUP_SIZE);
  judge(d->id, info);
}

/* ---- all platforms ---- */

static kvr_status get_platforms(cl_platform_id **out, cl_uint *num) {
  cl_uint n = 0;
  const cl_int code = clGetPlatformIDs(0, NULL, &n);
  if (code != CL_SUCCESS || n == 0)
    return kvr_fail(
        KVR_E_UNSUPPORTED,
        "there is no OpenCL platform (clGetPlatformIDs: %s): install a driver, e.g. the "
        "package pocl-opencl-icd, which runs on any CPU",
        code == CL_SUCCESS ? "0 platforms" : kvr_cl_error_name(code));
  cl_platform_id *list = calloc(n, sizeof(*list));
  if (list == NULL) return kvr_fail(KVR_E_OOM, "no host memory for %u platforms", (unsigned)n);
  const kvr_status status = kvr_cl_check(clGetPlatformIDs(n, list, NULL), "clGetPlatformIDs");
  if (status != KVR_OK) {
    free(list);
    return status;
  }
  *out = list;
  *num = n;
  return KVR_OK;
}

/* Appends the devices of one platform. One whose devices cannot be listed counts as empty: another
 * platform may still serve. */
static kvr_status add_platform(kvr_devices *all, cl_platform_id platform, int index) {
  cl_uint n = 0;
  if (clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 0, NULL, &n) != CL_SUCCESS || n == 0)
    return KVR_OK;
  cl_device_id *ids = calloc(n, sizeof(*ids));
  kvr_device *grown = realloc(all->devices, ((size_t)all->num + n) * sizeof *grown);
  if (grown != NULL) all->devices = grown;
  if (ids == NULL || grown == NULL) {
    free(ids);
    return kvr_fail(KVR_E_OOM, "no host memory for %u devices", (unsigned)n);
  }
  const cl_int code = clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, n, ids, NULL);
  for (cl_uint i = 0; i < n && code == CL_SUCCESS; i++) {
    kvr_device *d = &all->devices[all->num++];
    *d = (kvr_device){.platform = platform, .id = ids[i]};
    d->info.platform_index = index;
    d->info.device_index = (int)i;
    describe(platform, d);
  }
  free(ids);
  return KVR_OK;
}

kvr_status kvr_devices_init(kvr_devices *devices) {
  *devices = (kvr_devices){0};
  cl_platform_id *platforms = NULL;
  cl_uint num = 0;
  KVR_TRY(get_platforms(&platforms, &num));
  kvr_status status = KVR_OK;
  for (cl_uint i = 0; i < num && status == KVR_OK; i++)
    status = add_platform(devices, platforms[i], (int)i);
  free(platforms);
  if (status != KVR_OK) kvr_devices_fini(devices);
  return status;
}

void kvr_devices_fini(kvr_devices *devices) {
  free(devices->devices);
  *devices = (kvr_devices){0};
}

static kvr_status list_devices(kvr_devices *out) {
  kvr_driver_lock();
  const kvr_status status = kvr_devices_init(out);
  kvr_driver_unlock();
  return status;
}

kvr_status kvr_device_list(kvr_device_info **out, int *num) {
  if (out == NULL || num == NULL) return kvr_fail(KVR_E_NULL, "out or num is NULL");
  kvr_devices all;
  KVR_TRY(list_devices(&all));
  kvr_device_info *infos = calloc((size_t)all.num + 1, sizeof *infos);
  for (int i = 0; infos != NULL && i < all.num; i++) infos[i] = all.devices[i].info;
  const int n = all.num;
  kvr_devices_fini(&all);
  if (infos == NULL) return kvr_fail(KVR_E_OOM, "no host memory for %d devices", n);
  *out = infos;
  *num = n;
  return KVR_OK;
}

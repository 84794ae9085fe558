#include "device/device_select.h"

#include <ctype.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "device/cl_error.h"

enum { MAX_ENTRY = 256 };

/* One entry of the list: "PLATFORM.DEVICE" or part of a name, then "/N" or nothing. */
typedef struct entry {
  char text[MAX_ENTRY]; /* without "/N" */
  int parts;            /* N; 1 without "/N", 0 for "/0" */
} entry;

/* ---- reading the list ---- */

static bool all_digits(const char *text) {
  return text[0] != '\0' && text[strspn(text, "0123456789")] == '\0';
}

/* Decimal digits as an int, INT_MAX for more than fits. */
static int to_int(const char *digits) {
  const unsigned long value = strtoul(digits, NULL, 10);
  return value > INT_MAX ? INT_MAX : (int)value;
}

/* Device names may hold slashes: only a "/" before nothing but digits cuts. */
static kvr_status read_entry(const char *begin, size_t len, entry *out) {
  while (len > 0 && isspace((unsigned char)*begin)) begin++, len--;
  while (len > 0 && isspace((unsigned char)begin[len - 1])) len--;
  if (len == 0)
    return kvr_fail(KVR_E_RANGE, "the list of devices has an empty entry: remove a comma");
  if (len >= sizeof out->text)
    return kvr_fail(KVR_E_RANGE, "an entry of the list of devices has %zu characters, limit %d",
                    len, MAX_ENTRY - 1);
  memcpy(out->text, begin, len);
  out->text[len] = '\0';
  out->parts = 1;
  char *slash = strrchr(out->text, '/');
  if (slash == NULL || slash == out->text || !all_digits(slash + 1)) return KVR_OK;
  out->parts = to_int(slash + 1);
  *slash = '\0';
  return KVR_OK;
}

/* ---- finding a device ---- */

static bool contains(const char *text, const char *part) {
  const size_t len = strlen(part);
  for (; *text != '\0'; text++) {
    size_t i = 0;
    while (i < len && tolower((unsigned char)text[i]) == tolower((unsigned char)part[i])) i++;
    if (i == len) return true;
  }
  return false;
}

static void list_names(const kvr_devices *all, char *text, size_t size) {
  size_t used = 0;
  snprintf(text, size, "none");
  for (int i = 0; i < all->num && used < size; i++) {
    const kvr_device_info *d = &all->devices[i].info;
    const int n = snprintf(text + used, size - used, "%s%d.%d %s", i > 0 ? ", " : "",
                           d->platform_index, d->device_index, d->name);
    used += n > 0 ? (size_t)n : 0;
  }
}

static kvr_status fail_unknown(const kvr_devices *all, const char *text, const char *fix) {
  char names[1024];
  list_names(all, names, sizeof names);
  return kvr_fail(KVR_E_RANGE, "no OpenCL device matches '%s': %s. Devices: %s", text, fix, names);
}

/* "PLATFORM.DEVICE" and nothing else. */
static bool read_index(const char *text, int *platform, int *device) {
  const char *dot = text + strspn(text, "0123456789");
  if (dot == text || *dot != '.' || !all_digits(dot + 1)) return false;
  *platform = to_int(text);
  *device = to_int(dot + 1);
  return true;
}

static kvr_status fail_unusable(const kvr_device *d) {
  return kvr_fail(KVR_E_UNSUPPORTED, "device %d.%d (%s) cannot be used: %s", d->info.platform_index,
                  d->info.device_index, d->info.name, d->info.why_not);
}

static kvr_status find_index(const kvr_devices *all, const char *text, int platform, int device,
                             const kvr_device **out) {
  for (int i = 0; i < all->num; i++) {
    const kvr_device *d = &all->devices[i];
    if (d->info.platform_index != platform || d->info.device_index != device) continue;
    if (d->info.why_not[0] != '\0') return fail_unusable(d);
    *out = d;
    return KVR_OK;
  }
  return fail_unknown(all, text, "there is no such index");
}

static const kvr_device *match(const kvr_devices *all, const char *text, bool platform,
                               bool usable) {
  for (int i = 0; i < all->num; i++) {
    const kvr_device_info *d = &all->devices[i].info;
    if (contains(platform ? d->platform : d->name, text) && (d->why_not[0] == '\0') == usable)
      return &all->devices[i];
  }
  return NULL;
}

/* The first usable device whose platform contains text, or else whose name does: the name of a CPU,
 * its vendor included, is in the device names of other vendors' platforms too. A lone digit is more
 * likely an index than a part of a name. */
static kvr_status find_name(const kvr_devices *all, const char *text, const kvr_device **out) {
  if (all_digits(text) && strlen(text) <= 2)
    return fail_unknown(all, text, "write PLATFORM.DEVICE, e.g. 0.0");
  for (int usable = 1; usable >= 0; usable--)
    for (int platform = 1; platform >= 0; platform--) {
      const kvr_device *d = match(all, text, platform != 0, usable != 0);
      if (d == NULL) continue;
      if (!usable) return fail_unusable(d);
      *out = d;
      return KVR_OK;
    }
  return fail_unknown(all, text, "write PLATFORM.DEVICE or part of a name");
}

static kvr_status find(const kvr_devices *all, const char *text, const kvr_device **out) {
  int platform, device;
  if (read_index(text, &platform, &device)) return find_index(all, text, platform, device, out);
  return find_name(all, text, out);
}

static kvr_status find_default(const kvr_devices *all, const kvr_device **out) {
  for (int i = 0; i < all->num; i++) {
    if (all->devices[i].info.why_not[0] != '\0') continue;
    *out = &all->devices[i];
    return KVR_OK;
  }
  if (all->num > 0) return fail_unusable(&all->devices[0]);
  return kvr_fail(KVR_E_UNSUPPORTED,
                  "the OpenCL platforms have no device: check the driver (with PoCL: that "
                  "POCL_CACHE_DIR can be written), or install the package pocl-opencl-icd");
}

/* ---- cutting a device ---- */

static bool can_partition(cl_device_id device, cl_device_partition_property how) {
  cl_device_partition_property types[16];
  size_t size = 0;
  if (clGetDeviceInfo(device, CL_DEVICE_PARTITION_PROPERTIES, sizeof types, types, &size) !=
      CL_SUCCESS)
    return false;
  for (size_t i = 0; i < size / sizeof types[0]; i++)
    if (types[i] == how) return true;
  return false;
}

static kvr_status check_parts(const kvr_device *d, int parts) {
  cl_uint most = 0;
  clGetDeviceInfo(d->id, CL_DEVICE_PARTITION_MAX_SUB_DEVICES, sizeof most, &most, NULL);
  if (!can_partition(d->id, CL_DEVICE_PARTITION_BY_COUNTS) &&
      !can_partition(d->id, CL_DEVICE_PARTITION_EQUALLY))
    return kvr_fail(KVR_E_UNSUPPORTED,
                    "device %d.%d (%s) cannot be cut into sub-devices: name it without /%d, ranks "
                    "then share it",
                    d->info.platform_index, d->info.device_index, d->info.name, parts);
  if (parts > d->info.compute_units || (cl_uint)parts > most)
    return kvr_fail(KVR_E_RANGE,
                    "device %d.%d (%s) has %d compute units and cannot be cut into %d sub-devices: "
                    "ask for fewer (a PoCL CPU gets more units from POCL_MAX_PTHREAD_COUNT)",
                    d->info.platform_index, d->info.device_index, d->info.name,
                    d->info.compute_units, parts);
  return KVR_OK;
}

static kvr_status cut_by_counts(const kvr_device *d, int parts, cl_device_id *ids) {
  cl_device_partition_property *how = calloc((size_t)parts + 3, sizeof *how);
  if (how == NULL) return kvr_fail(KVR_E_OOM, "no host memory for %d sub-devices", parts);
  how[0] = CL_DEVICE_PARTITION_BY_COUNTS;
  for (int i = 0; i < parts; i++) how[1 + i] = d->info.compute_units / parts;
  how[1 + parts] = CL_DEVICE_PARTITION_BY_COUNTS_LIST_END;
  const cl_int code = clCreateSubDevices(d->id, how, (cl_uint)parts, ids, NULL);
  free(how);
  return kvr_cl_check(code, "clCreateSubDevices");
}

/* Equal parts of floor(units / parts) units may be more than asked for: the rest is let go. */
static kvr_status cut_equally(const kvr_device *d, int parts, cl_device_id *ids) {
  const cl_device_partition_property how[3] = {CL_DEVICE_PARTITION_EQUALLY,
                                               d->info.compute_units / parts, 0};
  cl_uint num = 0;
  KVR_CL(clCreateSubDevices, (d->id, how, 0, NULL, &num));
  if (num < (cl_uint)parts)
    return kvr_fail(KVR_E_CL, "clCreateSubDevices gives %u parts instead of %d", (unsigned)num,
                    parts);
  cl_device_id *all = calloc(num, sizeof(*all));
  if (all == NULL) return kvr_fail(KVR_E_OOM, "no host memory for %u sub-devices", (unsigned)num);
  const cl_int code = clCreateSubDevices(d->id, how, num, all, NULL);
  for (cl_uint i = 0; i < num && code == CL_SUCCESS; i++) {
    if (i < (cl_uint)parts)
      ids[i] = all[i];
    else
      clReleaseDevice(all[i]);
  }
  free(all);
  return kvr_cl_check(code, "clCreateSubDevices");
}

static kvr_status cut(const kvr_device *d, int parts, cl_device_id *ids) {
  return can_partition(d->id, CL_DEVICE_PARTITION_BY_COUNTS) ? cut_by_counts(d, parts, ids)
                                                             : cut_equally(d, parts, ids);
}

/* ---- places ---- */

static kvr_status reserve(kvr_places *places, int more) {
  const size_t num = (size_t)places->num + (size_t)more;
  if (num > INT_MAX) return kvr_fail(KVR_E_RANGE, "the list of devices has too many entries");
  kvr_place *grown = realloc(places->list, num * sizeof *grown);
  if (grown == NULL) return kvr_fail(KVR_E_OOM, "no host memory for %zu devices", num);
  places->list = grown;
  return KVR_OK;
}

static kvr_status add_parts(kvr_places *places, const kvr_device *d, int parts) {
  KVR_TRY(check_parts(d, parts)); /* before anything is as long as a number that was typed */
  cl_device_id *ids = calloc((size_t)parts, sizeof(*ids));
  if (ids == NULL) return kvr_fail(KVR_E_OOM, "no host memory for %d sub-devices", parts);
  kvr_status status = reserve(places, parts);
  if (status == KVR_OK) status = cut(d, parts, ids);
  for (int i = 0; i < parts && status == KVR_OK; i++)
    places->list[places->num++] = (kvr_place){.root = *d, .id = ids[i], .part = i, .parts = parts};
  free(ids);
  return status;
}

static kvr_status add(kvr_places *places, const kvr_device *d, int parts) {
  if (places->num > 0 && places->list[0].root.platform != d->platform)
    return kvr_fail(KVR_E_UNSUPPORTED,
                    "the list of devices names two platforms, %s and %s: all ranks of a group "
                    "must run on one",
                    places->list[0].root.info.platform, d->info.platform);
  if (parts > 1) return add_parts(places, d, parts);
  KVR_TRY(reserve(places, 1));
  places->list[places->num++] = (kvr_place){.root = *d, .id = d->id, .parts = 1};
  return KVR_OK;
}

static kvr_status add_list(const kvr_devices *all, const char *list, int num_ranks,
                           kvr_places *places) {
  for (const char *at = list;; at++) {
    const size_t len = strcspn(at, ",");
    const kvr_device *device = all->devices; /* find() sets it */
    entry e = {.parts = 1};
    KVR_TRY(read_entry(at, len, &e));
    KVR_TRY(find(all, e.text, &device));
    KVR_TRY(add(places, device, e.parts == 0 ? num_ranks : e.parts));
    at += len;
    if (*at == '\0') return KVR_OK;
  }
}

kvr_status kvr_places_init(const kvr_devices *devices, const char *list, int num_ranks,
                           kvr_places *places) {
  const kvr_device *device = devices->devices; /* find_default() sets it */
  kvr_status status;
  *places = (kvr_places){0};
  if (list != NULL && list[0] != '\0') {
    status = add_list(devices, list, num_ranks, places);
  } else {
    status = find_default(devices, &device);
    if (status == KVR_OK) status = add(places, device, 1);
  }
  if (status != KVR_OK) kvr_places_fini(places);
  return status;
}

void kvr_places_fini(kvr_places *places) {
  for (int i = 0; i < places->num; i++)
    if (places->list[i].parts > 1) clReleaseDevice(places->list[i].id);
  free(places->list);
  *places = (kvr_places){0};
}

#include "device/group.h"

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "core/validate.h"
#include "device/cl_error.h"
#include "device/driver_lock.h"
#include "device/watch.h"
#include "kvring/opencl.h"

/* ---- memory of a rank ---- */

/* Drivers of CPU devices report a part of the memory that they could use: PoCL computes it from a
 * limit. What the machine has is the truth there. */
static size_t machine_memory(void) {
#ifdef _SC_PHYS_PAGES
  const long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
  return pages > 0 && size > 0 ? (size_t)pages * (size_t)size : 0;
#else
  return 0;
#endif
}

static bool is_cpu(const kvr_place *place) { return strcmp(place->root.info.type, "cpu") == 0; }

static const kvr_place *place_of(const kvr_group *group, int rank) {
  return &group->places.list[rank % group->places.num];
}

/* Whether two places draw on the same memory; all CPU devices share the machine's. */
static bool share_memory(const kvr_place *a, const kvr_place *b) {
  return a->root.id == b->root.id || (is_cpu(a) && is_cpu(b));
}

static size_t default_budget(const kvr_group *group, int rank) {
  const kvr_place *place = place_of(group, rank);
  size_t memory = place->root.info.memory_bytes, sharers = 1; /* itself */
  if (is_cpu(place) && machine_memory() > memory) memory = machine_memory();
  for (int r = 0; r < group->num_ranks; r++)
    sharers += r != rank && share_memory(place, place_of(group, r));
  return memory / sharers;
}

/* KVRING_MAX_ALLOC=BYTES lowers the largest buffer of every rank, so that tests and users can see a
 * cache split without a device that needs it. */
static kvr_status read_max_alloc(size_t *out) {
  const char *text = getenv("KVRING_MAX_ALLOC");
  *out = SIZE_MAX;
  if (text == NULL || text[0] == '\0') return KVR_OK;
  char *end;
  errno = 0;
  const unsigned long long value = strtoull(text, &end, 10);
  if (errno != 0 || *end != '\0' || text[strspn(text, "0123456789")] != '\0' || value == 0 ||
      value > SIZE_MAX)
    return kvr_fail(KVR_E_RANGE, "KVRING_MAX_ALLOC is '%s'; it must be a number of bytes", text);
  *out = (size_t)value;
  return KVR_OK;
}

/* ---- creation ---- */

static kvr_status check_desc(const kvr_group_desc *desc) {
  if (desc->struct_size != sizeof *desc)
    return kvr_fail(KVR_E_SHAPE,
                    "kvr_group_desc.struct_size is %zu, this library expects %zu: set it to sizeof",
                    desc->struct_size, sizeof *desc);
  if (desc->num_ranks < 1 || desc->num_ranks > KVR_MAX_RANKS)
    return kvr_fail(KVR_E_RANGE, "num_ranks is %d; it must be between 1 and %d", desc->num_ranks,
                    KVR_MAX_RANKS);
  if (desc->copy_queue != 0 && desc->copy_queue != 1)
    return kvr_fail(KVR_E_RANGE, "copy_queue is %d; it must be 0 or 1", desc->copy_queue);
  if (!(desc->timeout >= 0 && desc->timeout <= KVR_MAX_TIMEOUT))
    return kvr_fail(KVR_E_RANGE, "timeout is %g s; it must be between 0 (default) and %g s",
                    desc->timeout, KVR_MAX_TIMEOUT);
  return KVR_OK;
}

static kvr_status select_places(kvr_group *group, const kvr_group_desc *desc) {
  kvr_devices devices;
  KVR_TRY(kvr_devices_init(&devices));
  const kvr_status status =
      kvr_places_init(&devices, desc->devices, desc->num_ranks, &group->places);
  kvr_devices_fini(&devices);
  return status;
}

/* Compute units and name of a sub-device are its own, the rest is the root device's. */
static void describe_rank(kvr_group *group, int rank) {
  const kvr_place *place = place_of(group, rank);
  kvr_device_info *info = &group->infos[rank];
  char slice[64];
  *info = place->root.info;
  if (place->parts == 1) return;
  const int len =
      snprintf(slice, sizeof slice, " (sub-device %d of %d)", place->part + 1, place->parts);
  const int room = (int)sizeof info->name - 1 - len;
  snprintf(info->name, sizeof info->name, "%.*s%s", room, place->root.info.name, slice);
  cl_uint units = 0;
  if (clGetDeviceInfo(place->id, CL_DEVICE_MAX_COMPUTE_UNITS, sizeof units, &units, NULL) ==
      CL_SUCCESS)
    info->compute_units = (int)units;
}

static kvr_status init_ranks(kvr_group *group, const kvr_group_desc *desc) {
  size_t max_alloc;
  KVR_TRY(read_max_alloc(&max_alloc));
  for (int r = 0; r < group->num_ranks; r++) {
    describe_rank(group, r);
    kvr_rank *rank = &group->ranks[r];
    const size_t largest = group->infos[r].max_alloc_bytes;
    rank->device = place_of(group, r)->id;
    rank->max_alloc = largest < max_alloc ? largest : max_alloc;
    rank->budget = desc->memory_budget > 0 ? desc->memory_budget : default_budget(group, r);
  }
  return KVR_OK;
}

/* The distinct devices of the ranks (at most num_ranks); returns how many. */
static cl_uint distinct_devices(const kvr_group *group, cl_device_id *devices) {
  cl_uint num = 0;
  for (int r = 0; r < group->num_ranks; r++) {
    cl_uint i = 0;
    while (i < num && devices[i] != group->ranks[r].device) i++;
    if (i == num) devices[num++] = group->ranks[r].device;
  }
  return num;
}

static kvr_status create_context(kvr_group *group) {
  cl_device_id *devices = calloc((cl_uint)group->num_ranks, sizeof(*devices));
  if (devices == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a group");
  const cl_context_properties properties[3] =
      {CL_CONTEXT_PLATFORM, (cl_context_properties)group->places.list[0].root.platform, 0};
  cl_int code;
  const cl_context context =
      clCreateContext(properties, distinct_devices(group, devices), devices, NULL, NULL, &code);
  free(devices);
  KVR_TRY(kvr_cl_check(code, "clCreateContext"));
  for (int r = 0; r < group->num_ranks; r++) group->ranks[r].context = context;
  return KVR_OK;
}

static kvr_status create_queue(const kvr_rank *rank, cl_command_queue *out) {
  cl_int code;
  const cl_command_queue queue =
      clCreateCommandQueue(rank->context, rank->device, CL_QUEUE_PROFILING_ENABLE, &code);
  KVR_TRY(kvr_cl_check(code, "clCreateCommandQueue"));
  *out = queue;
  return KVR_OK;
}

static kvr_status create_queues(kvr_group *group) {
  for (int r = 0; r < group->num_ranks; r++) {
    kvr_rank *rank = &group->ranks[r];
    kvr_status status = create_queue(rank, &rank->queue);
    if (status == KVR_OK && group->has_copy_queues) status = create_queue(rank, &rank->copy_queue);
    if (status != KVR_OK) return kvr_fail_at(status, "rank %d", r);
    if (!group->has_copy_queues) rank->copy_queue = rank->queue;
  }
  return KVR_OK;
}

static kvr_status init(kvr_group *group, const kvr_group_desc *desc) {
  group->num_ranks = desc->num_ranks;
  group->has_copy_queues = desc->copy_queue;
  group->timeout = desc->timeout > 0 ? desc->timeout : KVR_DEFAULT_TIMEOUT;
  group->notice = desc->notice;
  group->notice_user = desc->notice_user;
  group->ranks = calloc((size_t)desc->num_ranks, sizeof *group->ranks);
  group->infos = calloc((size_t)desc->num_ranks, sizeof *group->infos);
  if (group->ranks == NULL || group->infos == NULL)
    return kvr_fail(KVR_E_OOM, "no host memory for a group of %d ranks", desc->num_ranks);
  KVR_TRY(select_places(group, desc));
  KVR_TRY(init_ranks(group, desc));
  KVR_TRY(create_context(group));
  return create_queues(group);
}

kvr_status kvr_group_create(const kvr_group_desc *desc, kvr_group **out) {
  if (desc == NULL || out == NULL) return kvr_fail(KVR_E_NULL, "desc or out is NULL");
  *out = NULL;
  KVR_TRY(check_desc(desc));
  kvr_group *group = calloc(1, sizeof *group);
  if (group == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a group");
  kvr_driver_lock();
  const kvr_status status = init(group, desc);
  kvr_driver_unlock();
  if (status != KVR_OK) {
    kvr_group_destroy(group);
    return status;
  }
  *out = group;
  return KVR_OK;
}

static void release_rank_queues(kvr_rank *rank) {
  if (rank->copy_queue != NULL && rank->copy_queue != rank->queue)
    clReleaseCommandQueue(rank->copy_queue);
  if (rank->queue != NULL) clReleaseCommandQueue(rank->queue);
}

static void release_objects(kvr_group *group) {
  for (int r = 0; group->ranks != NULL && r < group->num_ranks; r++)
    release_rank_queues(&group->ranks[r]);
  if (group->ranks != NULL && group->ranks[0].context != NULL)
    clReleaseContext(group->ranks[0].context);
  kvr_places_fini(&group->places);
}

void kvr_group_destroy(kvr_group *group) {
  if (group == NULL) return;
  if (kvr_group_is_stuck(group))
    free(group->places.list); /* the rest is left to the driver */
  else
    release_objects(group);
  free(group->infos);
  free(group->ranks);
  free(group);
}

/* ---- notices ---- */

void kvr_group_notice(const kvr_group *group, const char *format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  if (group->notice != NULL)
    group->notice(group->notice_user, text);
  else
    fprintf(stderr, "kvring: %s\n", text);
}

/* ---- questions ---- */

kvr_status kvr_group_check_rank(const kvr_group *group, int rank) {
  if (rank >= 0 && rank < group->num_ranks) return KVR_OK;
  return kvr_fail(KVR_E_RANGE, "rank is %d; the group has ranks 0 to %d", rank,
                  group->num_ranks - 1);
}

int kvr_group_num_ranks(const kvr_group *group) { return group == NULL ? 0 : group->num_ranks; }

kvr_status kvr_group_device(const kvr_group *group, int rank, kvr_device_info *out) {
  if (group == NULL || out == NULL) return kvr_fail(KVR_E_NULL, "group or out is NULL");
  KVR_TRY(kvr_group_check_rank(group, rank));
  *out = group->infos[rank];
  return KVR_OK;
}

kvr_status kvr_group_memory(const kvr_group *group, int rank, size_t *now, size_t *peak,
                            size_t *budget) {
  if (group == NULL) return kvr_fail(KVR_E_NULL, "group is NULL");
  KVR_TRY(kvr_group_check_rank(group, rank));
  if (now != NULL) *now = group->ranks[rank].allocated;
  if (peak != NULL) *peak = group->ranks[rank].peak;
  if (budget != NULL) *budget = group->ranks[rank].budget;
  return KVR_OK;
}

kvr_status kvr_group_context(const kvr_group *group, int rank, cl_context *out) {
  if (group == NULL || out == NULL) return kvr_fail(KVR_E_NULL, "group or out is NULL");
  KVR_TRY(kvr_group_check_rank(group, rank));
  *out = group->ranks[rank].context;
  return KVR_OK;
}

kvr_status kvr_group_queue(const kvr_group *group, int rank, cl_command_queue *out) {
  if (group == NULL || out == NULL) return kvr_fail(KVR_E_NULL, "group or out is NULL");
  KVR_TRY(kvr_group_check_rank(group, rank));
  *out = group->ranks[rank].queue;
  return KVR_OK;
}

/* ---- buffers ---- */

static kvr_status check_alloc(const kvr_group *group, int rank, size_t bytes, size_t allocated,
                              const char *what) {
  const kvr_rank *r = &group->ranks[rank];
  if (bytes > r->max_alloc)
    return kvr_fail(KVR_E_OOM,
                    "rank %d: %s needs a buffer of %zu bytes, the largest allocation of %s is %zu: "
                    "make it smaller",
                    rank, what, bytes, group->infos[rank].name, r->max_alloc);
  if (bytes > r->budget - allocated)
    return kvr_fail(KVR_E_OOM,
                    "rank %d: %s needs %zu bytes, but %zu of the budget of %zu are in use: raise "
                    "memory_budget, or use fewer pages or smaller limits",
                    rank, what, bytes, allocated, r->budget);
  return KVR_OK;
}

/* Counts bytes as allocated if the budget allows it, also against other threads. */
static kvr_status take(kvr_group *group, int rank, size_t bytes, const char *what) {
  kvr_rank *r = &group->ranks[rank];
  size_t before = atomic_load(&r->allocated), peak = atomic_load(&r->peak);
  do KVR_TRY(check_alloc(group, rank, bytes, before, what));
  while (!atomic_compare_exchange_weak(&r->allocated, &before, before + bytes));
  while (peak < before + bytes && !atomic_compare_exchange_weak(&r->peak, &peak, before + bytes)) {
  }
  return KVR_OK;
}

kvr_status kvr_group_alloc(kvr_group *group, int rank, size_t bytes, const char *what,
                           cl_mem *out) {
  *out = NULL;
  KVR_TRY(kvr_group_check_rank(group, rank));
  if (bytes == 0) return KVR_OK;
  KVR_TRY(kvr_group_check_moving(group));
  KVR_TRY(take(group, rank, bytes, what));
  cl_int code;
  const cl_mem mem =
      clCreateBuffer(group->ranks[rank].context, CL_MEM_READ_WRITE, bytes, NULL, &code);
  if (code != CL_SUCCESS) {
    atomic_fetch_sub(&group->ranks[rank].allocated, bytes);
    return kvr_fail_at(kvr_cl_check(code, "clCreateBuffer"), "rank %d: %s of %zu bytes", rank, what,
                       bytes);
  }
  *out = mem;
  return KVR_OK;
}

void kvr_group_free(kvr_group *group, int rank, cl_mem mem, size_t bytes) {
  if (mem == NULL) return;
  if (!kvr_group_is_stuck(group)) clReleaseMemObject(mem);
  atomic_fetch_sub(&group->ranks[rank].allocated, bytes);
}

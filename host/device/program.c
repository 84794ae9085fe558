#include "device/program.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "device/binary_file.h"
#include "device/cl_error.h"
#include "device/quarantine.h"

/* ---- embedded sources ---- */

/* Generated from kernels_cl/ by the build; each ends with a NUL that its length does not count. */
extern const char kvr_src_shared_h[], kvr_src_numbers_h[], kvr_src_spans_h[];
extern const char kvr_src_attend_cl[], kvr_src_attend_bf16_cl[], kvr_src_attend_plain_cl[];
extern const char kvr_src_merge_cl[], kvr_src_rows_cl[];

static const struct {
  const char *file;
  const char *text;
} sources[] = {
    {"attend.cl", kvr_src_attend_cl},
    {"attend_bf16.cl", kvr_src_attend_bf16_cl},
    {"attend_plain.cl", kvr_src_attend_plain_cl},
    {"merge.cl", kvr_src_merge_cl},
    {"rows.cl", kvr_src_rows_cl},
};

static const char *find_source(const char *file) {
  for (size_t i = 0; i < sizeof sources / sizeof sources[0]; i++)
    if (strcmp(sources[i].file, file) == 0) return sources[i].text;
  return NULL;
}

/* printf into new memory (owned), NULL when there is none. */
__attribute__((format(printf, 1, 2))) static char *print_new(const char *format, ...) {
  va_list args, again;
  va_start(args, format);
  va_copy(again, args);
  const int len = vsnprintf(NULL, 0, format, args);
  char *text = len < 0 ? NULL : malloc((size_t)len + 1);
  if (text != NULL) vsnprintf(text, (size_t)len + 1, format, again);
  va_end(again);
  va_end(args);
  return text;
}

/* ---- what is to be built ---- */

typedef struct job {
  const kvr_group *group;
  int rank;
  cl_context context;
  cl_device_id device;
  const kvr_device_info *info;
  const char *file;
  char *source;  /* headers and the file, each after a #line that names it */
  char *options; /* all build options */
  char *key;     /* everything the binary depends on */
} job;

/* Masked scores are -inf and empty rows have LSE -inf, so infinities must mean what they say. */
static kvr_status check_options(const char *options) {
  static const char *const refused[] = {"-cl-fast-relaxed-math", "-cl-finite-math-only",
                                        "-cl-unsafe-math-optimizations"};
  for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
    if (strstr(options, refused[i]) != NULL)
      return kvr_fail(KVR_E_UNSUPPORTED,
                      "build option %s would break masks, which need infinities: remove it",
                      refused[i]);
  return KVR_OK;
}

static void platform_version(cl_device_id device, char *text, size_t size) {
  cl_platform_id platform;
  text[0] = '\0';
  if (clGetDeviceInfo(device, CL_DEVICE_PLATFORM, sizeof(platform), &platform, NULL) == CL_SUCCESS)
    if (clGetPlatformInfo(platform, CL_PLATFORM_VERSION, size, text, NULL) != CL_SUCCESS)
      text[0] = '\0';
}

/* Asks the driver: the texts of kvr_device_info may be cut, and name a sub-device, which shares
 * binaries with its device. */
static void device_text(cl_device_id device, cl_device_info name, char *text, size_t size) {
  if (clGetDeviceInfo(device, name, size, text, NULL) != CL_SUCCESS) text[0] = '\0';
}

static char *make_key(const job *j) {
  char platform[512], name[512], version[512], driver[512];
  platform_version(j->device, platform, sizeof platform);
  device_text(j->device, CL_DEVICE_NAME, name, sizeof name);
  device_text(j->device, CL_DEVICE_VERSION, version, sizeof version);
  device_text(j->device, CL_DRIVER_VERSION, driver, sizeof driver);
  return print_new("platform %s\nplatform version %s\ndevice %s\ndevice version %s\ndriver %s\n"
                   "kvring %s\noptions %s\nsource\n%s",
                   j->info->platform, platform, name, version, driver, kvr_version(), j->options,
                   j->source);
}

static void job_fini(job *j) {
  free(j->source);
  free(j->options);
  free(j->key);
  *j = (job){0};
}

static kvr_status job_init(job *j, const kvr_group *group, int rank, const char *file,
                           const char *options) {
  const char *text = find_source(file);
  if (text == NULL) return kvr_fail(KVR_E_RANGE, "there is no kernel source '%s'", file);
  *j = (job){.group = group,
             .rank = rank,
             .context = group->ranks[rank].context,
             .device = group->ranks[rank].device,
             .info = &group->infos[rank],
             .file = file};
  j->source = print_new("#line 1 \"shared.h\"\n%s\n#line 1 \"numbers.h\"\n%s\n"
                        "#line 1 \"spans.h\"\n%s\n#line 1 \"%s\"\n%s",
                        kvr_src_shared_h, kvr_src_numbers_h, kvr_src_spans_h, file, text);
  j->options = print_new("-cl-std=CL1.2 -Werror%s%s", options[0] != '\0' ? " " : "", options);
  if (j->source != NULL && j->options != NULL) j->key = make_key(j);
  if (j->key != NULL) return KVR_OK;
  job_fini(j);
  return kvr_fail(KVR_E_OOM, "no host memory for the source of %s", file);
}

/* ---- from source ---- */

/* Codes that blame the program; others say nothing about it. */
static bool compiler_refused(cl_int code) {
  return code == CL_BUILD_PROGRAM_FAILURE || code == CL_COMPILE_PROGRAM_FAILURE ||
         code == CL_LINK_PROGRAM_FAILURE;
}

/* The log's first lines are those of the first errors. KVR_E_UNSUPPORTED if the compiler refuses
 * the program. */
static kvr_status fail_build(const job *j, cl_program program, cl_int code) {
  enum { SHOWN = 1000 };
  size_t size = 0;
  char *log = NULL;
  if (clGetProgramBuildInfo(program, j->device, CL_PROGRAM_BUILD_LOG, 0, NULL, &size) == CL_SUCCESS)
    log = calloc(size + 1, 1);
  if (log != NULL) clGetProgramBuildInfo(program, j->device, CL_PROGRAM_BUILD_LOG, size, log, NULL);
  const kvr_status kind = compiler_refused(code) ? KVR_E_UNSUPPORTED : KVR_E_CL;
  const kvr_status status =
      kvr_fail(kind, "clBuildProgram: %s (%d): %s with options '%s' on %s, driver %s: %.*s",
               kvr_cl_error_name(code), (int)code, j->file, j->options, j->info->name,
               j->info->driver, SHOWN, log != NULL && log[0] != '\0' ? log : "no build log");
  free(log);
  return status;
}

static kvr_status build_from_source(const job *j, cl_program *out) {
  const char *text = j->source;
  cl_int code;
  const cl_program program = clCreateProgramWithSource(j->context, 1, &text, NULL, &code);
  KVR_TRY(kvr_cl_check(code, "clCreateProgramWithSource"));
  code = clBuildProgram(program, 1, &j->device, j->options, NULL, NULL);
  if (code != CL_SUCCESS) {
    const kvr_status status = fail_build(j, program, code);
    clReleaseProgram(program);
    return status;
  }
  *out = program;
  return KVR_OK;
}

/* ---- binaries ---- */

/* Whatever a driver has against a stored binary: it is built from source then. */
static cl_program build_from_binary(const job *j, const unsigned char *binary, size_t size) {
  cl_int code, loaded = CL_SUCCESS;
  const cl_program program =
      clCreateProgramWithBinary(j->context, 1, &j->device, &size, &binary, &loaded, &code);
  if (code != CL_SUCCESS) return NULL;
  if (loaded == CL_SUCCESS &&
      clBuildProgram(program, 1, &j->device, j->options, NULL, NULL) == CL_SUCCESS)
    return program;
  clReleaseProgram(program);
  return NULL;
}

/* The device that a sub-device is part of, NULL for a root device. */
static cl_device_id parent_of(cl_device_id device) {
  cl_device_id parent;
  const cl_int code =
      clGetDeviceInfo(device, CL_DEVICE_PARENT_DEVICE, sizeof(parent), &parent, NULL);
  return code == CL_SUCCESS ? parent : NULL;
}

/* Index of our device among those of the program; -1: not found. PoCL lists whole devices where a
 * program was built for their sub-devices. */
static int find_device(const job *j, cl_program program, cl_uint num) {
  cl_device_id *devices = calloc(num, sizeof(*devices));
  const cl_device_id parent = parent_of(j->device);
  int index = -1;
  if (devices != NULL && clGetProgramInfo(program, CL_PROGRAM_DEVICES, num * sizeof(*devices),
                                          devices, NULL) == CL_SUCCESS)
    for (cl_uint i = 0; i < num && index < 0; i++)
      if (devices[i] == j->device || (parent != NULL && devices[i] == parent)) index = (int)i;
  free(devices);
  return index;
}

/* Memory for the binaries of all devices. NULL should leave a device out, but PoCL writes there. */
static bool allocate_binaries(const size_t *sizes, cl_uint num, unsigned char **binaries) {
  for (cl_uint i = 0; i < num; i++) {
    binaries[i] = sizes[i] > 0 ? malloc(sizes[i]) : NULL;
    if (sizes[i] > 0 && binaries[i] == NULL) return false;
  }
  return true;
}

/* The binary of device `index` of num (owned), NULL if the driver has none. */
static unsigned char *get_binary(cl_program program, cl_uint num, int index, size_t *out_size) {
  size_t *sizes = calloc(num, sizeof *sizes);
  unsigned char **binaries = calloc(num, sizeof *binaries), *binary = NULL;
  if (sizes != NULL && binaries != NULL &&
      clGetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, num * sizeof *sizes, sizes, NULL) ==
          CL_SUCCESS &&
      allocate_binaries(sizes, num, binaries) &&
      clGetProgramInfo(program, CL_PROGRAM_BINARIES, num * sizeof *binaries, binaries, NULL) ==
          CL_SUCCESS) {
    *out_size = sizes[index];
    binary = binaries[index];
    binaries[index] = NULL;
  }
  for (cl_uint i = 0; binaries != NULL && i < num; i++) free(binaries[i]);
  free(sizes);
  free(binaries);
  return binary;
}

static void store(const job *j, cl_program program, const char *path) {
  cl_uint num = 0;
  size_t size = 0;
  if (clGetProgramInfo(program, CL_PROGRAM_NUM_DEVICES, sizeof num, &num, NULL) != CL_SUCCESS)
    return;
  const int index = find_device(j, program, num);
  unsigned char *binary = index < 0 ? NULL : get_binary(program, num, index, &size);
  if (binary != NULL) kvr_binary_store(path, j->key, binary, size);
  free(binary);
}

/* Where binary and quarantine of a job lie; empty: nothing is kept. */
static void find_path(const job *j, char *path, size_t size) {
  char dir[4096];
  if (!kvr_binary_dir(dir, sizeof dir) || !kvr_binary_path(dir, j->key, path, size)) path[0] = '\0';
}

static cl_program load(const job *j, const char *path) {
  size_t size;
  unsigned char *binary = kvr_binary_load(path, j->key, &size);
  const cl_program program = binary == NULL ? NULL : build_from_binary(j, binary, size);
  free(binary);
  return program;
}

/* ---- tests before first use ---- */

static kvr_status build_and_test(const job *j, const kvr_program_test *test, cl_program *out) {
  KVR_TRY(build_from_source(j, out));
  const kvr_status status = test->run(test->user, j->group, j->rank, *out);
  if (status == KVR_OK) return KVR_OK;
  clReleaseProgram(*out);
  *out = NULL;
  return status;
}

/* Remembers the reason and tells the user, who must know why things are slower than they could be.
 */
static kvr_status quarantine(const job *j, const char *path, const char *name, const char *reason) {
  char text[KVR_REASON_SIZE], kept[KVR_REASON_SIZE];
  snprintf(text, sizeof text, "%s", reason);
  if (path[0] == '\0' || !kvr_quarantine_add(path, j->key, text) ||
      !kvr_quarantine_find(path, j->key, kept))
    snprintf(kept, sizeof kept, "%s", text);
  kvr_group_notice(j->group, "%s is not used on %s (driver %s): %s", name, j->info->name,
                   j->info->driver, kept);
  return kvr_fail(KVR_E_UNSUPPORTED, "%s: %s", name, kept);
}

static kvr_status try_out(const job *j, const char *path, const kvr_program_test *test,
                          cl_program *out) {
  kvr_trial trial = {.file = -1};
  if (path[0] != '\0' && !kvr_trial_begin(&trial, path))
    return quarantine(j, path, test->name, "building or testing it ended the process");
  kvr_status status = build_and_test(j, test, out);
  if (status == KVR_OK && path[0] != '\0') store(j, *out, path);
  if (status == KVR_E_UNSUPPORTED) status = quarantine(j, path, test->name, kvr_error_message());
  kvr_trial_end(&trial);
  return status;
}

/* ---- all together ---- */

static kvr_status build(const job *j, const kvr_program_test *test, cl_program *out) {
  char path[4096 + 64], reason[KVR_REASON_SIZE];
  find_path(j, path, sizeof path);
  if (test != NULL && path[0] != '\0' && kvr_quarantine_find(path, j->key, reason))
    return kvr_fail(KVR_E_UNSUPPORTED, "%s: %s", test->name, reason);
  *out = path[0] == '\0' ? NULL : load(j, path);
  if (*out != NULL) return KVR_OK;
  if (test != NULL) return try_out(j, path, test, out);
  const kvr_status status = build_from_source(j, out);
  if (status == KVR_E_UNSUPPORTED) return kvr_fail(KVR_E_CL, "%s", kvr_error_message());
  if (status == KVR_OK && path[0] != '\0') store(j, *out, path);
  return status;
}

kvr_status kvr_program_create(const kvr_group *group, int rank, const char *file,
                              const char *options, const kvr_program_test *test, cl_program *out) {
  if (group == NULL || file == NULL || options == NULL || out == NULL)
    return kvr_fail(KVR_E_NULL, "group, file, options or out is NULL");
  KVR_TRY(kvr_group_check_rank(group, rank));
  KVR_TRY(check_options(options));
  job j = {.file = file};
  KVR_TRY(job_init(&j, group, rank, file, options));
  const kvr_status status = build(&j, test, out);
  job_fini(&j);
  return status == KVR_OK ? KVR_OK : kvr_fail_at(status, "rank %d", rank);
}

/* kvring doctor: what this machine lacks, and the command that installs it. */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "cli/check.h"
#include "cli/json.h"

static const char notes[] = "Exit code 1 when something that is needed is missing.\n";

enum { PATH_SIZE = 1024 };

typedef struct finding {
  const char *name;
  bool ok, needed;
  char detail[300];
  const char *fix; /* what to do; NULL if ok */
} finding;

static const char install_icd[] =
    "apt-get install pocl-opencl-icd  (a driver for CPUs; GPUs: their vendor's package)";

/* Says in detail what is wrong and how to mend it. */
static void miss(finding *f, const char *fix, const char *detail) {
  f->ok = false;
  f->fix = fix;
  snprintf(f->detail, sizeof f->detail, "%s", detail);
}

static bool ends_with(const char *text, const char *end) {
  const size_t len = strlen(text), tail = strlen(end);
  return len >= tail && strcmp(text + len - tail, end) == 0;
}

/* Files by which drivers announce themselves to the ICD loader. */
static void find_icd_files(finding *f) {
  const char *variable = getenv("OCL_ICD_VENDORS");
  const char *path = variable != NULL && variable[0] != '\0' ? variable : "/etc/OpenCL/vendors";
  DIR *folder = opendir(path);
  int num = 0;
  char names[200] = "", text[300];
  for (struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;)
    if (ends_with(entry->d_name, ".icd")) {
      const size_t used = strlen(names);
      snprintf(names + used, sizeof names - used, "%s%.60s", num++ > 0 ? ", " : "", entry->d_name);
    }
  if (folder != NULL) closedir(folder);
  /* OCL_ICD_VENDORS may also name one file or driver; the platforms tell then. */
  f->needed = variable == NULL;
  f->ok = num > 0;
  snprintf(f->detail, sizeof f->detail, "%d in %.60s: %s", num, path, names);
  if (num > 0) return;
  snprintf(text, sizeof text, "no *.icd file in %.200s", path);
  miss(f, install_icd, text);
}

static void find_loader(finding *f) {
  kvr_device_info *devices = NULL;
  int num = 0;
  f->needed = true;
  f->ok = kvr_device_list(&devices, &num) == KVR_OK;
  if (f->ok)
    snprintf(f->detail, sizeof f->detail, "the OpenCL loader answers, %d devices", num);
  else
    miss(f, install_icd, kvr_error_message());
  free(devices);
}

static void find_device(const cli_options *o, finding *f) {
  const kvr_group_desc desc = {.struct_size = sizeof desc, .num_ranks = 1, .devices = o->devices};
  kvr_group *group = NULL;
  kvr_device_info info;
  f->needed = true;
  f->ok = kvr_group_create(&desc, &group) == KVR_OK && kvr_group_device(group, 0, &info) == KVR_OK;
  if (f->ok)
    snprintf(f->detail, sizeof f->detail, "%d.%d %s", info.platform_index, info.device_index,
             info.name);
  else
    miss(f, install_icd, kvr_error_message());
  kvr_group_destroy(group);
}

static void try_kernels(const cli_options *o, finding *f) {
  f->needed = true;
  f->ok = check_smoke(o->devices) == KVR_OK;
  if (f->ok)
    snprintf(f->detail, sizeof f->detail, "built; a small step over three ranks is right");
  else
    miss(f, "kvring devices  (then choose another with --devices)", kvr_error_message());
}

/* Where the library keeps program binaries; false: nowhere, on purpose or for lack of a home. */
static bool cache_folder(char path[PATH_SIZE]) {
  const char *own = getenv("KVRING_CACHE_DIR"), *shared = getenv("XDG_CACHE_HOME"),
             *home = getenv("HOME");
  int len = -1;
  if (own != NULL)
    len = own[0] != '\0' ? snprintf(path, PATH_SIZE, "%s", own) : -1;
  else if (shared != NULL && shared[0] != '\0')
    len = snprintf(path, PATH_SIZE, "%s/kvring", shared);
  else if (home != NULL && home[0] != '\0')
    len = snprintf(path, PATH_SIZE, "%s/.cache/kvring", home);
  return len > 0 && len < PATH_SIZE;
}

/* The nearest folder above path that exists must be writable. */
static void find_cache_folder(finding *f) {
  char path[PATH_SIZE], text[300];
  f->ok = true;
  if (!cache_folder(path)) {
    snprintf(f->detail, sizeof f->detail, "off: programs are built anew in every run");
    return;
  }
  struct stat info;
  char nearest[PATH_SIZE];
  strcpy(nearest, path);
  while (stat(nearest, &info) != 0 && strrchr(nearest, '/') != NULL && strcmp(nearest, "/") != 0) {
    char *slash = strrchr(nearest, '/');
    slash[slash == nearest ? 1 : 0] = '\0';
  }
  snprintf(f->detail, sizeof f->detail, "%.250s", path);
  if (access(nearest, W_OK | X_OK) == 0) return;
  snprintf(text, sizeof text, "%.200s: %s", path, strerror(errno));
  miss(f, "export KVRING_CACHE_DIR=FOLDER  (one that you may write to)", text);
}

/* Kernels that failed their test on a device; others are used instead. */
static void find_quarantine(finding *f) {
  char path[PATH_SIZE], text[300];
  int num = 0;
  f->ok = true;
  DIR *folder = cache_folder(path) ? opendir(path) : NULL;
  for (struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;)
    num += ends_with(entry->d_name, ".refused");
  if (folder != NULL) closedir(folder);
  snprintf(f->detail, sizeof f->detail, "no kernel has failed its test");
  if (num == 0) return;
  snprintf(text, sizeof text, "kernels that failed their test: %d, see %.200s/*.refused", num,
           path);
  miss(f, "remove these files to try the kernels again", text);
}

static void print_finding(const finding *f) {
  printf("%-8s %-14s %s\n", f->ok ? "ok" : f->needed ? "MISSING" : "warning", f->name, f->detail);
  if (!f->ok) printf("%-8s %-14s -> %s\n", "", "", f->fix);
}

static kvr_status write_json(const char *path, const finding *findings, int num, bool ok) {
  cJSON *root = cJSON_CreateObject();
  cJSON_AddBoolToObject(root, "ok", ok);
  cJSON *list = cJSON_AddArrayToObject(root, "findings");
  for (int i = 0; i < num; i++) {
    cJSON *item = cJSON_CreateObject();
    cJSON_AddStringToObject(item, "name", findings[i].name);
    cJSON_AddBoolToObject(item, "ok", findings[i].ok);
    cJSON_AddBoolToObject(item, "needed", findings[i].needed);
    cJSON_AddStringToObject(item, "detail", findings[i].detail);
    if (findings[i].fix != NULL) cJSON_AddStringToObject(item, "fix", findings[i].fix);
    cJSON_AddItemToArray(list, item);
  }
  const kvr_status status = cli_json_write(path, root);
  cJSON_Delete(root);
  return status;
}

static void try_kernels_if(const cli_options *o, bool has_device, finding *f) {
  if (has_device)
    try_kernels(o, f);
  else
    miss(f, "see device", "not tried without a device");
}

static cli_exit run(const cli_options *options) {
  enum { ICD, LOADER, DEVICE, KERNELS, FOLDER, QUARANTINE, NUM };
  finding findings[NUM] = {{.name = "ICD files"}, {.name = "OpenCL"},       {.name = "device"},
                           {.name = "kernels"},   {.name = "cache folder"}, {.name = "quarantine"}};
  const bool quiet = options->json != NULL && strcmp(options->json, "-") == 0;
  bool ok = true;
  for (int i = 0; i < NUM; i++) {
    finding *f = &findings[i];
    switch (i) {
    case ICD: find_icd_files(f); break;
    case LOADER: find_loader(f); break;
    case DEVICE: find_device(options, f); break;
    case KERNELS: try_kernels_if(options, findings[DEVICE].ok, f); break;
    case FOLDER: find_cache_folder(f); break;
    default: find_quarantine(f);
    }
    ok &= f->ok || !f->needed;
    if (!quiet) print_finding(f);
    fflush(stdout); /* kernels may take long */
  }
  if (options->json != NULL && write_json(options->json, findings, NUM, ok) != KVR_OK)
    return cli_report("doctor", CLI_FAILED);
  return ok ? CLI_OK : CLI_FAILED;
}

const cli_command cli_doctor = {"doctor", CLI_CMD_DOCTOR,
                                "Say what this machine lacks and how to install it", notes, run};

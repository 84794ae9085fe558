/* kvring devices: platforms and devices, and where ranks would run. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/json.h"

static const char notes[] =
    "The first column names a device for --devices. Below the table: the device that each rank of\n"
    "--ranks and --devices would use.\n";

static void print_devices(const kvr_device_info *devices, int num) {
  const double GIB = 1.0 / (1 << 30);
  printf("%-6s %-12s %-44s %6s %9s %9s  %s\n", "device", "type", "name", "units", "GiB",
         "alloc GiB", "usable");
  for (int i = 0; i < num; i++) {
    const kvr_device_info *d = &devices[i];
    char index[24];
    snprintf(index, sizeof index, "%d.%d", d->platform_index, d->device_index);
    printf("%-6s %-12s %-44.44s %6d %9.1f %9.1f  %s%s\n", index, d->type, d->name, d->compute_units,
           (double)d->memory_bytes * GIB, (double)d->max_alloc_bytes * GIB,
           d->why_not[0] == '\0' ? "yes" : "no: ", d->why_not);
    printf("       %s, %s, driver %s\n", d->platform, d->version, d->driver);
  }
}

static cJSON *device_json(const kvr_device_info *d) {
  cJSON *item = cJSON_CreateObject();
  char index[24];
  snprintf(index, sizeof index, "%d.%d", d->platform_index, d->device_index);
  cJSON_AddStringToObject(item, "index", index);
  cJSON_AddStringToObject(item, "platform", d->platform);
  cJSON_AddStringToObject(item, "name", d->name);
  cJSON_AddStringToObject(item, "type", d->type);
  cJSON_AddStringToObject(item, "driver", d->driver);
  cJSON_AddStringToObject(item, "version", d->version);
  cJSON_AddNumberToObject(item, "compute_units", d->compute_units);
  cJSON_AddNumberToObject(item, "memory_bytes", (double)d->memory_bytes);
  cJSON_AddNumberToObject(item, "max_alloc_bytes", (double)d->max_alloc_bytes);
  cJSON_AddNumberToObject(item, "local_bytes", (double)d->local_bytes);
  cJSON_AddNumberToObject(item, "max_work_group", (double)d->max_work_group);
  cJSON_AddBoolToObject(item, "usable", d->why_not[0] == '\0');
  if (d->why_not[0] != '\0') cJSON_AddStringToObject(item, "why_not", d->why_not);
  return item;
}

/* The ranks of a group, printed and into JSON. */
static kvr_status show_ranks(const kvr_group *group, bool print, cJSON *ranks) {
  for (int r = 0; r < kvr_group_num_ranks(group); r++) {
    kvr_device_info d;
    size_t now, peak, budget;
    KVR_TRY(kvr_group_device(group, r, &d));
    KVR_TRY(kvr_group_memory(group, r, &now, &peak, &budget));
    if (print)
      printf("rank %-3d -> %d.%d %s, budget %.1f GiB\n", r, d.platform_index, d.device_index,
             d.name, (double)budget / (1 << 30));
    cJSON *item = cJSON_CreateObject();
    cJSON_AddNumberToObject(item, "rank", r);
    cJSON_AddNumberToObject(item, "platform_index", d.platform_index);
    cJSON_AddNumberToObject(item, "device_index", d.device_index);
    cJSON_AddStringToObject(item, "name", d.name);
    cJSON_AddNumberToObject(item, "budget_bytes", (double)budget);
    cJSON_AddItemToArray(ranks, item);
  }
  return KVR_OK;
}

static kvr_status show(const cli_options *o, const kvr_device_info *devices, int num, cJSON *root) {
  const bool print = o->json == NULL || strcmp(o->json, "-") != 0;
  cJSON *list = cJSON_AddArrayToObject(root, "devices");
  for (int i = 0; i < num; i++) cJSON_AddItemToArray(list, device_json(&devices[i]));
  if (print) print_devices(devices, num);
  const kvr_group_desc desc = {.struct_size = sizeof desc,
                               .num_ranks = o->ranks,
                               .devices = o->devices};
  kvr_group *group;
  KVR_TRY(kvr_group_create(&desc, &group));
  kvr_status status = show_ranks(group, print, cJSON_AddArrayToObject(root, "ranks"));
  kvr_group_destroy(group);
  if (status == KVR_OK && o->json != NULL) status = cli_json_write(o->json, root);
  return status;
}

static cli_exit run(const cli_options *options) {
  kvr_device_info *devices = NULL;
  int num = 0;
  cJSON *root = cJSON_CreateObject();
  kvr_status status = kvr_device_list(&devices, &num);
  if (status == KVR_OK) status = show(options, devices, num, root);
  const cli_exit code = status == KVR_OK ? CLI_OK : cli_report("devices", cli_exit_of(status));
  cJSON_Delete(root);
  free(devices);
  return code;
}

const cli_command cli_devices = {"devices", CLI_CMD_DEVICES,
                                 "List OpenCL devices and the device of each rank", notes, run};

/* From the text of kvr_group_desc.devices to places that ranks take in turn. */
#ifndef KVR_DEVICE_DEVICE_SELECT_H
#define KVR_DEVICE_DEVICE_SELECT_H

#include "device/device_list.h"

/* A device, or one of the equal parts that a device was cut into. */
typedef struct kvr_place {
  kvr_device root; /* the whole device */
  cl_device_id id; /* root.id, or a sub-device (owned) */
  int part, parts; /* parts = 1: the whole device */
} kvr_place;

typedef struct kvr_places {
  int num;
  kvr_place *list; /* (num) */
} kvr_places;

/* All places of a list; NULL or "": the first usable device. Release with kvr_places_fini.
 * Errors: KVR_E_RANGE naming the entry and the devices there are, KVR_E_UNSUPPORTED (unusable,
 * cannot be cut, two platforms), KVR_E_OOM, KVR_E_CL. */
kvr_status kvr_places_init(const kvr_devices *devices, const char *list, int num_ranks,
                           kvr_places *places);
void kvr_places_fini(kvr_places *places); /* releases the sub-devices */

#endif

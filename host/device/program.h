/* Programs from the embedded sources, through a binary cache on disk. */
#ifndef KVR_DEVICE_PROGRAM_H
#define KVR_DEVICE_PROGRAM_H

#include "device/group.h"

/* Builds shared.h + one embedded source (file: "attend.cl", "merge.cl", "rows.cl") for a rank's
 * device. options are appended to "-cl-std=CL1.2 -Werror". Owned; release with clReleaseProgram.
 *
 * Binaries are kept in $KVRING_CACHE_DIR, else $XDG_CACHE_HOME/kvring, else ~/.cache/kvring, keyed
 * by device, driver, library version, source and options; a file that cannot be used is rebuilt,
 * files are written under a temporary name and renamed. KVRING_CACHE_DIR="" turns the cache off.
 * Errors: KVR_E_CL with the build log's first lines, file, options and driver. */
kvr_status kvr_program_create(const kvr_group *group, int rank, const char *file,
                              const char *options, cl_program *out);

#endif

/* Programs from the embedded sources, through a binary cache on disk. */
#ifndef KVR_DEVICE_PROGRAM_H
#define KVR_DEVICE_PROGRAM_H

#include "device/group.h"

/* What a program must pass before its first use on a device: run gets the built program, returns
 * KVR_E_UNSUPPORTED with a reason if it is wrong or exceeds the device, any other status for an
 * error that says nothing about the program. */
typedef struct kvr_program_test {
  const char *name; /* of what is tested, e.g. "kernel variant rows64" */
  kvr_status (*run)(void *user, const kvr_group *group, int rank, cl_program program);
  void *user;
} kvr_program_test;

/* Builds shared.h + numbers.h + spans.h + one embedded source (file: "attend.cl",
 * "attend_bf16.cl", "attend_plain.cl", "merge.cl", "rows.cl") for a rank's device. options are
 * appended to "-cl-std=CL1.2 -Werror". Owned; release with clReleaseProgram.
 *
 * Binaries are kept in $KVRING_CACHE_DIR, else $XDG_CACHE_HOME/kvring, else ~/.cache/kvring, keyed
 * by device, driver, library version, source and options; a file that cannot be used is rebuilt,
 * files are written under a temporary name and renamed. KVRING_CACHE_DIR="" turns the cache off.
 *
 * test (NULL: none) runs where the program is built from source, so once per device and driver if
 * binaries are kept. A program that does not build or pass, or that ended the process meanwhile, is
 * quarantined (quarantine.h) and the user is told.
 *
 * Errors: KVR_E_CL with the build log's first lines, file, options and driver; with a test,
 * KVR_E_UNSUPPORTED with the reason of the quarantine. */
kvr_status kvr_program_create(const kvr_group *group, int rank, const char *file,
                              const char *options, const kvr_program_test *test, cl_program *out);

#endif

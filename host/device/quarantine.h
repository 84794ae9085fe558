/* Programs that must not be used on this device and driver, remembered on disk. No OpenCL in it.
 *
 * Beside the binary of a key (binary_file.h) lie, under the same hash:
 *   .refused   why the program is quarantined, then its key; removing the file lifts it
 *   .trial     exists while a process builds and tests the program. Compilers and kernels can end
 *              the process; a file that nobody holds any more then counts as refusal. */
#ifndef KVR_DEVICE_QUARANTINE_H
#define KVR_DEVICE_QUARANTINE_H

#include <stdbool.h>
#include <stddef.h>

enum { KVR_REASON_SIZE = 5000 }; /* a line and a path */

/* One program on trial; path (of its binary) is borrowed. */
typedef struct kvr_trial {
  const char *path;
  int file; /* descriptor of the .trial file, -1: none */
} kvr_trial;

/* Whether key is quarantined; then says why, and names the file. */
bool kvr_quarantine_find(const char *path, const char *key, char reason[KVR_REASON_SIZE]);
/* Stores a reason (one line). Returns false if nothing could be written. */
bool kvr_quarantine_add(const char *path, const char *key, const char *reason);

/* Begins a trial; waits while another process or thread tries the same program. Returns false if
 * an earlier trial ended its process. Where no file can be written, there is nothing to find. */
bool kvr_trial_begin(kvr_trial *trial, const char *path);
void kvr_trial_end(kvr_trial *trial);

#endif

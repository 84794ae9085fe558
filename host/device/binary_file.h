/* Program binaries on disk: one file per key, in one directory. No OpenCL in it.
 *
 * File: header (magic, lengths, checksum), key text, binary. The key is everything that the binary
 * depends on; it is stored whole and compared, so that two keys with one hash cannot be confused.
 */
#ifndef KVR_DEVICE_BINARY_FILE_H
#define KVR_DEVICE_BINARY_FILE_H

#include <stdbool.h>
#include <stddef.h>

/* The directory from the environment (see program.h) without creating it; false: no cache. */
bool kvr_binary_dir(char *path, size_t size);
/* DIR/<32 hex digits of the key's hash>.bin; false when it does not fit. */
bool kvr_binary_path(const char *dir, const char *key, char *path, size_t size);

/* The binary stored for key, NULL when there is none or the file is damaged or of another key.
 * Owned; release with free(). */
unsigned char *kvr_binary_load(const char *path, const char *key, size_t *out_size);
/* Stores it under a temporary name and renames, creating directories. A cache that cannot be
 * written is no error: returns false and leaves nothing behind. */
bool kvr_binary_store(const char *path, const char *key, const unsigned char *binary, size_t size);
/* Creates the directories on the way to path. Failures show when the file is opened. */
void kvr_binary_make_dir(const char *path);

#endif

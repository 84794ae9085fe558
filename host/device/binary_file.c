#include "device/binary_file.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arith.h"

/* In the byte order of the machine: a file from another order has another magic. */
typedef struct header {
  uint64_t magic;
  uint64_t key_size, binary_size;
  uint64_t checksum; /* of key and binary */
} header;

static const uint64_t MAGIC = 0x3130626b676e7276; /* "vrngkb01" */

/* ---- hashes ---- */

static const uint64_t FNV_BASIS = 0xcbf29ce484222325, FNV_PRIME = 0x100000001b3;

static uint64_t fnv1a(uint64_t hash, const void *bytes, size_t size) {
  for (size_t i = 0; i < size; i++) hash = (hash ^ ((const unsigned char *)bytes)[i]) * FNV_PRIME;
  return hash;
}

/* FNV-1: multiplies first, which makes it another function than fnv1a. */
static uint64_t fnv1(uint64_t hash, const void *bytes, size_t size) {
  for (size_t i = 0; i < size; i++) hash = (hash * FNV_PRIME) ^ ((const unsigned char *)bytes)[i];
  return hash;
}

static uint64_t checksum(const char *key, const unsigned char *binary, size_t size) {
  return fnv1a(fnv1a(FNV_BASIS, key, strlen(key)), binary, size);
}

/* ---- paths ---- */

static bool fits(int printed, size_t size) { return printed >= 0 && (size_t)printed < size; }

bool kvr_binary_dir(char *path, size_t size) {
  const char *own = getenv("KVRING_CACHE_DIR");
  if (own != NULL) return own[0] != '\0' && fits(snprintf(path, size, "%s", own), size);
  const char *xdg = getenv("XDG_CACHE_HOME");
  /* The XDG standard asks to ignore relative paths. */
  if (xdg != NULL && xdg[0] == '/') return fits(snprintf(path, size, "%s/kvring", xdg), size);
  const char *home = getenv("HOME");
  if (home == NULL || home[0] == '\0') return false;
  return fits(snprintf(path, size, "%s/.cache/kvring", home), size);
}

bool kvr_binary_path(const char *dir, const char *key, char *path, size_t size) {
  const size_t len = strlen(key);
  const unsigned long long a = fnv1a(FNV_BASIS, key, len), b = fnv1(FNV_BASIS, key, len);
  return fits(snprintf(path, size, "%s/%016llx%016llx.bin", dir, a, b), size);
}

void kvr_binary_make_dir(const char *path) {
  char *copy = strdup(path);
  if (copy == NULL) return;
  for (char *slash = strchr(copy + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
    *slash = '\0';
    mkdir(copy, 0700);
    *slash = '/';
  }
  free(copy);
}

/* ---- reading ---- */

static bool file_size(FILE *file, uint64_t *out) {
  struct stat st;
  if (fstat(fileno(file), &st) != 0 || !S_ISREG(st.st_mode) || st.st_size < 0) return false;
  *out = (uint64_t)st.st_size;
  return true;
}

/* Whether the header fits the key and the size of the file: only then are its lengths trusted. */
static bool header_fits(const header *h, const char *key, uint64_t size) {
  return h->magic == MAGIC && h->key_size == strlen(key) && size >= sizeof *h + h->key_size &&
         h->binary_size > 0 && h->binary_size == size - sizeof *h - h->key_size;
}

/* Reads key and binary behind the header into one block; returns the block if all is right. */
static unsigned char *read_body(FILE *file, const header *h, const char *key) {
  const size_t key_size = (size_t)h->key_size, binary_size = (size_t)h->binary_size;
  unsigned char *body = malloc(key_size + binary_size);
  if (body == NULL) return NULL;
  if (fread(body, 1, key_size + binary_size, file) == key_size + binary_size &&
      memcmp(body, key, key_size) == 0 &&
      h->checksum == checksum(key, body + key_size, binary_size))
    return body;
  free(body);
  return NULL;
}

unsigned char *kvr_binary_load(const char *path, const char *key, size_t *out_size) {
  FILE *file = fopen(path, "rb");
  if (file == NULL) return NULL;
  header h;
  uint64_t size;
  unsigned char *body = NULL;
  if (file_size(file, &size) && fread(&h, sizeof h, 1, file) == 1 && header_fits(&h, key, size))
    body = read_body(file, &h, key);
  fclose(file);
  if (body == NULL) return NULL;
  memmove(body, body + h.key_size, (size_t)h.binary_size);
  *out_size = (size_t)h.binary_size;
  return body;
}

/* ---- writing ---- */

static bool write_file(FILE *file, const char *key, const unsigned char *binary, size_t size) {
  const header h = {.magic = MAGIC,
                    .key_size = strlen(key),
                    .binary_size = size,
                    .checksum = checksum(key, binary, size)};
  const bool written = fwrite(&h, sizeof h, 1, file) == 1 &&
                       fwrite(key, 1, strlen(key), file) == strlen(key) &&
                       fwrite(binary, 1, size, file) == size;
  return fclose(file) == 0 && written;
}

bool kvr_binary_store(const char *path, const char *key, const unsigned char *binary, size_t size) {
  /* Processes and threads that store the same program at once must not share a name. */
  static atomic_uint counter;
  const size_t room = strlen(path) + 64;
  char *name = malloc(room);
  if (name == NULL) return false;
  snprintf(name, room, "%s.%ld.%u.tmp", path, (long)getpid(), atomic_fetch_add(&counter, 1u));
  kvr_binary_make_dir(path);
  FILE *file = fopen(name, "wbx");
  bool ok = false;
  if (file != NULL) {
    ok = write_file(file, key, binary, size) && rename(name, path) == 0;
    if (!ok) remove(name);
  }
  free(name);
  return ok;
}

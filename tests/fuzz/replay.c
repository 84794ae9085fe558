/* Feeds files, and those of folders, to a fuzz target: inputs that once broke something stay fixed.
 * Every prefix of a small file is fed too. replay FILE|FOLDER... */
#include <dirent.h>
#include <string.h>
#include <sys/stat.h>

#include "fuzz.h"

enum { MOST = 1 << 20, SMALL = 512 };

static int num_fed;

static void feed(const char *path) {
  static uint8_t bytes[MOST];
  FILE *file = fopen(path, "rb");
  HOLDS(file != NULL);
  const size_t size = fread(bytes, 1, MOST, file);
  fclose(file);
  for (size_t len = size <= SMALL ? 0 : size; len <= size; len++) {
    uint8_t *copy = malloc(len > 0 ? len : 1); /* of its own, so that sanitizers see its end */
    HOLDS(copy != NULL);
    memcpy(copy, bytes, len);
    (void)LLVMFuzzerTestOneInput(copy, len);
    free(copy);
  }
  num_fed++;
}

static void feed_folder(const char *path) {
  DIR *folder = opendir(path);
  HOLDS(folder != NULL);
  for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
    char name[1024];
    if (entry->d_name[0] == '.') continue;
    HOLDS(snprintf(name, sizeof name, "%s/%s", path, entry->d_name) < (int)sizeof name);
    feed(name);
  }
  closedir(folder);
}

int main(int argc, char **argv) {
  for (int i = 1; i < argc; i++) {
    struct stat info;
    HOLDS(stat(argv[i], &info) == 0);
    if (S_ISDIR(info.st_mode))
      feed_folder(argv[i]);
    else
      feed(argv[i]);
  }
  printf("%d inputs\n", num_fed);
  return num_fed > 0 ? 0 : 1;
}

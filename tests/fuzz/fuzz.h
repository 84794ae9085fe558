/* A fuzz target: one function, fed by libFuzzer or, in ordinary builds, by replay.c. */
#ifndef KVR_TESTS_FUZZ_H
#define KVR_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A property of the code under test; assert() would vanish from some builds. */
#define HOLDS(condition)                                                                           \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);                \
      abort();                                                                                     \
    }                                                                                              \
  } while (0)

#endif

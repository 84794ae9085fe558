#define _DEFAULT_SOURCE /* of syscall; NOLINT(bugprone-reserved-identifier) */
#include "device/cpu_products.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- what the processor and the system offer ---- */

typedef struct features {
  bool avx512, dot, tiles;
} features;

/* State that the system saves for threads (XCR0). */
static uint64_t saved_state(void) {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

static features look(void) {
  enum { OSXSAVE = 1 << 27, AVX512F = 1 << 16, AVX512_BF16 = 1 << 5 };
  enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };
  const uint64_t vectors = 0xe6, tiles = 0x60000;
  unsigned a, b, c, d, a1, b1, c1, d1;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & OSXSAVE) == 0) return (features){false};
  const uint64_t saved = saved_state();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return (features){false};
  if (!__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) a1 = 0;
  features f = {.avx512 = (b & AVX512F) != 0 && (saved & vectors) == vectors};
  f.dot = f.avx512 && (a1 & AVX512_BF16) != 0;
  f.tiles = f.avx512 && (d & AMX_BF16) != 0 && (d & AMX_TILE) != 0 && (saved & tiles) == tiles;
  return f;
}

/* Linux hands out tile registers on request, to all threads of the process. */
static bool ask_for_tiles(void) {
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

/* ---- how fast the dot product is ---- */

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* 16 independent instructions a turn; all registers hold 0. */
#define SIXTEEN(op)                                                                                \
  op " %%zmm0,%%zmm0,%%zmm0\n" op " %%zmm0,%%zmm0,%%zmm1\n" op " %%zmm0,%%zmm0,%%zmm2\n" op        \
     " %%zmm0,%%zmm0,%%zmm3\n" op " %%zmm0,%%zmm0,%%zmm4\n" op " %%zmm0,%%zmm0,%%zmm5\n" op        \
     " %%zmm0,%%zmm0,%%zmm6\n" op " %%zmm0,%%zmm0,%%zmm7\n" op " %%zmm0,%%zmm0,%%zmm8\n" op        \
     " %%zmm0,%%zmm0,%%zmm9\n" op " %%zmm0,%%zmm0,%%zmm10\n" op " %%zmm0,%%zmm0,%%zmm11\n" op      \
     " %%zmm0,%%zmm0,%%zmm12\n" op " %%zmm0,%%zmm0,%%zmm13\n" op " %%zmm0,%%zmm0,%%zmm14\n" op     \
     " %%zmm0,%%zmm0,%%zmm15\n"
#define CLOBBERED                                                                                  \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",         \
      "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"

enum { TURNS = 2000, TRIALS = 20 };

/* Best time of TURNS * 16 instructions: interruptions only ever add. */
#define DEFINE_TIME(NAME, OP)                                                                      \
  static double NAME(void) {                                                                       \
    double best = 1e9;                                                                             \
    for (int trial = 0; trial < TRIALS; trial++) {                                                 \
      const double start = seconds();                                                              \
      __asm__ volatile("vpxorq %%zmm0,%%zmm0,%%zmm0" ::: "xmm0");                                  \
      for (int i = 0; i < TURNS; i++) __asm__ volatile(SIXTEEN(OP)::: CLOBBERED);                  \
      const double time = seconds() - start;                                                       \
      if (time < best) best = time;                                                                \
    }                                                                                              \
    return best;                                                                                   \
  }
DEFINE_TIME(time_of_fma, "vfmadd231ps")
DEFINE_TIME(time_of_dot, "vdpbf16ps")

/* A dot product does two multiplications per lane, a fused multiply-add one. */
static bool dot_is_faster(void) { return time_of_dot() < 2 * time_of_fma() / 1.3; }

bool kvr_cpu_has_products(kvr_products products) {
  const features f = look();
  return products == KVR_PRODUCTS_TILES ? f.tiles && ask_for_tiles()
                                        : products == KVR_PRODUCTS_F32 || f.dot;
}

static kvr_products find(void) {
  if (kvr_cpu_has_products(KVR_PRODUCTS_TILES)) return KVR_PRODUCTS_TILES;
  if (!kvr_cpu_has_products(KVR_PRODUCTS_DOT)) return KVR_PRODUCTS_F32;
  return dot_is_faster() ? KVR_PRODUCTS_DOT : KVR_PRODUCTS_F32;
}

#else

bool kvr_cpu_has_products(kvr_products products) { return products == KVR_PRODUCTS_F32; }
static kvr_products find(void) { return KVR_PRODUCTS_F32; }

#endif

static kvr_products found;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void find_once(void) { found = find(); }

kvr_products kvr_cpu_products(void) {
  pthread_once(&once, find_once);
  return found;
}

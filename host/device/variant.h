/* Code shapes of kvr_attend and which one a launch should use. */
#ifndef KVR_DEVICE_VARIANT_H
#define KVR_DEVICE_VARIANT_H

#include <stdbool.h>

#include "device/cpu_products.h"
#include "kvring/problem.h"

enum { KVR_MAX_VARIANTS = 8 };

typedef struct kvr_variant {
  const char *name;
  const char *file; /* its source */
  int row_tile;     /* GQA-packed rows (tokens x heads of one KV head) of one work-group */
  int local;        /* work-items of a work-group */
  bool vectors;     /* made for cores with vector registers of their own */
  bool bf16;        /* products of bf16 numbers */
  int row, pack;    /* time per key: of a row, and of what is done once for all rows of a tile */
} kvr_variant;

int kvr_num_variants(void);
const kvr_variant *kvr_variant_get(int index); /* NULL past the end */
/* Index by name, -1 if there is none. */
int kvr_variant_find(const char *name);
/* The variant for a launch of num_rows query tokens with `group` query heads per KV head, among
 * the usable ones (KVR_MAX_VARIANTS flags); -1 if there is none. */
int kvr_variant_pick(const bool *usable, int num_rows, int group);
/* -D options that build it; products are those of a bf16 variant. Returns false when size is too
 * small. */
bool kvr_variant_options(int index, const kvr_cache_desc *cache, kvr_dtype out_dtype,
                         kvr_products products, char *text, size_t size);
/* Global and local sizes of a launch (2 dimensions). */
void kvr_variant_sizes(int index, int num_rows, int group, int num_kv_heads, size_t global[2],
                       size_t local[2]);

#endif

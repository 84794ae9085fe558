/* Code shapes of kvr_attend: they differ in the rows a work-item keeps beside one block of keys.
 *
 * A tall tile reads K and V less often; a short one leaves work for every core and less padding. */
#include "device/variant.h"

#include <stdio.h>

static const kvr_variant variants[] = {
    {.name = "rows128", .row_tile = 128},
    {.name = "rows32", .row_tile = 32},
    {.name = "rows16", .row_tile = 16},
};

int kvr_num_variants(void) { return (int)(sizeof variants / sizeof *variants); }

const kvr_variant *kvr_variant_get(int index) {
  return index >= 0 && index < kvr_num_variants() ? &variants[index] : NULL;
}

/* Packed rows of one KV head; 64 bits, as both factors may be large. */
static size_t packed_rows(int num_rows, int group) { return (size_t)num_rows * (size_t)group; }

/* The tallest tile of which a head has at least two, so that two cores share even a single head. */
int kvr_variant_pick(int num_rows, int group, int head_dim) {
  (void)head_dim;
  const int last = kvr_num_variants() - 1;
  for (int i = 0; i < last; i++)
    if (packed_rows(num_rows, group) > (size_t)variants[i].row_tile) return i;
  return last;
}

int kvr_variant_options(int index, const kvr_cache_desc *cache, kvr_dtype out_dtype, char *text,
                        size_t size) {
  const kvr_variant *v = kvr_variant_get(index);
  if (!v) return 0;
  const int n = snprintf(text, size, "-DHEAD_DIM=%d -DKV_DTYPE=%d -DOUT_DTYPE=%d -DROW_TILE=%d",
                         cache->head_dim, (int)cache->dtype, (int)out_dtype, v->row_tile);
  return n >= 0 && (size_t)n < size;
}

void kvr_variant_sizes(int index, int num_rows, int group, int num_kv_heads, size_t global[2],
                       size_t local[2]) {
  const size_t tile = (size_t)variants[index].row_tile;
  global[0] = (packed_rows(num_rows, group) + tile - 1) / tile;
  global[1] = (size_t)num_kv_heads;
  local[0] = local[1] = 1;
}

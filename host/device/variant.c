/* Code shapes of kvr_attend: they differ in the rows a work-item keeps beside one block of keys.
 *
 * A tall tile packs K and V less often, a short one leaves work for every core. Rows that a tile
 * has too many cost nothing beyond a multiple of 32 (16 for the shortest). */
#include "device/variant.h"

#include <stdio.h>
#include <string.h>

#define VECTORS .local = 1, .vectors = true

/* Times are measured on PoCL, relative to each other; sums of plain are never compared. */
static const kvr_variant variants[] = {
    {.name = "bf16x256",
     .file = "attend_bf16.cl",
     .row_tile = 256,
     .bf16 = true,
     .row = 2,
     .pack = 50,
     VECTORS},
    {.name = "bf16x64",
     .file = "attend_bf16.cl",
     .row_tile = 64,
     .bf16 = true,
     .row = 2,
     .pack = 50,
     VECTORS},
    {.name = "rows256", .file = "attend.cl", .row_tile = 256, .row = 4, .pack = 56, VECTORS},
    {.name = "rows64", .file = "attend.cl", .row_tile = 64, .row = 4, .pack = 56, VECTORS},
    {.name = "rows16", .file = "attend.cl", .row_tile = 16, .row = 4, .pack = 56, VECTORS},
    {.name = "plain", .file = "attend_plain.cl", .row_tile = 32, .local = 32, .row = 40},
};

enum { CORES = 2 };

int kvr_num_variants(void) { return (int)(sizeof variants / sizeof *variants); }

const kvr_variant *kvr_variant_get(int index) {
  return index >= 0 && index < kvr_num_variants() ? &variants[index] : NULL;
}

int kvr_variant_find(const char *name) {
  int i = kvr_num_variants() - 1;
  while (i >= 0 && strcmp(variants[i].name, name) != 0) i--;
  return i;
}

/* Packed rows of one KV head; 64 bits, as both factors may be large. */
static size_t packed_rows(int num_rows, int group) { return (size_t)num_rows * (size_t)group; }

/* Time of a launch per key, for one KV head on two cores. */
static size_t cost(int index, size_t rows) {
  const kvr_variant *v = &variants[index];
  const size_t tile = (size_t)v->row_tile, panel = v->bf16 ? 32 : 1;
  const size_t tall = rows < tile ? (rows + panel - 1) / panel * panel : tile;
  const size_t tiles = (rows + tile - 1) / tile;
  return (tiles + CORES - 1) / CORES * (tall * (size_t)v->row + (size_t)v->pack);
}

/* Shapes with vectors come before plain ones wherever both are usable. */
static bool better(int a, int b, size_t rows) {
  if (variants[a].vectors != variants[b].vectors) return variants[a].vectors;
  return cost(a, rows) < cost(b, rows);
}

int kvr_variant_pick(const bool *usable, int num_rows, int group) {
  const size_t rows = packed_rows(num_rows, group);
  int best = -1;
  for (int i = kvr_num_variants() - 1; i >= 0; i--)
    if (usable[i] && (best < 0 || better(i, best, rows))) best = i;
  return best;
}

bool kvr_variant_options(int index, const kvr_cache_desc *cache, kvr_dtype out_dtype,
                         kvr_products products, char *text, size_t size) {
  const kvr_variant *v = kvr_variant_get(index);
  if (v == NULL) return false;
  const int n = snprintf(text, size, "-DHEAD_DIM=%d -DKV_DTYPE=%d -DOUT_DTYPE=%d -DROW_TILE=%d",
                         cache->head_dim, (int)cache->dtype, (int)out_dtype, v->row_tile);
  if (n < 0 || (size_t)n >= size) return false;
  if (!v->bf16) return true;
  const int m = snprintf(text + n, size - (size_t)n, " -DPRODUCTS=%d", (int)products);
  return m >= 0 && (size_t)m < size - (size_t)n;
}

void kvr_variant_sizes(int index, int num_rows, int group, int num_kv_heads, size_t global[2],
                       size_t local[2]) {
  const kvr_variant *v = &variants[index];
  const size_t tile = (size_t)v->row_tile;
  local[0] = (size_t)v->local;
  local[1] = 1;
  global[0] = (packed_rows(num_rows, group) + tile - 1) / tile * local[0];
  global[1] = (size_t)num_kv_heads;
}

/* Code shapes of kvr_attend: they differ in the rows a work-item keeps beside one block of keys.
 *
 * A tall tile packs K and V less often, a short one leaves work for every core. Rows that a tile
 * has too many cost nothing beyond a multiple of 32 (16 for the shortest). */
#include "device/variant.h"

#include <stdio.h>
#include <string.h>

static const kvr_variant variants[] = {
    {.name = "rows256", .file = "attend.cl", .row_tile = 256, .local = 1, .vectors = true},
    {.name = "rows64", .file = "attend.cl", .row_tile = 64, .local = 1, .vectors = true},
    {.name = "rows16", .file = "attend.cl", .row_tile = 16, .local = 1, .vectors = true},
    {.name = "plain", .file = "attend_plain.cl", .row_tile = 32, .local = 32},
};

/* Packing a block of keys takes as long as attending this many rows to it (measured, PoCL). */
enum { PACK_ROWS = 14, CORES = 2 };

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

/* Time of a launch in rows per key, for one KV head on two cores. */
static size_t cost(int index, size_t rows) {
  const size_t tile = (size_t)variants[index].row_tile;
  const size_t tall = rows < tile ? rows : tile;
  const size_t tiles = (rows + tile - 1) / tile;
  return (tiles + CORES - 1) / CORES * (tall + PACK_ROWS);
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

bool kvr_variant_options(int index, const kvr_cache_desc *cache, kvr_dtype out_dtype, char *text,
                         size_t size) {
  const kvr_variant *v = kvr_variant_get(index);
  if (v == NULL) return false;
  const int n = snprintf(text, size, "-DHEAD_DIM=%d -DKV_DTYPE=%d -DOUT_DTYPE=%d -DROW_TILE=%d",
                         cache->head_dim, (int)cache->dtype, (int)out_dtype, v->row_tile);
  return n >= 0 && (size_t)n < size;
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

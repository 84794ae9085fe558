#include "strategy/share_stage.h"

#include <stdlib.h>

#include "base/arith.h"
#include "base/error.h"

kvr_status kvr_stager_init(const kvr_schedule *s, kvr_stager *stager) {
  const size_t P = (size_t)s->layout.num_ranks;
  *stager = (kvr_stager){.num_slots = s->options.num_slots};
  stager->held = calloc(P * (size_t)stager->num_slots, sizeof *stager->held);
  stager->next = calloc(P, sizeof *stager->next);
  if (stager->held == NULL || stager->next == NULL) {
    kvr_stager_fini(stager);
    return kvr_fail(KVR_E_OOM, "no host memory for the schedule");
  }
  kvr_stager_reset(s, stager);
  return KVR_OK;
}

void kvr_stager_fini(kvr_stager *stager) {
  free(stager->held);
  free(stager->next);
}

void kvr_stager_reset(const kvr_schedule *s, kvr_stager *stager) {
  for (int i = 0; i < s->layout.num_ranks * stager->num_slots; i++) stager->held[i] = -1;
}

kvr_status kvr_stager_get(kvr_schedule *s, kvr_stager *stager, kvr_at at, int rank, kvr_ref *out) {
  int *held = stager->held + rank * stager->num_slots;
  const int len = kvr_schedule_block_len(s, at.request, rank, at.block);
  for (int k = 0; k < stager->num_slots; k++)
    if (held[k] == at.block) {
      *out = kvr_make_ref(KVR_BUF_SLOT, rank, k, 0, len);
      return KVR_OK;
    }
  const int slot = stager->next[rank];
  stager->next[rank] = (slot + 1) % stager->num_slots;
  held[slot] = at.block;
  *out = kvr_make_ref(KVR_BUF_SLOT, rank, slot, 0, len);
  return kvr_build_stage(s, at, *out, at.block * s->options.tile);
}

int kvr_stager_num_blocks(const kvr_schedule *s, int request, int rank) {
  return kvr_ceil_div(kvr_layout_share(&s->layout, request, rank), s->options.tile);
}

#include "strategy/share_stage.h"

#include <stdlib.h>

#include "base/arith.h"
#include "base/error.h"

static void fini(kvr_stager *stager) {
  free(stager->held);
  free(stager->next);
}

/* Slots hold blocks of one request at a time. */
static void forget(const kvr_schedule *s, kvr_stager *stager) {
  for (int i = 0; i < s->layout.num_ranks * stager->num_slots; i++) stager->held[i] = -1;
}

static kvr_status init(const kvr_schedule *s, kvr_stager *stager) {
  const size_t P = (size_t)s->layout.num_ranks;
  *stager = (kvr_stager){.num_slots = s->options.num_slots};
  stager->held = calloc(P * (size_t)stager->num_slots, sizeof *stager->held);
  stager->next = calloc(P, sizeof *stager->next);
  if (stager->held != NULL && stager->next != NULL) return KVR_OK;
  fini(stager);
  return kvr_fail(KVR_E_OOM, "no host memory for the schedule");
}

kvr_status kvr_stager_get(kvr_schedule *s, kvr_stager *stager, kvr_at at, int rank, kvr_ref *out) {
  int *held = stager->held + (size_t)rank * (size_t)stager->num_slots;
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

int kvr_stager_first_block(const kvr_schedule *s, int request, int rank) {
  return kvr_min(kvr_schedule_first_block(s, request), kvr_stager_end_block(s, request, rank));
}

int kvr_stager_end_block(const kvr_schedule *s, int request, int rank) {
  return kvr_ceil_div(kvr_layout_share(&s->layout, request, rank), s->options.tile);
}

static kvr_status build_all(kvr_schedule *s, kvr_stager *stager, kvr_share_pass *build_pass) {
  KVR_TRY(kvr_build_gather_current(s));
  for (int i = 0; i < s->layout.num_requests; i++) {
    forget(s, stager);
    for (int pass = 0; pass < kvr_schedule_num_passes(s, i); pass++) {
      const kvr_at at = {i, pass, -1, -1};
      if (s->problem.requests[i].num_cached > 0)
        KVR_TRY(build_pass(s, stager, at));
      else
        KVR_TRY(kvr_build_attend_current(s, at));
    }
  }
  return kvr_build_cache_writes(s);
}

kvr_status kvr_build_over_shares(kvr_schedule *s, kvr_share_pass *build_pass) {
  kvr_stager stager;
  KVR_TRY(init(s, &stager));
  const kvr_status status = build_all(s, &stager, build_pass);
  fini(&stager);
  return status;
}

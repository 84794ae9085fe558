#include "device/watch.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "device/cl_error.h"

/* ---- looking and sleeping ---- */

enum { SHORTEST_NAP = 20000, LONGEST_NAP = 1000000 }; /* ns */
static const double looking = 20e-6;                  /* s; short commands end without a nap */

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A sixteenth of what has been waited for so far, within limits: short waits end soon, and long
 * ones cost nothing. */
static void nap(double waited) {
  if (waited < looking) return;
  double ns = waited * 1e9 / 16;
  if (ns < SHORTEST_NAP) ns = SHORTEST_NAP;
  if (ns > LONGEST_NAP) ns = LONGEST_NAP;
  nanosleep(&(struct timespec){.tv_nsec = (long)ns}, NULL);
}

kvr_status kvr_watch_status(cl_event event, cl_int *status) {
  KVR_CL(clGetEventInfo, (event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof *status, status, NULL));
  return KVR_OK;
}

/* ---- the limit ---- */

/* When something last moved. Counting looks at many events, so it is done a few times per limit. */
typedef struct limit {
  double timeout, moved, counted;
  int num; /* -1: not counted yet */
} limit;

static bool is_over(limit *l, double now, kvr_watch_count *count, void *data) {
  if (count != NULL && now - l->counted >= l->timeout / 16) {
    const int num = count(data);
    if (num != l->num && l->num >= 0) l->moved = now;
    l->num = num;
    l->counted = now;
  }
  return now - l->moved >= l->timeout;
}

static kvr_status give_up(kvr_group *group) {
  atomic_store(&group->is_stuck, true);
  return kvr_fail(KVR_E_TIMEOUT,
                  "nothing completed for %g s; if the device is only slow, raise timeout of "
                  "kvr_group_desc, else create a new group",
                  group->timeout);
}

kvr_status kvr_watch_event(kvr_group *group, cl_event event, kvr_watch_count *count, void *data) {
  const double start = seconds();
  limit l = {.timeout = kvr_group_is_stuck(group) ? 0 : group->timeout,
             .moved = start,
             .counted = start,
             .num = -1};
  for (double now = start;; now = seconds()) {
    cl_int status = CL_COMPLETE;
    KVR_TRY(kvr_watch_status(event, &status));
    if (status <= CL_COMPLETE) return kvr_cl_check(status, "command");
    if (is_over(&l, now, count, data)) return give_up(group);
    nap(now - start);
  }
}

/* A marker of an in-order queue ends after everything before it. */
kvr_status kvr_watch_queue(kvr_group *group, cl_command_queue queue, kvr_watch_count *count,
                           void *data) {
  cl_event end;
  KVR_CL(clEnqueueMarkerWithWaitList, (queue, 0, NULL, &end));
  kvr_status status = kvr_cl_check(clFlush(queue), "clFlush");
  if (status == KVR_OK && kvr_watch_event(group, end, count, data) == KVR_E_TIMEOUT)
    status = KVR_E_TIMEOUT;
  clReleaseEvent(end);
  return status;
}

/* ---- stuck groups ---- */

bool kvr_group_is_stuck(const kvr_group *group) { return atomic_load(&group->is_stuck); }

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of reasons, and of what is left */

void kvr_group_explain_stuck(kvr_group *group) {
  pthread_mutex_lock(&lock);
  if (group->why_stuck[0] == '\0')
    snprintf(group->why_stuck, sizeof group->why_stuck, "%s", kvr_error_message());
  pthread_mutex_unlock(&lock);
}

kvr_status kvr_group_check_moving(const kvr_group *group) {
  if (!kvr_group_is_stuck(group)) return KVR_OK;
  pthread_mutex_lock(&lock);
  kvr_error_set("the group cannot be used any more, since a command did not end: %s",
                group->why_stuck);
  pthread_mutex_unlock(&lock);
  return KVR_E_STATE;
}

/* Memory for good, where leak checkers see that it is meant. */
typedef struct left {
  struct left *next;
  void *memory;
} left;

static left *all_left;

void kvr_group_free_host(const kvr_group *group, void *memory) {
  if (memory == NULL || !kvr_group_is_stuck(group)) {
    free(memory);
    return;
  }
  left *l = malloc(sizeof *l);
  if (l == NULL) return;
  pthread_mutex_lock(&lock);
  *l = (left){.next = all_left, .memory = memory};
  all_left = l;
  pthread_mutex_unlock(&lock);
}

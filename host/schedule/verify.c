#include "schedule/verify.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"

kvr_status kvr_verify_fail(const kvr_schedule *s, int op, const char *what) {
  return kvr_fail(KVR_E_VERIFY, "schedule %s, op %d (%s, rank %d): %s", s->strategy, op,
                  kvr_op_name(s->ops[op].kind), s->ops[op].rank, what);
}

static bool share_rank(const kvr_op *a, const kvr_op *b) {
  return a->rank == b->rank || a->rank == b->peer || a->peer == b->rank ||
         (a->peer >= 0 && a->peer == b->peer);
}

/* marks (num_ops): 1 + the last op seen to depend on this one. */
static kvr_status check_deps(const kvr_schedule *s, int *marks, int i) {
  const kvr_op *op = &s->ops[i];
  const int *deps = kvr_op_deps(s, op);
  for (int d = 0; d < op->num_deps; d++) {
    if (deps[d] < 0 || deps[d] >= i) return kvr_verify_fail(s, i, "depends on a later op");
    if (!share_rank(op, &s->ops[deps[d]]))
      return kvr_verify_fail(s, i, "depends on an op between other ranks");
    marks[deps[d]] = i + 1;
  }
  return KVR_OK;
}

/* Users of each resource since its last write, as lists in one array: an account of its own, so
 * that a mistake in the ledger of schedule.c cannot hide itself. */
typedef struct user {
  int op;
  int next;
} user;

typedef struct book {
  int *writer;  /* (num_resources) last writer, or -1 */
  int *readers; /* (num_resources) list of readers since then, or -1 */
  user *users;
  int num_users;
  int *marks; /* (num_ops) see check_deps */
} book;

static kvr_status check_access(const kvr_schedule *s, book *b, int i, kvr_access access) {
  const int r = access.resource;
  if (b->writer[r] >= 0 && b->writer[r] != i && b->marks[b->writer[r]] != i + 1)
    return kvr_verify_fail(s, i,
                           access.write ? "may overtake an earlier write of the same rows"
                                        : "may read rows before they are written");
  if (!access.write) return KVR_OK;
  for (int u = b->readers[r]; u >= 0; u = b->users[u].next)
    if (b->users[u].op != i && b->marks[b->users[u].op] != i + 1)
      return kvr_verify_fail(s, i, "may overwrite rows that are still being read");
  return KVR_OK;
}

static void note_access(book *b, int i, kvr_access access) {
  const int r = access.resource;
  if (access.write) {
    b->writer[r] = i;
    b->readers[r] = -1;
    return;
  }
  b->users[b->num_users] = (user){i, b->readers[r]};
  b->readers[r] = b->num_users++;
}

static kvr_status walk(const kvr_schedule *s, book *b, kvr_access *accesses) {
  for (int i = 0; i < s->num_ops; i++) {
    KVR_TRY(check_deps(s, b->marks, i));
    const int n = kvr_op_accesses(s, &s->ops[i], accesses);
    for (int a = 0; a < n; a++) KVR_TRY(check_access(s, b, i, accesses[a]));
    for (int a = 0; a < n; a++) note_access(b, i, accesses[a]);
  }
  return KVR_OK;
}

kvr_status kvr_verify_order(const kvr_schedule *s) {
  const size_t resources = (size_t)s->num_resources + 1;
  const size_t most = (size_t)kvr_schedule_max_accesses(s);
  kvr_access *accesses = calloc(most, sizeof *accesses);
  book b = {.writer = malloc(resources * sizeof *b.writer),
            .readers = malloc(resources * sizeof *b.readers),
            .marks = calloc((size_t)s->num_ops + 1, sizeof *b.marks),
            .users = calloc((size_t)s->num_ops * most + 1, sizeof *b.users)};
  kvr_status status = KVR_E_OOM;
  if (accesses != NULL && b.writer != NULL && b.readers != NULL && b.users != NULL &&
      b.marks != NULL) {
    memset(b.writer, 0xff, resources * sizeof *b.writer); /* -1 everywhere */
    memset(b.readers, 0xff, resources * sizeof *b.readers);
    status = walk(s, &b, accesses);
  } else {
    kvr_error_set("no host memory to verify the schedule");
  }
  free(accesses);
  free(b.writer);
  free(b.readers);
  free(b.marks);
  free(b.users);
  return status;
}

kvr_status kvr_schedule_verify(const kvr_schedule *s, int64_t bytes_formula) {
  KVR_TRY(kvr_verify_order(s));
  KVR_TRY(kvr_verify_data(s));
  const int64_t moved = kvr_schedule_totals(s).bytes_moved;
  if (moved == bytes_formula) return KVR_OK;
  return kvr_fail(KVR_E_VERIFY, "schedule %s moves %lld bytes, its formula says %lld", s->strategy,
                  (long long)moved, (long long)bytes_formula);
}

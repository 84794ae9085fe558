/* Chrome/Perfetto trace: one process per rank, one track per queue, one more for what the rank
 * sends; every copy between ranks is an arrow from the sender's track to the copy itself. */
#include "kvring/trace.h"

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

enum { TRACK_COMPUTE, TRACK_COPY, TRACK_SENT, NUM_TRACKS };

typedef struct step {
  char label[48];
  int num_records;
  kvr_trace_record *records;
} step;

struct kvr_trace {
  int num_steps, cap_steps;
  step *steps;
};

kvr_status kvr_trace_create(kvr_trace **out) {
  if (out == NULL) return kvr_fail(KVR_E_NULL, "out is NULL");
  *out = calloc(1, sizeof **out);
  return *out != NULL ? KVR_OK : kvr_fail(KVR_E_OOM, "no host memory for a trace");
}

void kvr_trace_destroy(kvr_trace *trace) {
  if (trace == NULL) return;
  for (int i = 0; i < trace->num_steps; i++) free(trace->steps[i].records);
  free(trace->steps);
  free(trace);
}

kvr_status kvr_trace_add(kvr_trace *trace, const char *label, const kvr_trace_record *records,
                         int num_records) {
  if (trace == NULL || label == NULL || (records == NULL && num_records > 0))
    return kvr_fail(KVR_E_NULL, "trace, label or records is NULL");
  if (num_records < 0)
    return kvr_fail(KVR_E_RANGE, "num_records is %d; it must not be negative", num_records);
  if (trace->num_steps == trace->cap_steps) {
    const int larger = trace->cap_steps == 0 ? 16 : 2 * trace->cap_steps;
    step *moved = realloc(trace->steps, (size_t)larger * sizeof *moved);
    if (moved == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a trace");
    trace->steps = moved;
    trace->cap_steps = larger;
  }
  step s = {.num_records = num_records};
  snprintf(s.label, sizeof s.label, "%s", label);
  s.records = malloc(((size_t)num_records + 1) * sizeof *s.records);
  if (s.records == NULL) return kvr_fail(KVR_E_OOM, "no host memory for a trace");
  if (num_records > 0) memcpy(s.records, records, (size_t)num_records * sizeof *s.records);
  trace->steps[trace->num_steps++] = s;
  return KVR_OK;
}

/* ---- writing ---- */

typedef struct writer {
  FILE *file;
  int64_t origin_ns;
  int num_events, num_flows;
  bool failed;
} writer;

/* Writes one event (taken over). */
static void put(writer *w, cJSON *event) {
  char *text = event != NULL ? cJSON_PrintUnformatted(event) : NULL;
  if (text == NULL || fprintf(w->file, "%s%s", w->num_events++ > 0 ? ",\n" : "", text) < 0)
    w->failed = true;
  cJSON_free(text);
  cJSON_Delete(event);
}

static cJSON *new_event(const char *phase, const char *name, int rank, int track) {
  cJSON *e = cJSON_CreateObject();
  cJSON_AddStringToObject(e, "ph", phase);
  cJSON_AddStringToObject(e, "name", name);
  cJSON_AddNumberToObject(e, "pid", rank);
  cJSON_AddNumberToObject(e, "tid", track);
  return e;
}

static void put_name(writer *w, const char *what, int rank, int track, const char *name) {
  cJSON *e = new_event("M", what, rank, track);
  cJSON_AddStringToObject(cJSON_AddObjectToObject(e, "args"), "name", name);
  put(w, e);
}

static void put_rank_names(writer *w, int rank) {
  static const char *const tracks[NUM_TRACKS] = {"compute queue", "copy queue", "sent"};
  char name[32];
  snprintf(name, sizeof name, "rank %d", rank);
  put_name(w, "process_name", rank, 0, name);
  for (int t = 0; t < NUM_TRACKS; t++) put_name(w, "thread_name", rank, t, tracks[t]);
}

static double micros(const writer *w, int64_t ns) { return (double)(ns - w->origin_ns) / 1000.0; }

static void add_times(const writer *w, cJSON *e, const kvr_trace_record *r) {
  cJSON_AddNumberToObject(e, "ts", micros(w, r->start_ns));
  cJSON_AddNumberToObject(e, "dur", (double)(r->end_ns - r->start_ns) / 1000.0);
}

static void put_op(writer *w, const char *label, const kvr_trace_record *r) {
  cJSON *e = new_event("X", kvr_op_name((kvr_op_kind)r->kind), r->rank, r->queue);
  add_times(w, e, r);
  cJSON *args = cJSON_AddObjectToObject(e, "args");
  cJSON_AddStringToObject(args, "chunk", label);
  cJSON_AddNumberToObject(args, "op", r->op);
  cJSON_AddNumberToObject(args, "request", r->request);
  cJSON_AddNumberToObject(args, "pass", r->pass);
  cJSON_AddNumberToObject(args, "block", r->block);
  cJSON_AddNumberToObject(args, "step", r->step);
  cJSON_AddNumberToObject(args, "slot", r->slot);
  cJSON_AddNumberToObject(args, "bytes", (double)r->bytes);
  put(w, e);
}

static void put_flow(writer *w, const kvr_trace_record *r) {
  char name[48];
  snprintf(name, sizeof name, "%s to rank %d", kvr_op_name((kvr_op_kind)r->kind), r->rank);
  cJSON *sent = new_event("X", name, r->peer, TRACK_SENT);
  add_times(w, sent, r);
  put(w, sent);
  const struct {
    const char *phase;
    int rank, track;
  } ends[2] = {{"s", r->peer, TRACK_SENT}, {"f", r->rank, r->queue}};
  for (int i = 0; i < 2; i++) {
    cJSON *e = new_event(ends[i].phase, "transfer", ends[i].rank, ends[i].track);
    cJSON_AddStringToObject(e, "cat", "transfer");
    cJSON_AddStringToObject(e, "bp", "e");
    cJSON_AddNumberToObject(e, "id", w->num_flows);
    cJSON_AddNumberToObject(e, "ts", micros(w, r->start_ns));
    put(w, e);
  }
  w->num_flows++;
}

static bool has_time(const kvr_trace_record *r) { return r->launched && r->end_ns > 0; }

/* Earliest start and largest rank. */
static void measure(const kvr_trace *t, int64_t *origin, int *num_ranks) {
  *origin = 0;
  *num_ranks = 0;
  for (int i = 0; i < t->num_steps; i++)
    for (int j = 0; j < t->steps[i].num_records; j++) {
      const kvr_trace_record *r = &t->steps[i].records[j];
      if (r->rank >= *num_ranks) *num_ranks = r->rank + 1;
      if (has_time(r) && (*origin == 0 || r->start_ns < *origin)) *origin = r->start_ns;
    }
}

static void put_all(writer *w, const kvr_trace *t) {
  int num_ranks;
  measure(t, &w->origin_ns, &num_ranks);
  for (int r = 0; r < num_ranks; r++) put_rank_names(w, r);
  for (int i = 0; i < t->num_steps; i++)
    for (int j = 0; j < t->steps[i].num_records; j++) {
      const kvr_trace_record *r = &t->steps[i].records[j];
      if (!has_time(r)) continue;
      put_op(w, t->steps[i].label, r);
      if (r->peer >= 0) put_flow(w, r);
    }
}

kvr_status kvr_trace_write(const kvr_trace *trace, const char *path) {
  if (trace == NULL || path == NULL) return kvr_fail(KVR_E_NULL, "trace or path is NULL");
  char temporary[4096];
  const int len = snprintf(temporary, sizeof temporary, "%s.partial", path);
  if (len < 0 || (size_t)len >= sizeof temporary)
    return kvr_fail(KVR_E_IO, "the path '%.80s...' is too long", path);
  writer w = {.file = fopen(temporary, "w")};
  if (w.file == NULL)
    return kvr_fail(KVR_E_IO, "cannot write '%s'; check the folder and its permissions", temporary);
  if (fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", w.file) < 0) w.failed = true;
  put_all(&w, trace);
  if (fputs("\n]}\n", w.file) < 0) w.failed = true;
  if (fclose(w.file) != 0) w.failed = true;
  if (!w.failed && rename(temporary, path) == 0) return KVR_OK;
  remove(temporary);
  return kvr_fail(KVR_E_IO, "cannot write '%s'; is the disk full?", path);
}

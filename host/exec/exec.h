/* The inside of the device executor, shared by its files. */
#ifndef KVR_EXEC_EXEC_H
#define KVR_EXEC_EXEC_H

#include "device/attend_kernel.h"
#include "exec/exec_cl.h"

/* Kernels of one device. Ranks on the same device share them; one thread at a time uses a session.
 */
typedef struct kvr_kernels {
  bool is_cpu; /* a row is copied by one work-item; elsewhere by a work-group */
  kvr_attend_kernels attend[KVR_NUM_DTYPES]; /* by output type */
  cl_program merge_program[KVR_NUM_DTYPES], rows_program;
  cl_kernel merge_states[KVR_NUM_DTYPES], merge_outputs[KVR_NUM_DTYPES];
  cl_kernel stage, cache_write;
} kvr_kernels;

typedef struct kvr_rank_exec {
  cl_mem *memory[KVR_NUM_BUFFERS]; /* (footprint.memories) */
  cl_mem sinks;                    /* (num_q_heads) floats */
  cl_mem *tables;                  /* (max_requests): (max_table_entries) ints each */
  kvr_kernels *kernels;            /* owned by the first rank on the device */
  cl_mem carry;                    /* state between launches of one op, see launch.c; or NULL */
  bool owns_kernels;
  bool dirty[2];        /* compute, copy queue: commands since its last flush */
  cl_event input_ready; /* of the step in flight */
} kvr_rank_exec;

/* The end of a transfer, or an event of the caller's, that the end of the step waits for. */
typedef struct kvr_sink {
  cl_event event;
  int rank;         /* -1: the caller's event */
  const char *what; /* "upload of q" */
} kvr_sink;

struct kvr_exec {
  kvr_group *group;
  kvr_cache *cache;
  kvr_exec_desc desc;
  kvr_row_bytes row_bytes;
  kvr_rank_exec *ranks;
  size_t bytes; /* of one rank */
  kvr_exec_gate *gate;
  void *gate_data;
  int *host_tables; /* (max_requests, max_table_entries) copies that uploads read, and sinks: the */
  float *host_sinks; /* cache and the plan may change or end while a command is stuck */
  /* the step in flight */
  const kvr_schedule *schedule;
  kvr_trace_record *records;
  cl_event *events; /* (num_ops); NULL before enqueueing and once harvested */
  cl_event *waits;  /* scratch: wait list */
  cl_uint num_waits, cap_waits;
  kvr_sink *sinks; /* (num_sinks) inputs, from num_inputs on outputs */
  int num_sinks, num_inputs, cap_sinks;
  int num_enqueued, num_harvested;
};

/* kernels.c */
kvr_status kvr_exec_create_kernels(kvr_exec *exec);
void kvr_exec_destroy_kernels(kvr_exec *exec);

/* warm_up.c: runs every kernel of a rank once on nothing, since drivers finish compiling at the
 * first launch with a given work-group size */
kvr_status kvr_exec_warm_up(kvr_exec *exec, int rank, kvr_dtype out_dtype);

/* Global and local sizes of a launch: of rows.cl, and of merge.cl. */
typedef struct kvr_launch_size {
  size_t global[2], local[2];
} kvr_launch_size;
kvr_launch_size kvr_rows_size(const kvr_kernels *kernels, int num_rows);
kvr_launch_size kvr_merge_size(int num_rows, int num_q_heads);

/* queue.c: which queue, wait lists, flushing */
int kvr_exec_queue_of(const kvr_exec *exec, const kvr_op *op); /* 0 compute, 1 copy */
cl_command_queue kvr_exec_queue(const kvr_exec *exec, int rank, int queue);
/* Starts an empty wait list; adds to it (NULL is skipped). */
void kvr_exec_waits_clear(kvr_exec *exec);
kvr_status kvr_exec_waits_add(kvr_exec *exec, cl_event event);
static inline const cl_event *kvr_exec_waits(const kvr_exec *exec) {
  return exec->num_waits > 0 ? exec->waits : NULL;
}
/* Remembers an event that the end of the step must wait for (taken over); what is borrowed. */
kvr_status kvr_exec_add_sink(kvr_exec *exec, int rank, const char *what, cl_event event);
kvr_status kvr_exec_flush(kvr_exec *exec, int rank, int queue);

/* launch.c: one op, after the current wait list; *event is owned by the caller */
kvr_status kvr_exec_launch(kvr_exec *exec, const kvr_op *op, cl_event *event);

/* complete.c */
/* Puts rank, op and its place before the message. */
kvr_status kvr_exec_fail_op(const kvr_exec *exec, int op, kvr_status status);
/* Waits for the ops before end and notes their times. */
kvr_status kvr_exec_harvest(kvr_exec *exec, int end);
/* Ends the step in flight. After a failure (status), waits until nothing of it is in flight any
 * more; returns status, or KVR_E_TIMEOUT if that does not happen. */
kvr_status kvr_exec_end(kvr_exec *exec, kvr_status status);

/* io.c */
kvr_status kvr_exec_upload(kvr_exec *exec, const kvr_io *io, cl_uint num_waits,
                           const cl_event *waits);
kvr_status kvr_exec_download(kvr_exec *exec, const kvr_io *io);

static inline cl_mem kvr_exec_memory(const kvr_exec *exec, kvr_ref ref) {
  return exec->ranks[ref.rank].memory[ref.buffer][kvr_ref_memory(ref)];
}

#endif

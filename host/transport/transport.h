/* Transports: how rows get from one rank's memory to another's. */
#ifndef KVR_TRANSPORT_TRANSPORT_H
#define KVR_TRANSPORT_TRANSPORT_H

#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 120
#endif
#include <CL/cl.h>
#include <stddef.h>

#include "kvring/status.h"

typedef struct kvr_transport_copy {
  cl_mem src, dst;
  size_t src_offset, dst_offset, bytes; /* bytes > 0 */
} kvr_transport_copy;

typedef struct kvr_transport {
  const char *name;
  /* Enqueues the copy on the receiver's queue. *done (owned by the caller) completes when the
   * source may be reused and the destination is ready; in one context these are the same moment. */
  kvr_status (*hop)(cl_command_queue queue, const kvr_transport_copy *copy, cl_uint num_waits,
                    const cl_event *waits, cl_event *done);
} kvr_transport;

/* Both memories belong to one OpenCL context. */
extern const kvr_transport kvr_transport_same_context;

#endif

#include "device/cl_error.h"
#include "transport/transport.h"

static kvr_status hop(cl_command_queue queue, const kvr_transport_copy *copy, cl_uint num_waits,
                      const cl_event *waits, cl_event *done) {
  KVR_CL(clEnqueueCopyBuffer, (queue, copy->src, copy->dst, copy->src_offset, copy->dst_offset,
                               copy->bytes, num_waits, waits, done));
  return KVR_OK;
}

const kvr_transport kvr_transport_same_context = {.name = "same-context", .hop = hop};

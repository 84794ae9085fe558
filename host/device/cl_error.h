/* OpenCL errors as statuses. */
#ifndef KVR_DEVICE_CL_ERROR_H
#define KVR_DEVICE_CL_ERROR_H

#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 120
#endif
#include <CL/cl.h>

#include "base/error.h"

/* "CL_INVALID_VALUE" for -30; "CL_?" for unknown codes (static storage). */
const char *kvr_cl_error_name(cl_int code);
/* KVR_OK for CL_SUCCESS, else KVR_E_CL (KVR_E_OOM for the three out-of-memory codes) with the
 * message "clFoo: CL_BAR (-30)". */
kvr_status kvr_cl_check(cl_int code, const char *call);

/* Runs an OpenCL function and returns from the caller when it fails: KVR_CL(clFinish, (queue)). */
#define KVR_CL(function, args) KVR_TRY(kvr_cl_check(function args, #function))

#endif

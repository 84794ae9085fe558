/* Status codes and error messages of libkvring. */
#ifndef KVRING_STATUS_H
#define KVRING_STATUS_H

#if defined(_WIN32)
#define KVR_API
#else
#define KVR_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, what it means). One list: the enum, the names and the documentation come from it. */
#define KVR_STATUS_LIST(X)                                                                         \
  X(OK, "success")                                                                                 \
  X(E_NULL, "a required pointer is NULL")                                                          \
  X(E_SHAPE, "array shapes or head counts do not fit together")                                    \
  X(E_DTYPE, "element type not allowed here")                                                      \
  X(E_RANGE, "a number or a name is outside what is allowed")                                      \
  X(E_TABLE, "a block table names a page that must not be used")                                   \
  X(E_CAPACITY, "a table, a pool or a limit is too small for the request")                         \
  X(E_UNSUPPORTED, "this build or device cannot do it")                                            \
  X(E_CONFLICT, "two options exclude each other")                                                  \
  X(E_LAYOUT, "layouts of two objects differ")                                                     \
  X(E_OOM, "not enough memory, or the memory budget refuses")                                      \
  X(E_CL, "an OpenCL call failed")                                                                 \
  X(E_STATE, "the object is busy or was poisoned by an earlier error")                             \
  X(E_IO, "a file cannot be read or written")                                                      \
  X(E_VERIFY, "a schedule broke one of its own rules")                                             \
  X(E_TIMEOUT, "nothing completed on the device for too long")

#define KVR_STATUS_ENUM(name, text) KVR_##name,
typedef enum kvr_status { KVR_STATUS_LIST(KVR_STATUS_ENUM) KVR_NUM_STATUS } kvr_status;
#undef KVR_STATUS_ENUM

/* Name of a status, e.g. "KVR_E_SHAPE"; "KVR_?" for a number that is none (static storage). */
KVR_API const char *kvr_status_name(kvr_status status);

/* Message of the last error on this thread: value, limit and fix. Empty after no error.
 * Valid until the next failing call on this thread (borrowed). */
KVR_API const char *kvr_error_message(void);

/* Version of the library, e.g. "0.1.0" (static storage). */
KVR_API const char *kvr_version(void);

#ifdef __cplusplus
}
#endif
#endif

/* Failing with a message: every fallible function returns kvr_fail(...) or passes a status on. */
#ifndef KVR_BASE_ERROR_H
#define KVR_BASE_ERROR_H

#include "kvring/status.h"

/* Sets this thread's message (printf style). */
void kvr_error_set(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* kvr_fail(status, format, ...): sets the message; its value is status. A macro, so that compilers
 * see that it never means success. */
#define kvr_fail(status, ...) (kvr_error_set(__VA_ARGS__), (status))
/* Puts "prefix: " before the current message and returns status. */
kvr_status kvr_fail_at(kvr_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Returns from the calling function when an expression of type kvr_status is not KVR_OK. */
#define KVR_TRY(expr)                                                                              \
  do {                                                                                             \
    const kvr_status kvr_try_status_ = (expr);                                                     \
    if (kvr_try_status_ != KVR_OK) return kvr_try_status_;                                         \
  } while (0)

#endif

#include "kvring/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"

#ifndef KVR_VERSION
#error "define KVR_VERSION, e.g. -DKVR_VERSION='\"0.1.0\"'"
#endif

enum { MESSAGE_SIZE = 2048 };

static _Thread_local char message[MESSAGE_SIZE];

const char *kvr_status_name(kvr_status status) {
#define NAME(name, text) "KVR_" #name,
  static const char *const names[KVR_NUM_STATUS] = {KVR_STATUS_LIST(NAME)};
#undef NAME
  return (unsigned)status < KVR_NUM_STATUS ? names[status] : "KVR_?";
}

const char *kvr_error_message(void) { return message; }

const char *kvr_version(void) { return KVR_VERSION; }

/* Formatted aside first: an argument may be the current message. */
void kvr_error_set(const char *format, ...) {
  char text[MESSAGE_SIZE];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  memcpy(message, text, strlen(text) + 1);
}

/* A message that gets too long loses its end. */
kvr_status kvr_fail_at(kvr_status status, const char *format, ...) {
  char text[MESSAGE_SIZE];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  const size_t used = strlen(text);
  if (snprintf(text + used, sizeof text - used, ": %s", message) < 0) return status;
  memcpy(message, text, strlen(text) + 1);
  return status;
}

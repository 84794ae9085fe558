#include "device/driver_lock.h"

#include <pthread.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t mutex;

static void init(void) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

void kvr_driver_lock(void) {
  pthread_once(&once, init);
  pthread_mutex_lock(&mutex);
}

void kvr_driver_unlock(void) { pthread_mutex_unlock(&mutex); }

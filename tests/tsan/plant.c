/* Mistakes that ThreadSanitizer must report in spite of support/tsan.supp: plant race | lock_order.
 * Ends with 0 when nothing notices. */
#include <pthread.h>
#include <string.h>

static int counter;

static void *count(void *unused) {
  for (int i = 0; i < 1000; i++) counter++;
  return unused;
}

static void race(void) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, count, NULL) != 0) return;
  count(NULL);
  pthread_join(thread, NULL);
}

static void lock_both(pthread_mutex_t *first, pthread_mutex_t *second) {
  pthread_mutex_lock(first);
  pthread_mutex_lock(second);
  pthread_mutex_unlock(second);
  pthread_mutex_unlock(first);
}

static void lock_order(void) {
  static pthread_mutex_t a = PTHREAD_MUTEX_INITIALIZER, b = PTHREAD_MUTEX_INITIALIZER;
  lock_both(&a, &b);
  lock_both(&b, &a);
}

int main(int argc, char **argv) {
  if (argc == 2 && strcmp(argv[1], "race") == 0) race();
  if (argc == 2 && strcmp(argv[1], "lock_order") == 0) lock_order();
  return 0;
}

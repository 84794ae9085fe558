/* A small cache with three requests, and a session on it, for tests of what is refused: after every
 * refusal nothing may have changed. */
#ifndef KVR_TESTS_DEVICE_REFUSED_CASE_H
#define KVR_TESTS_DEVICE_REFUSED_CASE_H

#include "kvring/kvring.h"

enum {
  REFUSED_P = 2,
  REFUSED_NQ = 4,
  REFUSED_NKV = 2,
  REFUSED_D = 4,
  REFUSED_PAGE = 4,
  REFUSED_PAGES = 8,
  REFUSED_REQUESTS = 3,
  REFUSED_NEW = 2 /* new tokens of a good step */
};

typedef struct refused_world {
  kvr_group *group;
  kvr_cache *cache;
  kvr_session *session;
  int ids[REFUSED_REQUESTS]; /* with 5, 9 and 0 tokens, and room for 16, 16 and 8 */
  kvr_problem problem;       /* a good step of two new tokens of the first; may be changed */
  kvr_options options;
  kvr_request requests[REFUSED_REQUESTS];
} refused_world;

/* One world per program, opened once; close is a group teardown of cmocka. */
refused_world *refused_open(void);
int refused_close(void **state);
/* Puts problem, options and requests back to a good step. */
void refused_reset(refused_world *w);
/* The limits that the session was made with: exactly what a good step needs. */
kvr_limits refused_limits(void);
kvr_cache_desc refused_desc(void);

/* Status and message (up to three words: value, limit, what to do), and that no length, table, free
 * page or byte of the cache has changed. */
typedef struct refused_words {
  const char *list[3];
} refused_words;
void refused_expect(refused_world *w, kvr_status got, kvr_status want, refused_words words);
#define REFUSED(w, call, status, ...)                                                              \
  refused_expect(w, call, status, (refused_words){{__VA_ARGS__}})

#endif

/* Strict parsing of numbers and names: value, limit and fix in every message. */
#include "cli/parse.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "kvring/group.h"

/* strto* skip blanks, and would read a number out of "  7". */
static bool starts_a_number(const char *text) {
  return text[0] != '\0' && strchr("+-.0123456789", text[0]) != NULL;
}

kvr_status cli_parse_int(const char *what, const char *text, int min, int max, int *out) {
  char *end;
  errno = 0;
  const long long value = strtoll(text, &end, 10);
  if (end == text || *end != '\0' || !starts_a_number(text))
    return kvr_fail(KVR_E_RANGE, "%s is '%.40s', which is not a whole number; use %d..%d", what,
                    text, min, max);
  if (errno == ERANGE || value < min || value > max)
    return kvr_fail(KVR_E_RANGE, "%s is %.40s; it must be in %d..%d", what, text, min, max);
  *out = (int)value;
  return KVR_OK;
}

kvr_status cli_parse_seed(const char *what, const char *text, uint64_t *out) {
  char *end;
  errno = 0;
  const unsigned long long value = strtoull(text, &end, 10);
  if (text[0] < '0' || text[0] > '9' || *end != '\0')
    return kvr_fail(KVR_E_RANGE, "%s is '%.40s', which is not a whole number; use 0..2^64-1", what,
                    text);
  if (errno == ERANGE) return kvr_fail(KVR_E_RANGE, "%s is %.40s; the limit is 2^64-1", what, text);
  *out = value;
  return KVR_OK;
}

kvr_status cli_parse_bytes(const char *what, const char *text, size_t *out) {
  char *end;
  errno = 0;
  const unsigned long long value = strtoull(text, &end, 10);
  const bool number = text[0] >= '0' && text[0] <= '9';
  static const char units[] = "KMGT";
  const char *unit = number && *end != '\0' ? strchr(units, *end) : NULL;
  const int shift = unit != NULL ? 10 * (int)(unit - units + 1) : 0;
  if (!number || strcmp(unit != NULL ? end + 1 : end, "") != 0)
    return kvr_fail(KVR_E_RANGE,
                    "%s is '%.40s', which is not a number of bytes; use e.g. 512M or 2G", what,
                    text);
  if (errno == ERANGE || value > (SIZE_MAX >> shift))
    return kvr_fail(KVR_E_RANGE, "%s is %.40s; the limit is %zu bytes", what, text,
                    (size_t)SIZE_MAX);
  *out = (size_t)value << shift;
  return KVR_OK;
}

static kvr_status parse_real(const char *what, const char *text, double *out) {
  char *end;
  const double value = strtod(text, &end);
  if (end == text || *end != '\0' || !starts_a_number(text) || !isfinite(value))
    return kvr_fail(KVR_E_RANGE, "%s is '%.40s', which is not a finite number; use e.g. 0.5", what,
                    text);
  *out = value;
  return KVR_OK;
}

/* Sizes that f32 holds with room for products of a few of them. */
#define SMALLEST 1e-18
#define LARGEST 1e18

kvr_status cli_parse_cap(const char *what, const char *text, double *out) {
  double value;
  KVR_TRY(parse_real(what, text, &value));
  if (value != 0 && !(value >= SMALLEST && value <= LARGEST))
    return kvr_fail(KVR_E_RANGE, "%s is %.40s; it must be in %g..%g, or 0 for none", what, text,
                    SMALLEST, LARGEST);
  *out = value;
  return KVR_OK;
}

kvr_status cli_parse_scale(const char *what, const char *text, double *out) {
  double value;
  KVR_TRY(parse_real(what, text, &value));
  if (!(fabs(value) >= SMALLEST && fabs(value) <= LARGEST))
    return kvr_fail(KVR_E_RANGE, "%s is %.40s; its size must be in %g..%g; use 1 for no scale",
                    what, text, SMALLEST, LARGEST);
  *out = value;
  return KVR_OK;
}

kvr_status cli_parse_seconds(const char *what, const char *text, double *out) {
  double value;
  KVR_TRY(parse_real(what, text, &value));
  if (!(value > 0 && value <= KVR_MAX_TIMEOUT))
    return kvr_fail(KVR_E_RANGE, "%s is %.40s; it must be more than 0 and at most %g seconds", what,
                    text, KVR_MAX_TIMEOUT);
  *out = value;
  return KVR_OK;
}

kvr_status cli_parse_dtype(const char *what, const char *text, kvr_dtype *out) {
  for (int i = 0; i < KVR_NUM_DTYPES; i++)
    if (strcmp(text, kvr_dtype_name((kvr_dtype)i)) == 0) {
      *out = (kvr_dtype)i;
      return KVR_OK;
    }
  return kvr_fail(KVR_E_RANGE, "%s is '%.40s'; use f32, f16 or bf16", what, text);
}

kvr_status cli_parse_math(const char *what, const char *text, kvr_math *out) {
  for (int i = 0; i < KVR_NUM_MATHS; i++)
    if (strcmp(text, kvr_math_name((kvr_math)i)) == 0) {
      *out = (kvr_math)i;
      return KVR_OK;
    }
  return kvr_fail(KVR_E_RANGE, "%s is '%.40s'; use auto, f32 or bf16", what, text);
}

/* Edit distance of two short words (Levenshtein, with one row of the table). */
static int edit_distance(const char *a, const char *b) {
  enum { LIMIT = 40 };
  int row[LIMIT + 1];
  const int n = kvr_min((int)strlen(b), LIMIT);
  for (int j = 0; j <= n; j++) row[j] = j;
  for (int i = 1; a[i - 1] != '\0' && i <= LIMIT; i++) {
    int diagonal = row[0];
    row[0] = i;
    for (int j = 1; j <= n; j++) {
      const int replace = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = kvr_min(replace, kvr_min(row[j], row[j - 1]) + 1);
    }
  }
  return row[n];
}

const char *cli_nearest(const char *word, const char *const *candidates, int num) {
  const char *best = NULL;
  int best_distance = kvr_max(2, (int)strlen(word) / 2) + 1;
  for (int i = 0; i < num; i++) {
    const int distance = edit_distance(word, candidates[i]);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidates[i];
    }
  }
  return best;
}

/* Uses an installed kvring; both calls are refused before any device is touched. */
#include <stdio.h>

#include "kvring/kvring.h"
#include "kvring/opencl.h"

int main(void) {
  kvr_group *group = NULL;
  printf("kvring %s, %d strategies\n", kvr_version(), kvr_num_strategies());
  if (kvr_group_create(NULL, &group) != KVR_E_NULL) return 1;
  return kvr_problem_check(NULL, NULL) == KVR_E_NULL ? 0 : 1;
}

/* Uses one function of every kind of library code: plain, with libm, and over OpenCL. */
#include <stdio.h>

#include "kvring/kvring.h"
#include "kvring/opencl.h"

int main(void) {
  cl_context context;
  const kvr_status status = kvr_group_context(NULL, 0, &context);
  printf("kvring %s, %d strategies, no group: %s\n", kvr_version(), kvr_num_strategies(),
         kvr_status_name(status));
  return status == KVR_E_NULL && kvr_problem_check(NULL, NULL) == KVR_E_NULL ? 0 : 1;
}

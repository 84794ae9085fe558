/* plant NAME: runs a kernel, or makes an OpenCL call, with a mistake planted in it. The reader of
 * oclgrind's log must find it, and nothing in `clean`. Output and exit code say nothing. */
#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = 8, SIZE = 4 * GROUP };

/* Every work-group reverses its GROUP numbers in local memory. */
#define HEAD                                                                                       \
  "__kernel void plant(__global const int *in, __global int *out, __global int *unset,\n"          \
  "                    __local int *room) {\n"                                                     \
  "  const int i = (int)get_global_id(0), l = (int)get_local_id(0);\n"
#define STORE "  room[l] = in[i];\n"
#define BARRIER "  barrier(CLK_LOCAL_MEM_FENCE);\n"
#define REVERSE "  out[i] = room[7 - l];\n"

static const struct plant {
  const char *name;
  const char *source;
} plants[] = {
    {"clean", HEAD STORE BARRIER REVERSE "}\n"},
    {"local-race", HEAD STORE REVERSE "}\n"},
    {"global-race", HEAD STORE BARRIER REVERSE "  out[0] = room[l] + i;\n}\n"},
    {"read-overrun", HEAD STORE BARRIER REVERSE "  out[i] += in[i + 1];\n}\n"},
    {"write-overrun", HEAD STORE BARRIER REVERSE "  out[i + 1 + l] = 0;\n}\n"},
    {"local-overrun", HEAD "  room[l + 1] = in[i];\n" BARRIER REVERSE "}\n"},
    {"private-overrun", HEAD STORE BARRIER REVERSE
     "  int own[4];\n  for (int n = 0; n < 4; n++) own[n] = in[n];\n  out[i] += own[l];\n}\n"},
    {"divergent-barrier", HEAD STORE "  if (l < 4)" BARRIER REVERSE "}\n"},
    {"uninitialized", HEAD STORE BARRIER REVERSE "  if (unset[i] > 3) out[i] = 0;\n}\n"},
    {"uninitialized-part", HEAD STORE BARRIER REVERSE "  if (unset[i] > 3) out[i] = 0;\n}\n"},
    {"api", HEAD STORE BARRIER REVERSE "}\n"},
};

static void run(const struct plant *p, cl_device_id device) {
  static int numbers[SIZE];
  for (int i = 0; i < SIZE; i++) numbers[i] = i;
  const cl_context context = clCreateContext(NULL, 1, &device, NULL, NULL, NULL);
  const cl_command_queue queue = clCreateCommandQueue(context, device, 0, NULL);
  const cl_program program =
      clCreateProgramWithSource(context, 1, (const char *[]){p->source}, NULL, NULL);
  clBuildProgram(program, 1, &device, "", NULL, NULL);
  const cl_kernel kernel = clCreateKernel(program, "plant", NULL);
  const cl_mem mems[3] = {clCreateBuffer(context, CL_MEM_COPY_HOST_PTR, sizeof numbers, numbers,
                                         NULL),
                          clCreateBuffer(context, CL_MEM_READ_WRITE, sizeof numbers, NULL, NULL),
                          clCreateBuffer(context, CL_MEM_READ_WRITE, sizeof numbers, NULL, NULL)};
  const size_t global = SIZE, local = GROUP;
  for (cl_uint i = 0; i < 3; i++) clSetKernelArg(kernel, i, sizeof(cl_mem), &mems[i]);
  clSetKernelArg(kernel, 3, GROUP * sizeof(int), NULL);
  if (strcmp(p->name, "api") == 0)
    clEnqueueCopyBuffer(queue, mems[0], mems[1], 4, 0, sizeof numbers, 0, NULL, NULL);
  if (strcmp(p->name, "uninitialized-part") == 0) /* all but the last number */
    clEnqueueWriteBuffer(queue, mems[2], CL_TRUE, 0, sizeof numbers - 4, numbers, 0, NULL, NULL);
  clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &global, &local, 0, NULL, NULL);
  clFinish(queue);
  for (int i = 0; i < 3; i++) clReleaseMemObject(mems[i]);
  clReleaseKernel(kernel);
  clReleaseProgram(program);
  clReleaseCommandQueue(queue);
  clReleaseContext(context);
}

int main(int argc, char **argv) {
  cl_platform_id platform;
  cl_device_id device;
  if (argc != 2 || clGetPlatformIDs(1, &platform, NULL) != CL_SUCCESS ||
      clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL) != CL_SUCCESS)
    return 1;
  for (size_t i = 0; i < sizeof plants / sizeof *plants; i++)
    if (strcmp(plants[i].name, argv[1]) == 0) {
      run(&plants[i], device);
      printf("%s has run\n", argv[1]);
      return 0;
    }
  return 2;
}

/* How the CPU of this machine multiplies bf16 numbers fastest. No OpenCL in it. */
#ifndef KVR_DEVICE_CPU_PRODUCTS_H
#define KVR_DEVICE_CPU_PRODUCTS_H

#include <stdbool.h>

/* The numbers are those of PRODUCTS in attend_bf16.cl. */
typedef enum kvr_products {
  KVR_PRODUCTS_F32,  /* nothing beats f32 arithmetic */
  KVR_PRODUCTS_DOT,  /* vdpbf16ps */
  KVR_PRODUCTS_TILES /* AMX, for which this process has the system's permission */
} kvr_products;

/* Looks once per process. The dot product counts where it is measured to be clearly faster than
 * f32: AMD's Zen 5 doubles the rate, Intel's Sapphire Rapids halves it. */
kvr_products kvr_cpu_products(void);
/* Whether the CPU has the instructions, however fast. */
bool kvr_cpu_has_products(kvr_products products);

#endif

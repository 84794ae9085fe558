/* One thread at a time lists devices, builds programs and launches kernels for the first time.
 * OpenCL promises that threads may do so together, but drivers break there: PoCL 3.1 crashes when
 * two threads look for its devices first, and miscounts when a kernel is launched for the first
 * time at two widths at once (exec/warm_up.c). One lock for the process, since drivers are. */
#ifndef KVR_DEVICE_DRIVER_LOCK_H
#define KVR_DEVICE_DRIVER_LOCK_H

/* The thread that holds it may take it again: callers' notices run under it. */
void kvr_driver_lock(void);
void kvr_driver_unlock(void);

#endif

/* Sessions one after another in one process: create, plan, run, destroy. */
#ifndef KVR_TESTS_DEVICE_SESSION_CYCLES_H
#define KVR_TESTS_DEVICE_SESSION_CYCLES_H

/* At least num sessions, over all strategies. Fails the test when a step is wrong, an OpenCL object
 * stays behind, or device bytes do. */
void session_cycles(int num);

#endif

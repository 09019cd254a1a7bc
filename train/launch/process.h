/* process.h - process-wide settings: descriptors, stack, signals, waiting of OpenMP's threads. */
#ifndef MT_PROCESS_H
#define MT_PROCESS_H

#include "kernels/base.h"

/* OpenMP's threads spin only briefly before they sleep, unless the user set OMP_WAIT_POLICY, GOMP_SPINCOUNT or
 * KMP_BLOCKTIME. Sets GOMP_SPINCOUNT, which process_prepare removes. Runs before libgomp's constructor, which reads it,
 * and after that of tests/main.c. */
__attribute__((constructor(102))) void process_bound_spins(void);
/* Opens descriptors 0 to 2 if they are closed, so that no output file gets the number of standard output. Makes a write
 * beyond `ulimit -f` fail with an error instead of a signal. Standard output is written line by line, so that its lines
 * stay whole and in order where a file or pipe also receives standard error. */
void process_prepare(void);
/* An error when the stack limit (`ulimit -s`) is below what the commands need. */
int process_check_stack(struct err *err) MT_CHECK;
/* A signal that ends the process first deletes this file, or this directory: an incomplete output under its
 * temporary name. NULL: none. For commands without a state to save. */
void process_delete_on_signal(const char *path);

#endif

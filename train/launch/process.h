/* process.h - process-wide settings: descriptors, stack, signals, how OpenMP's threads wait. */
#ifndef MT_PROCESS_H
#define MT_PROCESS_H

#include "kernels/base.h"

/* OpenMP's threads spin only briefly before they sleep, unless the user set OMP_WAIT_POLICY, GOMP_SPINCOUNT or
 * KMP_BLOCKTIME. Sets GOMP_SPINCOUNT, which process_prepare removes. Must run before libgomp's constructor, which reads
 * this variable, and after the constructor of tests/main.c. */
__attribute__((constructor(102))) void process_bound_spins(void);
/* Opens descriptors 0 to 2 if they are closed, so that no output file gets the number of standard output. A write
 * beyond `ulimit -f` then fails with an error instead of a signal. Standard output is written line by line, so that
 * lines stay whole and in order in a file that also receives standard error. */
void process_prepare(void);
/* Error: the stack limit (`ulimit -s`) is below what the commands need. */
int process_check_stack(struct err *err) MT_CHECK;
/* For commands that have no state to save: a signal that ends the process first deletes path, the incomplete output
 * (file or directory) under its temporary name. NULL: nothing. */
void process_delete_on_signal(const char *path);

#endif

/* process.h - process-wide settings: descriptors, stack, signals. */
#ifndef MT_PROCESS_H
#define MT_PROCESS_H

#include "kernels/base.h"

/* Opens descriptors 0 to 2 if they are closed, so that no output file gets the number of standard output. Makes a write
 * beyond `ulimit -f` fail with an error instead of a signal. */
void process_prepare(void);
/* An error when the stack limit (`ulimit -s`) is below what the commands need. */
int process_check_stack(struct err *err) MT_CHECK;
/* A signal that ends the process deletes this file first: an incomplete output under its temporary name. NULL: no file.
 * For commands without a state to save. */
void process_delete_on_signal(const char *path);

#endif

/* process.h - what a process needs from the system before it opens anything. */
#ifndef MT_PROCESS_H
#define MT_PROCESS_H

#include "kernels/base.h"

/* Descriptors 0 to 2 are open afterwards, so that no file of a run gets one of them and standard output is never
 * written into it; a write beyond `ulimit -f` fails with an error instead of ending the process. */
void process_prepare(void);
/* An error when the limit of the stack (`ulimit -s`) is below what every command works in. */
int process_check_stack(struct err *err) MT_CHECK;

#endif

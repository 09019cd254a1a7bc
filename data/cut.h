/* cut.h - errors for mapped files that another program truncates, or whose disk fails: reading them raises SIGBUS. */
#ifndef MT_CUT_H
#define MT_CUT_H

#include "kernels/base.h"

/* From here on, SIGBUS inside this mapping ends the process with status 1 and an error that names the file. */
void cut_watch(const void *begin, int64_t bytes, const char *path);
void cut_forget(const void *begin); /* call before unmapping */

#endif

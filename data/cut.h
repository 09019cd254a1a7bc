/* cut.h - what happens when a mapped file is cut by somebody else, or its disk fails: reading it raises SIGBUS. */
#ifndef MT_CUT_H
#define MT_CUT_H

#include "kernels/base.h"

/* From here on SIGBUS inside of this mapping ends the process with 1 and an error that names the file. */
void cut_watch(const void *begin, int64_t bytes, const char *path);
void cut_forget(const void *begin); /* before the mapping goes */

#endif

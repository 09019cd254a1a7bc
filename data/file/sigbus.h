/* sigbus.h - errors for mapped files that another program truncates, or whose disk fails: reading them raises SIGBUS.
 */
#ifndef MT_SIGBUS_H
#define MT_SIGBUS_H

#include "kernels/base.h"

/* From here on, SIGBUS inside this mapping ends the process with status 1 and an error that names the file. */
void sigbus_watch(const void *begin, int64_t bytes, const char *path);
void sigbus_forget(const void *begin); /* call before unmapping */

#endif

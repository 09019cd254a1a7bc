/* memory.h - how much more host memory this process may use. */
#ifndef MT_MEMORY_H
#define MT_MEMORY_H

#include <stdint.h>

/* Bytes: the machine's available memory without swapping, or the smaller limit of a control group (version 1 or 2, this
 * process's group or one around it) or RLIMIT_AS. root: "", or in tests a directory with proc/ and sys/. */
int64_t memory_room(const char *root);

#endif

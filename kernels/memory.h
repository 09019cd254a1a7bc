/* memory.h - how much of the host's memory this process may still take. */
#ifndef MT_MEMORY_H
#define MT_MEMORY_H

#include <stdint.h>

/* Bytes: what the machine has available without swapping, or less where a control group (version 1 or 2, this process's
 * own or one around it) or RLIMIT_AS allows less. root: "", or in tests a directory that holds proc/ and sys/. */
int64_t memory_room(const char *root);

#endif

/* unused.h - the tensors of a checkpoint that were not read. */
#ifndef MT_UNUSED_H
#define MT_UNUSED_H

#include "model/stored/source.h"

/* Counts the tensors that were not read and whose purpose is unknown; *first: the name of the first of them. Unless
 * quiet, logs the number of known tensors that moetrain does not need. */
int64_t unused_count(const struct checkpoint *ck, const struct arch *a, bool quiet, const char **first);

#endif

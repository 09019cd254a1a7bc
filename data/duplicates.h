/* duplicates.h - equal documents of data sets. */
#ifndef MT_DUPLICATES_H
#define MT_DUPLICATES_H

#include "data/dataset.h"

/* Counts documents of ds with the same ids as a document of an earlier row (repeats by a weight do not count), or as a
 * document of `other`. */
int64_t duplicates_in(const struct dataset *ds);
int64_t duplicates_shared(const struct dataset *ds, const struct dataset *other);

#endif

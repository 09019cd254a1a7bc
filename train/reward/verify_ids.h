/* verify_ids.h - rewards of an answer's tokens. */
#ifndef MT_VERIFY_IDS_H
#define MT_VERIFY_IDS_H

#include "kernels/base.h"

/* The overlong penalty of DAPO for n tokens: 0 up to max - cache, then linear to -1 at max, -1 above. */
double reward_length(int64_t n, int64_t max, int64_t cache);
/* Number of different n-grams / number of n-grams - 1; 0 for fewer than `gram` ids. */
double reward_repetition(const int32_t *ids, int64_t n, int64_t gram);

#endif

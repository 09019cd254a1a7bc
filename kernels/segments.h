/* segments.h - cuts the rows of packed sequences where prefixes end, for recurrent ops (struct segments of ops.h). */
#ifndef MT_SEGMENTS_H
#define MT_SEGMENTS_H

#include "kernels/ops/ops.h"

int64_t segments_ints(int64_t n_seq); /* the size of data below */
/* cu [n_seq + 1] and prefix [n_seq] as in struct seqs, on the host. Fills data; the tensors of the result are there. */
struct segments segments_make(int32_t *data, const int32_t *cu, const int32_t *prefix, int64_t n_seq);
/* The same for a copy of data. */
struct segments segments_at(struct segments s, int32_t *data, int64_t n_seq);

#endif

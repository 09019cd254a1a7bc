/* lowrank.h - norms of products B A on the host, without computing them. */
#ifndef MT_LOWRANK_H
#define MT_LOWRANK_H

#include "kernels/base.h"

/* out [n] += |B_i A_i|^2, the squared Frobenius norms of a stack: a [n, r, n_in], b [n, n_out, r] f32. */
void lowrank_norms(double *out, const float *a, const float *b, int64_t n, int64_t r, int64_t n_in, int64_t n_out);

#endif

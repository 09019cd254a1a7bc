/* grad_sums.h - the gradients of a step's micro-batches, summed in the order of the micro-batches, so that the bits of
 * the sum do not depend on the number of ranks. Rank p of the P ranks computes micro-batches p, p + P, p + 2 P, ...
 *
 * A rank with several micro-batches usually adds their gradients before the ranks add theirs, an order that changes
 * with P. Here each rank keeps the sums of an equal part of the elements. After every P micro-batches the ranks
 * exchange their gradients, and each adds the P gradients of its part in the order of ranks. */
#ifndef MT_GRAD_SUMS_H
#define MT_GRAD_SUMS_H

#include "kernels/comm/comm.h"
#include "kernels/ops/ops.h"

struct grad_sums {
    struct comm *ranks;
    struct tensor part; /* [n / P] stat: this rank's sums; ndim 0: the functions below do nothing */
};

/* Elements of the flat gradient must be a multiple of this. */
int64_t grad_sums_multiple(const struct comm *ranks);
/* n: elements of the flat gradient. Allocates on dev->state. */
void grad_sums_open(struct grad_sums *s, struct device *dev, struct comm *ranks, int64_t n);
void grad_sums_clear(struct grad_sums *s, struct device *dev);
/* Adds the gradients grad [n] of the last micro-batch of each rank, then zeroes grad. Uses dev->work; all ranks call
 * it. */
void grad_sums_add(struct grad_sums *s, struct device *dev, struct tensor grad);
/* grad [n] = the sums, on all ranks. */
void grad_sums_end(struct grad_sums *s, struct device *dev, struct tensor grad);

#endif

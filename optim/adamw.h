/* adamw.h - global-norm clipping and AdamW over the flat arrays of all adapters.
 *   g  = grad * clip          clip = min(1, clip_norm / (norm + 1e-6)), 1 when clip_norm = 0 (torch's clip_grad_norm_)
 *   p *= 1 - lr * wd ; m = b1 m + (1-b1) g ; v = b2 v + (1-b2) g^2
 *   p -= lr * (m / c1) / (sqrt(v / c2) + eps) , c = 1 - b^step      (decoupled decay, as torch.optim.AdamW) */
#ifndef MT_ADAMW_H
#define MT_ADAMW_H

#include "kernels/ops.h"

struct adamw {
    struct tensor param, grad, m, v; /* flat [n] stat, in the state arena, owned by the caller */
    double beta1, beta2, eps, weight_decay, clip_norm;
    int64_t step; /* updates done */
};
/* Norm of the gradient and how many elements are not finite; waits for the device. sum2: a [2] f64 device tensor. */
void adamw_norm(struct device *dev, const struct adamw *opt, struct tensor sum2, double *norm, int64_t *n_bad);
/* One update with the norm just measured; counts the step. */
void adamw_update(struct device *dev, struct adamw *opt, double lr, double norm);

#endif

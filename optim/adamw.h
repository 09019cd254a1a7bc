/* adamw.h - global-norm clipping and AdamW over the flat arrays of all adapters.
 *   g  = grad * clip          clip = min(1, clip_norm / (norm + 1e-6)), 1 when clip_norm = 0 (torch's clip_grad_norm_)
 *   p *= 1 - lr * wd ; m = b1 m + (1-b1) g ; v = b2 v + (1-b2) g^2
 *   p -= lr * (m / c1) / (sqrt(v / c2) + eps) , c = 1 - b^step      (decoupled decay, as torch.optim.AdamW) */
#ifndef MT_ADAMW_H
#define MT_ADAMW_H

#include "kernels/ops/ops.h"

struct adamw {
    struct tensor param, grad; /* flat [n] stat, in the state arena, owned by the caller */
    struct tensor m,
        v; /* [k] stat; moments of param[first .. first+k-1], the part that this process updates. k < n: ZeRO-1 */
    int64_t first;
    double beta1, beta2, eps, weight_decay, clip_norm;
    int64_t step; /* number of updates done */
};
/* Counts a step and returns its factors. norm: of the whole gradient (op_sumsq). */
struct adamw_step adamw_next(struct adamw *opt, double lr, double norm);
/* Makes one update, with op_adamw, and counts the step. */
void adamw_update(struct device *dev, struct adamw *opt, double lr, double norm);

#endif

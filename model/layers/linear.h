/* linear.h - the product with a dense projection: op_linear_fwd and op_linear_bwd, with a quantised input
 * (struct input_quant) or with DoRA (struct dora) where the projection has them. */
#ifndef MT_LINEAR_H
#define MT_LINEAR_H

#include "kernels/ops/ops.h"

void linear_fwd(struct device *dev, struct tensor y, struct tensor xa, struct tensor x, const struct proj *p,
                struct tensor res);
/* With DoRA it computes the forward product again, for the gradient of the magnitudes. */
void linear_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor xa,
                const struct proj *p);

#endif

/* input_quant.h - fake quantisation Q of the inputs of projections (struct input_quant), and its calibration.
 *
 * Scales follow from amax, the largest magnitude of an input. All rows of a product share one amax, and so do all
 * experts of a layer: one for the input of gate and up, one for that of down. Inference does the same: vLLM takes the
 * largest input scale over a layer's experts, because they share a token's quantised row, which is sent once. So
 * experts without rows in the calibration have an amax too. Files repeat it per expert (adapters.amax). */
#ifndef MT_INPUT_QUANT_H
#define MT_INPUT_QUANT_H

#include "kernels/ops/ops.h"

/* What calibration has seen of an input. */
struct input_range {
    float amax;   /* largest magnitude of its finite values */
    double n_bad; /* values that are not finite */
};

/* x as the products of p read it: Q(x) [T, n_in] on dev->work, or x itself where the input is not quantised. While
 * calibrating, the largest magnitude of x enters p->in.seen; this waits for the device. */
struct tensor input_quant_fwd(struct device *dev, const struct proj *p, struct tensor x);
/* Turns dx, the gradient with respect to Q(x), into the gradient with respect to x, in place. */
void input_quant_bwd(struct device *dev, const struct proj *p, struct tensor dx, struct tensor x);
/* For the down product of experts: replaces act, the activation h of pre, by Q(h). The backward calls it again before
 * op_moe_down_bwd, which zeroes the gradient where |h| > amax. */
void input_quant_act(struct device *dev, const struct proj *down, struct tensor act, struct tensor pre,
                     const struct glu *glu);

#endif

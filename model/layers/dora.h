/* dora.h - DoRA (lora.dora): the norms of the rows of W + scale B A, and the initial magnitudes. */
#ifndef MT_DORA_H
#define MT_DORA_H

#include "model/lora.h"
#include "model/weights.h"

/* Computes the norms of a layer's adapted matrices. Does nothing without DoRA. */
void dora_layer_norms(struct device *dev, const struct arch *a, int64_t layer, const struct lora_layer *lora,
                      struct layer_weights *weights);
/* Computes the norms of all layers if the adapters have changed since the last call. */
void dora_refresh(struct adapters *ad, struct device *dev, const struct arch *a, struct layer_weights *layers);
/* Sets the magnitudes to the norms, so that the products are those of plain LoRA. */
void dora_init(struct adapters *ad, struct device *dev, const struct arch *a, struct layer_weights *layers);
/* Error: a target that PEFT adapts as a parameter, where it has no DoRA; kv_b_proj, whose parts decoding multiplies
 * separately. */
int dora_check(const struct adapters *ad, struct err *err) MT_CHECK;

#endif

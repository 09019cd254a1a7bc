/* lora_init.h - the first values of adapters that the weights determine: PiSSA and OLoRA. */
#ifndef MT_LORA_INIT_H
#define MT_LORA_INIT_H

#include "model/lora.h"
#include "model/weights.h"

/* With ad->init: a rank above that of a matrix is an error. */
int lora_init_check(const struct adapters *ad, const struct arch *a, struct err *err) MT_CHECK;
/* Computes both halves of the ranks, and writes them to the masters and the working copies. Reads the weights of one
 * layer after the other, and has one matrix in f32, in host memory. The same on every rank. */
int lora_init_values(struct adapters *ad, struct device *dev, const struct weights_source *from,
                     const struct quantize *quantize, struct err *err) MT_CHECK;

#endif

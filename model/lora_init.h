/* lora_init.h - initial values of adapters that follow from the weights: PiSSA and OLoRA. */
#ifndef MT_LORA_INIT_H
#define MT_LORA_INIT_H

#include "model/lora.h"
#include "model/weights.h"

/* With ad->init, refuses a lora rank above the smaller side of a matrix. */
int lora_init_check(const struct adapters *ad, const struct arch *a, struct err *err) MT_CHECK;
/* Computes the trained and the frozen half of the lora ranks (struct adapters: init), and writes masters and working
 * copies. Reads the weights layer by layer, with one matrix at a time in host memory, in f32. All processes get the
 * same values. */
int lora_init_values(struct adapters *ad, struct device *dev, const struct weights_source *from,
                     const struct quantize *quantize, struct err *err) MT_CHECK;

#endif

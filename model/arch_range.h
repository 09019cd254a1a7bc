/* arch_range.h - ranges of the real values in config.json. Outside of them a value is a mistake: the model's outputs
 * would not depend on its weights, and their gradients would be 0. */
#ifndef MT_ARCH_RANGE_H
#define MT_ARCH_RANGE_H

#include "data/json.h"

/* What a root has added to it: positive, a normal number in f32, in which the ops receive it, and below 1. */
int range_eps(struct json at, const char *key, double value, struct err *err) MT_CHECK;
/* What multiplies activations or logits; published models have 0.1 to 16. `key` may be other words for its origin. */
int range_factor(struct json at, const char *key, double value, struct err *err) MT_CHECK;

#endif

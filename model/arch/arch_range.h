/* arch_range.h - ranges of the real values in config.json. Outside of them a value is a mistake: the model's outputs
 * would not depend on its weights, and their gradients would be 0. */
#ifndef MT_ARCH_RANGE_H
#define MT_ARCH_RANGE_H

#include "data/json/json.h"

/* What a root has added to it: positive, a normal number in f32, in which the ops receive it, and below 1. */
int range_eps(struct json at, const char *key, double value, struct err *err) MT_CHECK;
/* What multiplies activations or logits, published models have 0.1 to 16; YaRN's rotations, they have 1 and 32. `key`
 * may be other words for its origin. */
int range_factor(struct json at, const char *key, double value, struct err *err) MT_CHECK;
/* RoPE's base; published models have 1e4 to 1e7, for long contexts up to some 1e9. */
int range_theta(struct json at, const char *key, double value, struct err *err) MT_CHECK;
/* What YaRN multiplies the model's length by; published models have 4 to 128. */
int range_stretch(struct json at, const char *key, double value, struct err *err) MT_CHECK;

#endif

/* arch_range.h - ranges of the real values in config.json. A value outside is a mistake: the model's outputs would not
 * depend on its weights, whose gradients would be 0. */
#ifndef MT_ARCH_RANGE_H
#define MT_ARCH_RANGE_H

#include "data/json/json.h"

/* Checks an epsilon that is added below a root: positive, below 1, and a normal number in f32, the dtype in which ops
 * receive it. */
int range_eps(struct json at, const char *key, double value, struct err *err) MT_CHECK;
/* Checks a factor of activations or logits (published models: 0.1 to 16), or YaRN's numbers of rotations (1 and 32).
 * `key` may be other words that name the value. */
int range_factor(struct json at, const char *key, double value, struct err *err) MT_CHECK;
/* Checks RoPE's base; published models have 1e4 to 1e7, for long contexts up to some 1e9. */
int range_theta(struct json at, const char *key, double value, struct err *err) MT_CHECK;
/* Checks what YaRN multiplies the model's length by; published models have 4 to 128. */
int range_stretch(struct json at, const char *key, double value, struct err *err) MT_CHECK;

#endif

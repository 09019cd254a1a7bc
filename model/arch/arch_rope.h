/* arch_rope.h - reads RoPE's settings; the table of angles. */
#ifndef MT_ARCH_ROPE_H
#define MT_ARCH_ROPE_H

#include "model/arch/arch_types.h"

/* Finds RoPE's settings: *scaling is rope_parameters or rope_scaling, whichever has keys; *other is rope_scaling if
 * both have. As in transformers an empty object counts as absent. */
int rope_find(struct json *scaling, struct json *other, struct json root, struct err *err) MT_CHECK;
bool rope_given(struct json scaling);
/* Reads the base of RoPE: rope_theta of scaling, or key of root. If a file has both, they must be equal. theta holds
 * the default. */
int rope_read_theta(double *theta, struct json root, const char *key, struct json scaling, struct err *err) MT_CHECK;
bool rope_same(const struct rope_arch *a, const struct rope_arch *b);
int rope_differs(struct json other, struct err *err); /* the error that rope_scaling contradicts rope_parameters */
/* Keys of YaRN that a family has: the common ones; also DeepSeek's mscale; also mscale and Mistral's
 * llama_4_scaling_beta. */
enum rope_keys { ROPE_KEYS_COMMON, ROPE_KEYS_MSCALE, ROPE_KEYS_GROWTH };
/* Reads rope_type, "default" or "yarn", and its keys; another type is an error. root: the object that holds scaling.
 * The other members of r are set already. */
int rope_read_type(struct rope_arch *r, struct json root, struct json scaling, enum rope_keys keys,
                   struct err *err) MT_CHECK;
/* Computes cos | sin of positions 0..n-1, attention factor included; table [n, r->width] f32 on the host. */
void arch_rope_table(const struct rope_arch *r, int64_t n, float *table);

#endif

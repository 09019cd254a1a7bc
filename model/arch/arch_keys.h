/* arch_keys.h - keys of config.json that only one or a few families have. */
#ifndef MT_ARCH_KEYS_H
#define MT_ARCH_KEYS_H

#include "model/arch/arch_types.h"

/* Reads sizes of gated DeltaNet: a->delta. */
int keys_delta(struct arch *a, struct json root, bool fused, struct err *err) MT_CHECK;
/* Reads rotary_dim to r->width, which partial_rotary_factor may also have set. */
int keys_rotary_dim(struct rope_arch *r, struct json root, struct json scaling, int64_t head_dim,
                    struct err *err) MT_CHECK;
/* Reads num_mtp_modules and mtp_transformer_layers: a->n_mtp. */
int keys_mtp_modules(struct arch *a, struct json root, struct err *err) MT_CHECK;
/* Reads conv_L_cache, conv_bias and use_expert_bias. */
int keys_conv(struct arch *a, struct json root, struct err *err) MT_CHECK;

#endif

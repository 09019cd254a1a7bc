/* moe_part.h - the products of one projection of the experts, one by one: for `moetrain bench lora --split` and its
 * test. No configuration can choose them. */
#ifndef MT_MOE_PART_H
#define MT_MOE_PART_H

#include "kernels/ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Training runs MOE_THIN and MOE_HYBRID; on Hopper with r <= 16 it computes dy B beside dB. The split form is MOE_THIN,
 * MOE_BASE and MOE_ADD. In the forward `in` is x; in the backward it is dy, with the formula behind "backward". */
enum moe_part_kind {
    MOE_THIN,   /* thin = in A^T; backward: thin = in B */
    MOE_BASE,   /* out = in W^T + bias; backward: out = in W */
    MOE_HYBRID, /* out = in W^T + bias + scale thin B^T, in one launch; backward: out = in W + scale thin A */
    MOE_ADD,    /* out += scale thin B^T; backward: out += scale thin A */
    MOE_GRAD    /* grad.a += scale thin^T in, where thin is dy B; backward: grad.b += scale in^T thin, thin is x A^T */
};
struct moe_part {
    enum moe_part_kind kind;
    bool backward, tokens;       /* tokens: `in` has a row per token, else it is in expert order */
    struct tensor out, thin, in; /* act: [M, out], [M, R], [M or T, in]; backward [M, in], [M, R], [M or T, out] */
    const struct proj *proj;
};
/* false in a build without CUDA. dev must be a GPU. */
bool ops_moe_part(struct device *dev, const struct moe_part *p, const struct route *r);

#ifdef __cplusplus
}
#endif
#endif

/* ffn_moe.h - a router and its experts. `experts` says where the experts run (experts.h). ffn_moe.c and ffn_dense.c
 * are built on these functions. */
#ifndef MT_FFN_MOE_H
#define MT_FFN_MOE_H

#include "model/experts.h"

void moe_products(const struct arch *a, int64_t layer, struct product *p); /* without LoRA targets */
void moe_plan(const struct acts_plan *p, const struct experts *experts, struct layer_acts *s, enum acts_group group);
void moe_fwd(const struct block *b, const struct experts *experts, const struct router *router, struct layer_acts *s,
             struct tensor y);
void moe_bwd(const struct block *b, const struct experts *experts, const struct router *router,
             const struct layer_acts *s, struct tensor dnorm, struct tensor dres);

#endif

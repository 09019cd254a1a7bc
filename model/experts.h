/* experts.h - the routed experts of a layer, from the rows that are routed to what they add: run on this rank, or on
 * the ranks of an expert-parallel group (model/dispatch.h). model_open chooses once. */
#ifndef MT_EXPERTS_H
#define MT_EXPERTS_H

#include "model/layer.h"

struct experts {
    /* M of moe_acts: rows that pre, up_xa and down_ha have room for; and the group that down_ha is of. */
    int64_t (*n_row)(const struct acts_plan *p, const struct ffn_size *size);
    enum acts_group down_ha;
    /* y = s->h + what the experts make of s->ffn_norm along s->moe.route. */
    void (*fwd)(const struct block *b, struct layer_acts *s, struct tensor y);
    /* Fills pre and up_xa from s->ffn_norm and the route. */
    void (*recompute)(const struct block *b, struct layer_acts *s);
    /* dnorm [T,D] act =, dgate [T,J] stat =, adapter gradients +=; dres [T,D] act: gradient of y. */
    void (*bwd)(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dgate,
                struct tensor dres);
};
extern const struct experts experts_local;    /* experts.c */
extern const struct experts experts_parallel; /* dispatch.c */

#endif

/* experts.h - the routed experts of a layer: gather, up, activation, down, combine. They run on the token's rank
 * (experts.c) or on the ranks of an expert-parallel group (dispatch.c); model_open chooses one for the whole run. */
#ifndef MT_EXPERTS_H
#define MT_EXPERTS_H

#include "model/layer.h"

struct experts {
    /* M of struct moe_acts: allocated rows of pre, up_xa and down_ha. */
    int64_t (*n_row)(const struct acts_plan *p, const struct ffn_size *size);
    enum acts_group down_ha; /* the group of down_ha */
    /* y = experts(s->ffn_norm) + s->ffn_res where present, with the routing s->moe.route. */
    void (*fwd)(const struct block *b, struct layer_acts *s, struct tensor y);
    /* Computes pre and up_xa (struct moe_acts) from s->ffn_norm and s->moe.route. */
    void (*recompute)(const struct block *b, struct layer_acts *s);
    /* dnorm [T,D] act =, dgate [T,J] stat =, adapter gradients +=. dres [T,D] act is the gradient of y. */
    void (*bwd)(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dgate,
                struct tensor dres);
};
extern const struct experts experts_local; /* experts.c: on the token's rank */

#endif

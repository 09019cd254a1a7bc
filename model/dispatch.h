/* dispatch.h - expert parallelism: the experts of a layer lie on several ranks, and rows travel to them and back.
 *
 * The ranks of dev->ep hold E/P experts each, in order: rank p the experts p*E/P .. (p+1)*E/P - 1. Every rank has its
 * own tokens and its copy of all else. Routing and combination happen at home; in between
 *
 *   home   x [T,D] -> rows in expert order [M,D], those for one rank together -> all to all
 *   there  N rows by rank of origin, each a token with one expert -> sort -> up, activation, down -> order of arrival
 *   home   all to all -> rows in expert order [M,D] -> combine
 *
 * and in the backward the rows of dout and the gates go out, those of dx and the gates' gradients come home. Only rows
 * that exist travel. The host learns all counts of a layer at once, in forward, and keeps them. */
#ifndef MT_DISPATCH_H
#define MT_DISPATCH_H

#include "model/block.h"

/* The experts of a layer with n_exp that rank p of `ep` holds. */
struct shard {
    int64_t first, count;
};
struct shard dispatch_shard(const struct comm *ep, int64_t n_exp);

/* Steps 9 to 11 of block.c, from s->n2 and the route to y = s->h + what the experts made of it. When a rank was to take
 * more rows than s->rows has room for, no row travels and *b->most_rows has the number: y is worthless then. */
void dispatch_fwd(const struct block *b, struct layer_acts *s, struct tensor y);
/* Step 9 anew: fills s->rows, s->pre, s->up_xa by the counts of the forward. */
void dispatch_recompute(const struct block *b, struct layer_acts *s);
/* Steps 11 to 9 backward: dnorm [T,D] act =, dgate [T,J] stat =, adapter gradients +=. dres [T,D] as in block_bwd. */
void dispatch_bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dgate,
                  struct tensor dres);

#endif

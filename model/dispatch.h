/* dispatch.h - expert parallelism: the experts of a layer lie on several ranks, and rows travel to them and back.
 *
 * The ranks of ep hold E/P experts each, in order: rank p the experts p*E/P .. (p+1)*E/P - 1. Every rank has its
 * own tokens and its copy of all else. Routing and combination happen at home; in between
 *
 *   home   x [T,D] -> rows in expert order, those for one rank together -> all to all
 *   there  rows by rank of origin, each a token with one expert -> up, activation, down -> order of arrival
 *   home   all to all -> rows in expert order -> combine
 *
 * and in the backward the rows of x and dout and the gates go out, those of dx and the gates' gradients come home. Only
 * rows that exist travel.
 *
 * All this is done piece by piece, a piece being some of every rank's tokens: the rows of the next one travel to the
 * experts and those of the last one home while the experts work. Each rank has room for a number of rows of one piece;
 * where the router sends more to some rank, all cut the layer into smaller pieces, down to a token each if need be: it
 * takes longer, and nothing is dropped. The host learns the counts of all pieces at once, in forward, and keeps them.
 */
#ifndef MT_DISPATCH_H
#define MT_DISPATCH_H

#include "model/block.h"

/* The experts of a layer with n_exp that rank p of `ep` holds. */
struct shard {
    int64_t first, count;
};
struct shard dispatch_shard(const struct comm *ep, int64_t n_exp);

/* Steps 9 to 11 of block.c, from s->n2 and the route to y = s->h + what the experts made of it. Sorts s->route's rows
 * anew, piece by piece. */
void dispatch_fwd(const struct block *b, struct layer_acts *s, struct tensor y);
/* Steps 11 to 9 backward, from s->n2: dnorm [T,D] act =, dgate [T,J] stat =, adapter gradients +=. dres [T,D] as in
 * block_bwd. What forward did not keep is made again. */
void dispatch_bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dgate,
                  struct tensor dres);

#endif

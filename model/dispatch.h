/* dispatch.h - expert parallelism: the experts of a layer lie on several ranks, and rows are sent to them and back.
 *
 * The ranks of ep hold E/P experts each, in order: rank p the experts p*E/P .. (p+1)*E/P - 1. Every rank has its own
 * tokens and its copy of all else. Routing and combination are done where the token is; in between
 *
 *   token's rank    x [T,D] -> rows in expert order, those for one rank together -> all to all
 *   expert's rank   rows by rank of origin, each a token with one expert -> up, activation, down -> order of arrival
 *   token's rank    all to all -> rows in expert order -> combine
 *
 * and in the backward the rows of x and dout and the gates are sent, those of dx and the gates' gradients come back.
 * Only rows that exist are sent.
 *
 * All this is done chunk by chunk, a chunk being some of every rank's tokens: the rows of the next one are sent to the
 * experts and those of the last one back while the experts work. Each rank has room for a number of rows of one chunk;
 * where the router sends more to some rank, all cut the layer into smaller chunks, down to a token each if need be: it
 * takes longer, and nothing is dropped. The host learns the counts of all chunks at once, in forward, and keeps them.
 *
 * experts_parallel (model/experts.h) is its interface: fwd sorts the route's rows anew, chunk by chunk, and bwd
 * computes again what fwd did not keep. */
#ifndef MT_DISPATCH_H
#define MT_DISPATCH_H

#include "model/experts.h"

/* The experts of a layer with n_exp that rank p of `ep` holds. */
struct shard {
    int64_t first, count;
};
struct shard dispatch_shard(const struct comm *ep, int64_t n_exp);

#endif

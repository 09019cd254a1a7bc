/* dispatch.h - expert parallelism: the experts of a layer are divided among P ranks, and all-to-alls move their rows.
 *
 * Rank p of ep holds the experts p*E/P .. (p+1)*E/P - 1. Every rank has its own tokens and a copy of all other weights.
 * Routing and the sum over a token's experts run on the token's rank:
 *
 *   token's rank    x [T,D] -> rows in expert order, so rows for one rank are contiguous -> all-to-all (dispatch)
 *   expert's rank   rows in order of sending rank -> sort by expert -> up, activation, down -> order of sending rank
 *   token's rank    all-to-all (combine) -> rows in expert order -> sum over a token's experts
 *
 * The backward dispatches rows of x and dout and the gates; it combines rows of dx and the gates' gradients. Rows are
 * not padded.
 *
 * A layer is processed in chunks. A chunk holds a part of every rank's tokens. While the experts compute one chunk, the
 * next chunk is dispatched and the previous one combined. The receive buffer of a rank has a fixed capacity of rows per
 * chunk. If the router sends more to any rank, all ranks double the number of chunks until every chunk fits; no row is
 * dropped. Forward reads the row counts of all chunks to the host, and backward uses them again.
 *
 * The interface is experts_parallel (model/layers/experts.h). fwd sorts the rows of each chunk separately. bwd
 * recomputes the activations that fwd did not save. */
#ifndef MT_DISPATCH_H
#define MT_DISPATCH_H

#include "model/layers/experts.h"

extern const struct experts experts_parallel;

#endif

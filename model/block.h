/* block.h - one transformer layer: forward, recomputation, backward. */
#ifndef MT_BLOCK_H
#define MT_BLOCK_H

#include "model/layer.h"

/* y [T, D], or with N streams [T, N*D], act =: the next layer's x */
void block_fwd(const struct block *b, struct layer_acts *s, struct tensor y);
/* Computes the groups of s that are not saved, from s->x and the saved routing. saved: SAVE_* of acts.h. */
void block_recompute(const struct block *b, struct layer_acts *s, int saved);
/* dres, shaped like y, act, is updated in place: gradient of y on entry, of x on return. Adapter gradients +=. */
void block_bwd(const struct block *b, const struct layer_acts *s, struct tensor dres);

#endif

/* block.h - one transformer layer: forward, recomputation, backward. */
#ifndef MT_BLOCK_H
#define MT_BLOCK_H

#include "model/acts.h"
#include "model/weights.h"

/* All that a layer reads besides its activations. */
struct block {
    struct device *dev;
    const struct arch *a;
    struct ffn ffn;
    const struct layer_weights *w;
    struct attn_shape attn;
    const struct seqs *seqs;
    struct tensor pos, rope; /* [T] i32, [P, A] f32 */
    struct aux *aux;         /* of this layer; coef 0: off */
    struct comm *ep;
    const struct dispatch_options *divided; /* the experts lie on all ranks of ep (model/dispatch.h); or NULL */
    bool save_experts;                      /* divided: what they make is kept where there is room */
    int64_t *n_piece;                       /* divided: pieces that the layer was cut into, = max */
};

/* Makes the adapters of a layer part of its projections; again whenever they change, as their dropout does. */
void block_adapt(struct layer_weights *w, const struct lora_layer *lora);
void block_fwd(const struct block *b, struct layer_acts *s, struct tensor y); /* y [T, D] act =, the next layer's x */
/* Fills the groups of s that are not saved, from s->x and the saved routing. */
void block_recompute(const struct block *b, struct layer_acts *s, enum recompute mode);
/* dres [T, D] act, in place: gradient of y on entry, of x on return. Adapter gradients +=. */
void block_bwd(const struct block *b, const struct layer_acts *s, struct tensor dres);

#endif

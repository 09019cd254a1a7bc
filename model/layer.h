/* layer.h - the kinds of layers: a layer is norm, mixer, residual, norm, feed-forward network, residual, and its mixer
 * and its feed-forward network each are of a kind behind a small interface. model/arch.c chooses the kinds of every
 * layer; block.c puts them together and knows none of them. */
#ifndef MT_LAYER_H
#define MT_LAYER_H

#include "kernels/comm/comm.h"
#include "model/acts.h"
#include "model/weights.h"

/* All that a layer reads besides its activations. */
struct block {
    struct device *dev;
    const struct arch *a;
    int64_t layer;
    const struct layer_weights *w;
    const struct seqs *seqs;
    struct tensor pos, rope; /* [T] i32, [P, A] f32 */
    struct aux *aux;         /* of this layer; coef 0: off */
    const struct experts *experts;
    bool save_ffn; /* what the feed-forward network makes is kept for the backward */

    /* with expert parallelism */
    struct comm *ep;
    const struct ep_options *ep_options;
    const struct recv_buf *recv_buf;
    int64_t *n_chunk; /* chunks that the layer was cut into, = max */
};

/* Makes the adapters of a layer part of its projections; again whenever they change, as their dropout does. */
void layer_adapt(struct layer_weights *w, const struct arch *a, int64_t layer, const struct lora_layer *lora);

/* Mixes tokens. */
struct mixer_kind {
    /* Its matrices, at most MIXER_PRODUCTS, into zeroed p (lora.h). */
    void (*products)(const struct arch *a, int64_t layer, struct product *p);
    /* Its weights, from the checkpoint into its part of lw, by the functions of weights.h. */
    int (*load)(struct fill *f, const struct arch *a, int64_t layer, struct layer_weights *lw);
    /* Pushes its activations of one group (acts.h). */
    void (*plan)(const struct acts_plan *p, struct layer_acts *s, enum acts_group group);
    /* s->h = s->x + mixer(s->attn_norm). Recomputation calls it again: it must do the same to the bit. */
    void (*fwd)(const struct block *b, struct layer_acts *s);
    /* dnorm [T,D] act =: gradient of s->attn_norm; dres [T,D] act: that of s->h; adapter gradients +=. */
    void (*bwd)(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres);
};

/* Works on every token alone. */
struct ffn_kind {
    bool routed; /* a router chooses among experts: they are counted, balanced and may lie on several ranks */
    void (*products)(const struct arch *a, int64_t layer, struct product *p);
    int (*load)(struct fill *f, const struct arch *a, int64_t layer, struct layer_weights *lw);
    void (*plan)(const struct acts_plan *p, struct layer_acts *s, enum acts_group group);
    /* y = s->h + ffn(s->ffn_norm) */
    void (*fwd)(const struct block *b, struct layer_acts *s, struct tensor y);
    /* Fills what it has in the group FFN from s->ffn_norm and the group KEPT. */
    void (*recompute)(const struct block *b, struct layer_acts *s);
    /* dnorm [T,D] act =: gradient of s->ffn_norm; dres [T,D] act: that of y; adapter gradients +=. */
    void (*bwd)(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres);
};

extern const struct mixer_kind mixer_attention;
extern const struct ffn_kind ffn_moe, ffn_dense;

#endif

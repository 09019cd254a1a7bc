/* glu_network.h - a network that every token uses, on the token's rank: the shared experts of a layer, or a dense
 * layer.
 *
 *   ffn_norm [T,D] -> gate_up (+lora) [T,U] -> act [T,G] (* gate [T,1]) -> down (+lora) [T,D] -> + res = y
 *
 * U = glu_cols(G): gate and up, or up alone. */
#ifndef MT_GLU_NETWORK_H
#define MT_GLU_NETWORK_H

#include "model/layer.h"

/* The network's activations are s->shared, whose gate is absent unless the caller sets it. */
struct glu_network {
    const struct proj *up, *down; /* [U, D]: gate rows (if any), up rows; [D, G] */
};
/* The network's first matrix of gate, up and down: 0, or 1 without a gate. */
static inline int glu_network_first(const struct arch *a) { return glu_gated(&a->glu) ? 0 : 1; }

/* Describes the products of a network of width G. up, down: offsets of its projections in struct layer_weights.
 * Targets: first (gate, if any), first + 1 (up), first + 2 (down). */
void glu_network_products(const struct arch *a, int64_t width, size_t up, size_t down, enum lora_target first,
                          struct product p[2]);
/* Reads a network beside routed experts. lora_target_module of its targets names its tensors. (ffn_dense.c reads a
 * dense layer as one expert, by weights_experts.) */
int glu_network_load(struct weights_read *f, const struct arch *a, int64_t width, enum lora_target first,
                     struct proj *up, struct proj *down) MT_CHECK;
void glu_network_plan(const struct acts_plan *p, struct layer_acts *s, enum acts_group group, int64_t width,
                      const struct glu_network *n);
void glu_network_fwd(const struct block *b, struct layer_acts *s, const struct glu_network *n, struct tensor y,
                     struct tensor res);
void glu_network_recompute(const struct block *b, struct layer_acts *s, const struct glu_network *n);
/* dx [T,D] act = gradient of s->ffn_norm; dgate [T,1] stat =, absent without a gate; dres: gradient of y */
void glu_network_bwd(const struct block *b, const struct layer_acts *s, const struct glu_network *n, struct tensor dx,
                     struct tensor dgate, struct tensor dres);

#endif

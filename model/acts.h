/* acts.h - the activation plan: what a layer leaves for its backward, and what is computed again.
 *
 *   group        tensors                                    none     selective  full     forward only
 *   input        x, routes, down_ha (logits when wanted)    saved    saved      saved    two slots in turn
 *   attention    n1 .. h                                    saved    saved      again    one slot
 *   experts      n2 .. rows, pre, up_xa                         saved    again      again    one slot
 *
 * "again" means: one slot shared by all layers (of a kind: with experts or dense), filled anew by block_recompute
 * before the layer's backward. The routing is always saved, so that recomputation takes the very same experts. */
#ifndef MT_ACTS_H
#define MT_ACTS_H

#include "model/lora.h"

enum recompute { RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL };
const char *recompute_name(enum recompute r);

/* Where experts are divided among ranks (model/dispatch.h): the rows that this rank takes. */
struct dispatch {
    int32_t *offs;      /* [P, E+1] host: route.offs of every rank of dev->ep */
    struct route route; /* of N rows, each with one local expert; no gates */
};

struct layer_acts {
    /* input */
    struct tensor x;          /* [T, D] act */
    struct route route;       /* T*J rows */
    struct dispatch dispatch; /* absent where this rank has all experts; else M below is room for N, then N */
    struct tensor logits;     /* [T, E] stat; the router's backward or the auxiliary loss may want them */
    struct tensor down_ha;    /* [M, R] act */
    /* attention */
    struct tensor n1, rstd1;   /* [T, D] act, [T] stat */
    struct tensor qkv_xa;      /* [T, n_seg*R] act */
    struct tensor qk, rstd_qk; /* [T, (H+K)A] act, [T, H+K or 2] stat: before their norm; absent without one */
    struct tensor qkv;         /* [T, (H+2K)A] act, rotated */
    struct tensor o, lse;      /* [T, HA] act, [T, H] stat */
    struct tensor out_xa;      /* [T, R] act */
    struct tensor h;           /* [T, D] act */
    /* experts */
    struct tensor n2, rstd2; /* [T, D] act, [T] stat */
    struct tensor rows;      /* [N, D] act: of n2, from all ranks; absent without dispatch */
    struct tensor pre;       /* [M, 2F] act, expert order */
    struct tensor up_xa;     /* [M, R] act */
};

struct acts {
    struct layer_acts *layers; /* [n_layer+1] host; of the last only x is used: what the final norm reads */
    int64_t dispatch_tok; /* a rank takes at most as many rows of a layer as this many tokens have; 0: no dispatch */
    int32_t *offs;        /* [n_layer, P, E+1] host */
};

/* Pushes everything on `work` for T tokens; backward = false for evaluation. keep_logits: the backward wants them.
 * The host table is allocated once by acts_init. */
void acts_init(struct acts *s, int64_t n_layer);
/* After it: experts are divided among `ranks`. */
void acts_divide(struct acts *s, const struct arch *a, const struct comm *ranks, int64_t dispatch_tok);
void acts_push(struct acts *s, struct device *dev, const struct arch *a, const struct adapters *ad, int64_t n_tok,
               bool backward, enum recompute mode, bool keep_logits);
void acts_free(struct acts *s);

#endif

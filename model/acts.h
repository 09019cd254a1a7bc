/* acts.h - the activation plan: what a layer leaves for its backward, and what is computed again.
 *
 *   group        tensors                                    none     selective  full     forward only
 *   input        x, routes, down_ha (logits when wanted)    saved    saved      saved    two slots in turn
 *   attention    n1 .. h                                    saved    saved      again    one slot
 *   experts      n2 .. pre, up_xa                           saved    again      again    one slot
 *
 * "again" means: one slot shared by all layers (of a kind: with experts or dense), filled anew by block_recompute
 * before the layer's backward. The routing is always saved, so that recomputation takes the very same experts.
 *
 * Where experts are divided among ranks (model/dispatch.h), a layer's rows come and go in pieces. Then down_ha is of
 * the group experts; what they read is never saved but sent again; and when it is saved what they made of it, there is
 * room for `capacity` times what a rank gets if all get alike: a layer that gets more, and every layer in the other
 * modes, is worked on anew in its backward, piece by piece. */
#ifndef MT_ACTS_H
#define MT_ACTS_H

#include "model/lora.h"

enum recompute { RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL };
const char *recompute_name(enum recompute r);

/* How experts are divided among an expert-parallel group. */
struct dispatch_options {
    int64_t n_tok;   /* of the largest micro-batch; 0: they are not */
    double capacity; /* a rank has room for so many rows, per row if all ranks had alike */
    int64_t n_piece; /* into which a micro-batch is cut, or into more while a piece has too many rows for some rank */
};

/* How the rows of a layer were dealt, from its forward to its backward: on the host. */
struct dealing {
    int64_t n_piece, cap; /* cap: what offs has room for */
    bool kept;            /* pre, up_xa and down_ha of all pieces are there for the backward */
    int32_t *offs;        /* [n_piece, P, E+1]: of every piece, route.offs of every rank */
};

/* Where rows arrive, two pieces in turn. At the bottom of dev->work, so at the same place on all ranks. */
struct landing {
    struct tensor rows[2], back[2];      /* [room, D] act: what experts read; forward: what they made of it, to be sent
                                            home; backward: dout, then dx */
    struct tensor gate[2], dgate[2];     /* [room, 1] stat */
    struct tensor home[2], home_gate[2]; /* [rows of the largest piece, D] act, [.., 1] stat: what came home */
};

struct dispatch {
    struct dealing *dealing;
    const struct landing *landing;
};

struct layer_acts {
    /* input */
    struct tensor x;          /* [T, D] act */
    struct route route;       /* T*J rows */
    struct dispatch dispatch; /* of divided experts; M of pre .. down_ha is then room: for a piece or, saved, all */
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
    struct tensor pre;       /* [M, 2F] act, expert order */
    struct tensor up_xa;     /* [M, R] act */
};

struct acts {
    struct layer_acts *layers; /* [n_layer+1] host; of the last only x is used: what the final norm reads */
    int64_t n_layer;
    struct dispatch_options divided;
    int n_ep;                 /* ranks that share out the experts */
    struct dealing *dealings; /* [n_layer] host */
    struct landing landing;
};

/* The host's tables. */
void acts_init(struct acts *s, int64_t n_layer, const struct dispatch_options *divided, int n_ep);
/* What lies at the same place on all ranks: before anything else of a micro-batch. */
void acts_push_landing(struct acts *s, struct device *dev, const struct arch *a);
/* Pushes everything on `work` for T tokens; backward = false for evaluation. keep_logits: the backward wants them. */
void acts_push(struct acts *s, struct device *dev, const struct arch *a, const struct adapters *ad, int64_t n_tok,
               bool backward, enum recompute mode, bool keep_logits);
void acts_free(struct acts *s);

#endif

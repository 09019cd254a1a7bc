/* acts.h - the activation plan: what a layer leaves for its backward, and what is computed again.
 *
 *   group     tensors                                            none     selective  full     forward only
 *   KEPT      x, what the layer's kinds must have from forward   saved    saved      saved    one slot, x two in turn
 *             to backward: the routing, say
 *   MIXER     attn_norm .. h, the mixer's own                    saved    saved      again    one slot
 *   FFN       ffn_norm, the feed-forward network's own           saved    again      again    one slot
 *   SCRATCH   what forward alone needs                           one slot in every mode
 *
 * "again" means: one slot shared by all layers, filled anew by block_recompute before the layer's backward. The routing
 * is always saved, so that recomputation takes the very same experts.
 *
 * With expert parallelism (model/dispatch.h) a layer's rows come and go in chunks. Then down_ha is of the group FFN;
 * what the experts read is never saved but sent again; and when what they made of it is saved, there is room for
 * `capacity_factor` times what a rank gets if all get alike: a layer that gets more, and every layer in the other
 * modes, is recomputed in its backward, chunk by chunk. */
#ifndef MT_ACTS_H
#define MT_ACTS_H

#include "model/lora.h"
#include "model/weights.h"

struct experts;
enum recompute { RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL };
const char *recompute_name(enum recompute r);

/* Expert parallelism: how the experts of every layer are divided among the ranks of a group. */
struct ep_options {
    int64_t n_tok;          /* of the largest micro-batch; 0: they are not divided */
    double capacity_factor; /* size of the receive buffer relative to balanced routing */
    int64_t n_chunk;        /* of a micro-batch; more where a chunk has too many rows for some rank */
};

/* Which rank gets how many rows of a layer, from its forward to its backward: on the host. */
struct layout {
    int64_t n_chunk, cap; /* cap: what offs has room for */
    bool kept;            /* pre, up_xa and down_ha of all chunks are there for the backward */
    int32_t *offs;        /* [n_chunk, P, E+1]: of every chunk, route.offs of every rank */
};

/* Where rows arrive, two chunks in turn. At the bottom of dev->work, so at the same place on all ranks. */
struct recv_buf {
    struct tensor rows[2], back[2];  /* [room, D] act: what experts read; forward: what they made of it, to be sent
                                        back; backward: dout, then dx */
    struct tensor gate[2], dgate[2]; /* [room, 1] stat */
    struct tensor local[2], local_gate[2]; /* [rows of the largest chunk, D] act, [.., 1] stat: what came back */
};

/* Of attention. */
struct attention_acts {
    struct tensor qkv_xa;      /* [T, n_seg*R] act */
    struct tensor qk, rstd_qk; /* [T, (H+K)A] act, [T, H+K or 2] stat: before their norm; absent without one */
    struct tensor qkv;         /* [T, (H+2K)A] act, rotated */
    struct tensor o, lse;      /* [T, HA] act, [T, H] stat */
    struct tensor out_xa;      /* [T, R] act */
};

/* Of experts. With expert parallelism M is the room for the rows of a chunk or, saved, of all. */
struct moe_acts {
    struct route route;           /* T*J rows */
    struct tensor logits;         /* [T, E] stat; the router's backward or the auxiliary loss may want them */
    struct tensor pre;            /* [M, 2F] act, expert order */
    struct tensor up_xa, down_ha; /* [M, R] act */
    struct layout *layout;        /* with expert parallelism */
};

/* A kind of mixer or of feed-forward network has its member here; a layer uses those of its kinds. */
struct layer_acts {
    struct tensor x;                    /* [T, D] act */
    struct tensor attn_norm, attn_rstd; /* [T, D] act, [T] stat: what the mixer reads */
    struct tensor h;                    /* [T, D] act: x + mixer */
    struct tensor ffn_norm, ffn_rstd;   /* [T, D] act, [T] stat: what the feed-forward network reads */
    struct attention_acts attention;
    struct moe_acts moe;
};

/* What the kinds of a layer plan their activations for. */
enum acts_group { ACTS_KEPT, ACTS_MIXER, ACTS_FFN, ACTS_SCRATCH, ACTS_GROUPS };
struct acts_plan {
    struct device *dev;
    const struct arch *a;
    int64_t layer, n_tok;
    struct layer_weights w;        /* adapters alone */
    const struct experts *experts; /* model/experts.h */
    const struct acts *acts;
    bool saved[ACTS_GROUPS];
    bool keep_logits; /* the routers' backward wants them */
};
/* A tensor [rows, cols] act on dev->work; what the A product of an adapter leaves: absent without one. */
struct tensor acts_2d(const struct acts_plan *p, int64_t rows, int64_t cols);
struct tensor acts_xa(const struct acts_plan *p, int64_t rows, const struct lora *lora);

struct acts {
    struct layer_acts *layers; /* [n_layer+1] host; of the last only x is used: what the final norm reads */
    int64_t n_layer;
    const struct experts *experts; /* how routed experts are run */
    struct ep_options ep;
    int n_ep;               /* ranks that share out the experts */
    struct layout *layouts; /* [n_layer] host */
    struct recv_buf recv_buf;
};

/* The host's tables. */
void acts_init(struct acts *s, int64_t n_layer, const struct ep_options *ep, int n_ep);
/* What lies at the same place on all ranks: before anything else of a micro-batch. */
void acts_push_recv_buf(struct acts *s, struct device *dev, const struct arch *a);
/* Pushes everything on `work` for T tokens; backward = false for evaluation. keep_logits: the backward wants them. */
void acts_push(struct acts *s, struct device *dev, const struct arch *a, const struct adapters *ad, int64_t n_tok,
               bool backward, enum recompute mode, bool keep_logits);
void acts_free(struct acts *s);

#endif

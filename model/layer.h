/* layer.h - interfaces of mixers (struct mixer_kind) and feed-forward networks (struct ffn_kind), here called networks.
 * A layer is norm, mixer, residual, norm, network, residual; mixer or network may be missing. In layers with several
 * residual streams, or with norms after mixer and network, block.c adds the residual. model/arch/arch.c chooses both
 * kinds for every layer. */
#ifndef MT_LAYER_H
#define MT_LAYER_H

#include "kernels/comm/comm.h"
#include "model/acts.h"
#include "model/weights.h"

/* The inputs of a layer other than its activations. */
struct block {
    struct device *dev;
    const struct arch *a;
    int64_t layer;
    const struct layer_weights *w;
    const struct seqs *seqs;
    struct tensor tok;       /* [T] i32: ids of the tokens */
    struct tensor pos, rope; /* [T] i32; [P, width] f32: RoPE of P positions for the layer's kind of attention, or
                                absent */
    struct aux *aux;         /* auxiliary loss of this layer; coef 0: off */
    const struct experts *experts;
    struct host_ring *offload;       /* [OFFLOAD_KINDS] */
    struct host_ring *host_experts;  /* NULL: none */
    bool given_experts;              /* route.idx is an input (choices.h) */
    bool save_ffn;                   /* forward saves the group FFN (acts.h) for the backward */
    bool core_saved;                 /* recomputation: the group CORE is saved, so that the mixer does not compute it */
    const struct layer_cache *cache; /* of this layer, in a pass with a cache; else NULL */
    bool decode;                     /* some sequence of the pass has tokens in the cache */
    const int32_t *group_cu;         /* group_cu of struct model_batch */

    /* used with expert parallelism only */
    struct comm *ep;
    const struct ep_options *ep_options;
    const struct recv_buf *recv_buf;
    int64_t *n_chunk; /* = max(*n_chunk, chunks of this layer) */
};

/* The residual between mixer and network, if there is one residual stream. */
static inline struct tensor block_between(const struct block *b, const struct layer_acts *s)
{
    return b->a->mixer[b->layer] ? s->h : s->x;
}

/* A product's projection in the weights of its layer. */
static inline struct proj *layer_proj(struct layer_weights *w, const struct product *p)
{
    return (struct proj *)(void *)((char *)w + p->proj);
}
/* Copies the adapters' views into the layer's projections. Call it again whenever a view changes (its dropout key). */
void layer_adapt(struct layer_weights *w, const struct arch *a, int64_t layer, const struct lora_layer *lora);

/* What decoding keeps of a layer: rows of tokens in pages, and states of fixed size per sequence. */
enum { CACHE_ROWS = 4, CACHE_STATES = 2 };
struct cache_rows {
    int64_t cols;   /* values of a row, act; 0: none */
    int64_t window; /* tokens that a query sees, its own included; 0: all */
    int64_t ratio;  /* tokens of a row: 1; more in compressed attention */
};
struct cache_state {
    int64_t n; /* values of a sequence; 0: none */
    bool stat; /* dtype stat, else act */
};
struct cache_need {
    struct cache_rows rows[CACHE_ROWS];
    struct cache_state state[CACHE_STATES];
};
struct layer_cache {
    struct pages rows[CACHE_ROWS];
    struct tensor state[CACHE_STATES]; /* [n_slot, n] */
    struct tensor slot;                /* [S] i32: row of the states of each sequence in the pass */
};

/* A mixer: each output row depends on several tokens of its document. */
struct mixer_kind {
    /* Describes its matrices, at most MIXER_PRODUCTS, in p, which is zeroed (lora.h). */
    void (*products)(const struct arch *a, int64_t layer, struct product *p);
    /* Reads its weights from the checkpoint into its members of lw, with the functions at the end of weights.h. */
    int (*load)(struct weights_read *f, const struct arch *a, int64_t layer, struct layer_weights *lw);
    /* Allocates its activations of one group (acts.h) on dev->work. */
    void (*plan)(const struct acts_plan *p, struct layer_acts *s, enum acts_group group);
    /* Computes the group CORE from s->attn_norm and the groups KEPT and MIXER. */
    void (*core)(const struct block *b, struct layer_acts *s);
    /* y = mixer(s->attn_norm) + s->mixer_res where present. Recomputation calls it again, perhaps with core_saved, and
     * must give the same bits. */
    void (*fwd)(const struct block *b, struct layer_acts *s, struct tensor y);
    /* dnorm [T,D] act = gradient of s->attn_norm. dres [T,D] act is the gradient of y. Adapter gradients +=. */
    void (*bwd)(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres);

    /* For decoding with a cache (model/cache.h). */
    struct cache_need (*cache)(const struct arch *a, int64_t layer);
    /* fwd of the sequences' first tokens; stores in b->cache what decode would. */
    void (*prefill)(const struct block *b, struct layer_acts *s, struct tensor y);
    /* fwd of any number of tokens per sequence, which see the earlier ones in b->cache and are stored there. */
    void (*decode)(const struct block *b, struct layer_acts *s, struct tensor y);

    /* The least rows of a shared prefix (struct seqs) that fwd and bwd take; 0: they take no prefixes. Sharing so many
     * rows saves at least the memory of the states that it adds, so that a plan can ignore prefixes. */
    int64_t prefixes;
};

/* A feed-forward network: each output row depends on one token. */
struct ffn_kind {
    bool routed; /* a router chooses among experts: the model counts their rows, the auxiliary loss balances them,
                    expert parallelism may divide them among ranks */
    void (*products)(const struct arch *a, int64_t layer, struct product *p);
    int (*load)(struct weights_read *f, const struct arch *a, int64_t layer, struct layer_weights *lw);
    void (*plan)(const struct acts_plan *p, struct layer_acts *s, enum acts_group group);
    /* y = ffn(s->ffn_norm) + s->ffn_res where present */
    void (*fwd)(const struct block *b, struct layer_acts *s, struct tensor y);
    /* Computes its activations of the group FFN from s->ffn_norm and the group KEPT. */
    void (*recompute)(const struct block *b, struct layer_acts *s);
    /* dnorm [T,D] act = gradient of s->ffn_norm. dres [T,D] act is the gradient of y. dh [T,D] act += the gradient of
     * the residual between mixer and network, if the network reads that. dh is dres itself, unless a norm follows the
     * network; absent with several streams. Adapter gradients +=. May overwrite its activations. */
    void (*bwd)(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres,
                struct tensor dh);
};

#define X(kind) extern const struct mixer_kind mixer_##kind;
MIXERS(X)
#undef X
extern const struct ffn_kind ffn_moe, ffn_shared, ffn_parallel, ffn_latent, ffn_dense;

#endif

/* acts.h - the activation plan: which activations are saved for the backward, and which are recomputed. The columns are
 * the modes of enum recompute; "forward only" is evaluation and generation. Shared: all layers use the same memory.
 *
 *   group     tensors                                            none     selective  full        forward only
 *   KEPT      x; always saved tensors, such as the routing       saved    saved      saved       shared; x: 2 in turn
 *   CORE      output of attention or of the delta rule           saved    saved      recomputed  shared
 *   MIXER     the mixer's other activations .. h                 saved    saved      recomputed  shared
 *   FFN       the feed-forward network's activations             saved    recomputed recomputed  shared
 *   NORMS     attn_norm, ffn_norm: inputs of mixer, network      saved    recomputed recomputed  shared
 *   SCRATCH   tensors that only forward needs                    shared in every mode
 *
 * Recomputed groups share memory too; block_recompute fills it before the layer's backward. The routing is always
 * saved, so that recomputation uses the same experts.
 *
 * Layers may save different groups (struct acts_save): train/plan/plan_choice.c chooses those that save the most time.
 * The three modes save the same groups in all layers. x, MIXER and FFN may be in host memory (kernels/host_ring.h).
 *
 * With several residual streams (hyper-connections) KEPT also has the output of the network, MIXER the sum of the
 * streams before the mixer, FFN the streams between mixer and network and their sum before the network.
 *
 * With expert parallelism (model/layers/dispatch.h) the rows of a layer are sent to other ranks in chunks:
 * - down_ha (struct moe_acts) belongs to the group FFN.
 * - The experts' input is not saved; the backward sends it again.
 * - A saved FFN has room for `capacity_factor` times the rows of balanced routing. The backward recomputes a layer with
 *   more rows, or without FFN, chunk by chunk.
 *
 * act and stat are the dtypes of activations and of statistics. T: tokens, D: hidden, H, K: query and kv heads, A: head
 * dim, J: top-k, R: LoRA rank. *_xa, *_ha: a projection's input times its adapter's A; n_seg matrices A share a product
 * (q, k, v). */
#ifndef MT_ACTS_H
#define MT_ACTS_H

#include "kernels/host_ring.h"
#include "model/lora.h"
#include "model/weights.h"

struct experts;
enum recompute { RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL };
const char *recompute_name(enum recompute r);

/* The groups that a layer saves besides KEPT, as bits. SAVE_*_HOST: the group, if saved, is in host memory. */
enum { SAVE_CORE = 1, SAVE_MIXER = 2, SAVE_FFN = 4, SAVE_NORMS = 8, SAVE_MIXER_HOST = 16, SAVE_FFN_HOST = 32 };
struct acts_save {
    uint8_t groups[MT_MAX_LAYERS];
};
enum offload_kind { OFFLOAD_MIXER, OFFLOAD_FFN, OFFLOAD_KINDS };
enum { OFFLOAD_SLOTS = 2 };                                         /* groups of one offload_kind on the device */
static inline bool acts_in_host(int groups, enum offload_kind kind) /* groups: SAVE_* bits of a layer */
{
    const int bits = kind == OFFLOAD_MIXER ? SAVE_MIXER | SAVE_MIXER_HOST : SAVE_FFN | SAVE_FFN_HOST;
    return (groups & bits) == bits;
}
struct acts_save acts_save_mode(enum recompute r); /* of every layer */
/* "none", "selective" or "full"; "per layer" when no mode saves these groups. */
const char *acts_save_name(const struct acts_save *s, int64_t n_layer);

/* Sizes of expert parallelism. */
struct ep_options {
    int64_t n_tok;          /* tokens of the largest micro-batch; 0: no expert parallelism */
    double capacity_factor; /* size of the receive buffer relative to balanced routing */
    int64_t n_chunk;        /* chunks of a micro-batch; doubled while a chunk exceeds the receive buffer of a rank */
};

/* One layer's offsets of the rows that each rank sends to each other; on the host, kept from forward to backward. */
struct layout {
    int64_t n_chunk, cap; /* cap: chunks allocated in offs */
    bool saved;           /* pre, up_xa and down_ha of all chunks are saved for the backward */
    int32_t *offs;        /* [n_chunk, P, E+1]: route.offs of every chunk and rank */
};

/* Receive buffers, double-buffered by chunk. A micro-batch allocates them first in dev->work, so that they have the
 * same offset on all ranks. */
struct recv_buf {
    struct tensor rows[2], back[2];        /* [capacity, D] act. rows: input of the experts. back: in forward their
                                              output, sent back; in backward dout, then dx */
    struct tensor gate[2], dgate[2];       /* [capacity, 1] stat */
    struct tensor local[2], local_gate[2]; /* [rows of the largest chunk, D] act, [.., 1] stat: rows returned for own
                                              tokens */
};

/* Activations of mixer_attention.c. */
struct attention_acts {
    struct tensor qkv_xa;      /* [T, (H+K)A] act, [T, H+K or 2] stat: q and k before their norm, and its statistic;
                                  both absent without a norm. With an output gate qk is absent, because `wide` has q and
                                  k. With a norm of v: [T, (H+2K)A], [T, H+2K] */
    struct tensor qk, rstd_qk; /* [T, (H+K)A] act, [T, H+K or 2] stat: q and k before their norm, and its statistic;
                                  both absent without a norm. With an output gate qk is absent, because `wide` has q and
                                  k. With a norm of v: [T, (H+2K)A], [T, H+2K] */
    struct tensor qkv;         /* [T, (H+2K)A] act, after RoPE */
    struct tensor wide, gated; /* [T, (2H+2K)A], [T, HA] act, with an output gate: first product; o times the gate */
    struct tensor o, lse;      /* [T, HA] act, [T, H] stat */
    struct tensor out_xa;      /* [T, R] act */
};

/* Activations of mixer_mla.c. Lq, Lkv: widths of the latents. A head has N columns without position, G rotated columns,
 * B value columns. */
struct mla_acts {
    struct tensor a, a_xa;                 /* [T, Lq+Lkv+G] act: q_a | kv_a | rotated key; [T, n_seg*R] act */
    struct tensor q_norm, q_rstd, q_xa;    /* [T, Lq] act, [T] stat, [T, R] act; absent without q_lora_rank */
    struct tensor kv_norm, kv_rstd, kv_xa; /* [T, Lkv] act, [T] stat, [T, R] act */
    struct tensor qkv;                     /* [T, H(2(N+G)+B)] act, after RoPE */
    struct tensor o, lse;                  /* [T, HB] act, [T, H] stat */
    struct tensor out_xa;                  /* [T, R] act */
};

/* Activations of mixer_deltanet.c. C: columns q | k | v, V: value columns, N: value heads. */
struct deltanet_acts {
    struct tensor in, in_xa;  /* [T, C+V] act: q | k | v before the convolution, z; [T, n_seg*R] act */
    struct tensor ba, ba_xa;  /* [T, 2N] act: b | a */
    struct tensor qkv;        /* [T, C] act, after the convolution */
    struct tensor o, y, rstd; /* [T, V] act: output of the delta rule; o after its norm; [T, N] stat */
    struct tensor out_xa;     /* [T, R] act */
};

/* Activations of mixer_shortconv.c. */
struct shortconv_acts {
    struct tensor bcx, in_xa; /* [T, 3D] act, [T, R] act */
    struct tensor y, out_xa;  /* [T, D] act, group CORE; [T, R] act */
};

/* Activations of mixer_compressed.c. Lq: width of the queries' first projection. N entries, each summing up several
 * tokens, with W value columns. */
struct compressed_acts {
    struct tensor a, a_xa;              /* [T, Lq+A] act: q_a | kv; [T, n_seg*R] act */
    struct tensor q_norm, q_rstd, q_xa; /* [T, Lq] act, [T] stat, [T, R] act */
    struct tensor q_in, head_rstd, q;   /* [T, HA] act before the norm of heads, [T, H] stat, [T, HA] act */
    struct tensor kv, kv_rstd;          /* [T, A] act after norm and rope, [T] stat */
    struct tensor pair; /* [T, 2W or 4W] act: values | gates. pair to entry_pos: only in layers with entries */
    struct tensor entry_in, entry_rstd; /* [N, A] act before their norm, [N] stat */
    struct tensor entry, entry_pos;     /* [N, A] act after norm and rope, [N] i32 */
    struct tensor idx;                  /* [T, K] i32: entries chosen for each token; absent where tokens see all */
    struct tensor o, lse;               /* [T, HA] act, [T, H] stat */
    struct tensor group, out_xa;        /* [T, GO] act, [T, R] act */
};

/* Activations of ffn_moe.c. With expert parallelism M is the capacity of one chunk, or of all chunks if saved. */
struct moe_acts {
    struct route route;  /* T*J rows */
    struct tensor share; /* [T, J] stat: the router's gates before gate_scale multiplies them (route.gate: after).
                            Absent without gate_scale */
    struct tensor router_in, drouter_in; /* [T, D] act: views that ffn_parallel.c and ffn_latent.c set; absent: the
                                            router reads the input of the experts. The router adds to drouter_in */
    struct tensor logits;         /* [T, E] stat; only when the router's backward or the auxiliary loss reads them */
    struct tensor pre;            /* [M, glu_cols(F)] act, expert order */
    struct tensor up_xa, down_ha; /* [M, R] act */
    struct layout *layout;        /* NULL without expert parallelism */
};

/* Activations of the shared experts of ffn_shared.c, or of the dense network of ffn_parallel.c or ffn_dense.c. */
struct shared_acts {
    struct route gate;    /* route of one expert: gate.gate [T, 1] scales the shared experts; absent without a gate */
    struct tensor logits; /* [T, 1] stat, of the gate */
    struct tensor pre;    /* [T, glu_cols(G)] act */
    struct tensor up_xa, down_xa; /* [T, n_seg*R], [T, R] act */
};

/* Activations of hyper-connections before a mixer or a network. N streams; V = (2 + N) N values (kernels/ops/ops.h). */
struct site_acts {
    struct tensor sum;     /* [T, D] act: weighted sum of the streams, the input of the norm */
    struct tensor m, rstd; /* [T, V], [T] stat */
};

/* Activations of a layer with several residual streams. */
struct stream_acts {
    struct site_acts mixer, ffn;
    struct tensor h;   /* [T, N*D] act: between mixer and network */
    struct tensor out; /* [T, D] act: output of the network */
};

/* Activations of the norm after a mixer or a network; absent where there is no such norm. */
struct post_acts {
    struct tensor out, rstd; /* [T, D] act, [T] stat: what the norm reads */
};

/* Activations of ffn_parallel.c; those of its dense network are in struct shared_acts. */
struct parallel_acts {
    struct tensor norm, rstd;       /* [T, D] act, [T] stat: input of the experts; group FFN */
    struct post_acts dense, routed; /* group KEPT */
};

/* Activations of mixer_mamba.c; sizes as in struct mamba_weights. */
struct mamba_acts {
    struct tensor in, in_xa; /* [T, V+C+N] act, [T, R] act */
    struct tensor xbc;       /* [T, C] act: after the convolution */
    struct tensor o;         /* [T, V] act: of the state space */
    struct tensor y, rstd;   /* [T, V] act: o after gate and norm; [T, G] stat */
    struct tensor out_xa;    /* absent: out has no adapter */
};

/* Activations of ffn_latent.c. */
struct latent_acts {
    struct tensor in, out;        /* [T, Z] act: of the experts; groups FFN, KEPT */
    struct tensor down_xa, up_xa; /* [T, R] act */
};

/* Activations of one layer, which uses the members of its kinds of mixer and network. It has one mixer: the mixers'
 * members share memory. */
struct layer_acts {
    struct tensor x;                    /* [T, D] act; with N streams [T, N*D] */
    struct tensor attn_norm, attn_rstd; /* [T, D] act, [T] stat: input of the mixer */
    struct tensor h;                    /* [T, D] act: x plus the mixer's output, or with several residual streams the
                                           output alone. Absent in a layer that has no mixer, and in one that has no
                                           feed-forward network and saves MIXER */
    struct tensor ffn_norm, ffn_rstd;   /* [T, D] act, [T] stat: input of the feed-forward network */
    struct tensor mixer_res, ffn_res;   /* views of x and h that block.c sets: mixer and network add their outputs to
                                           them. Absent with several streams, or if a norm follows the output */
    struct stream_acts streams;
    struct post_acts mixer_post, ffn_post; /* groups MIXER and KEPT */
    union {
#define X(kind) struct kind##_acts kind;
        MIXERS(X)
#undef X
    };
    struct moe_acts moe;
    struct shared_acts shared;
    struct parallel_acts parallel;
    struct latent_acts latent;
};

/* Arguments of the plan functions of mixers and networks. */
enum acts_group { ACTS_KEPT, ACTS_CORE, ACTS_MIXER, ACTS_FFN, ACTS_NORMS, ACTS_SCRATCH, ACTS_GROUPS };
struct acts_plan {
    struct device *dev;
    const struct arch *a;
    int64_t layer, n_tok;
    struct layer_weights w;          /* only for the sizes of adapters; may be of another layer with the same sizes */
    int64_t adapted;                 /* the layer that w is of; -1: none yet */
    int16_t like[MT_MAX_LAYERS + 1]; /* the first layer with the same activations, perhaps itself */
    const struct experts *experts;   /* where routed experts run */
    const struct acts *acts;
    bool saved[ACTS_GROUPS]; /* of this layer */
    bool backward;
    bool keep_logits; /* allocate the routers' logits for the backward */
};
/* Allocates a tensor [rows, cols] act on dev->work. acts_xa: x A^T [rows, R] of an adapter; absent without adapter. */
struct tensor acts_2d(const struct acts_plan *p, int64_t rows, int64_t cols);
struct tensor acts_xa(const struct acts_plan *p, int64_t rows, const struct lora *lora);

struct acts {
    struct layer_acts *layers; /* [n_layer+1] host; of the last only x is used: the input of the final norm */
    int64_t n_layer;
    const struct experts *experts; /* where routed experts run */
    struct ep_options ep;
    int n_ep;               /* ranks of the expert-parallel group */
    struct layout *layouts; /* [n_layer] host */
    struct recv_buf recv_buf;
    struct acts_save save;
    struct host_ring inputs;                 /* x of layers 0 .. n_layer */
    struct host_ring offload[OFFLOAD_KINDS]; /* groups of some layers */
    int64_t (*bytes)[ACTS_GROUPS];           /* [n_layer] host: size of every group in the last acts_push */
};

/* Bytes of a layer's group, saved or not, in the last acts_push: what a copy to host memory would move. */
int64_t acts_host_bytes(const struct acts *s, int64_t layer, enum offload_kind kind);
/* If x is in host memory: the number of layers whose x is on the device at a time, half of all plus 1, from 3 to
 * HOST_RING_SLOTS. With more of them a copy has more time to wait for longer copies of networks or experts
 * (tests/notebook/memory.md). */
int64_t acts_input_slots(int64_t n_layer);
/* Allocates the host tables. */
void acts_init(struct acts *s, int64_t n_layer, const struct ep_options *ep, int n_ep);
/* Allocates the receive buffers, before anything else of the micro-batch (struct recv_buf). */
void acts_push_recv_buf(struct acts *s, struct device *dev, const struct arch *a);
/* Allocates the activations of n_tok tokens on dev->work. backward = false: forward only. keep_logits: the router's
 * logits too. */
void acts_push(struct acts *s, struct device *dev, const struct arch *a, const struct adapters *ad, int64_t n_tok,
               bool backward, bool keep_logits);
void acts_free(struct acts *s);

#endif

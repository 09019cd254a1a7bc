/* weights.h - safetensors -> the frozen weights in dev->weights, experts packed as they are on disk or as asked. */
#ifndef MT_WEIGHTS_H
#define MT_WEIGHTS_H

#include "data/safetensors.h"
#include "kernels/comm/comm.h"
#include "model/arch.h"
#include "model/quantize.h"

struct layer_weights {
    struct tensor attn_norm, ffn_norm; /* [D] f32 */
    struct proj qkv, out;              /* [(H+2K)A, D]: q rows, k rows, v rows; [D, HA] */
    struct tensor q_norm, k_norm;      /* f32: both [A], or [HA] and [KA]; absent without such norms */
    struct tensor sinks;               /* [H] f32 */
    struct weight router;              /* [E, D]; a dense layer's is one row of zeros */
    struct tensor router_bias;         /* [E] f32 */
    struct proj up, down;              /* [E, 2F, D], [E, D, F]; E of this rank's, where experts are divided */
};

struct weights {
    struct weight embed, head;         /* [V, D]; head may share embed's bytes */
    struct tensor norm;                /* [D] f32, final */
    struct layer_weights *layers;      /* [L] host */
    int64_t expert_bytes, dense_bytes; /* in dev->weights: up and down with their biases; the rest */
    int64_t n_decoded, decoded_bytes;  /* layers whose experts were decoded; what they take beyond their packed bytes */
    char experts[96];   /* how they are held: "nf4-nested, packed from bf16, 3 of 24 layers decoded to bf16" */
    uint64_t mark;      /* of samples of the bytes as they came: tells base models of one shape apart */
    int64_t n_unused;   /* tensors of the checkpoint that are not needed */
    const char *unused; /* the first of them; st's, and gone with it */
};

/* Takes dev->weights bytes for every tensor and, unless the device is measuring, copies them there. All names, shapes
 * and formats are checked before the first copy; the error names the tensor and what was expected. */
struct weights_options {
    const struct quantize *quantize; /* what is packed on the way, dense feed-forward networks too; NULL: nothing */
    bool embed_on_host;              /* the embedding goes to dev->host, unless it is the head as well */
    int64_t n_resident;    /* of so many layers, the last ones, the experts are decoded once, to what op_decode makes of
                              them: their packed bytes pass through dev->work and are not kept */
    const struct comm *ep; /* of experts divided among these only this rank's are read; NULL: alone */
};
int weights_load(struct weights *w, struct device *dev, const struct arch *a, const struct safetensors *st,
                 const struct weights_options *opt, struct err *err) MT_CHECK;
void weights_free(struct weights *w); /* the host table only */

/* Part by part, for who cannot hold them all: one layer (packed by q as weights_load does, but without its cache), or
 * what stands around the layers. Each takes its bytes from dev->weights; the caller gives them back to the mark. */
int weights_load_layer(struct layer_weights *lw, struct device *dev, const struct arch *a, const struct safetensors *st,
                       const struct quantize *q, int64_t layer, struct err *err) MT_CHECK;
int weights_load_embed(struct weight *embed, struct device *dev, const struct arch *a, const struct safetensors *st,
                       struct err *err) MT_CHECK;
int weights_load_head(struct weight *head, struct tensor *norm, struct device *dev, const struct arch *a,
                      const struct safetensors *st, struct err *err) MT_CHECK;

#endif

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

/* ---- for the load functions of kinds (model/layer.h): a layer under way. Names are those of the checkpoint after
 * "model.layers.N.", suffix is ".weight" or ".bias". Each call takes its bytes from dev->weights, checks the shape and
 * copies. */
struct fill;
bool weights_has(const struct fill *f, const char *name, const char *suffix);
int weights_vector(struct fill *f, struct tensor *out, const char *name, const char *suffix, int64_t n) MT_CHECK;
/* A matrix that model.quantize leaves as it is; one of zeros, which the checkpoint does not have. */
int weights_matrix(struct fill *f, struct weight *w, const char *name, int64_t n_out, int64_t n_in) MT_CHECK;
void weights_zeros(struct fill *f, struct weight *w, int64_t n_out, int64_t n_in);
/* Matrices below each other in one, with their biases; model.quantize_attention packs them. marked: of the first layer,
 * its first bytes count for weights.mark. */
enum { STORED_PARTS = 3 };
struct stored_rows {
    const char *part[STORED_PARTS];
    int64_t rows[STORED_PARTS], n_in;
    int n_part;
};
int weights_rows(struct fill *f, struct proj *p, const struct stored_rows *r, bool biased, bool marked) MT_CHECK;
/* The two products of every expert, in whichever form the checkpoint has them: this rank's part, packed or decoded as
 * asked. Biases go by arch.expert_bias. */
struct stored_experts {
    const char *stack;   /* "mlp.experts.gate_up_proj": all experts in one tensor; NULL: there is no such form */
    const char *part[2]; /* of one expert, # its number, or of none; part[1], unless NULL, lies below part[0] */
    int64_t n_out, n_in;
};
int weights_experts(struct fill *f, struct proj *up, const struct stored_experts *stored_up, struct proj *down,
                    const struct stored_experts *stored_down) MT_CHECK;

#endif

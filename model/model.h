/* model.h - the whole model: embedding, layers, chunked loss head; one micro-batch at a time.
 *
 *   model_begin   takes work memory, uploads the batch
 *   model_fwd     embedding and layers; acts.layers[l].x is the input of layer l, the last one that of the final norm
 *   model_loss    final norm, head, cross-entropy over the labelled tokens, += into the tally
 *   model_bwd     gradients of every adapter, += into the flat gradient
 *   model_end     gives the work memory back
 *
 * Instead of model_loss, model_logits reads what the model would say next.
 *
 * None of these waits for the device. What a step wants to know adds up in the tally, in device memory, and is read
 * once, when the step is over:
 *
 *   model_clear   tally of losses = 0
 *   model_sum     the tally's losses of all ranks are added, on each; their gradients were, by pass.reduce
 *   model_norm    the gradient's norm goes into it
 *   model_read    waits, and has it all */
#ifndef MT_MODEL_H
#define MT_MODEL_H

#include "data/safetensors.h"
#include "model/block.h"

struct model_options {
    int64_t max_len; /* longest document: rows of the RoPE table */
    enum recompute recompute;
    double aux_coef;            /* 0: no auxiliary loss */
    bool aux_pooled;            /* over all layers as transformers has it, or layer by layer as Megatron (struct aux) */
    struct quantize quantize;   /* what is packed while it loads */
    int64_t ce_chunk;           /* labelled tokens per pass of the loss head; 0: model_ce_chunk of 128 MiB */
    int64_t expert_group;       /* as in struct device */
    bool embed_on_host;         /* the embedding lies in dev->host */
    int64_t n_resident;         /* the last layers, whose experts are decoded when they are loaded */
    const struct parallel *par; /* NULL: alone */
    bool share_moments;         /* among par->dp (ZeRO-1) */
    bool frozen;                /* forward only: no gradients, no moments */
    struct ep_options ep;       /* n_tok 0 where par->ep is alone */
};

/* A micro-batch as the host has it: n_seq documents end to end. In a dry run the arrays may be NULL. */
struct model_batch {
    int64_t n_tok, n_seq, n_label, max_len;
    const int32_t *tok, *pos, *cu;       /* [n_tok], [n_tok], [n_seq+1] */
    const int32_t *label_row, *label_id; /* [n_label] */
};

struct model_pass {
    bool backward;
    double loss_scale;    /* multiplies dnll: 1 / labelled tokens of the optimizer step */
    double aux_share;     /* of this micro-batch in the step's auxiliary loss */
    uint64_t dropout_key; /* differs for every micro-batch */
    bool reduce;          /* the last one of a step here: the ranks' gradients are added as backward leaves a layer */
};

/* Sums over the micro-batches since model_clear. */
struct model_tally {
    double nll;      /* sum over labelled tokens, natural log */
    double aux;      /* auxiliary losses, before coef; 0 when off */
    int64_t n_label; /* on this rank; all else after model_sum: on all */
    int64_t n_hit;
    double grad_norm;   /* of all adapters' gradients, when model_norm was called */
    int64_t n_bad_grad; /* gradient elements that are not finite */
};

struct model {
    struct device *dev;
    struct parallel par;
    struct arch arch;
    struct weights weights;
    struct adapters adapters;
    struct tensor rope;    /* [max_len, A] f32 */
    struct tensor tally;   /* [7] f64: nll, hits, aux, sum of squares and non-finite elements of the gradient, and of
                              the divided experts' */
    struct tensor row_sum; /* [L*E] f64: rows of every expert in training micro-batches since model_take_rows */
    enum recompute recompute;
    int64_t ce_chunk;
    double aux_coef;
    bool aux_pooled;
    int64_t n_label; /* since model_clear, on this rank */
    int64_t n_chunk; /* most chunks that a layer was cut into so far, with expert parallelism */

    /* the micro-batch under way, all on dev->work */
    struct model_pass pass;
    struct acts acts;
    struct aux *aux; /* [L] host: of each layer; pooled ones share their tensors, a dense layer has none */
    struct seqs seqs;
    struct tensor tok, pos, label_row, label_id;
    struct tensor final_norm, final_rstd, dfinal; /* [T, D], [T], [T, D] */
};

/* Loads weights and adapters (A random, B zero, by seed) into dev's arenas, or measures them in a dry run. ad
 * is planned (adapters_plan) and becomes the model's own, also after an error. st may be closed afterwards. */
int model_open(struct model *m, struct device *dev, const struct arch *a, const struct safetensors *st,
               struct adapters *ad, const struct model_options *opt, uint64_t seed, struct err *err) MT_CHECK;
void model_close(struct model *m);

void model_begin(struct model *m, const struct model_batch *b, const struct model_pass *pass);
void model_fwd(struct model *m);
void model_loss(struct model *m);
void model_bwd(struct model *m);
/* What follows row `row` of the micro-batch: logits [V] host, rounded to act. Takes less work memory than the loss of
 * two labelled tokens. Waits for the device. */
void model_logits(struct model *m, int64_t row, float *logits);
void model_end(struct model *m);

void model_clear(struct model *m);
void model_sum(struct model *m);
void model_norm(struct model *m);
void model_read(struct model *m, struct model_tally *out); /* waits for the device */
/* rows [L*E] host: what every expert was given since the last call, on all ranks; 0 in dense layers. Waits for the
 * device. */
void model_take_rows(struct model *m, int64_t *rows);

/* After model_loss of a micro-batch whose loss is not finite: what went bad first, e.g. "output of layer 3". Waits. */
void model_first_bad(struct model *m, char name[64]);
/* The first adapter whose gradient is not finite; false when all are finite. */
bool model_first_bad_grad(struct model *m, char name[64]);

/* Labelled tokens per pass of the loss head, such that the chunk's logits in f32 stay near that many bytes. */
int64_t model_ce_chunk(const struct arch *a, int64_t logits_bytes);

#endif

/* lora.h - the adapters: which parameters are trained, their offsets in the flat arrays, and the ops' views of them.
 *
 * One flat array of dtype stat holds all parameters (the masters). Gradients and the
 * optimizer's states (optim/optimizer.h) are arrays of the same layout. Ops read working copies of dtype act: a
 * separate array, or the masters themselves when both dtypes are equal.
 *
 * There are two layouts. The device layout may pad lora ranks, it orders the rows of B as the weight in memory, and
 * with expert parallelism it has only the experts of this rank. The logical layout has the configured lora ranks, the
 * rows in the order of the checkpoint, and all experts; host arrays and files use it.
 * adapters_gather, adapters_get and adapters_put convert between them. One struct lora_param is one PEFT tensor, e.g.
 * q_proj's A of layer 3, or B of all experts' gate_up_proj of layer 3. */
#ifndef MT_LORA_H
#define MT_LORA_H

#include "kernels/comm/comm.h"
#include "model/arch/arch.h"
#include "model/lora_options.h"
#include "model/stored/base_model.h"
#include "optim/optimizer.h"

struct lora_param {
    enum lora_target target;
    bool is_b; /* A otherwise */
    bool is_m; /* magnitudes of DoRA [rows of B, 1]; is_b is set too, because rows and learning rate are those of B */
    bool experts;              /* a stack with one matrix per expert */
    int64_t layer, off;        /* off: first element in the flat arrays */
    int64_t n_exp, rows, cols; /* A [n_exp, R, in], B [n_exp, out, R]; n_exp 1 for attention. R is padded_rank[target]
                                * in the device layout, rank[target] in the logical layout */
    int64_t first_exp;         /* number of the first expert that this rank holds */
    struct row_order order;    /* of a B in the device layout; the logical layout has the order of the checkpoint */
};

/* A matrix of a layer, or a stack of one per expert, to which adapters can be added. The layer's mixer or network lists
 * its products (model/layer.h). The rows of the matrix are those of its targets in order (q, k, v); one struct lora
 * adapts them all. */
enum { MIXER_PRODUCTS = 4, LAYER_PRODUCTS = 10, PRODUCT_TARGETS = 3 };
struct product {
    size_t proj;                /* offset of its struct proj in struct layer_weights */
    int64_t n_exp, n_out, n_in; /* n_exp 1: one matrix */
    bool experts; /* a stack: expert parallelism divides it, and its adapters have no dropout, as in PEFT */
    int n_target; /* 0: it has no adapter */
    bool frozen;  /* the target only names the matrix: no adapter may be on it */
    enum lora_target target[PRODUCT_TARGETS];
    int64_t rows[PRODUCT_TARGETS];
    struct row_order order; /* of the rows in the checkpoint; a matrix with such an order has one target */
};
/* Lists the products of a layer: the mixer's at 0, the feed-forward network's at MIXER_PRODUCTS. n_out 0: empty
 * entry. */
void layer_products(const struct arch *a, int64_t layer, struct product p[LAYER_PRODUCTS]);
/* The product that a target adapts, and the number of its rows; false: the layer has none. */
bool lora_find_product(const struct arch *a, int64_t layer, enum lora_target t, struct product *out, int64_t *rows);

/* The adapters of a layer, indexed by product. */
struct adapter {
    struct lora lora;
    struct lora_rows rows; /* of tokens with different adapters (model/layers/lora_rows.h) */
    struct lora_grad grad;
    struct dora dora;        /* model/layers/dora.h */
    struct proj_quant quant; /* model/qat.h */
    struct input_quant in;
};
struct lora_layer {
    struct adapter of[LAYER_PRODUCTS];
};
void lora_unquantised(struct lora_layer *lora); /* makes the products read the weights as they are stored */

/* The largest magnitudes that a run keeps for the scales of quantisation-aware training: of inputs, from the
 * calibration; with quant.amax = static also of the weights at the start. They are saved with every adapter
 * (train/adapter/amax_file.h). A row is a matrix or a stack, or its input. */
struct amax_row {
    char name[64];         /* "layers.3.gate_up_proj.amax"; of an input "layers.3.gate_up_proj.input_amax" */
    bool input;            /* stride is 0: the matrices share one value */
    int64_t n_held, n_exp; /* matrices on this rank, and of the model */
    int64_t off, stride;   /* matrix e of this rank is element off + e * stride of flat */
};
struct amax_table {
    bool weights;       /* the weights' magnitudes are kept */
    bool known;         /* they are computed or loaded, and not computed again */
    bool calibrated;    /* the inputs' magnitudes are known */
    struct tensor flat; /* f32 on the device: struct qat's; ndim 0: nothing is kept */
    int64_t n_rows;
    struct amax_row *rows; /* [n_rows] host */
};

struct adapters {
    int64_t r;                  /* lora rank of targets that lora_options.ranks does not name */
    int64_t rank[LORA_TARGETS]; /* lora rank of each target; r if it is not trained */
    /* Lora ranks in the device layout: rounded up to a multiple that the device needs. Targets that share a product,
     * such as q, k and v, have the largest rank of those that are trained. Values beyond rank[] are zero and stay zero.
     */
    int64_t padded_rank[LORA_TARGETS];
    double alpha, dropout;
    double alpha_of[LORA_TARGETS]; /* alpha where lora_options.alphas does not name the target */
    bool rslora;
    enum lora_init init;  /* not default: r, rank and alpha are twice those of the options with the same scale, and the
                           * upper half of each target's ranks is frozen (adapters_freeze) */
    bool dora;            /* every matrix has magnitudes */
    struct tensor norms;  /* [rows of all magnitudes] stat on the device, if dora: row norms */
    int64_t norm_version; /* adapters.version for which `norms` was computed; 0: not computed */
    double budget; /* above 0: the routing distributes ranks among the experts, and this share of all ranks is trained.
                      The other ranks have A = 0 and B = 0, hence no gradient, and stay 0 (lora_routing.h) */
    float scale[LORA_TARGETS];        /* alpha_of/rank, or alpha_of/sqrt(rank) with rslora */
    bool asked[LORA_TARGETS];         /* in lora.targets */
    bool target[LORA_TARGETS];        /* in lora.targets, and a layer of lora.layers has it */
    unsigned fused[LORA_TARGETS];     /* bits of the targets that share a product with this one */
    bool transposed;                  /* transformers stores the experts as [E, in, out]; used for PEFT files only */
    const struct tensor_names *names; /* the architecture's */
    bool nested;                      /* names of files have language_model before layers: arch.nested */
    struct base_model base;           /* the model that they were trained on; their file records it too */
    int64_t step;                     /* of the run that trained them, also in their file; 0: none, or unknown */
    int64_t n_layer;
    bool *layer_on;       /* [n_layer] host: the layer has trained parameters */
    int64_t lowest_layer; /* backward stops here; n_layer when nothing is trained */
    int64_t n_params;
    struct lora_param *params;  /* [n_params] host, sorted by off */
    int64_t n_values;           /* trainable values, over all ranks */
    int64_t n_flat;             /* length of the flat arrays, padding included */
    struct optimizer opt;       /* param, grad [n_flat] stat; states: ZeRO-1 divides them among ranks */
    struct param_group *groups; /* [opt.n_group] host, sorted by `first` */
    struct tensor working;      /* [n_flat] act; == opt.param when both dtypes are equal */
    int64_t version;            /* changes with the values */
    struct lora_layer *layers;  /* [n_layer] host; r == 0 where nothing is trained */
    struct adapters *logical;   /* parameters in the logical layout; NULL: same as the device layout */
    struct parallel par;        /* the ranks that train these adapters */
    bool ep;                    /* expert parallel: this rank holds a part of the experts */
    struct amax_table amax;     /* filled by qat_open */
    int64_t n_common; /* if ep: the first n_common elements are replicated on all ranks; this rank's experts follow */
};

/* Plans the parameters from the options, without device memory. An unknown target or layer is an error, and so is a
 * target that matches nothing. Targets skip layers without their matrix. */
int adapters_plan(struct adapters *ad, const struct arch *a, const struct lora_options *opt, struct err *err) MT_CHECK;
/* Computes the device layout: lora ranks rounded up to `multiple`, experts divided among the ranks of par->ep. Call it
 * before adapters_alloc. adapters_plan leaves a layout with multiple 1 and one rank. */
void adapters_layout(struct adapters *ad, const struct arch *a, int64_t multiple, const struct parallel *par);
/* Divides the moments for ZeRO-1: each rank of par.dp holds those of an equal part; n_flat is rounded up for this. Call
 * it before adapters_alloc. */
void adapters_shard_moments(struct adapters *ad);
/* Rounds n_flat up to a multiple. Call it before adapters_alloc. */
void adapters_round(struct adapters *ad, int64_t multiple);
/* Allocates the flat arrays on dev->state, zeroes them and sets the views; a dry run only counts the bytes. Adapters of
 * stacks have no dropout, as in PEFT. The caller sets dropout_key. */
void adapters_alloc(struct adapters *ad, struct device *dev, const struct arch *a);
/* As adapters_alloc, for inference: no gradients, no moments. */
void adapters_alloc_frozen(struct adapters *ad, struct device *dev, const struct arch *a);
/* Bytes on dev->host of adapters whose states are in host memory. ad itself may have its states on the device. */
int64_t adapters_host_bytes(const struct adapters *ad, bool cpu_update);
/* Makes the layers of ad with scale 0, for forward passes of a reference; A and B are those of ad. The reference then
 * runs the same kernels as the adapted model, so both give the same bits while B is 0. */
void adapters_without_effect(struct adapters *like, const struct adapters *ad);
/* Initialises A uniformly in +-1/sqrt(in), and B with zero. Each parameter has a random stream keyed by its name, so
 * that its values do not depend on the other targets. */
void adapters_init(struct adapters *ad, struct device *dev, uint64_t seed);
/* With ad->init: clears the gradients of a layer's frozen ranks. Call it before adapters_reduce. */
void adapters_freeze(struct adapters *ad, struct device *dev, int64_t layer);
/* All-reduces the gradients of a layer. */
void adapters_reduce(struct adapters *ad, struct device *dev, int64_t layer);
/* Call it when the gradients of a layer are complete for this step. With cpu_update it copies them to the host. */
void adapters_complete(struct adapters *ad, struct device *dev, int64_t layer);
/* Call it before ops that read the working copies of a layer: makes the layer's update of the step that adapters_update
 * recorded. */
void adapters_need(const struct adapters *ad, struct device *dev, int64_t layer);
/* adapters_need for all layers; the arrays in dev->host may then be read and written. */
void adapters_settle(const struct adapters *ad, struct device *dev);
/* One optimizer step; with cpu_update it is only recorded, and adapters_need makes it. With ZeRO-1 each rank updates
 * its part, then the parts are all-gathered. */
void adapters_update(struct adapters *ad, struct device *dev, double lr, double norm);
/* The logical layout. Host arrays and files use it; it does not depend on the device or the number of ranks. */
const struct adapters *adapters_logical(const struct adapters *ad);
/* Collects parameters, gradients or a state of all ranks in a zeroed host array [n_flat of the logical layout] on rank
 * 0. All ranks call it, the others with host = NULL. dtype, here and below, is the host array's: flat.dtype or F32.
 * Host arrays have 8-bit states decoded, in dtype stat. */
void adapters_gather(const struct adapters *ad, struct device *dev, struct tensor flat, enum dtype dtype, void *host);
/* adapters_put copies this rank's part of a host array in the logical layout to flat and zeroes the padding.
 * adapters_get copies flat to a zeroed host array. Neither communicates. adapters_get does not accept states with
 * ZeRO-1. */
void adapters_put(const struct adapters *ad, struct device *dev, struct tensor flat, enum dtype dtype,
                  const void *host);
void adapters_get(const struct adapters *ad, struct device *dev, struct tensor flat, enum dtype dtype, void *host);
/* Broadcasts the parameters from rank 0 of par.dp, the ranks with the same experts. */
void adapters_broadcast(struct adapters *ad, struct device *dev);
/* Copies the masters to the working copies. Call it after every change of the masters. */
void adapters_refresh(struct adapters *ad, struct device *dev);
void adapters_free(struct adapters *ad); /* frees the host tables */

/* A target's padded rank on a device that needs multiples of `multiple`; q, k and v have the largest of the three. */
int64_t adapters_padded_rank(const struct adapters *ad, enum lora_target t, int64_t multiple);
/* Trained lora ranks of target t in a layer, summed over the experts of a stack; with ad->budget that share of the sum,
 * rounded down, at least 1. q: the target's product in the layer. */
int64_t adapters_trained_ranks(const struct adapters *ad, const struct product *q, enum lora_target t);
/* The largest lora rank of the trained targets. */
int64_t adapters_max_rank(const struct adapters *ad);
/* The lora ranks in the form of lora_options.ranks; "" when all are r. */
#define LORA_RANKS_TEXT 1024
void adapters_ranks_text(const struct adapters *ad, char text[LORA_RANKS_TEXT]);
void adapters_alphas_text(const struct adapters *ad, char text[LORA_RANKS_TEXT]); /* as lora_options.alphas */
/* A parameter of a layer: A or B of a target, or the target's magnitudes. NULL: the layer has no such trained target,
 * or no DoRA. */
const struct lora_param *adapters_find(const struct adapters *ad, int64_t layer, enum lora_target t, bool is_b);
const struct lora_param *adapters_find_magnitude(const struct adapters *ad, int64_t layer, enum lora_target t);
/* The parameter of `other` for the same matrix and factor as p, or NULL. */
const struct lora_param *adapters_match(const struct adapters *other, const struct lora_param *p);
int64_t lora_param_count(const struct lora_param *p);
/* "layers.3.gate_up_proj.lora_B", for messages and checkpoints */
void lora_param_name(const struct lora_param *p, char name[64]);

#endif

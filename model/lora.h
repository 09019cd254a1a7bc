/* lora.h - the adapters: what is trained, where each parameter lies in the flat arrays, and the ops' views of it.
 *
 * All parameters lie in one flat array of dtype stat (the masters); gradients, m and v are three more of the same
 * layout. Ops read working copies of dtype act: a fifth array, or the masters themselves when nothing would be rounded.
 * The device's layout may pad ranks, and holds a rank's share of the experts. Outside the device there is one layout,
 * the logical one: ranks as configured, all experts. adapters_gather, adapters_get and adapters_put convert. One struct
 * lora_param is one PEFT tensor: q_proj's A of layer 3, or the B of all experts' gate_up of layer 3. */
#ifndef MT_LORA_H
#define MT_LORA_H

#include "kernels/comm/comm.h"
#include "model/arch.h"
#include "optim/adamw.h"

enum lora_target { LORA_Q, LORA_K, LORA_V, LORA_O, LORA_UP, LORA_DOWN, LORA_TARGETS };

struct lora_param {
    enum lora_target target;
    bool is_b;                 /* A otherwise */
    bool experts;              /* a stack of one for each expert */
    int64_t layer, off;        /* first element in the flat arrays */
    int64_t n_exp, rows, cols; /* A [n_exp, R, in], B [n_exp, out, R], R = held[target] on the device, rank[target]
                                * in the logical layout; n_exp 1 for attention */
    int64_t first_exp;         /* of all experts, the first held here */
};

/* A matrix of a layer, or a stack of one for each expert, as adapters see it; its kind declares it (model/layer.h). Its
 * rows are those of its targets, one below the other (q, k, v): one struct lora adapts them all. */
enum { MIXER_PRODUCTS = 4, LAYER_PRODUCTS = 8, PRODUCT_TARGETS = 3 };
struct product {
    size_t proj;                /* offset of its struct proj in struct layer_weights */
    int64_t n_exp, n_out, n_in; /* n_exp 1: one matrix */
    bool experts;               /* a stack: expert parallelism divides it, and PEFT gives its adapters no dropout */
    int n_target;               /* 0: it has no adapter */
    enum lora_target target[PRODUCT_TARGETS];
    int64_t rows[PRODUCT_TARGETS];
};
/* The products of a layer: the mixer's from 0, the feed-forward network's from MIXER_PRODUCTS; n_out 0: none there. */
void layer_products(const struct arch *a, int64_t layer, struct product p[LAYER_PRODUCTS]);

/* The adapters of a layer, by product. */
struct adapter {
    struct lora lora;
    struct lora_grad grad;
};
struct lora_layer {
    struct adapter of[LAYER_PRODUCTS];
};

struct lora_options {
    int64_t r;
    double alpha, dropout;
    bool rslora;
    const char *targets; /* comma-separated: q_proj k_proj v_proj o_proj experts gate_up_proj down_proj */
    const char *ranks;   /* "" or NULL: r everywhere; else "experts=8,q_proj=32", of targets that are trained */
    const char *layers;  /* "" or "all": every layer; else "0-3,7" */
};

struct adapters {
    int64_t r;                  /* of targets without a rank of their own */
    int64_t rank[LORA_TARGETS]; /* of each; r where nothing is trained */
    /* Ranks as held: rounded up to what the device takes, and for q, k and v, which are one product, up to the largest
     * of them; those from rank on are zero and stay so. */
    int64_t held[LORA_TARGETS];
    double alpha, dropout;
    bool rslora;
    float scale[LORA_TARGETS]; /* alpha/rank, or alpha/sqrt(rank) with rslora */
    bool target[LORA_TARGETS];
    unsigned fused[LORA_TARGETS]; /* bits of the targets that feed one product with this one */
    bool transposed;              /* transformers holds the experts as [E, in, out]; matters to PEFT files alone */
    int64_t n_layer;
    bool *layer_on;       /* [n_layer] host: something of the layer is trained */
    int64_t lowest_layer; /* backward stops here; n_layer when nothing is trained */
    int64_t n_params;
    struct lora_param *params; /* [n_params] host, ascending off */
    int64_t n_values;          /* trainable values, of all ranks */
    int64_t n_flat;            /* length of the flat arrays, padding included */
    int64_t n_moment,
        first_moment;          /* elements whose moments this rank holds and which it updates, and where they begin */
    struct adamw opt;          /* param, grad, m, v [n_flat] stat; m, v [n_moment] */
    struct tensor working;     /* [n_flat] act; == opt.param when nothing is rounded */
    struct lora_layer *layers; /* [n_layer] host; r == 0 where nothing is trained */
    struct adapters *whole;    /* the table of the logical layout; NULL: this one is it */
    struct parallel par;       /* of the ranks that train them */
    bool ep;                   /* expert parallel: this rank holds a part of the experts */
    int64_t n_common;          /* then: elements at the front that all ranks have; behind them are own experts */
};

/* Spelling and numbers of the options, for any model: what needs no checkpoint. */
int lora_options_check(const struct lora_options *opt, struct err *err) MT_CHECK;
/* The table of parameters, from options alone (no device memory). An unknown target or layer is an error, as is a
 * target that matches nothing. Targets in experts leave dense layers out. */
int adapters_plan(struct adapters *ad, const struct arch *a, const struct lora_options *opt, struct err *err) MT_CHECK;
/* Lays the parameters out for a device: ranks rounded up to a multiple of what it takes, experts divided among the
 * ranks of par->ep; before adapters_alloc. After adapters_plan the multiple is 1 and this process alone. */
void adapters_hold(struct adapters *ad, const struct arch *a, int64_t multiple, const struct parallel *par);
/* Each rank of par.dp, whose adapters are the same, holds the moments of an equal part, which n_flat is rounded up for;
 * before adapters_alloc. */
void adapters_share(struct adapters *ad);
/* Takes the flat arrays from dev->state (measures in a dry run), zeroes them and points the views at them.
 * Dropout goes to the attention adapters alone: PEFT's experts take none. The caller sets dropout_key. */
void adapters_alloc(struct adapters *ad, struct device *dev, const struct arch *a);
/* The same for adapters that are only used: no gradients, no moments. */
void adapters_alloc_frozen(struct adapters *ad, struct device *dev, const struct arch *a);
/* A uniform in +-1/sqrt(in), B zero; each parameter from a stream of its own name, so that the values do not depend on
 * what else is trained. */
void adapters_init(struct adapters *ad, struct device *dev, uint64_t seed);
/* Gradients of a layer += those of the other ranks. */
void adapters_reduce(struct adapters *ad, struct device *dev, int64_t layer);
/* One step of the optimizer; where moments are shared, every rank updates its part and gets the others'. */
void adapters_update(struct adapters *ad, struct device *dev, double lr, double norm);
/* The logical layout, which every host array and every file has: the same on every device and any number of ranks. */
const struct adapters *adapters_whole(const struct adapters *ad);
/* Parameters, gradients, m or v of all ranks into a zeroed host array [n_flat of adapters_whole], on rank 0; host is
 * NULL on the others, which all call it. dtype, here and below: of the host array, that of flat or F32. */
void adapters_gather(const struct adapters *ad, struct device *dev, struct tensor flat, enum dtype dtype, void *host);
/* This rank's part of such a host array into flat (padding becomes zero), and into a zeroed host array from flat:
 * nothing is sent. flat is not one of the moments that other ranks hold parts of, in adapters_get. */
void adapters_put(const struct adapters *ad, struct device *dev, struct tensor flat, enum dtype dtype,
                  const void *host);
void adapters_get(const struct adapters *ad, struct device *dev, struct tensor flat, enum dtype dtype, void *host);
/* The parameters of the first rank with the same experts, on all. */
void adapters_agree(struct adapters *ad, struct device *dev);
/* Working copies <- masters; after every change of the masters. */
void adapters_refresh(struct adapters *ad, struct device *dev);
void adapters_free(struct adapters *ad); /* host tables */

/* A target's rank on a device that takes multiples of `multiple`: q, k and v have that of the largest of them. */
int64_t adapters_held_rank(const struct adapters *ad, enum lora_target t, int64_t multiple);
/* Of the targets that are trained. */
int64_t adapters_max_rank(const struct adapters *ad);
/* The ranks as lora_options has them; "" where all are r. */
#define LORA_RANKS_TEXT 160
void adapters_ranks_text(const struct adapters *ad, char text[LORA_RANKS_TEXT]);
const char *lora_target_name(enum lora_target t); /* "q_proj" ... "gate_up_proj", "down_proj" */
/* NULL: not trained, as the experts of a dense layer. */
const struct lora_param *adapters_find(const struct adapters *ad, int64_t layer, enum lora_target t, bool is_b);
int64_t lora_param_count(const struct lora_param *p);
/* "layers.3.gate_up_proj.lora_B", for messages and checkpoints */
void lora_param_name(const struct lora_param *p, char name[64]);
/* Before step 1: per target its layers, shapes, parameters; returns text for mem_free. */
char *adapters_table(const struct adapters *ad, const struct arch *a);

#endif

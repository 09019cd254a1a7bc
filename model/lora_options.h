/* lora_options.h - the targets of adapters and their names; the options that choose targets, lora ranks, scales,
 * layers. */
#ifndef MT_LORA_OPTIONS_H
#define MT_LORA_OPTIONS_H

#include "model/arch/arch.h"

enum lora_target {
    LORA_Q,
    LORA_K,
    LORA_V,
    LORA_O,
    LORA_Q_A, /* of latent attention */
    LORA_Q_B,
    LORA_KV_A,
    LORA_KV_B,
    LORA_KV, /* of compressed attention, beside LORA_Q_A and LORA_Q_B */
    LORA_O_B,
    LORA_CONV_IN, /* of the gated short convolution */
    LORA_CONV_OUT,
    LORA_IN_QKV, /* of gated DeltaNet */
    LORA_IN_Z,
    LORA_IN_B,
    LORA_IN_A,
    LORA_IN_QKVZ, /* of gated DeltaNet with fused matrices */
    LORA_IN_BA,
    LORA_IN,  /* of Mamba-2, whose LORA_OUT is frozen */
    LORA_OUT, /* of gated DeltaNet */
    LORA_UP,  /* of the routed experts: stacks */
    LORA_DOWN,
    LORA_SHARED_GATE, /* of the shared experts */
    LORA_SHARED_UP,
    LORA_SHARED_DOWN,
    LORA_DENSE_GATE, /* of layers without routed experts */
    LORA_DENSE_UP,
    LORA_DENSE_DOWN,
    LORA_LATENT_DOWN, /* around routed experts */
    LORA_LATENT_UP,
    LORA_TARGETS
};

/* Initial values of new adapters: A random and B zero, or from the weights (model/lora_init.c). */
enum lora_init { LORA_INIT_DEFAULT, LORA_INIT_PISSA, LORA_INIT_OLORA };
struct lora_options {
    int64_t r;
    double alpha, dropout;
    bool rslora;
    enum lora_init init;
    bool dora;     /* of Linears that PEFT adapts as modules: not of stacks, dense layers and some shared experts */
    double budget; /* share of the routed experts' ranks, which the routing distributes (lora_routing.h); 0: all */
    const char *targets; /* comma-separated names of targets or of groups: attention, mixers, experts, shared_experts,
                            dense, all-linear */
    const char *ranks;   /* "" or NULL: r for all; else "experts=8,q_proj=32"; these targets must be trained */
    const char *alphas;  /* alpha of targets in the form of ranks, "experts=16" */
    const char *layers;  /* "" or "all": every layer; else "0-3,7" */
};

/* The options, by target. */
struct lora_choice {
    bool target[LORA_TARGETS];
    int64_t rank[LORA_TARGETS];
    double alpha[LORA_TARGETS];
};
/* Targets that a model has. */
struct lora_model {
    const char *family;
    bool has[LORA_TARGETS];
    bool frozen[LORA_TARGETS]; /* the model has the matrix, but no adapter may be on it */
};

/* Checks spelling and numbers of the options without a checkpoint. */
int lora_options_check(const struct lora_options *opt, struct err *err) MT_CHECK;
/* Reads the options for the targets of `model`; NULL: a model with all targets. */
int lora_options_read(struct lora_choice *out, const struct lora_model *model, const struct lora_options *opt,
                      struct err *err) MT_CHECK;
/* Reads options.layers into layer_on [n_layer]; NULL: only checks the spelling. */
int lora_options_layers(bool *layer_on, int64_t n_layer, const char *layers, struct err *err) MT_CHECK;

#define LORA_NAMES_TEXT 512                        /* the names of all targets, separated by commas */
const char *lora_target_name(enum lora_target t);  /* "q_proj" ... "gate_up_proj", "down_proj" */
const char *lora_target_short(enum lora_target t); /* "q" ..., at most 7 letters: the column of a table */
/* Whether the target is a stack of the routed experts. The others are Linears, modules "self_attn.q_proj",
 * "mlp.shared_experts.gate_proj", ... of a layer in transformers. */
bool lora_target_is_stack(enum lora_target t);
bool lora_target_is_shared(enum lora_target t);
bool lora_target_is_dense(enum lora_target t);
#define LORA_MODULE_TEXT 64
void lora_target_module(const struct tensor_names *names, enum lora_target t, char module[LORA_MODULE_TEXT]);
const char *lora_experts_module(const struct tensor_names *names); /* "mlp.experts" */
/* The parameter of a stack: "mlp.experts.gate_up_proj", without a gate "mlp.experts.up_proj". */
void lora_stack_module(const struct tensor_names *names, enum lora_target t, char module[LORA_MODULE_TEXT]);

#endif

/* synth_tensors.h - lists the tensors of a checkpoint of random weights, with the distribution of each. */
#ifndef MT_SYNTH_TENSORS_H
#define MT_SYNTH_TENSORS_H

#include "model/lora_options.h"
#include "model/stored/stored.h"
#include "train/synth/presets.h"
#include "train/synth/random_weights.h"

/* A matrix of each expert: its names in the checkpoint and its shape. */
struct matrix {
    const char *pattern; /* struct tensor_names */
    const char *stack;   /* all experts in one tensor */
    int64_t n_out, n_in;
    double std;
    float scale;     /* of the whole matrix, NVFP4 and FP8 */
    char state[128]; /* bitsandbytes' quant_state */
};

struct name {
    char s[256];
};
/* How experts are stored: a value of --quant. */
struct form {
    const char *name;
    enum weight_format format;
    const struct stored_layout *layout; /* of one expert's matrix; NULL: NF4 of bitsandbytes */
    const struct stored_layout *stack;  /* of all experts of gpt-oss; NULL: it has a tensor per expert */
    enum random_kind kind[3];           /* of the tensors, in either layout */
    bool published;                     /* only families that are published in it have such a layout */
    /* DeepSeek-V4. names: tensors have the publisher's names, the only ones that transformers reads. blocks: matrices
     * other than experts are FP8, as published. */
    bool names, blocks;
};

struct synth {
    const struct preset *p;
    struct arch a; /* of all layers */
    int64_t n_layer;
    const struct form *form;
    uint64_t seed;
    struct matrix products[3];
    char stacks[2][LORA_MODULE_TEXT]; /* names of tensors of all experts: gate_up, down */
    int n_products;
    struct st_entry *entries; /* data: a struct random_weights */
    int64_t n, cap, n_params, bytes;
    bool sizes; /* only counts n_params and bytes */
};

/* Row i; NULL: i is past the end. */
const struct form *synth_tensors_form(int64_t i);
/* Lists the tensors of the first n_layer layers in `entries`, or counts them. */
void synth_tensors_add(struct synth *s);

#endif

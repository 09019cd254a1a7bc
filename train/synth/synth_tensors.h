/* synth_tensors.h - the tensors of a checkpoint of random weights, with the distribution of each. */
#ifndef MT_SYNTH_TENSORS_H
#define MT_SYNTH_TENSORS_H

#include "data/safetensors.h"
#include "train/synth/presets.h"
#include "train/synth/random_weights.h"

/* A matrix that every expert has: its names in the checkpoint and its shape. */
struct matrix {
    const char *pattern; /* struct tensor_names */
    const char *stack;   /* all experts in one tensor */
    int64_t n_out, n_in;
    double std;
    float scale;     /* of the whole matrix, NVFP4 and FP8 */
    char state[128]; /* bitsandbytes' quant_state */
};

struct synth {
    const struct preset *p;
    struct arch a; /* of all layers */
    int64_t n_layer;
    enum weight_format experts;
    uint64_t seed;
    struct matrix products[3];
    int n_products;
    struct st_entry *entries; /* data: a struct random_weights */
    int64_t n, cap, n_params, bytes;
    bool sizes; /* counts n_params and bytes alone */
};

/* Lists the tensors of the first n_layer layers in `entries`, or counts them. */
void synth_tensors_add(struct synth *s);

#endif

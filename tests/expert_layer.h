/* expert_layer.h - the experts of one layer with all their tensors, for the tests of their ops: weights in every
 * format, routings from no tokens to all tokens on one expert. */
#ifndef MT_EXPERT_LAYER_H
#define MT_EXPERT_LAYER_H

#include "tests/packed.h"

/* How tokens choose experts. SPREAD: over all experts but the last. CROWDED: every token goes to experts 1 .. J. MIXED:
 * as SPREAD, but three of four tokens choose the middle expert first. APART: the experts of a token are not neighbours,
 * and never the last. ENDS, for J = 1: three of four tokens go to the first expert, the others to the ninth. ALL: every
 * token goes to all experts, J = E. */
enum layout { SPREAD, CROWDED, MIXED, APART, ENDS, ALL };

struct setup {
    struct weight_packing packing;
    int64_t n_tok, n_exp, top_k, dim, width, r_up, r_down;
    struct glu glu;
    bool bias;
    enum layout routing;
};

struct layer {
    struct device *dev;
    struct proj up, down;
    struct glu glu;
    struct route route;
    struct tensor x, res, pre, act, xa, y, ha, out;
    struct tensor dout, dpre, dgate, dx;
};

#define GPTOSS                                                                                                         \
    {                                                                                                                  \
        GLU_CLAMPED, 1.702f, 0.5f, true                                                                                \
    }
#define GPTOSS_HALVES                                                                                                  \
    {                                                                                                                  \
        GLU_CLAMPED, 1.702f, 0.5f, false                                                                               \
    }
#define SWIGLU                                                                                                         \
    {                                                                                                                  \
        GLU_SWIGLU, 1, 0, false                                                                                        \
    }
#define SWIGLU_CLAMPED                                                                                                 \
    {                                                                                                                  \
        GLU_SWIGLU_CLAMPED, 1, 0.5f, false                                                                             \
    }
#define SWIGLU_PAIRS                                                                                                   \
    {                                                                                                                  \
        GLU_SWIGLU, 1, 0, true                                                                                         \
    }
#define GEGLU                                                                                                          \
    {                                                                                                                  \
        GLU_GELU, 0, 0, false                                                                                          \
    }
#define RELU2                                                                                                          \
    {                                                                                                                  \
        GLU_RELU2, 0, 0, false                                                                                         \
    }

/* Few elements reach this clamp limit. Rounding moves some of them across it, which removes or adds their gradient. */
#define GPTOSS_2                                                                                                       \
    {                                                                                                                  \
        GLU_CLAMPED, 1.702f, 2, true                                                                                   \
    }
#define GPTOSS_HALVES_2                                                                                                \
    {                                                                                                                  \
        GLU_CLAMPED, 1.702f, 2, false                                                                                  \
    }

#define SWIGLU_CLAMPED_2                                                                                               \
    {                                                                                                                  \
        GLU_SWIGLU_CLAMPED, 1, 2, false                                                                                \
    }

struct layer expert_layer_make(struct device *dev, const struct setup *s);
void expert_layer_fwd(struct layer *l);
void expert_layer_bwd(struct layer *l);
/* Forward, backward, and every tensor that they write. */
void expert_layer_both(struct layer *l, struct op_outputs *outputs);
void expert_layer_run(struct device *dev, const void *params, struct op_outputs *outputs); /* params: struct setup */

struct gpu_setup {
    struct setup s;
    int64_t expert_group; /* as in struct device */
    bool views;           /* rows of x, res, out, dout and dx have a stride larger than their length */
};

/* op_check_cuda for n cases. */
void expert_layer_run_gpu(struct device *dev, const void *params,
                          struct op_outputs *outputs); /* params: struct gpu_setup */
void expert_layer_on_gpu(const struct gpu_setup *cases, int64_t n);

#endif

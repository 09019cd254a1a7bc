/* networks.h - for ops.h: the structs of activations of feed-forward parts and of the auxiliary loss. */
#ifndef MT_NETWORKS_H
#define MT_NETWORKS_H

#include "kernels/tensor.h"

/* Activations of gate g and up u. GLU_SWIGLU: silu(g) * u. GLU_CLAMPED (gpt-oss): g = min(g, limit), u = clamp(u,
 * -limit, limit), then (u + 1) * g * sigmoid(alpha * g). GLU_SWIGLU_CLAMPED (DeepSeek-V4): silu(g) * u with g and u
 * clamped in the same way. The gradient passes where a value equals the limit. GLU_RELU2 (Nemotron-H): max(0, u)^2,
 * without a gate. GLU_GELU (Gemma-4): gelu(g) * u, gelu(g) = g sigmoid(GELU_ALPHA (g + GELU_CUBE g^3)): the tanh
 * approximation. */
#define GELU_ALPHA 1.5957691216057308 /* 2 sqrt(2 / pi) */
#define GELU_CUBE  0.044715
enum glu_kind { GLU_SWIGLU, GLU_CLAMPED, GLU_SWIGLU_CLAMPED, GLU_RELU2, GLU_GELU };
struct glu {
    enum glu_kind kind;
    float alpha, limit;
    bool interleaved; /* columns 2i gate, 2i+1 up; otherwise gate [0,F), up [F,2F); without a gate false */
};
static inline bool glu_gated(const struct glu *glu) { return glu->kind != GLU_RELU2; }
/* Columns before an activation of `width` columns: gates and ups, or ups alone. */
static inline int64_t glu_cols(const struct glu *glu, int64_t width) { return glu_gated(glu) ? 2 * width : width; }

/* Auxiliary load-balancing loss; coef 0: off, the tensors are absent. p_i is the mean probability of expert i. pooled
 * (transformers): over the tokens of all layers, F_i = rows of i / tokens, loss E * sum_i F_i p_i. Otherwise (Megatron,
 * NeMo): per layer, f_i = E / (J T) * rows of i, loss sum_i f_i p_i, averaged over layers: count and prob are then of
 * one layer, and coef includes 1 / layers. */
struct aux {
    float coef;
    bool pooled;
    struct tensor count; /* [E] stat, += rows of expert e, over the layers counted */
    struct tensor prob;  /* [E] stat, += softmax(logits) */
    int64_t rows;        /* tokens counted: layers * T if pooled, else T */
};

#endif

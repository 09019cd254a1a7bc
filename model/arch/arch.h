/* arch.h - config.json -> struct arch (arch_types.h). */
#ifndef MT_ARCH_H
#define MT_ARCH_H

#include "model/arch/arch_rope.h"
#include "model/arch/arch_types.h"

/* Size of the feed-forward network of a layer. A dense layer is one expert that every token uses with weight 1. */
struct ffn_size {
    int64_t n_exp, top_k, d_ff;
};

/* Reads dir/config.json. An error names a missing, contradictory or unsupported value. */
int arch_load(struct arch *a, const char *dir, struct err *err) MT_CHECK;
int arch_parse(struct arch *a, struct json root, struct err *err) MT_CHECK; /* the same, from parsed JSON */
struct ffn_size arch_ffn(const struct arch *a, int64_t layer);
/* Whether a tensor belongs to the layers of multi-token prediction, which follow the last layer. */
bool arch_is_prediction(const struct arch *a, const char *name);
/* Whether a tensor belongs to a vision tower, or to multi-token prediction outside the layers. */
bool arch_is_other_part(const char *name);
int64_t arch_stored_row(const struct row_order *o, int64_t row);    /* row of memory -> row of the checkpoint */
int64_t arch_row_in_memory(const struct row_order *o, int64_t row); /* row of the checkpoint -> row of memory */
int64_t arch_stream_cols(const struct arch *a);                     /* columns of the residual: D, or n_stream * D */
int64_t arch_qkv_cols(const struct arch *a, int64_t layer);         /* (H + 2K) * A */
int64_t arch_q_rows(const struct arch *a, int64_t layer); /* of q_proj: H * A, with an output gate 2 * H * A */
int64_t arch_expert_cols(const struct arch *a);           /* columns that routed experts read and write */
bool arch_is_routed(const struct arch *a, int64_t layer); /* the layer has routed experts */
/* The name of the tensor with the bias of `router`: "mlp.gate.e_score_correction_bias" for "mlp.gate". */
enum { ARCH_NAME = 96 };
void arch_router_bias(const struct tensor_names *n, const char *router, char name[ARCH_NAME]);
float arch_embed_factor(const struct arch *a, const struct device *dev); /* of the embedding, rounded to activations */
const char *arch_norm_name(const struct arch *a, enum norm_name n);      /* NULL: no such norm */
const struct attn_arch *arch_attn(const struct arch *a, int64_t layer);
/* Whether two layers have equal kinds and sizes. */
bool arch_same_layer(const struct arch *a, int64_t x, int64_t y);

#endif

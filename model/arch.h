/* arch.h - config.json -> struct arch: every size and switch of a model family. */
#ifndef MT_ARCH_H
#define MT_ARCH_H

#include "kernels/ops.h"

#define MT_MAX_LAYERS 512

struct rope_arch {
    double theta, factor, beta_fast, beta_slow, attention_factor; /* factor 1: plain RoPE */
    int64_t original_len;
    bool yarn, truncate;
};

struct arch {
    const char *family; /* "gpt_oss": model_type of config.json */
    int64_t n_layer, d_model, n_head, n_kv, head_dim;
    int64_t n_exp, top_k, d_ff; /* d_ff: width of one expert */
    int64_t vocab, max_len;
    float norm_eps, attn_scale;
    bool attn_bias, expert_bias, router_bias, sinks, tied;
    struct glu glu;
    struct rope_arch rope;
    int64_t window[MT_MAX_LAYERS]; /* 0: full causal */
};

/* dir holds config.json. Missing, contradictory or unsupported values are named. */
int arch_load(struct arch *a, const char *dir, struct err *err) MT_CHECK;
int64_t arch_qkv_cols(const struct arch *a); /* (H + 2K) * A */
/* cos | sin of positions 0..n-1, attention factor included; table [n, head_dim] f32 on the host */
void arch_rope_table(const struct arch *a, int64_t n, float *table);

#endif

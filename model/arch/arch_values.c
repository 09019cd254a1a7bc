/* arch_values.c - the table of the values in struct arch, under the names that config.json has for them. */
#include "model/arch/arch_values.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "model/layer.h"

enum kind { TEXT, I64, INT, BOOL, FLOAT, DOUBLE, QK_NORM, NORMALISED };

#define NAMED(member) offsetof(struct arch, member)
static const struct row {
    const char *name;
    enum kind kind;
    size_t offset;
} rows[] = {
    {"model_type", TEXT, NAMED(family)},
    {"num_hidden_layers", I64, NAMED(n_layer)},
    {"hidden_size", I64, NAMED(d_model)},
    {"num_attention_heads", I64, NAMED(attn[0].n_head)},
    {"num_key_value_heads", I64, NAMED(attn[0].n_kv)},
    {"head_dim", I64, NAMED(attn[0].head_dim)},
    {"num_experts", I64, NAMED(n_exp)},
    {"num_experts_per_tok", I64, NAMED(top_k)},
    {"moe_intermediate_size", I64, NAMED(d_ff)},
    {"intermediate_size", I64, NAMED(d_dense)},
    {"shared_expert_intermediate_size", I64, NAMED(d_shared)},
    {"vocab_size", I64, NAMED(vocab)},
    {"rms_norm_eps", FLOAT, NAMED(norm.eps)},
    {"attention_bias", BOOL, NAMED(attn_bias)},
    {"tie_word_embeddings", BOOL, NAMED(tied)},
    {"use_qk_norm", QK_NORM, NAMED(qk_norm)},
    {"q_lora_rank", I64, NAMED(mla.q_lora)},
    {"kv_lora_rank", I64, NAMED(mla.kv_lora)},
    {"qk_nope_head_dim", I64, NAMED(mla.nope)},
    {"qk_rope_head_dim", I64, NAMED(mla.rope)},
    {"v_head_dim", I64, NAMED(mla.value)},
    {"rope_interleave", BOOL, NAMED(mla.interleaved)},
    {"linear_num_key_heads", I64, NAMED(delta.shape.n_key)},
    {"linear_num_value_heads", I64, NAMED(delta.shape.n_value)},
    {"linear_key_head_dim", I64, NAMED(delta.shape.key_dim)},
    {"linear_value_head_dim", I64, NAMED(delta.shape.value_dim)},
    {"linear_conv_kernel_dim", I64, NAMED(delta.n_tap)},
    {"moe_latent_size", I64, NAMED(d_latent)},
    {"mamba_num_heads", I64, NAMED(mamba.n_head)},
    {"mamba_head_dim", I64, NAMED(mamba.head_dim)},
    {"n_groups", I64, NAMED(mamba.n_group)},
    {"ssm_state_size", I64, NAMED(mamba.state)},
    {"conv_kernel", I64, NAMED(mamba.n_tap)},
    {"use_conv_bias", BOOL, NAMED(mamba.conv_bias)},
    {"use_bias", BOOL, NAMED(mamba.bias)},
    {"time_step_min", DOUBLE, NAMED(mamba.dt_min)},
    {"conv_L_cache", I64, NAMED(conv.n_tap)},
    {"conv_bias", BOOL, NAMED(conv.bias)},
    {"use_expert_bias", BOOL, NAMED(router_bias)},
    {"norm_topk_prob", NORMALISED, NAMED(router.kind)},
    {"routed_scaling_factor", FLOAT, NAMED(router.scale)},
    {"n_group", INT, NAMED(router.n_group)},
    {"topk_group", INT, NAMED(router.top_group)},
    {"swiglu_alpha", FLOAT, NAMED(glu.alpha)},
    {"swiglu_limit", FLOAT, NAMED(glu.limit)},
    {"rope_theta", DOUBLE, NAMED(rope[0].theta)},
    {"rotated channels", I64, NAMED(rope[0].width)}, /* partial_rotary_factor */
    {"rope_type = yarn", BOOL, NAMED(rope[0].yarn)},
    {"factor", DOUBLE, NAMED(rope[0].factor)},
    {"beta_fast", DOUBLE, NAMED(rope[0].beta_fast)},
    {"beta_slow", DOUBLE, NAMED(rope[0].beta_slow)},
    {"truncate", BOOL, NAMED(rope[0].truncate)},
    {"original_max_position_embeddings", I64, NAMED(rope[0].original_len)},
    {"attention_factor", DOUBLE, NAMED(rope[0].attention_factor)},
    {"softmax factor of mscale_all_dim", DOUBLE, NAMED(rope[0].softmax_gain)},
    {"llama_4_scaling_beta", DOUBLE, NAMED(rope[0].query_beta)},
    {"q_lora_rank of compressed attention", I64, NAMED(compress.q_lora)},
    {"o_groups", I64, NAMED(compress.n_group)},
    {"o_lora_rank", I64, NAMED(compress.o_lora)},
    {"compressed_sparse_attention", I64, NAMED(compress.ratio[COMPRESS_SPARSE])},
    {"heavily_compressed_attention", I64, NAMED(compress.ratio[COMPRESS_HEAVY])},
    {"index_n_heads", I64, NAMED(compress.n_index)},
    {"index_head_dim", I64, NAMED(compress.index_dim)},
    {"index_topk", I64, NAMED(compress.index_top)},
    {"hc_mult", I64, NAMED(hyper.n_stream)},
    {"hc_sinkhorn_iters", INT, NAMED(hyper.n_iter)},
    {"hc_eps", DOUBLE, NAMED(hyper.eps)},
    {"num_hash_layers", I64, NAMED(n_hash)},
    {"compress_rope_theta", DOUBLE, NAMED(rope[1].theta)},
    {"compress.rope_type = yarn", BOOL, NAMED(rope[1].yarn)},
    {"compress.factor", DOUBLE, NAMED(rope[1].factor)},
    {"compress.beta_fast", DOUBLE, NAMED(rope[1].beta_fast)},
    {"compress.beta_slow", DOUBLE, NAMED(rope[1].beta_slow)},
    {"compress.truncate", BOOL, NAMED(rope[1].truncate)},
    {"compress.original_max_position", I64, NAMED(rope[1].original_len)},
    {"compress.attention_factor", DOUBLE, NAMED(rope[1].attention_factor)},
    {"final_logit_softcapping", FLOAT, NAMED(logit_cap)},
    {"pairs of proportional RoPE", I64, NAMED(rope[0].n_pair)},
    {"sliding_attention: rotated channels", I64, NAMED(rope[1].width)},
    {"sliding_attention: pairs of proportional RoPE", I64, NAMED(rope[1].n_pair)},
};

/* Writes twelve digits: YaRN's factors come from logarithms, whose last bit depends on the C library. */
static void write_value(char *text, size_t size, enum kind kind, const void *at)
{
    switch (kind) {
    case TEXT: snprintf(text, size, "%s", *(const char *const *)at); break;
    case I64: snprintf(text, size, "%" PRId64, *(const int64_t *)at); break;
    case INT: snprintf(text, size, "%d", *(const int *)at); break;
    case BOOL: snprintf(text, size, "%s", *(const bool *)at ? "true" : "false"); break;
    case FLOAT: snprintf(text, size, "%.7g", (double)*(const float *)at); break;
    case DOUBLE: snprintf(text, size, "%.12g", *(const double *)at); break;
    case QK_NORM: snprintf(text, size, "%s", *(const enum qk_norm *)at == QK_NORM_NONE ? "false" : "true"); break;
    case NORMALISED: {
        const enum router_kind router = *(const enum router_kind *)at;
        snprintf(text, size, "%s",
                 router == ROUTER_CHOSEN || router == ROUTER_SIGMOID_CHOSEN || router == ROUTER_SQRT_CHOSEN ? "true"
                                                                                                            : "false");
        break;
    }
    }
}

/* Writes the layer's heads, if they differ from those that the table records, and whether values are keys. */
static void write_heads(char text[96], const struct arch *a, int64_t layer)
{
    const struct attn_arch *h = arch_attn(a, layer), *first = &a->attn[0];
    int n = 0;
    text[0] = '\0';
    if (h->n_head != first->n_head || h->n_kv != first->n_kv || h->head_dim != first->head_dim)
        n = snprintf(text, 96, " with %" PRId64 " heads of %" PRId64 ", %" PRId64 " for keys", h->n_head, h->head_dim,
                     h->n_kv);
    if (h->values_are_keys && n < 96) snprintf(text + n, (size_t)(96 - n), ", values are keys");
}

static void write_layer(char *text, size_t size, const struct arch *a, int64_t layer)
{
    const struct attn_arch *h = arch_attn(a, layer);
    const char *ffn = !a->ffn[layer] ? "no network" : a->dense[layer] ? "dense" : "sparse";
    static const char *const compressed[] = {[COMPRESS_NONE] = "sliding_attention",
                                             [COMPRESS_HEAVY] = "heavily_compressed_attention",
                                             [COMPRESS_SPARSE] = "compressed_sparse_attention"};
    char heads[96];
    write_heads(heads, a, layer);
    if (!a->mixer[layer])
        snprintf(text, size, "no mixer, %s", ffn);
    else if (a->mixer[layer] == &mixer_compressed)
        snprintf(text, size, "%s, window %" PRId64 ", %s", compressed[a->compress.kind[layer]], h->window, ffn);
    else if (a->mixer[layer] == &mixer_mamba)
        snprintf(text, size, "mamba, %s", ffn);
    else if (a->mixer[layer] == &mixer_deltanet)
        snprintf(text, size, "linear_attention, %s", ffn);
    else if (a->mixer[layer] == &mixer_shortconv)
        snprintf(text, size, "conv, %s", ffn);
    else if (h->window)
        snprintf(text, size, "sliding_attention of %" PRId64 "%s, %s", h->window, heads, ffn);
    else
        snprintf(text, size, "full_attention%s, %s", heads, ffn);
}

bool arch_value(const struct arch *a, int64_t i, struct arch_value *v)
{
    const int64_t layer = i - MT_LEN(rows);
    if (layer >= a->n_layer) return false;
    if (layer < 0) {
        snprintf(v->name, sizeof(v->name), "%s", rows[i].name);
        write_value(v->text, sizeof(v->text), rows[i].kind, (const char *)a + rows[i].offset);
    } else {
        snprintf(v->name, sizeof(v->name), "layers.%" PRId64, layer);
        write_layer(v->text, sizeof(v->text), a, layer);
    }
    return true;
}

void arch_values_write(struct json_out *o, const char *key, const struct arch *a)
{
    struct arch_value v;
    json_out_open(o, key, '{');
    for (int64_t i = 0; arch_value(a, i, &v); i++) json_out_str(o, v.name, v.text);
    json_out_close(o, '}');
}

/* test_deepseek_v4.c - what surrounds DeepSeek-V4's network: its configuration as transformers writes it and as
 * published, the names of its tensors, its packed experts, FP8 matrices and table of experts by token id. */
#include "tests/test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/file.h"
#include "kernels/quant.h"
#include "model/fill.h"
#include "model/layer.h"
#include "model/published.h"

#define SIZES                                                                                                          \
    "\"model_type\": \"deepseek_v4\", \"vocab_size\": 40, \"hidden_size\": 64, \"num_hidden_layers\": 4, "             \
    "\"num_attention_heads\": 4, \"num_key_value_heads\": 1, \"head_dim\": 32, \"q_lora_rank\": 32, "                  \
    "\"o_groups\": 2, \"o_lora_rank\": 16, \"sliding_window\": 8, \"index_n_heads\": 2, \"index_head_dim\": 16, "      \
    "\"index_topk\": 4, \"hc_mult\": 2, \"hc_sinkhorn_iters\": 5, \"n_routed_experts\": 4, "                           \
    "\"num_experts_per_tok\": 2, \"moe_intermediate_size\": 32, \"swiglu_limit\": 7.0, "                               \
    "\"routed_scaling_factor\": 1.5, "
#define PUBLISHED                                                                                                      \
    "{" SIZES "\"compress_ratios\": [0, 4, 8, 4, 0], \"num_hash_layers\": 1, \"qk_rope_head_dim\": 8, "                \
    "\"compress_rope_theta\": 160000, \"rope_theta\": 10000, \"n_shared_experts\": 1, "                                \
    "\"scoring_func\": \"sqrtsoftplus\", \"topk_method\": \"noaux_tc\", \"norm_topk_prob\": true, "                    \
    "\"num_nextn_predict_layers\": 1, \"expert_dtype\": \"fp4\", "                                                     \
    "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 16, \"beta_fast\": 32, \"beta_slow\": 1, "                     \
    "\"original_max_position_embeddings\": 65536}, \"quantization_config\": {\"quant_method\": \"fp8\", "              \
    "\"fmt\": \"e4m3\", \"scale_fmt\": \"ue8m0\", \"weight_block_size\": [128, 128]}}"
#define TRANSFORMERS                                                                                                   \
    "{" SIZES                                                                                                          \
    "\"layer_types\": [\"sliding_attention\", \"compressed_sparse_attention\", \"heavily_compressed_attention\", "     \
    "\"compressed_sparse_attention\"], \"mlp_layer_types\": [\"hash_moe\", \"moe\", \"moe\", \"moe\"], "               \
    "\"compress_rates\": {\"compressed_sparse_attention\": 4, \"heavily_compressed_attention\": 8}, "                  \
    "\"partial_rotary_factor\": 0.25, \"rope_parameters\": {\"main\": {\"rope_type\": \"default\", "                   \
    "\"rope_theta\": 10000.0, \"partial_rotary_factor\": 0.25}, \"compress\": {\"rope_type\": \"yarn\", "              \
    "\"factor\": 16.0, \"beta_fast\": 32, \"beta_slow\": 1, \"original_max_position_embeddings\": 65536, "             \
    "\"rope_theta\": 160000.0, \"partial_rotary_factor\": 0.25, \"attention_factor\": 1.0}}}"

static int parse(struct arch *a, const char *text, struct err *err)
{
    struct json_doc *doc = json_parse(text, (int64_t)strlen(text), "config.json", err);
    if (!doc) fail_msg("%s", err->msg);
    const int rc = arch_parse(a, json_root(doc), err);
    json_free(doc);
    return rc;
}

static struct arch parsed(const char *text)
{
    struct err err = {.msg = ""};
    struct arch a;
    if (parse(&a, text, &err)) fail_msg("%s", err.msg);
    return a;
}

/* The text with its first `from` replaced. */
static const char *edit(const char *text, const char *from, const char *to)
{
    static char buf[4096];
    const char *at = strstr(text, from);
    if (!at) fail_msg("%s is not in the text", from);
    snprintf(buf, sizeof(buf), "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    return buf;
}

static void test_both_styles(void **state)
{
    const char *const texts[] = {PUBLISHED, TRANSFORMERS};
    (void)state;
    for (int i = 0; i < 2; i++) {
        const struct arch a = parsed(texts[i]);
        const struct compress_arch *c = &a.compress;
        assert_true(a.n_layer == 4 && a.n_kv == 1 && a.head_dim == 32 && a.d_ff == 32 && a.d_shared == 32);
        assert_true(c->q_lora == 32 && c->n_group == 2 && c->o_lora == 16 && c->rope == 8);
        assert_true(c->n_index == 2 && c->index_dim == 16 && c->index_top == 4);
        assert_true(c->ratio[COMPRESS_SPARSE] == 4 && c->ratio[COMPRESS_HEAVY] == 8);
        assert_true(c->kind[0] == COMPRESS_NONE && c->kind[1] == COMPRESS_SPARSE && c->kind[2] == COMPRESS_HEAVY &&
                    c->kind[3] == COMPRESS_SPARSE);
        for (int l = 0; l < 4; l++) assert_true(a.window[l] == 8 && !a.dense[l] && a.ffn[l] == &ffn_shared);
        assert_true(a.hyper.n_stream == 2 && a.hyper.n_iter == 5 && a.hyper.eps == 1e-6 && a.n_hash == 1);
        assert_true(a.rope.theta == 10000 && !a.rope.yarn && a.rope.width == 8);
        assert_true(a.rope_entry.theta == 160000 && a.rope_entry.yarn && a.rope_entry.factor == 16 &&
                    a.rope_entry.original_len == 65536 && a.rope_entry.width == 8);
        assert_true(a.rope_entry.attention_factor == 1);
        assert_true(a.router.kind == ROUTER_SQRT_CHOSEN && a.router.scale == 1.5f && !a.router.given && a.router_bias);
        assert_true(a.glu.kind == GLU_SWIGLU_CLAMPED && a.glu.limit == 7 && !a.glu.interleaved);
        assert_true(a.sinks && !a.attn_bias && !a.norm.round_twice && a.names->published);
    }
    assert_int_equal(parsed(edit(PUBLISHED, "\"num_hash_layers\": 1, ", "")).n_hash, 3);
    assert_true(parsed(edit(PUBLISHED, "4, 8, 4, 0]", "128, 4, 128, 0, 0, 0]")).compress.ratio[COMPRESS_HEAVY] == 128);
}

/* The angles of the published model: frequencies as its reference has them. */
static void test_angles(void **state)
{
    static const struct {
        int i;
        double value;
    } rows[] = {{0, 1},
                {15, 3.635538584e-03},
                {16, 2.265625e-03},
                {20, 2.969777783e-04},
                {24, 1.953125e-05},
                {25, 5.372312671e-06},
                {31, 5.680529037e-07}};
    const struct rope_arch r = {.theta = 160000,
                                .factor = 16,
                                .beta_fast = 32,
                                .beta_slow = 1,
                                .attention_factor = 1,
                                .original_len = 65536,
                                .width = 64,
                                .yarn = true,
                                .truncate = true};
    float table[2 * 64];
    (void)state;
    arch_rope_table(&r, 2, table);
    for (int i = 0; i < MT_LEN(rows); i++)
        assert_close(atan2((double)table[96 + rows[i].i], (double)table[64 + rows[i].i]), rows[i].value, 1e-6);
}

static void test_refusals(void **state)
{
    static const struct {
        const char *text, *from, *to, *says;
    } rows[] = {
        {PUBLISHED, "\"sqrtsoftplus\"", "\"softmax\"", "scoring_func \"softmax\""},
        {PUBLISHED, "\"noaux_tc\"", "\"greedy\"", "topk_method \"greedy\""},
        {PUBLISHED, "\"norm_topk_prob\": true", "\"norm_topk_prob\": false", "norm_topk_prob"},
        {PUBLISHED, "\"num_key_value_heads\": 1", "\"num_key_value_heads\": 2", "num_key_value_heads 2"},
        {PUBLISHED, "\"o_groups\": 2", "\"o_groups\": 3", "o_groups 3"},
        {PUBLISHED, "\"hc_mult\": 2", "\"hc_mult\": 5", "hc_mult"},
        {PUBLISHED, "\"hc_sinkhorn_iters\": 5", "\"hc_sinkhorn_iters\": 99", "hc_sinkhorn_iters"},
        {PUBLISHED, "\"swiglu_limit\": 7.0", "\"swiglu_limit\": 0.0", "swiglu_limit 0"},
        {PUBLISHED, "[0, 4, 8, 4, 0]", "[0, 4, 8, 16, 0]", "compress_ratios[3]`: 16 is not supported"},
        {PUBLISHED, "[0, 4, 8, 4, 0]", "[0, 4, 8]", "compress_ratios"},
        {PUBLISHED, "\"compress_ratios\"", "\"other\"", "layer_types and compress_ratios are both missing"},
        {PUBLISHED, "\"n_shared_experts\": 1", "\"n_shared_experts\": 2", "n_shared_experts 2"},
        {PUBLISHED, "\"expert_dtype\": \"fp4\"", "\"expert_dtype\": \"int4\"", "expert_dtype \"int4\""},
        {PUBLISHED, "[128, 128]", "[128, 64]", "weight_block_size[1]"},
        {PUBLISHED, "\"ue8m0\"", "\"e5m3\"", "scale_fmt \"e5m3\""},
        {PUBLISHED, "\"type\": \"yarn\"", "\"type\": \"linear\"", "rope_type \"linear\""},
        {PUBLISHED, "\"factor\": 16", "\"mscale\": 1, \"factor\": 16", "mscale"},
        {PUBLISHED, "\"qk_rope_head_dim\": 8", "\"qk_rope_head_dim\": 7", "qk_rope_head_dim 7"},
        {PUBLISHED, "\"qk_rope_head_dim\": 8", "\"qk_rope_head_dim\": 18", "index_head_dim 16"},
        {PUBLISHED, "\"expert_dtype\"", "\"mlp_bias\": true, \"expert_dtype\"", "mlp_bias"},
        {PUBLISHED, "\"expert_dtype\"", "\"attention_bias\": true, \"expert_dtype\"", "attention_bias"},
        {TRANSFORMERS, "\"sliding_attention\"", "\"full_attention\"", "layer_types[0]"},
        {TRANSFORMERS, "\"hash_moe\", \"moe\"", "\"moe\", \"hash_moe\"", "mlp_layer_types[1]"},
        {TRANSFORMERS, "\"hash_moe\", \"moe\"", "\"hash_moe\", \"dense\"", "mlp_layer_types[1]"},
        {TRANSFORMERS, "\"partial_rotary_factor\": 0.25", "\"partial_rotary_factor\": 0.5", "partial_rotary_factor"},
        {TRANSFORMERS, "\"default\"", "\"yarn\", \"factor\": 2, \"original_max_position_embeddings\": 64",
         "rope_parameters.main"},
    };
    (void)state;
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct err err = {.msg = ""};
        struct arch a;
        if (!parse(&a, edit(rows[i].text, rows[i].from, rows[i].to), &err)) fail_msg("accepted: %s", rows[i].to);
        if (!strstr(err.msg, rows[i].says)) fail_msg("%s: %s", rows[i].says, err.msg);
    }
}

int test_deepseek_v4(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_styles),
        cmocka_unit_test(test_angles),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests_name("deepseek_v4", tests, NULL, NULL);
}

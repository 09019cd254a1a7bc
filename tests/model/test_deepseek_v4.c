/* test_deepseek_v4.c - DeepSeek-V4: config.json as published and as transformers writes it, names of tensors, packed
 * experts, FP8 matrices, the table of experts by token id. */
#include "tests/process.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/layer.h"
#include "model/stored/published.h"
#include "train/synth/synth.h"

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

/* Keys with the values that TRANSFORMERS has under other names. */
#define AGREEING                                                                                                       \
    "\"compress_rate_csa\": 4, \"compress_rate_hca\": 8, \"rope_theta\": 10000, \"compress_rope_theta\": 160000, "     \
    "\"moe_layer_freq\": 1, \"first_k_dense_replace\": 0, \"attention_factor\": 1, "
#define RATIOS "\"compress_ratios\": [0, 4, 8, 4, 0], \"num_hash_layers\": 1, "
static void test_both_styles(void **state)
{
    const char *const texts[] = {PUBLISHED, TRANSFORMERS};
    (void)state;
    for (int i = 0; i < 2; i++) {
        const struct arch a = parsed(texts[i]);
        const struct compress_arch *c = &a.compress;
        assert_true(a.n_layer == 4 && a.attn[0].n_kv == 1 && a.attn[0].head_dim == 32 && a.d_ff == 32 &&
                    a.d_shared == 32);
        assert_true(c->q_lora == 32 && c->n_group == 2 && c->o_lora == 16 && c->rope == 8);
        assert_true(c->n_index == 2 && c->index_dim == 16 && c->index_top == 4);
        assert_true(c->ratio[COMPRESS_SPARSE] == 4 && c->ratio[COMPRESS_HEAVY] == 8);
        assert_true(c->kind[0] == COMPRESS_NONE && c->kind[1] == COMPRESS_SPARSE && c->kind[2] == COMPRESS_HEAVY &&
                    c->kind[3] == COMPRESS_SPARSE);
        for (int l = 0; l < 4; l++)
            assert_true(arch_attn(&a, l)->window == 8 && !a.dense[l] && a.ffn[l] == &ffn_shared);
        assert_true(a.hyper.n_stream == 2 && a.hyper.n_iter == 5 && a.hyper.eps == 1e-6 && a.n_hash == 1);
        assert_true(a.rope[0].theta == 10000 && !a.rope[0].yarn && a.rope[0].width == 8);
        assert_true(a.rope[1].theta == 160000 && a.rope[1].yarn && a.rope[1].factor == 16 &&
                    a.rope[1].original_len == 65536 && a.rope[1].width == 8);
        assert_true(a.rope[1].attention_factor == 1);
        assert_true(a.router.kind == ROUTER_SQRT_CHOSEN && a.router.scale == 1.5f && !a.router.given && a.router_bias);
        assert_true(a.glu.kind == GLU_SWIGLU_CLAMPED && a.glu.limit == 7 && !a.glu.interleaved);
        assert_true(a.sinks && !a.attn_bias && !a.norm.round_twice && a.names->published);
    }
    assert_int_equal(parsed(edit(PUBLISHED, "\"num_hash_layers\": 1, ", "")).n_hash, 3);
    /* Without attention_factor in rope_parameters it is 1, as in the published code, which has no factor for cos and
     * sin. */
    assert_true(parsed(edit(TRANSFORMERS, ", \"attention_factor\": 1.0", "")).rope[1].attention_factor == 1);
    /* Both styles at once agree. */
    const struct arch both = parsed(edit(TRANSFORMERS, "\"layer_types\"", RATIOS "\"layer_types\""));
    assert_true(both.compress.kind[2] == COMPRESS_HEAVY && both.n_hash == 1);
    assert_true(parsed(edit(TRANSFORMERS, "\"layer_types\"", AGREEING "\"layer_types\"")).rope[1].yarn);
    /* main and compress may be null. */
    assert_true(parsed(edit(PUBLISHED, "\"type\": \"yarn\"", "\"main\": null, \"compress\": null, \"type\": \"yarn\""))
                    .rope[1]
                    .yarn);
    const struct arch scaled =
        parsed(edit(PUBLISHED, "\"type\": \"yarn\"", "\"attention_factor\": 1.5, \"type\": \"yarn\""));
    assert_true(scaled.rope[1].attention_factor == 1.5 && scaled.rope[0].attention_factor == 1);
    assert_false(parsed(edit(PUBLISHED, "\"rope_scaling\"", "\"other\"")).rope[1].yarn);
    assert_true(parsed(edit(PUBLISHED, "\"rope_scaling\"", "\"rope_parameters\": {}, \"rope_scaling\"")).rope[1].yarn);
    assert_true(parsed(edit(PUBLISHED, "4, 8, 4, 0]", "128, 4, 128, 0, 0, 0]")).compress.ratio[COMPRESS_HEAVY] == 128);
}

/* The angles of the published model: the frequencies are those of its reference code. */
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

static void assert_unparsed(const char *text, const char *says)
{
    struct err err = {.msg = ""};
    struct arch a;
    if (!parse(&a, text, &err)) fail_msg("accepted: %s", says);
    if (!strstr(err.msg, says)) fail_msg("%s: %s", says, err.msg);
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
        {PUBLISHED, "\"hc_mult\": 2", "\"hc_mult\": 2, \"hc_eps\": 1e30", "hc_eps 1e+30 is not at least"},
        {PUBLISHED, "\"hc_mult\": 2", "\"hc_mult\": 2, \"rms_norm_eps\": 1e6", "rms_norm_eps 1e+06 is not at least"},
        {PUBLISHED, "factor\": 1.5", "factor\": 1e30", "routed_scaling_factor 1e+30 is not between 0.001 and 1000"},
        {TRANSFORMERS, "\"attention_factor\": 1.0", "\"attention_factor\": 0", "attention_factor 0 is not between"},
        {PUBLISHED, "[0, 4, 8, 4, 0]", "[0, 4, 8, 16, 0]", "compress_ratios[3]`: 16 is not supported"},
        {PUBLISHED, "[0, 4, 8, 4, 0]", "[0, 4, 8]", "compress_ratios"},
        {PUBLISHED, "\"compress_ratios\"", "\"other\"", "layer_types and compress_ratios are both missing"},
        {PUBLISHED, "\"n_shared_experts\": 1", "\"n_shared_experts\": 2", "n_shared_experts 2"},
        {PUBLISHED, "\"expert_dtype\": \"fp4\"", "\"expert_dtype\": \"int4\"", "expert_dtype \"int4\""},
        {PUBLISHED, "[128, 128]", "[128, 64]", "weight_block_size[1]"},
        {PUBLISHED, "\"ue8m0\"", "\"e5m3\"", "scale_fmt \"e5m3\""},
        {PUBLISHED, "\"type\": \"yarn\"", "\"type\": \"linear\"", "rope_type \"linear\""},
        {PUBLISHED, "160000", "1", "config.json: compress_rope_theta 1 is not above 1"},
        {PUBLISHED, "160000", "1e300", "config.json: compress_rope_theta 1e+300 is not above 1 and at most 1e+12"},
        {TRANSFORMERS, "160000.0", "1e300", "compress`: rope_theta 1e+300 is not above 1 and at most 1e+12"},
        {PUBLISHED, "\"factor\": 16", "\"mscale\": 1, \"factor\": 16", "mscale"},
        {PUBLISHED, "\"qk_rope_head_dim\": 8", "\"qk_rope_head_dim\": 7", "qk_rope_head_dim 7"},
        {PUBLISHED, "\"qk_rope_head_dim\": 8", "\"qk_rope_head_dim\": 18", "index_head_dim 16"},
        {PUBLISHED, "\"expert_dtype\"", "\"mlp_bias\": true, \"expert_dtype\"", "mlp_bias"},
        {PUBLISHED, "\"expert_dtype\"", "\"attention_bias\": true, \"expert_dtype\"", "attention_bias"},
        {TRANSFORMERS, "\"sliding_attention\"", "\"full_attention\"", "layer_types[0]"},
        {TRANSFORMERS, "{\"compressed_sparse_attention\": 4, \"heavily_compressed_attention\": 8}", "[4, 8]",
         "compress_rates`: is not an object"},
        {TRANSFORMERS, "\"layer_types\"", "\"compress_ratios\": [0, 4, 4, 4], \"layer_types\"",
         "compress_ratios[2]`: is compressed_sparse_attention, but layer_types[2] is heavily_compressed_attention"},
        {TRANSFORMERS, "\"layer_types\"", "\"compress_ratios\": [0, 4, 16, 4], \"layer_types\"",
         "compress_ratios[2]`: 16 is not supported (0, 4, 8"},
        {TRANSFORMERS, "\"layer_types\"", "\"compress_ratios\": [0, 4], \"layer_types\"",
         "compress_ratios`: is not a list of 4 layers"},
        {TRANSFORMERS, "\"mlp_layer_types\"", "\"num_hash_layers\": 3, \"mlp_layer_types\"",
         "mlp_layer_types[1]`: is moe, but num_hash_layers = 3 contradicts it"},
        {PUBLISHED, "\"rope_scaling\"",
         "\"rope_parameters\": {\"type\": \"yarn\", \"factor\": 8, \"original_max_position_embeddings\": 65536}, "
         "\"rope_scaling\"",
         "rope_scaling`: contradicts rope_parameters"},
        {TRANSFORMERS, "{\"main\"", "{\"other\"", "rope_parameters`: has one of main and compress"},
        {TRANSFORMERS, "\"hash_moe\", \"moe\"", "\"moe\", \"hash_moe\"", "mlp_layer_types[1]"},
        {TRANSFORMERS, "\"hash_moe\", \"moe\"", "\"hash_moe\", \"dense\"", "mlp_layer_types[1]"},
        {TRANSFORMERS, "\"partial_rotary_factor\": 0.25", "\"partial_rotary_factor\": 0.5", "partial_rotary_factor"},
        {TRANSFORMERS, "\"default\"", "\"yarn\", \"factor\": 2, \"original_max_position_embeddings\": 64",
         "rope_parameters.main"},
    };
    (void)state;
    for (int i = 0; i < MT_LEN(rows); i++) assert_unparsed(edit(rows[i].text, rows[i].from, rows[i].to), rows[i].says);
}

/* Two names for one thing with different values, and keys that would have no effect. */
static void test_contradictions(void **state)
{
    static const struct {
        const char *text, *from, *to, *says;
    } rows[] = {
        {PUBLISHED, "\"type\": \"yarn\", ", "", "rope_scaling`: has factor, but no rope_type"},
        {PUBLISHED, "\"type\": \"yarn\"", "\"type\": \"yarn\", \"rope_type\": \"default\"",
         "rope_scaling`: type is \"yarn\", but rope_type is \"default\""},
        {TRANSFORMERS, "\"rope_type\": \"yarn\", ", "", "rope_parameters.compress`: has factor, but no rope_type"},
        {TRANSFORMERS, "\"layer_types\"", "\"compress_rate_csa\": 8, \"layer_types\"",
         "`compress_rate_csa`: is 8, but compress_rates.compressed_sparse_attention is 4: correct one, or remove "
         "compr"},
        {TRANSFORMERS, "\"layer_types\"", "\"compress_rate_hca\": 4, \"layer_types\"",
         "`compress_rate_hca`: is 4, but compress_rates.heavily_compressed_attention is 8"},
        {PUBLISHED, "\"rope_scaling\"", "\"compress_rate_hca\": 16, \"rope_scaling\"",
         "compress_ratios[2]`: 8 is not supported (0, 4, 16"},
        {TRANSFORMERS, "\"rope_parameters\"", "\"rope_theta\": 50000, \"rope_parameters\"",
         "`rope_parameters.main.rope_theta`: is 10000, but rope_theta outside it is 50000: correct one"},
        {TRANSFORMERS, "\"rope_parameters\"", "\"compress_rope_theta\": 10000, \"rope_parameters\"",
         "`rope_parameters.compress.rope_theta`: is 160000, but compress_rope_theta outside it is 10000: correct one"},
        {PUBLISHED, "\"rope_scaling\": {", "\"rope_scaling\": {\"main\": 1, ", "rope_scaling.main`: is not an object"},
        {PUBLISHED, "\"rope_scaling\": {", "\"rope_scaling\": {\"compress\": [], ",
         "rope_scaling.compress`: is not an object"},
        {PUBLISHED, "\"rope_scaling\"", "\"attention_factor\": 1.3, \"rope_scaling\"",
         "config.json: attention_factor 1.3 is outside rope_scaling: move it there, or remove it"},
        {PUBLISHED, "\"rope_scaling\"", "\"rope_type\": \"yarn\", \"other\"",
         "config.json: rope_type \"yarn\" is outside rope_scaling: move it there, or remove it"},
        {PUBLISHED, "\"rope_scaling\"", "\"moe_layer_freq\": 2, \"rope_scaling\"",
         "moe_layer_freq 2 is not supported (1)"},
        {PUBLISHED, "\"rope_scaling\"", "\"first_k_dense_replace\": 3, \"rope_scaling\"",
         "first_k_dense_replace 3 is not supported (0)"},
    };
    (void)state;
    for (int i = 0; i < MT_LEN(rows); i++) assert_unparsed(edit(rows[i].text, rows[i].from, rows[i].to), rows[i].says);
}

/* ---- names */

#define PEFT_PREFIX "base_model.model."
static void test_names(void **state)
{
    static const struct {
        const char *file, *name;
    } rows[] = {
        {"embed.weight", "model.embed_tokens.weight"},
        {"head.weight", "lm_head.weight"},
        {"hc_head_fn", "model.hc_head.hc_fn"},
        {"layers.12.attn.wq_a.scale", "model.layers.12.self_attn.q_a_proj.weight_scale_inv"},
        {"layers.0.attn.attn_sink", "model.layers.0.self_attn.sinks"},
        {"layers.2.attn.indexer.compressor.ape", "model.layers.2.self_attn.compressor.indexer.position_bias"},
        {"layers.2.ffn.experts.255.w3.weight", "model.layers.2.mlp.experts.255.up_proj.weight"},
        {"layers.2.ffn.gate.tid2eid", "model.layers.2.mlp.gate.tid2eid"},
        {"layers.5.ffn.gate.bias", "model.layers.5.mlp.gate.e_score_correction_bias"},
        {"layers.5.hc_ffn_base", "model.layers.5.ffn_hc.base"},
    };
    const struct arch a = parsed(PUBLISHED);
    const int64_t n = MT_LEN(rows) + 3;
    struct safetensors st = {.tensors = mem_array(n, sizeof(struct st_tensor)), .n_tensors = n};
    struct err err = {.msg = ""};
    char to[256];
    (void)state;
    for (int i = 0; i < MT_LEN(rows); i++) {
        st.tensors[i] = (struct st_tensor){.name = rows[i].file};
        assert_true(published_name(to, sizeof(to), rows[i].name));
        assert_string_equal(to, rows[i].file);
    }
    st.tensors[MT_LEN(rows)] = (struct st_tensor){.name = "mtp.0.attn.wq_a.weight"};
    st.tensors[MT_LEN(rows) + 1] = (struct st_tensor){.name = "model.layers.0.attn.norm.weight"}; /* save_pretrained */
    st.tensors[MT_LEN(rows) + 2] = (struct st_tensor){.name = "model.layers.1.self_attn.kv_norm.weight"};
    assert_int_equal(published_rename(&st, &a, &err), 0);
    for (int i = 0; i < MT_LEN(rows); i++) {
        const struct st_tensor *t = safetensors_find(&st, rows[i].name);
        assert_non_null(t);
        assert_string_equal(safetensors_stored(t), rows[i].file);
    }
    assert_non_null(safetensors_find(&st, "mtp.0.attn.wq_a.weight"));
    assert_true(arch_is_other_part("mtp.0.attn.wq_a.weight"));
    assert_non_null(safetensors_find(&st, "model.layers.0.self_attn.kv_norm.weight"));
    assert_non_null(safetensors_find(&st, "model.layers.1.self_attn.kv_norm.weight"));
    assert_false(published_name(to, sizeof(to), "model.layers.0.mlp.experts.0.gate_proj.weight.absmax"));
    assert_false(published_adapter_name(to, sizeof(to), "model.layers.0.self_attn.q_a_proj.lora_A.weight"));
    assert_false(published_adapter_name(to, 40, PEFT_PREFIX "model.layers.0.self_attn.q_a_proj.lora_A.weight"));
    assert_true(published_adapter_name(to, sizeof(to), PEFT_PREFIX "model.layers.0.self_attn.q_a_proj.lora_A.weight"));
    assert_string_equal(to, PEFT_PREFIX "layers.0.attn.wq_a.lora_A.weight");
    safetensors_close(&st);
    st = (struct safetensors){.tensors = mem_array(2, sizeof(struct st_tensor)), .n_tensors = 2};
    st.tensors[0] = (struct st_tensor){.name = "layers.0.attn.kv_norm.weight"};
    st.tensors[1] = (struct st_tensor){.name = "model.layers.0.attn.norm.weight"};
    assert_int_equal(published_rename(&st, &a, &err), -1);
    assert_non_null(strstr(err.msg, "are both model.layers.0.self_attn.kv_norm.weight"));
    safetensors_close(&st);
}

/* ---- loading */

/* A random checkpoint in memory, whose tensors can be changed, and its weights on the CPU. */
struct loading {
    struct synth_memory m;
    struct device dev;
    struct weights w;
};

static int load(struct loading *l, const struct comm *ep, struct err *err)
{
    const struct quantize none = {.format = WF_NONE};
    const struct weights_options opt = {.quantize = &none, .ep = ep};
    struct device measure;
    struct weights w;
    if (device_open(&l->dev, "cpu", "fp32", err)) return -1;
    device_dry_run(&measure, &l->dev);
    if (weights_load(&w, &measure, &l->m.arch, &l->m.st, &opt, err)) return -1;
    weights_free(&w);
    if (device_reserve(&l->dev, &l->dev.weights, "weights", measure.weights.peak, err) ||
        device_reserve(&l->dev, &l->dev.work, "work", measure.work.peak, err))
        return -1;
    return weights_load(&l->w, &l->dev, &l->m.arch, &l->m.st, &opt, err);
}

static void unload(struct loading *l)
{
    weights_free(&l->w);
    device_close(&l->dev);
}

static void open_memory(struct loading *l, const char *quant)
{
    struct err err = {.msg = ""};
    const struct synth_options opt = {.arch = "deepseek-v4-tiny", .quant = quant, .seed = 3};
    *l = (struct loading){.w = {.layers = NULL}};
    if (synth_memory_open(&l->m, &opt, &err)) fail_msg("%s", err.msg);
}

static struct st_tensor *tensor_of(struct loading *l, const char *name)
{
    const struct st_tensor *t = safetensors_find(&l->m.st, name);
    if (!t) fail_msg("%s is missing", name);
    return &l->m.st.tensors[t - l->m.st.tensors];
}

/* Where the bytes of one expert's part must be: its tensor in the file, and the rows of a stack in memory. */
static void assert_part(struct loading *l, int64_t layer, int64_t expert, const char *part, const uint8_t *data,
                        const uint8_t *scale, int64_t row, int64_t n_row, int64_t n_in)
{
    char name[128];
    snprintf(name, sizeof(name), "model.layers.%d.mlp.experts.%d.%s.weight", (int)layer, (int)expert, part);
    const struct st_tensor *t = tensor_of(l, name);
    assert_int_equal(t->bytes, n_row * n_in / 2);
    assert_memory_equal(data + row * n_in / 2, t->data, (size_t)t->bytes);
    strncat(name, "_scale_inv", sizeof(name) - strlen(name) - 1);
    t = tensor_of(l, name);
    assert_int_equal(t->bytes, n_row * n_in / 32);
    assert_memory_equal(scale + row * n_in / 32, t->data, (size_t)t->bytes);
}

/* The bytes of packed experts are those of the file: gate, then up, of every expert that the rank holds. */
static void test_packed_bytes(void **state)
{
    (void)state;
    for (int rank = -1; rank < 2; rank++) {
        struct loading l;
        struct err err = {.msg = ""};
        struct comm ep = comm_alone;
        open_memory(&l, "mxfp4");
        ep.world = rank < 0 ? 1 : 2, ep.rank = MT_MAX(rank, 0);
        if (load(&l, &ep, &err)) fail_msg("%s", err.msg);
        const int64_t count = 16 / ep.world, d = l.m.arch.d_model, f = l.m.arch.d_ff;
        assert_string_equal(l.w.experts, "mxfp4");
        assert_int_equal(l.w.n_unused, 0);
        assert_int_equal(l.w.expert_bytes, 4 * count * 3 * d * f * 17 / 32);
        for (int64_t i = 0; i < 4 * count; i++) {
            const int64_t layer = i / count, e = i % count, of = e + ep.rank * count;
            const struct weight *up = &l.w.layers[layer].up.w, *down = &l.w.layers[layer].down.w;
            assert_true(up->format == WF_MXFP4 && down->format == WF_MXFP4 && up->n_exp == count);
            assert_part(&l, layer, of, "gate_proj", up->data, up->scale, 2 * e * f, f, d);
            assert_part(&l, layer, of, "up_proj", up->data, up->scale, (2 * e + 1) * f, f, d);
            assert_part(&l, layer, of, "down_proj", down->data, down->scale, e * d, d, f);
        }
        unload(&l);
        synth_memory_close(&l.m);
    }
}

/* FP8 with exponents as scales: attention and shared experts stay FP8. In the older release the routed experts are FP8
 * too. */
static void test_fp8(void **state)
{
    (void)state;
    for (int older = 0; older < 2; older++) {
        struct loading l;
        struct err err = {.msg = ""};
        open_memory(&l, older ? "fp8" : "mxfp4");
        const struct st_tensor *t = tensor_of(&l, "model.layers.0.mlp.shared_experts.up_proj.weight");
        struct st_tensor *s = tensor_of(&l, "model.layers.0.mlp.shared_experts.up_proj.weight_scale_inv");
        uint8_t scales[2] = {120, 121};
        assert_int_equal(s->bytes, 2);
        s->data = scales;
        if (load(&l, &comm_alone, &err)) fail_msg("%s", err.msg);
        const struct weight *w = &l.w.layers[0].shared_up.w;
        const int64_t f = l.m.arch.d_shared;
        assert_int_equal(w->format, WF_FP8);
        assert_memory_equal((const char *)w->data + f * w->n_in, t->data, (size_t)t->bytes);
        assert_true(w->scale2[2 * f] == 1.0f / 128 && w->scale2[2 * f + 1] == 1.0f / 64);
        assert_int_equal(l.w.layers[1].up.w.format, older ? WF_FP8 : WF_MXFP4);
        unload(&l);
        scales[1] = 255;
        assert_int_equal(load(&l, &comm_alone, &err), -1);
        assert_non_null(strstr(err.msg, "layers.0.ffn.shared_experts.w3.scale has the value nan at ["));
        device_close(&l.dev);
        synth_memory_close(&l.m);
    }
}

static void assert_refused(struct loading *l, const char *says)
{
    struct err err = {.msg = ""};
    assert_int_equal(load(l, &comm_alone, &err), -1);
    if (!strstr(err.msg, says)) fail_msg("%s: %s", says, err.msg);
    device_close(&l->dev);
    synth_memory_close(&l->m);
}

/* Changes one value of a table of experts by token id. */
static void refuse_table(int64_t at, int64_t value)
{
    struct loading l;
    struct err err = {.msg = ""};
    open_memory(&l, "mxfp4");
    struct st_tensor *t = tensor_of(&l, "model.layers.1.mlp.gate.tid2eid");
    uint8_t *copy = mem_alloc(t->bytes);
    memcpy(copy, t->data, (size_t)t->bytes);
    memcpy(copy + 8 * at, &value, 8);
    t->data = copy;
    assert_int_equal(load(&l, &comm_alone, &err), -1);
    if (!strstr(err.msg, "tensor layers.1.ffn.gate.tid2eid: the experts of token 7 are not distinct"))
        fail_msg("%s", err.msg);
    device_close(&l.dev);
    synth_memory_close(&l.m);
    mem_free(copy);
}

static void test_table_of_experts(void **state)
{
    struct loading l;
    struct err err = {.msg = ""};
    int64_t first, id;
    (void)state;
    open_memory(&l, "mxfp4");
    if (load(&l, &comm_alone, &err)) fail_msg("%s", err.msg);
    const struct st_tensor *t = tensor_of(&l, "model.layers.1.mlp.gate.tid2eid");
    memcpy(&first, t->data + 8 * 4 * 7, 8);
    for (int64_t i = 0; i < tensor_count(l.w.layers[1].hash); i++) {
        memcpy(&id, t->data + 8 * i, 8);
        assert_int_equal(((const int32_t *)l.w.layers[1].hash.data)[i], id);
    }
    assert_true(l.w.layers[2].hash.ndim == 2 && !l.w.layers[3].hash.ndim && l.w.layers[3].router_bias.ndim == 1 &&
                !l.w.layers[2].router_bias.ndim);
    unload(&l);
    synth_memory_close(&l.m);
    refuse_table(4 * 7 + 3, 16);
    refuse_table(4 * 7 + 2, -1);
    refuse_table(4 * 7 + 1, first);
    refuse_table(4 * 7, (int64_t)1 << 32);
    open_memory(&l, "mxfp4");
    struct st_tensor *real = tensor_of(&l, "model.layers.1.mlp.gate.tid2eid");
    real->dtype = DT_F32;
    real->st_dtype = "F32";
    assert_refused(&l, "tensor layers.1.ffn.gate.tid2eid is F32 [2048, 4], expected I64 or I32 [2048, 4]");
}

/* A model whose layers have no compressor loads, but not if the checkpoint has weights of a compressor or indexer. */
static void test_kinds_of_the_weights(void **state)
{
    static const struct {
        int64_t layer;
        enum compress_kind kind;
        const char *says;
    } rows[] = {
        {2, COMPRESS_NONE,
         "by config.json layer 2 has no compressor, but the checkpoint has layers.2.attn.compressor.wkv.weight"},
        {3, COMPRESS_NONE,
         "by config.json layer 3 has no compressor, but the checkpoint has layers.3.attn.compressor.wkv.weight"},
        {2, COMPRESS_HEAVY,
         "by config.json layer 2 has no indexer, but the checkpoint has layers.2.attn.indexer.compressor.wkv.weight"}};
    const struct synth_options sliding = {.arch = "deepseek-v4-tiny", .n_layer = 2};
    struct loading l = {.w = {.layers = NULL}};
    struct err err = {.msg = ""};
    (void)state;
    if (synth_memory_open(&l.m, &sliding, &err) || load(&l, &comm_alone, &err)) fail_msg("%s", err.msg);
    assert_int_equal(l.w.n_unused, 0);
    unload(&l);
    synth_memory_close(&l.m);
    for (int i = 0; i < MT_LEN(rows); i++) {
        open_memory(&l, "mxfp4");
        l.m.arch.compress.kind[rows[i].layer] = rows[i].kind;
        assert_refused(&l, rows[i].says);
    }
}

/* Removes the tensors whose name contains `part`, except the one named `kept`; "": no exception. */
static void drop_named(struct loading *l, const char *part, const char *kept)
{
    struct safetensors *st = &l->m.st;
    for (int64_t i = st->n_tensors - 1; i >= 0; i--) {
        struct st_tensor *t = &st->tensors[i];
        if (!strstr(t->name, part) || !strcmp(t->name, kept)) continue;
        mem_free((void *)(uintptr_t)t->name);
        memmove(t, t + 1, (size_t)(--st->n_tensors - i) * sizeof(*t));
    }
}

/* One tensor of an indexer or of a compressor is enough to contradict config.json. */
static void test_left_over_entries(void **state)
{
#define ENTRIES "model.layers.2.self_attn.compressor."
    static const struct {
        const char *kept, *says;
    } rows[] = {
        {ENTRIES "gate_proj.weight", "no compressor, but the checkpoint has layers.2.attn.compressor.wgate.weight"},
        {ENTRIES "position_bias", "no compressor, but the checkpoint has layers.2.attn.compressor.ape: "},
        {ENTRIES "kv_norm.weight", "no compressor, but the checkpoint has layers.2.attn.compressor.norm.weight"},
        {ENTRIES "indexer.position_bias",
         "no indexer, but the checkpoint has layers.2.attn.indexer.compressor.ape: correct layer_types or compress_"},
        {ENTRIES "indexer.q_b_proj.weight", "no indexer, but the checkpoint has layers.2.attn.indexer.wq_b.weight"},
        {ENTRIES "indexer.scorer.weights_proj.weight",
         "no indexer, but the checkpoint has layers.2.attn.indexer.weights_proj.weight"},
    };
    (void)state;
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct loading l;
        open_memory(&l, "mxfp4");
        drop_named(&l, ENTRIES, rows[i].kept);
        l.m.arch.compress.kind[2] = COMPRESS_NONE;
        assert_refused(&l, rows[i].says);
    }
}

/* num_hash_layers against the tables and biases of the checkpoint, whose first three layers have tables. */
static void test_hash_layers_of_the_weights(void **state)
{
    static const struct {
        int64_t n_hash;
        const char *dropped, *says;
    } rows[] = {
        {2, "none",
         "by config.json layer 2 has no table of experts by token id, but the checkpoint has "
         "layers.2.ffn.gate.tid2eid: "
         "correct num_hash_layers or mlp_layer_types"},
        {4, "none",
         "by config.json layer 3 has no router bias, but the checkpoint has layers.3.ffn.gate.bias: correct "
         "num_hash_layers or mlp_layer_types"},
        {3, "layers.1.mlp.gate.tid2eid",
         "by config.json layer 1 chooses experts by token id, but the checkpoint has no layers.1.ffn.gate.tid2eid: "
         "correct num_hash_layers or mlp_layer_types"},
    };
    (void)state;
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct loading l;
        open_memory(&l, "mxfp4");
        drop_named(&l, rows[i].dropped, "");
        l.m.arch.n_hash = rows[i].n_hash;
        assert_refused(&l, rows[i].says);
    }
}

/* Matrices that are joined in memory have one format; errors name what they are. */
static void test_formats_of_pairs(void **state)
{
    static const char *const rows[][2] = {
        {"self_attn.compressor.gate_proj.weight", "tensors layers.2.attn.compressor.wkv.weight and "
                                                  "layers.2.attn.compressor.wgate.weight have different formats: "
                                                  "matrices of attention that are joined in memory need one format"},
        {"self_attn.kv_proj.weight", "tensors layers.2.attn.wq_a.weight and layers.2.attn.wkv.weight have different "
                                     "formats: matrices of attention"},
        {"mlp.shared_experts.up_proj.weight",
         "layers.2.ffn.shared_experts.w3.weight have different formats: matrices of shared experts that are joined"},
        {"mlp.experts.3.up_proj.weight",
         "layers.2.ffn.experts.3.w3.weight are quantised in different ways: all experts of a layer need one format"},
    };
    (void)state;
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct loading l;
        char name[96];
        open_memory(&l, "mxfp4");
        snprintf(name, sizeof(name), "model.layers.2.%s", rows[i][0]);
        struct st_tensor *t = tensor_of(&l, name);
        if (!strcmp(t->st_dtype, "I8")) t->shape[1] *= 2; /* nibbles */
        t->dtype = DT_F32;
        t->st_dtype = "F32";
        assert_refused(&l, rows[i][1]);
    }
}

/* Exponents have the shape of blocks, also those of a matrix with one block. */
static void test_shapes_of_exponents(void **state)
{
    static const char *const says[] = {
        "layers.2.attn.wkv.scale is F8_E8M0 [], expected an exponent per 128 x 128 block, [1, ",
        "layers.2.attn.wkv.scale is F8_E8M0 [1], expected an exponent per 128 x 128 block, [1, "};
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct loading l;
        open_memory(&l, "mxfp4");
        struct st_tensor *t = tensor_of(&l, "model.layers.2.self_attn.kv_proj.weight_scale_inv");
        assert_string_equal(t->st_dtype, "F8_E8M0");
        t->ndim = i;
        t->shape[0] = 1;
        assert_refused(&l, says[i]);
    }
}

/* model.quantize on the published layout packs the FP8 matrices, and the log names them. */
static void test_packed_shared_experts(void **state)
{
    (void)state;
    char model[MT_PATH], path[MT_PATH + 16], cache[2 * MT_PATH];
    const char *config = process_config(""), *text = fixture("parity/deepseek_v4/eval.jsonl");
    snprintf(model, sizeof(model), "%s/model", scratch_dir());
    snprintf(path, sizeof(path), "model.path=%s", model);
    if (RUN("synth", "deepseek-v4-tiny", model)) fail_msg("%s", said.err);
    snprintf(cache, sizeof(cache), "data.eval=%s", text);
    for (int i = 0; i < 4; i++) {
        const char *both = i < 2 ? "model.quantize_attention=false" : "model.quantize_attention=true";
        if (RUN("eval", config, "--base", "--set", path, "--set", cache, "--set", "model.quantize=mxfp4", "--set", both,
                "--set", "data.train=", "--set", "data.format=text"))
            fail_msg("%s", said.err);
        assert_says(said.err, i % 2 ? "packed weights read from " : " weights quantised to mxfp4 in ");
        assert_says(said.err, i < 2 ? ": shared experts (fp8)\n" : ": attention (fp8), shared experts (fp8)\n");
    }
    assert_int_equal(RUN("eval", config, "--base", "--set", path, "--set", cache, "--set", "model.quantize=nf4",
                         "--set", "data.train=", "--set", "data.format=text"),
                     1);
    assert_says(said.err, "tensor layers.0.ffn.experts.0.w1.weight is packed in the checkpoint as mxfp4, but ");
}

/* NaN in each tensor of a layer is reported at load. In the indexer it would change the chosen entries and never reach
 * the loss. FP8 codes: in matrices that stay FP8, and in the indexer's, which is decoded. */
static void test_values(void **state)
{
#define NOT_FINITE " has the value nan at ["
#define LAYER      "model.layers.2."
#define INDEXER    LAYER "self_attn.compressor.indexer."
    static const char *const rows[][2] = {
        {INDEXER "q_b_proj.weight", "tensor layers.2.attn.indexer.wq_b.weight" NOT_FINITE},
        {INDEXER "scorer.weights_proj.weight", "tensor layers.2.attn.indexer.weights_proj.weight" NOT_FINITE},
        {INDEXER "gate_proj.weight", "tensor layers.2.attn.indexer.compressor.wgate.weight" NOT_FINITE},
        {INDEXER "position_bias", "tensor layers.2.attn.indexer.compressor.ape" NOT_FINITE},
        {LAYER "self_attn.compressor.kv_proj.weight", "tensor layers.2.attn.compressor.wkv.weight" NOT_FINITE},
        {LAYER "self_attn.q_b_proj.weight", "tensor layers.2.attn.wq_b.weight" NOT_FINITE},
        {LAYER "mlp.shared_experts.down_proj.weight", "tensor layers.2.ffn.shared_experts.w2.weight" NOT_FINITE},
        {LAYER "attn_hc.fn", "tensor layers.2.hc_attn_fn" NOT_FINITE},
        {LAYER "ffn_hc.base", "tensor layers.2.hc_ffn_base" NOT_FINITE},
    };
    (void)state;
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct loading l;
        open_memory(&l, "mxfp4");
        struct st_tensor *t = tensor_of(&l, rows[i][0]);
        uint8_t *copy = mem_alloc(t->bytes);
        memcpy(copy, t->data, (size_t)t->bytes);
        memset(copy + t->bytes - 4, 255, 4); /* NaN in FP8, bf16 and f32 */
        t->data = copy;
        assert_refused(&l, rows[i][1]);
        mem_free(copy);
    }
}

/* Errors name tensors as the file does. */
static void test_missing(void **state)
{
    static const char *const rows[][2] = {
        {LAYER "self_attn.q_a_proj.weight",
         "tensor layers.2.attn.wq_a.weight is not in the checkpoint; the nearest name there is layers."},
        {LAYER "self_attn.q_a_proj.weight_scale_inv",
         "tensor layers.2.attn.wq_a.weight is F8_E4M3, but its scales layers.2.attn.wq_a.scale are not in"},
        {LAYER "mlp.experts.1.gate_proj.weight_scale_inv",
         "tensor layers.2.ffn.experts.1.w1.weight is I8, but its scales layers.2.ffn.experts.1.w1.scale are not in"},
        {LAYER "mlp.experts.0.down_proj.weight",
         "tensor layers.2.ffn.experts.0.w2.weight is not in the checkpoint; the nearest name there is layers."},
        {"lm_head.weight", "tensor head.weight is not in the checkpoint, and tie_word_embeddings is false"},
    };
    (void)state;
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct loading l;
        open_memory(&l, "mxfp4");
        drop_named(&l, rows[i][0], "");
        assert_refused(&l, rows[i][1]);
    }
}

int test_deepseek_v4(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_styles),
        cmocka_unit_test(test_angles),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_contradictions),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_packed_bytes),
        cmocka_unit_test(test_fp8),
        cmocka_unit_test(test_table_of_experts),
        cmocka_unit_test(test_kinds_of_the_weights),
        cmocka_unit_test(test_left_over_entries),
        cmocka_unit_test(test_hash_layers_of_the_weights),
        cmocka_unit_test(test_formats_of_pairs),
        cmocka_unit_test(test_shapes_of_exponents),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_missing),
        cmocka_unit_test(test_packed_shared_experts),
    };
    return cmocka_run_group_tests_name("deepseek_v4", tests, NULL, NULL);
}

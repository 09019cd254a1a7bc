/* test_mla.c - latent attention: gradients of a model against finite differences, recomputation, packed documents, its
 * keys of config.json. */
#include "tests/test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "data/safetensors.h"
#include "tests/checkpoints.h"
#include "tests/whole_model.h"
#include "train/export/export_targets.h"
#include "train/run/run.h"

enum { LAYERS = 2, HIDDEN = 40, HEADS = 3, VOCAB = 40, DENSE = 32 };

struct sizes {
    int64_t q_lora, kv_lora, nope, rope, value; /* q_lora 0: null */
    const char *keys;                           /* of config.json, after a comma */
    const char *targets;
};
#define Q_A "q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj"
#define YARN(more)                                                                                                     \
    "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4.0, \"original_max_position_embeddings\": 4" more "}"
static const struct sizes sizes[] = {
    {10, 8, 4, 6, 5, "\"rope_theta\": 100", Q_A ",dense"},
    {10, 8, 4, 6, 12, "\"rope_interleave\": false", Q_A},
    {0, 6, 5, 4, 3, YARN(", \"mscale\": 1.0, \"mscale_all_dim\": 1.0"), "q_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj"},
    {7, 9, 3, 2, 4, "\"attention_bias\": true", "q_b_proj,kv_a_proj_with_mqa,dense_up_proj"},
};

static const char *config_text(const struct sizes *s)
{
    static char text[1024];
    char q[32] = "null";
    if (s->q_lora) snprintf(q, sizeof(q), "%d", (int)s->q_lora);
    snprintf(text, sizeof(text),
             "{\"model_type\": \"deepseek_v3\", \"num_hidden_layers\": %d, \"hidden_size\": %d, "
             "\"num_attention_heads\": %d, \"vocab_size\": %d, \"intermediate_size\": %d, "
             "\"moe_intermediate_size\": 8, \"n_routed_experts\": 4, \"n_shared_experts\": 1, "
             "\"num_experts_per_tok\": 2, \"n_group\": 1, \"topk_group\": 1, "
             "\"q_lora_rank\": %s, \"kv_lora_rank\": %d, \"qk_nope_head_dim\": %d, \"qk_rope_head_dim\": %d, "
             "\"v_head_dim\": %d, %s}",
             LAYERS, HIDDEN, HEADS, VOCAB, DENSE, q, (int)s->kv_lora, (int)s->nope, (int)s->rope, (int)s->value,
             s->keys);
    return text;
}

static const char *write_config(const char *text)
{
    struct err err;
    char path[MT_PATH];
    const char *dir = scratch_dir();
    snprintf(path, sizeof(path), "%s/config.json", dir);
    assert_int_equal(file_write_atomic(path, text, (int64_t)strlen(text), &err), 0);
    return dir;
}

/* ---- a random checkpoint whose layers are all dense: the default of first_k_dense_replace is 3 */

static void add(struct draft *d, int64_t layer, const char *name, int64_t n_out, int64_t n_in)
{
    draft_random(d, "model.", layer, name, n_out, n_in);
}

static void add_layer(struct draft *d, int64_t l, const struct sizes *s)
{
    const int64_t q = HEADS * (s->nope + s->rope), kv = s->kv_lora + s->rope;
    add(d, l, "input_layernorm.weight", HIDDEN, 0);
    add(d, l, "post_attention_layernorm.weight", HIDDEN, 0);
    if (s->q_lora) {
        add(d, l, "self_attn.q_a_proj.weight", s->q_lora, HIDDEN);
        add(d, l, "self_attn.q_a_layernorm.weight", s->q_lora, 0);
    }
    add(d, l, s->q_lora ? "self_attn.q_b_proj.weight" : "self_attn.q_proj.weight", q, s->q_lora ? s->q_lora : HIDDEN);
    add(d, l, "self_attn.kv_a_proj_with_mqa.weight", kv, HIDDEN);
    add(d, l, "self_attn.kv_a_layernorm.weight", s->kv_lora, 0);
    add(d, l, "self_attn.kv_b_proj.weight", HEADS * (s->nope + s->value), s->kv_lora);
    add(d, l, "self_attn.o_proj.weight", HIDDEN, HEADS * s->value);
    if (strstr(s->keys, "attention_bias")) {
        add(d, l, "self_attn.q_a_proj.bias", s->q_lora, 0);
        add(d, l, "self_attn.kv_a_proj_with_mqa.bias", kv, 0);
        add(d, l, "self_attn.o_proj.bias", HIDDEN, 0);
    }
    add(d, l, "mlp.gate_proj.weight", DENSE, HIDDEN);
    add(d, l, "mlp.up_proj.weight", DENSE, HIDDEN);
    add(d, l, "mlp.down_proj.weight", HIDDEN, DENSE);
}

static const char *write_model(const struct sizes *s)
{
    struct draft d;
    draft_begin(&d, config_text(s));
    add(&d, -1, "model.embed_tokens.weight", VOCAB, HIDDEN);
    add(&d, -1, "lm_head.weight", VOCAB, HIDDEN);
    add(&d, -1, "model.norm.weight", HIDDEN, 0);
    for (int64_t l = 0; l < LAYERS; l++) add_layer(&d, l, s);
    const char *dir = draft_save(&d, 1);
    draft_free(&d);
    return dir;
}

/* ---- runs in F64 with random adapters */

static void gradients(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(sizes); i++) {
        struct config cfg;
        struct run r;
        whole_model_open(&r, &cfg, write_model(&sizes[i]), sizes[i].targets, CFG_RECOMPUTE_NONE);
        whole_model_check_slopes(&r);
        run_close(&r);
    }
}

static void recomputation(void **state)
{
    (void)state;
    whole_model_check_recomputation(write_model(&sizes[0]), sizes[0].targets);
}

static void packed_equals_separate(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(sizes); i++) whole_model_check_packing(write_model(&sizes[i]), sizes[i].targets);
}

/* ---- checkpoints */

/* Stores every Linear but router, embedding and head in FP8 with a scale per 128 x 128 block, as DeepSeek publishes, or
 * the same values in F32. q_b_proj has 160 rows: its second block is smaller. */
static const char *save_fp8(bool decoded)
{
    struct draft d;
    const struct linear_form form = {.fp8 = FP8_BLOCKS_INV, .decoded = decoded};
    char names[256][96];
    int64_t n = 0;
    draft_open_case(&d, "parity/glm4_lite");
    for (int64_t i = 0; i < d.n; i++)
        if (strstr(d.entries[i].name, "_proj")) snprintf(names[n++], sizeof(names[0]), "%s", d.entries[i].name);
    for (int64_t i = 0; i < n; i++) {
        const struct st_entry e = *draft_find(&d, names[i]);
        float *x = draft_values(&d, names[i]);
        draft_linear(&d, names[i], x, e.shape[0], e.shape[1], &form);
        mem_free(x);
    }
    const char *dir = draft_save(&d, decoded ? 1 : 3);
    draft_free(&d);
    return dir;
}

static void fp8_blocks_are_read(void **state)
{
    (void)state;
    assert_same_model(save_fp8(false), save_fp8(true));
}

/* ---- config.json */

static void sizes_are_read(void **state)
{
    (void)state;
    struct arch a;
    struct err err = {.msg = ""};
    if (arch_load(&a, write_config(config_text(&sizes[0])), &err)) fail_msg("%s", err.msg);
    assert_true(a.attn[0].head_dim == 10 && a.rope[0].width == 6 && a.mla.interleaved && a.mla.q_lora == 10);
    assert_true(a.attn[0].scale == (float)(1 / sqrt(10)));
    if (arch_load(&a, write_config(config_text(&sizes[2])), &err)) fail_msg("%s", err.msg);
    const double gain = 0.1 * log(4) + 1;
    assert_true(a.mla.q_lora == 0 && a.rope[0].attention_factor == 1);
    assert_close((double)a.attn[0].scale, gain * gain / 3, 1e-7);
    struct sizes s = sizes[2];
    s.keys = YARN(", \"mscale\": 0.5, \"mscale_all_dim\": 1.0");
    if (arch_load(&a, write_config(config_text(&s)), &err)) fail_msg("%s", err.msg);
    assert_close(a.rope[0].attention_factor, (0.05 * log(4) + 1) / gain, 1e-15);
    s.keys = YARN("");
    if (arch_load(&a, write_config(config_text(&s)), &err)) fail_msg("%s", err.msg);
    assert_close(a.rope[0].attention_factor, gain, 1e-15);
    assert_close((double)a.attn[0].scale, 1.0 / 3, 1e-7);
}

/* The kinds of feed-forward networks: a number of dense layers, or a list. */
static void layer_kinds_are_read(void **state)
{
    (void)state;
    static const struct {
        const char *keys;
        bool dense[LAYERS];
    } rows[] = {
        {"\"first_k_dense_replace\": 1", {true, false}},
        {"\"mlp_layer_types\": [\"sparse\", \"dense\"]", {false, true}},
        {"\"first_k_dense_replace\": 0, \"mlp_layer_types\": null", {false, false}},
    };
    struct err err = {.msg = ""};
    struct arch a;
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct sizes s = sizes[0];
        s.keys = rows[i].keys;
        if (arch_load(&a, write_config(config_text(&s)), &err)) fail_msg("%s", err.msg);
        for (int l = 0; l < LAYERS; l++) assert_int_equal(a.dense[l], rows[i].dense[l]);
    }
    struct sizes s = sizes[0];
    s.keys = "\"mlp_layer_types\": [\"dense\", \"moe\"]";
    assert_int_equal(arch_load(&a, write_config(config_text(&s)), &err), -1);
    assert_non_null(strstr(err.msg, "\"moe\" is not supported (dense, sparse)"));
}

/* Settings of the router that config.json lacks have the defaults of transformers' configuration classes. */
static void missing_router_keys_have_defaults(void **state)
{
    (void)state;
    static const struct {
        const char *family;
        float scale;
        int n_group, top_group;
    } rows[] = {{"deepseek_v3", 2.5f, 8, 4}, {"glm4_moe_lite", 1.8f, 1, 1}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        char text[1024];
        struct arch a;
        struct err err = {.msg = ""};
        snprintf(text, sizeof(text),
                 "{\"model_type\": \"%s\", \"num_hidden_layers\": 4, \"hidden_size\": 40, "
                 "\"num_attention_heads\": 3, \"vocab_size\": 40, \"intermediate_size\": 32, "
                 "\"moe_intermediate_size\": 8, \"n_routed_experts\": 16, \"num_experts_per_tok\": 2, "
                 "\"q_lora_rank\": null, \"kv_lora_rank\": 8, \"qk_nope_head_dim\": 4, \"qk_rope_head_dim\": 6, "
                 "\"v_head_dim\": 5}",
                 rows[i].family);
        if (arch_load(&a, write_config(text), &err)) fail_msg("%s", err.msg);
        assert_true(a.router.kind == ROUTER_SIGMOID_CHOSEN && a.router.scale == rows[i].scale);
        assert_int_equal(a.router.n_group, rows[i].n_group);
        assert_int_equal(a.router.top_group, rows[i].top_group);
    }
}

static void bad_sizes_are_refused(void **state)
{
    (void)state;
    static const struct {
        struct sizes s;
        const char *says;
    } rows[] = {
        {{10, 8, 4, 5, 5, "\"rope_theta\": 100", Q_A}, "qk_rope_head_dim 5 is odd"},
        {{10, 0, 4, 6, 5, "\"rope_theta\": 100", Q_A}, "kv_lora_rank"},
        {{10, 8, 4, 6, 0, "\"rope_theta\": 100", Q_A}, "v_head_dim"},
        {{10, 8, 4, 6, 5, "\"num_key_value_heads\": 1", Q_A}, "num_key_value_heads 1 is not supported"},
        {{0, 8, 4, 6, 5, "\"attention_bias\": true", Q_A}, "attention_bias without q_lora_rank"},
        {{10, 8, 4, 6, 5, YARN(", \"mscale_all_dim\": -1.0"), Q_A}, "must not be negative"},
        {{10, 8, 4, 6, 5, YARN(", \"mscale_all_dim\": 1e30"), Q_A}, "softmax factor of mscale_all_dim"},
        {{10, 8, 4, 6, 5, YARN(", \"mscale\": 1e30, \"mscale_all_dim\": 1.0"), Q_A},
         "the attention factor of mscale 1.2"},
        {{10, 8, 4, 6, 5, "\"scoring_func\": \"softmax\"", Q_A}, "scoring_func \"softmax\" is not supported"},
        {{10, 8, 4, 6, 5, "\"topk_method\": \"greedy\"", Q_A}, "topk_method \"greedy\" is not supported"},
        {{10, 8, 4, 6, 5, "\"moe_layer_freq\": 2", Q_A}, "moe_layer_freq 2 is not supported"},
    };
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct arch a;
        struct err err = {.msg = ""};
        assert_int_equal(arch_load(&a, write_config(config_text(&rows[i].s)), &err), -1);
        if (!strstr(err.msg, rows[i].says)) fail_msg("%s: %s", rows[i].says, err.msg);
    }
}

/* Mistral Small 4: a share of each head is rotated, queries grow with their position, the router is a softmax. */
static void mistral_is_read(void **state)
{
    (void)state;
#define MISTRAL                                                                                                        \
    "{\"model_type\": \"mistral4\", \"num_hidden_layers\": 2, \"hidden_size\": 40, \"num_attention_heads\": 3, "       \
    "\"vocab_size\": 40, \"intermediate_size\": 32, \"moe_intermediate_size\": 8, \"n_routed_experts\": 4, "           \
    "\"num_experts_per_tok\": 2, \"q_lora_rank\": 10, \"kv_lora_rank\": 8, \"qk_nope_head_dim\": 4, "                  \
    "\"qk_rope_head_dim\": 4, \"v_head_dim\": 5, \"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 128.0, "   \
    "\"original_max_position_embeddings\": 8192, \"mscale\": 1.0, \"mscale_all_dim\": 1.0, "
    static const struct {
        const char *more, *says; /* says NULL: read */
    } rows[] = {
        {"\"llama_4_scaling_beta\": 0.1, \"partial_rotary_factor\": 0.5}}", NULL},
        {"\"llama_4_scaling_beta\": -0.1}}", "llama_4_scaling_beta -0.1 is negative"},
        {"\"llama_4_scaling_beta\": 1e30}}", "llama_4_scaling_beta 1e+30 is not between 0.001 and 1000"},
        {"\"partial_rotary_factor\": 0.5, \"attention_factor\": -1}}", "attention_factor -1 is not between"},
        {"\"partial_rotary_factor\": 0.25}}", "partial_rotary_factor 0.25 is not supported"},
        {"\"rope_theta\": 1e4}, \"routed_scaling_factor\": 2.5}", "routed_scaling_factor 2.5 is not supported with"},
        {"\"rope_theta\": 1e4}, \"n_group\": 2}", "n_group 2 is not supported with a softmax router"},
    };
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct arch a;
        struct err err = {.msg = ""};
        char text[1024];
        snprintf(text, sizeof(text), "%s%s", MISTRAL, rows[i].more);
        if (arch_load(&a, write_config(text), &err) != (rows[i].says ? -1 : 0)) fail_msg("row %d: %s", (int)i, err.msg);
        if (rows[i].says && !strstr(err.msg, rows[i].says)) fail_msg("%s: %s", rows[i].says, err.msg);
        if (rows[i].says) continue;
        assert_true(a.rope[0].query_beta == 0.1 && a.rope[0].original_len == 8192 && a.rope[0].width == 4);
        assert_int_equal(export_family_check(EXPORT_VLLM, &a, &err), -1); /* no program reads the text part alone */
        assert_int_equal(export_family_check(EXPORT_PEFT, &a, &err), 0);
        assert_true(a.router.kind == ROUTER_CHOSEN && !a.router_bias && !a.dense[0] && a.d_shared == 8);
        assert_close((double)a.attn[0].scale, pow(0.1 * log(128) + 1, 2) / sqrt(8), 1e-6);
    }
}

/* A target that this model does not have is an error that names those it has. */
static void other_targets_are_refused(void **state)
{
    (void)state;
    struct arch a;
    struct adapters ad;
    struct err err = {.msg = ""};
    const struct lora_options opt = {.r = 2, .alpha = 4, .targets = "q_proj,o_proj", .layers = ""};
    if (arch_load(&a, write_config(config_text(&sizes[0])), &err)) fail_msg("%s", err.msg);
    assert_int_equal(adapters_plan(&ad, &a, &opt, &err), -1);
    assert_string_equal(err.msg,
                        "lora.targets: \"q_proj\" matches nothing: the targets of deepseek_v3 are "
                        "o_proj, q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, dense_gate_proj, dense_up_proj, "
                        "dense_down_proj; for all of attention and other mixers write mixers, for all targets "
                        "all-linear");
}

/* Sizes that the CUDA kernels do not support are errors when the model is opened. */
static void sizes_for_a_gpu(void **state)
{
    (void)state;
    static const struct {
        struct sizes s;
        const char *says; /* NULL: supported */
    } rows[] = {
        {{8, 16, 16, 16, 24, "\"rope_theta\": 100", ""}, NULL},
        {{8, 16, 248, 16, 16, "\"rope_theta\": 100", ""},
         "qk_nope_head_dim + qk_rope_head_dim is 264; the CUDA kernels need a multiple of 8 from 8 to 256"},
        {{8, 16, 16, 16, 12, "\"rope_theta\": 100", ""}, "v_head_dim is 12; the CUDA kernels need a multiple of 8"},
        {{8, 16, 16, 16, 264, "\"rope_theta\": 100", ""}, "v_head_dim is 264"},
        {{8, 16, 10, 6, 16, "\"rope_theta\": 100", ""},
         "qk_rope_head_dim is 6; the CUDA kernels need a multiple of 16"},
        {{10, 16, 16, 16, 16, "\"rope_theta\": 100", ""}, "q_lora_rank is 10; the CUDA kernels need a multiple of 8"},
        {{8, 12, 16, 16, 16, "\"rope_theta\": 100", ""}, "kv_lora_rank is 12; the CUDA kernels need a multiple of 8"},
    };
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct err err = {.msg = ""};
        const int rc = whole_model_open_gpu(write_model(&rows[i].s), "all-linear", &err);
        if (rc != (rows[i].says ? -1 : 0) || (rc && !strstr(err.msg, rows[i].says)))
            fail_msg("row %d: %s", (int)i, err.msg);
    }
}

static void all_linear_is_every_target(void **state)
{
    (void)state;
    struct arch a;
    struct adapters ad;
    struct err err = {.msg = ""};
    const struct lora_options opt = {
        .r = 2, .alpha = 4, .targets = "all-linear", .ranks = "all-linear=3", .layers = ""};
    if (arch_load(&a, fixture("parity/glm4_lite"), &err)) fail_msg("%s", err.msg);
    if (adapters_plan(&ad, &a, &opt, &err)) fail_msg("%s", err.msg);
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) {
        const bool has = (t >= LORA_O && t <= LORA_KV_B) || t == LORA_UP || t == LORA_DOWN ||
                         lora_target_is_shared(t) || lora_target_is_dense(t);
        if (ad.target[t] != has) fail_msg("%s", lora_target_name(t));
        assert_int_equal(ad.rank[t], has ? 3 : 2);
    }
    adapters_free(&ad);
}

/* Dropout of each product has a separate stream of random numbers. */
static void products_drop_different_elements(void **state)
{
    (void)state;
    enum { PRODUCTS = 6 }; /* of a layer: q_a with kv_a, o, kv_b, q_b, gate with up, down */
    struct run r;
    struct config cfg;
    struct product p[LAYER_PRODUCTS];
    uint64_t keys[LAYERS * LAYER_PRODUCTS];
    int n = 0;
    whole_model_open(&r, &cfg, write_model(&sizes[0]), sizes[0].targets, CFG_RECOMPUTE_NONE);
    double *grad = mem_array(r.model.adapters.n_flat, sizeof(*grad));
    whole_model_loss_of_12(&r.model, grad);
    for (int64_t l = 0; l < LAYERS; l++) {
        layer_products(&r.arch, l, p);
        for (int i = 0; i < LAYER_PRODUCTS; i++)
            if (p[i].n_out) keys[n++] = layer_proj(&r.model.weights.layers[l], &p[i])->lora.dropout_key;
    }
    assert_int_equal(n, LAYERS * PRODUCTS);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < i; k++) assert_true(keys[i] != keys[k]);
    mem_free(grad);
    run_close(&r);
}

int test_mla(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients),
        cmocka_unit_test(recomputation),
        cmocka_unit_test(products_drop_different_elements),
        cmocka_unit_test(packed_equals_separate),
        cmocka_unit_test(fp8_blocks_are_read),
        cmocka_unit_test(sizes_are_read),
        cmocka_unit_test(layer_kinds_are_read),
        cmocka_unit_test(missing_router_keys_have_defaults),
        cmocka_unit_test(bad_sizes_are_refused),
        cmocka_unit_test(mistral_is_read),
        cmocka_unit_test(other_targets_are_refused),
        cmocka_unit_test(all_linear_is_every_target),
        cmocka_unit_test(sizes_for_a_gpu),
    };
    return cmocka_run_group_tests_name("mla", tests, NULL, NULL);
}

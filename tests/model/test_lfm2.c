/* test_lfm2.c - LFM2-MoE: config.json, refused values, targets by PEFT's words, finite differences with other widths
 * and biases of the convolution, recomputation, packed documents, names of tensors in exports. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/gguf.h"
#include "model/layer.h"
#include "model/lora_table.h"
#include "tests/checkpoints.h"
#include "tests/process.h"
#include "tests/whole_model.h"
#include "train/adapter/peft.h"

#define CASE "parity/lfm2"
#define CONFIG                                                                                                         \
    "{\"model_type\": \"lfm2_moe\", \"num_hidden_layers\": 4, \"hidden_size\": 32, \"num_attention_heads\": 4, "       \
    "\"num_key_value_heads\": 2, \"intermediate_size\": 48, \"moe_intermediate_size\": 24, \"vocab_size\": 100, "      \
    "\"num_experts_per_tok\": 2, \"num_experts\": 8, "
#define KINDS "\"layer_types\": [\"conv\", \"conv\", \"full_attention\", \"conv\"]"

static int parse(struct arch *a, const char *more, struct err *err)
{
    char text[1024];
    const int n = snprintf(text, sizeof(text), "%s%s}", CONFIG, more);
    struct json_doc *doc = json_parse(text, n, "config.json", err);
    if (!doc) fail_msg("%s", err->msg);
    const int rc = arch_parse(a, json_root(doc), err);
    json_free(doc);
    return rc;
}

static struct arch parsed(const char *more)
{
    struct arch a;
    struct err err;
    if (parse(&a, more, &err)) fail_msg("%s: %s", more, err.msg);
    return a;
}

static void config_values(void **state)
{
    (void)state;
    const struct arch a = parsed(KINDS);
    for (int l = 0; l < 4; l++) {
        assert_ptr_equal(a.mixer[l], l == 2 ? &mixer_attention : &mixer_shortconv);
        assert_ptr_equal(a.ffn[l], l < 2 ? &ffn_dense : &ffn_moe); /* num_dense_layers is 2 by default */
    }
    assert_true(a.attn[0].head_dim == 8 && a.qk_norm == QK_NORM_HEAD && a.rope[0].width == 8 &&
                a.rope[0].theta == 1000000);
    assert_true(a.conv.n_tap == 3 && !a.conv.bias && a.d_dense == 48 && a.d_ff == 24 && a.tied);
    assert_true(a.norm.eps == 1e-5f && a.norm.round_twice && a.router_bias && a.max_len == 128000);
    assert_true(a.router.kind == ROUTER_SIGMOID_CHOSEN && a.router.floor == 1e-6f && a.router.scale == 1);
    const struct arch b = parsed(KINDS ", \"conv_L_cache\": 5, \"conv_bias\": true, \"num_dense_layers\": 0, "
                                       "\"norm_eps\": 0.001, \"tie_word_embeddings\": true, \"tie_embedding\": false, "
                                       "\"use_expert_bias\": false, \"norm_topk_prob\": false, "
                                       "\"routed_scaling_factor\": 2, \"head_dim\": 16");
    assert_true(b.conv.n_tap == 5 && b.conv.bias && b.ffn[0] == &ffn_moe && b.norm.eps == 1e-3f && !b.tied);
    assert_true(!b.router_bias && b.router.kind == ROUTER_SIGMOID && b.router.scale == 2 && b.attn[0].head_dim == 16);
    assert_false(parsed(KINDS ", \"tie_word_embeddings\": false").tied);
}

static void refused_values(void **state)
{
    (void)state;
    static const struct {
        const char *more, *says;
    } rows[] = {
        {"\"conv_bias\": false", "key `layer_types` is missing"},
        {"\"layer_types\": [\"conv\"]", "layer_types`: is not a list of 4 names"},
        {"\"layer_types\": [\"conv\", \"conv\", \"linear_attention\", \"conv\"]",
         "layer_types[2]`: \"linear_attention\" is not supported (conv, full_attention)"},
        {KINDS ", \"conv_L_cache\": 0", "conv_L_cache"},
        {KINDS ", \"conv_L_cache\": 33", "conv_L_cache"},
        {KINDS ", \"norm_eps\": 0", "norm_eps 0 is not at least"},
        {KINDS ", \"num_dense_layers\": -1", "num_dense_layers"},
        {KINDS ", \"scoring_func\": \"softmax\"", "scoring_func \"softmax\" is not supported (sigmoid)"},
        {KINDS ", \"rope_parameters\": {\"partial_rotary_factor\": 0.5}", "partial_rotary_factor 0.5"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct arch a;
        struct err err = {.msg = ""};
        if (!parse(&a, rows[i].more, &err)) fail_msg("%s: accepted", rows[i].more);
        if (!strstr(err.msg, rows[i].says)) fail_msg("%s: %s", rows[i].more, err.msg);
    }
}

/* lora.targets takes PEFT's names out_proj and in_proj; the table of adapters names the mixers without adapters. */
static void targets(void **state)
{
    (void)state;
    const struct arch a = parsed(KINDS);
    static const struct {
        const char *targets, *same, *missed;
    } rows[] = {{"out_proj", "o_proj,conv_out_proj", NULL},
                {"in_proj", "conv_in_proj", "1 of 4 layers have no adapters of their attention"},
                {"q_proj,o_proj", "o_proj,q_proj", "3 of 4 layers have no adapters of their short convolutions"},
                {"mixers", "q_proj,k_proj,v_proj,out_proj,in_proj", NULL},
                {"all-linear", "mixers,experts,dense", NULL}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct adapters ad[2];
        struct err err = {.msg = ""};
        char missed[200] = "";
        for (int k = 0; k < 2; k++) {
            const struct lora_options opt = {
                .r = 2, .alpha = 4, .layers = "", .targets = k ? rows[i].same : rows[i].targets};
            if (adapters_plan(&ad[k], &a, &opt, &err)) fail_msg("%s", err.msg);
        }
        assert_int_equal(ad[0].n_params, ad[1].n_params);
        assert_memory_equal(ad[0].target, ad[1].target, sizeof(ad[0].target));
        assert_int_equal(lora_table_missed(&ad[0], &a, missed, sizeof(missed)), rows[i].missed != NULL);
        if (rows[i].missed && !strstr(missed, rows[i].missed)) fail_msg("%s", missed);
        adapters_free(&ad[0]);
        adapters_free(&ad[1]);
    }
    struct adapters ad;
    struct err err = {.msg = ""};
    const struct lora_options ranks = {
        .r = 2, .alpha = 4, .layers = "", .targets = "all-linear", .ranks = "out_proj=5", .alphas = "in_proj=3"};
    if (adapters_plan(&ad, &a, &ranks, &err)) fail_msg("%s", err.msg);
    assert_true(ad.rank[LORA_O] == 5 && ad.rank[LORA_CONV_OUT] == 5 && ad.rank[LORA_CONV_IN] == 2 &&
                ad.alpha_of[LORA_CONV_IN] == 3 && ad.alpha_of[LORA_CONV_OUT] == 4);
    adapters_free(&ad);
    const struct lora_options short_name = {.r = 2, .alpha = 4, .layers = "", .targets = "w1"};
    assert_int_equal(adapters_plan(&ad, &a, &short_name, &err), -1);
    assert_non_null(strstr(err.msg, "\"w1\": write experts, or dense for layers without experts"));
}

/* The case with another convolution: its width, and biases of convolution and projections. */
static const char *with_conv(int64_t n_tap, bool biased)
{
    static const struct {
        const char *name;
        int64_t n;
    } biases[] = {{"conv.in_proj.bias", 120}, {"conv.conv.bias", 40}, {"conv.out_proj.bias", 40}};
    struct draft d;
    char text[32];
    draft_open_case(&d, CASE);
    snprintf(text, sizeof(text), "\"conv_L_cache\": %lld", (long long)n_tap);
    draft_config(&d, "\"conv_L_cache\": 3", text);
    if (biased) draft_config(&d, "\"conv_bias\": false", "\"conv_bias\": true");
    for (int64_t l = 0; l < 4; l += 2) {
        char name[64];
        float *w = mem_array(40 * n_tap, sizeof(*w));
        for (int64_t i = 0; i < 40 * n_tap; i++) w[i] = (float)test_value(7 + (uint64_t)l, (uint64_t)i);
        snprintf(name, sizeof(name), "model.layers.%lld.conv.conv.weight", (long long)l);
        draft_put(&d, name, DT_F32, 3, (int64_t[]){40, 1, n_tap}, w);
        for (int i = 0; i < MT_LEN(biases) && biased; i++)
            draft_random(&d, "model.", l, biases[i].name, biases[i].n, 0);
    }
    const char *dir = draft_save(&d, 1);
    draft_free(&d);
    return dir;
}

static void gradients(void **state)
{
    (void)state;
    const char *const dirs[] = {fixture(CASE), with_conv(1, true), with_conv(7, true)};
    for (int i = 0; i < MT_LEN(dirs); i++) {
        struct config cfg;
        struct run r;
        whole_model_open(&r, &cfg, dirs[i], "all-linear", CFG_RECOMPUTE_NONE);
        whole_model_check_slopes(&r);
        run_close(&r);
        whole_model_check_recomputation(dirs[i], "all-linear");
        whole_model_check_packing(dirs[i], "all-linear");
    }
}

/* A bias that config.json does not announce. */
static void unannounced_bias(void **state)
{
    (void)state;
    struct draft d;
    draft_open_case(&d, CASE);
    draft_random(&d, "model.", 2, "conv.conv.bias", 40, 0);
    assert_draft_refused(&d, "conv_bias");
    draft_free(&d);
}

static const char *config_of(void)
{
    static char path[MT_PATH];
    char config[8 * MT_PATH];
    struct err err;
    const char *dir = scratch_dir(), *of = fixture(CASE);
    snprintf(config, sizeof(config),
             "[model]\npath = %s\n[data]\neval = %s/eval.jsonl\nformat = text\nseq_len = 24\n[output]\ndir = %s\n", of,
             of, dir);
    snprintf(path, sizeof(path), "%s/c.ini", dir);
    if (file_write_atomic(path, config, (int64_t)strlen(config), &err)) fail_msg("%s", err.msg);
    return path;
}

static const char *exported(const char *format)
{
    static char out[MT_PATH];
    snprintf(out, sizeof(out), "%s/%s", scratch_dir(), format);
    if (RUN("export", config_of(), "--to", format, "--adapter", fixture(CASE "/adapter_final"), "--out", out))
        fail_msg("%s: %s%s", format, said.out, said.err);
    return out;
}

static void assert_tensors(const char *dir, const char *const *names, int64_t n)
{
    struct safetensors st;
    struct err err;
    char path[MT_PATH];
    snprintf(path, sizeof(path), "%s/adapter_model.safetensors", dir);
    if (safetensors_open(&st, path, &err)) fail_msg("%s", err.msg);
    for (int64_t i = 0; i < n; i++)
        if (!safetensors_find(&st, names[i])) fail_msg("%s has no %s", dir, names[i]);
    safetensors_close(&st);
}

#define L "base_model.model.model.layers."
/* Names of PEFT, vLLM and llama.cpp; export itself compares the values. */
static void names_in_exports(void **state)
{
    (void)state;
    static const char *const peft[] = {L "0.conv.in_proj.lora_A.weight",
                                       L "2.conv.out_proj.lora_B.weight",
                                       L "1.self_attn.out_proj.lora_A.weight",
                                       L "0.feed_forward.w1.lora_A.weight",
                                       L "0.feed_forward.w2.lora_B.weight",
                                       L "3.feed_forward.experts.lora_A.weight",
                                       L "3.feed_forward.experts.base_layer.lora_B.weight"};
    static const char *const vllm[] = {
        L "0.conv.in_proj.lora_A.weight", L "3.self_attn.out_proj.lora_B.weight", L "0.feed_forward.w3.lora_A.weight",
        L "2.feed_forward.experts.5.w1.lora_A.weight", L "2.feed_forward.experts.0.w2.lora_B.weight"};
    static const char *const gguf[] = {"blk.0.shortconv.in_proj.weight.lora_a",
                                       "blk.2.shortconv.out_proj.weight.lora_b", "blk.1.attn_output.weight.lora_a",
                                       "blk.0.ffn_up.weight.lora_b", "blk.3.ffn_down_exps.weight.lora_a"};
    assert_tensors(exported("peft"), peft, MT_LEN(peft));
    assert_tensors(exported("vllm"), vllm, MT_LEN(vllm));
    struct gguf g;
    struct err err;
    char path[MT_PATH];
    snprintf(path, sizeof(path), "%s/adapter.gguf", exported("gguf"));
    if (gguf_open(&g, path, &err)) fail_msg("%s", err.msg);
    assert_string_equal(gguf_value(&g, "general.architecture")->text, "lfm2moe");
    for (int i = 0; i < MT_LEN(gguf); i++)
        if (!gguf_tensor(&g, gguf[i])) fail_msg("no %s", gguf[i]);
    gguf_close(&g);
}

/* The merged checkpoint has the tensors of the source, without a head. */
static void merged_tensors(void **state)
{
    (void)state;
    struct safetensors from, to;
    struct err err;
    const char *dir = exported("merged-bf16");
    if (safetensors_open(&from, fixture(CASE), &err) || safetensors_open(&to, dir, &err)) fail_msg("%s", err.msg);
    assert_int_equal(from.n_tensors, to.n_tensors);
    for (int64_t i = 0; i < from.n_tensors; i++) {
        const struct st_tensor *a = &from.tensors[i], *b = safetensors_find(&to, a->name);
        if (!b || a->dtype != b->dtype || a->bytes != b->bytes) fail_msg("%s", a->name);
        const bool same = !memcmp(a->data, b->data, (size_t)a->bytes);
        const bool adapted = strstr(a->name, "_proj.weight") || strstr(a->name, ".w1.") || strstr(a->name, ".w2.") ||
                             strstr(a->name, ".w3.");
        if (same == adapted) fail_msg("%s is %s", a->name, same ? "unchanged" : "changed");
    }
    safetensors_close(&from);
    safetensors_close(&to);
}

/* An adapter of PEFT whose rank_pattern and alpha_pattern have PEFT's names: `out_proj` is the output projection of
 * attention and of the convolution. */
static void patterns_of_peft(void **state)
{
    (void)state;
    struct adapters ad;
    struct arch a;
    struct err err = {.msg = ""};
    const char *dir = scratch_dir(), *of = fixture(CASE "/adapter_final");
    char from[MT_PATH], to[MT_PATH], text[1 << 14], edited[1 << 14];
    snprintf(from, sizeof(from), "%s/adapter_model.safetensors", of);
    snprintf(to, sizeof(to), "%s/adapter_model.safetensors", dir);
    if (symlink(from, to)) fail_msg("%s", to);
    snprintf(from, sizeof(from), "%s/adapter_config.json", of);
    snprintf(to, sizeof(to), "%s/adapter_config.json", dir);
    process_read(from, text, sizeof(text));
    const char *at = strstr(text, "\"alpha_pattern\": {}");
    assert_non_null(at);
    snprintf(edited, sizeof(edited), "%.*s\"alpha_pattern\": {\"out_proj\": 8, \"in_proj\": 32, \"w1\": 4}%s",
             (int)(at - text), text, at + strlen("\"alpha_pattern\": {}"));
    if (file_write_atomic(to, edited, (int64_t)strlen(edited), &err)) fail_msg("%s", err.msg);
    if (arch_load(&a, fixture(CASE), &err) || peft_plan(&ad, &a, dir, &err)) fail_msg("%s", err.msg);
    assert_true(ad.target[LORA_O] && ad.target[LORA_CONV_IN] && ad.target[LORA_DENSE_DOWN]);
    assert_true(ad.alpha_of[LORA_O] == 8 && ad.alpha_of[LORA_CONV_OUT] == 8 && ad.alpha_of[LORA_CONV_IN] == 32 &&
                ad.alpha_of[LORA_DENSE_GATE] == 4 && ad.alpha_of[LORA_Q] == 16);
    adapters_free(&ad);
}

int test_lfm2(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(config_values),  cmocka_unit_test(refused_values),   cmocka_unit_test(targets),
        cmocka_unit_test(gradients),      cmocka_unit_test(unannounced_bias), cmocka_unit_test(names_in_exports),
        cmocka_unit_test(merged_tensors), cmocka_unit_test(patterns_of_peft),
    };
    return cmocka_run_group_tests_name("lfm2", tests, NULL, NULL);
}

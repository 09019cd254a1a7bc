/* test_minimax.c - MiniMax-M2: config.json as published and as transformers writes it, refused values, FP8 in blocks,
 * tensors of a merged checkpoint. */
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "kernels/format/quant.h"
#include "model/layer.h"
#include "tests/checkpoints.h"
#include "tests/process.h"

#define CONFIG                                                                                                         \
    "{\"model_type\": \"minimax_m2\", \"num_hidden_layers\": 3, \"hidden_size\": 32, \"num_attention_heads\": 4, "     \
    "\"num_key_value_heads\": 2, \"head_dim\": 16, \"intermediate_size\": 24, \"vocab_size\": 100, "                   \
    "\"num_experts_per_tok\": 2, \"num_local_experts\": 8%s%s}"

static int parse(struct arch *a, const char *more, struct err *err)
{
    char text[1024];
    const int n = snprintf(text, sizeof(text), CONFIG, *more ? ", " : "", more);
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
    const struct arch a = parsed("");
    assert_true(a.n_exp == 8 && a.top_k == 2 && a.d_ff == 24 && !a.d_shared && !a.dense[0]);
    assert_true(a.router.kind == ROUTER_SIGMOID_CHOSEN && a.router.scale == 1 && a.router.n_group == 1 &&
                a.router_bias);
    assert_true(a.qk_norm == QK_NORM_WHOLE && !a.attn_bias && !a.tied && a.norm.round_twice && a.norm.eps == 1e-6f);
    assert_true(a.rope[0].theta == 5000000 && a.rope[0].width == 16); /* neither key: all channels */
    assert_int_equal(a.max_len, 196608);
    static const struct {
        const char *more;
        int64_t width;
    } rows[] = {{"\"rotary_dim\": 8", 8},
                {"\"rotary_dim\": 4, \"rope_theta\": 5000000", 4},
                {"\"partial_rotary_factor\": 0.5", 8},
                {"\"rope_parameters\": {\"partial_rotary_factor\": 0.25}", 4},
                {"\"rotary_dim\": 8, \"partial_rotary_factor\": 0.5", 8},
                {"\"rotary_dim\": 8, \"rope_parameters\": {\"partial_rotary_factor\": 0.5, \"rope_theta\": 1e4}", 8},
                {"\"rotary_dim\": null", 16}};
    for (int i = 0; i < MT_LEN(rows); i++) assert_int_equal(parsed(rows[i].more).rope[0].width, rows[i].width);
    const struct arch published = parsed(
        "\"use_qk_norm\": true, \"qk_norm_type\": \"per_layer\", \"use_routing_bias\": true, \"use_mtp\": true, "
        "\"mtp_transformer_layers\": 2, \"num_mtp_modules\": 3, \"shared_intermediate_size\": 0, \"scoring_func\": "
        "\"sigmoid\", \"attn_type_list\": [1, 1, 1], \"router_jitter_noise\": 0.0, \"layernorm_mlp_beta\": 1.0");
    assert_int_equal(published.n_mtp, 6);
    assert_true(arch_is_prediction(&published, "model.layers.8.mlp.gate.weight"));
    assert_false(arch_is_prediction(&published, "model.layers.9.mlp.gate.weight"));
}

static void refused_values(void **state)
{
    (void)state;
    static const struct {
        const char *more, *says;
    } rows[] = {
        {"\"qk_norm_type\": \"per_head\"", "qk_norm_type`: \"per_head\" is not supported (per_layer)"},
        {"\"use_qk_norm\": false", "use_qk_norm`: false is not supported (true)"},
        {"\"use_routing_bias\": false", "use_routing_bias`: false is not supported (true)"},
        {"\"attn_type_list\": [1, 0, 1]", "attn_type_list[1]`: 0 is not supported (1)"},
        {"\"attn_type_list\": 1", "attn_type_list`: is not a list"},
        {"\"shared_intermediate_size\": 48", "shared_intermediate_size`: 48 is not supported (0)"},
        {"\"layernorm_mlp_beta\": 3.5", "layernorm_mlp_beta`: 3.5 is not supported (1)"},
        {"\"layernorm_full_attention_beta\": 2", "layernorm_full_attention_beta`: 2 is not supported (1)"},
        {"\"routed_scaling_factor\": 2.5", "routed_scaling_factor`: 2.5 is not supported (1)"},
        {"\"n_group\": 2", "n_group`: 2 is not supported (1)"},
        {"\"scoring_func\": \"softmax\"", "scoring_func \"softmax\" is not supported (sigmoid)"},
        {"\"router_jitter_noise\": 0.1", "router_jitter_noise 0.1 is not supported (0)"},
        {"\"rotary_dim\": 18", "rotary_dim"},
        {"\"rotary_dim\": 7", "no pairs"},
        {"\"rotary_dim\": 8, \"partial_rotary_factor\": 1",
         "rotary_dim`: is 8, but partial_rotary_factor rotates 16 of 16 channels"},
        {"\"rotary_dim\": 4, \"rope_parameters\": {\"partial_rotary_factor\": 0.5}",
         "rotary_dim`: is 4, but partial_rotary_factor rotates 8 of 16 channels"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct arch a;
        struct err err = {.msg = ""};
        if (!parse(&a, rows[i].more, &err)) fail_msg("%s: accepted", rows[i].more);
        if (!strstr(err.msg, rows[i].says)) fail_msg("%s: %s", rows[i].more, err.msg);
    }
}

/* Attention and experts in FP8 with a scale per block of 128 x 128, as published, load as the same model as the decoded
 * values. The router and the head stay dense. */
static void published_fp8(void **state)
{
    (void)state;
    const char *dirs[2];
    for (int decoded = 0; decoded < 2; decoded++) {
        const struct linear_form form = {.format = WF_F32, .fp8 = FP8_BLOCKS_INV, .decoded = decoded};
        struct draft d;
        draft_open_case(&d, "parity/minimax_m2");
        for (int64_t i = 0, n = d.n; i < n; i++) {
            char name[128];
            const int64_t out = d.entries[i].shape[0], in = d.entries[i].shape[1];
            snprintf(name, sizeof(name), "%s", d.entries[i].name);
            if (!strstr(name, "_proj.weight") && !strstr(name, ".experts.")) continue;
            float *x = draft_values(&d, name);
            draft_linear(&d, name, x, out, in, &form);
            mem_free(x);
            assert_int_equal(draft_find(&d, name)->shape[1], in);
        }
        dirs[decoded] = draft_save(&d, 1);
        draft_free(&d);
    }
    assert_same_model(dirs[0], dirs[1]);
}

/* A merged checkpoint has every tensor of the source once, and the router's bias with the same bytes. */
static void merged_tensors(void **state)
{
    (void)state;
    char config[8 * MT_PATH], path[MT_PATH];
    const char *dir = scratch_dir(), *of = fixture("parity/minimax_m2");
    struct safetensors from, to;
    struct err err;
    snprintf(config, sizeof(config),
             "[model]\npath = %s\n[data]\neval = %s/eval.jsonl\nformat = text\nseq_len = 24\n[output]\ndir = %s\n", of,
             of, dir);
    snprintf(path, sizeof(path), "%s/c.ini", dir);
    if (file_write_atomic(path, config, (int64_t)strlen(config), &err)) fail_msg("%s", err.msg);
    const char *adapter = fixture("parity/minimax_m2/adapter_final");
    char out[MT_PATH + 8];
    snprintf(out, sizeof(out), "%s/merged", dir);
    if (RUN("export", path, "--to", "merged-bf16", "--adapter", adapter, "--out", out))
        fail_msg("%s%s", said.out, said.err);
    if (safetensors_open(&from, of, &err) || safetensors_open(&to, out, &err)) fail_msg("%s", err.msg);
    assert_int_equal(from.n_tensors, to.n_tensors);
    for (int64_t i = 0; i < from.n_tensors; i++) {
        const struct st_tensor *a = &from.tensors[i], *b = safetensors_find(&to, a->name);
        if (!b || a->dtype != b->dtype || a->bytes != b->bytes) fail_msg("%s", a->name);
        if (strstr(a->name, "block_sparse_moe.e_score_correction_bias") || strstr(a->name, "norm"))
            assert_memory_equal(a->data, b->data, (size_t)a->bytes);
    }
    safetensors_close(&from);
    safetensors_close(&to);
}

int test_minimax(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(config_values),
        cmocka_unit_test(refused_values),
        cmocka_unit_test(published_fp8),
        cmocka_unit_test(merged_tensors),
    };
    return cmocka_run_group_tests_name("minimax", tests, NULL, NULL);
}

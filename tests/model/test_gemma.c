/* test_gemma.c - Gemma-4: config.json as published and as transformers 5.17 writes it, refused values, names of tensors
 * in exports, tensors of a merged checkpoint. */
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "data/gguf.h"
#include "model/layer.h"
#include "tests/checkpoints.h"
#include "tests/process.h"

#define CASE "parity/gemma4"
#define CONFIG                                                                                                         \
    "\"num_hidden_layers\": 4, \"hidden_size\": 32, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "          \
    "\"head_dim\": 8, \"intermediate_size\": 48, \"moe_intermediate_size\": 24, \"vocab_size\": 100, "                 \
    "\"num_experts\": 8, \"top_k_experts\": 2"
#define MOE ", \"enable_moe_block\": true, \"hidden_size_per_layer_input\": 0"

enum { FULL, SLIDING };

static int parse(struct arch *a, const char *before, const char *more, const char *after, struct err *err)
{
    char text[2048];
    const int n = snprintf(text, sizeof(text), "%s%s%s}%s", before, CONFIG, more, after);
    struct json_doc *doc = json_parse(text, n, "config.json", err);
    if (!doc) fail_msg("%s: %s", text, err->msg);
    const int rc = arch_parse(a, json_root(doc), err);
    json_free(doc);
    return rc;
}

static struct arch parsed(const char *more)
{
    struct arch a;
    struct err err;
    if (parse(&a, "{\"model_type\": \"gemma4_text\", ", more, "", &err)) fail_msg("%s: %s", more, err.msg);
    return a;
}

static void config_values(void **state)
{
    (void)state;
    const struct arch a = parsed(MOE);
    for (int l = 0; l < 4; l++) assert_int_equal(a.attn_of[l], l < 3 ? SLIDING : FULL); /* the last one is full */
    const struct attn_arch *full = &a.attn[FULL], *sliding = &a.attn[SLIDING];
    assert_true(full->head_dim == 512 && full->n_kv == 2 && !full->values_are_keys && full->scale == 1);
    assert_true(sliding->head_dim == 8 && sliding->n_kv == 2 && sliding->window == 512 && sliding->scale == 1);
    assert_true(a.rope[FULL].width == 512 && a.rope[FULL].n_pair == 64 && a.rope[FULL].theta == 1e6);
    assert_true(a.rope[SLIDING].width == 8 && a.rope[SLIDING].theta == 1e4);
    assert_true(a.tied && a.value_norm && a.embed_scaled && a.logit_cap == 0 && a.d_dense == 48 && a.d_ff == 24);
    const struct arch b = parsed(MOE ", \"attention_k_eq_v\": true, \"num_global_key_value_heads\": 1, "
                                     "\"global_head_dim\": 16, \"sliding_window\": 7, "
                                     "\"final_logit_softcapping\": 30, \"tie_word_embeddings\": false");
    assert_true(b.attn[FULL].values_are_keys && !b.attn[SLIDING].values_are_keys && b.attn[SLIDING].window == 7);
    assert_true(b.attn[FULL].head_dim == 16 && b.attn[FULL].n_kv == 1 && b.logit_cap == 30 && !b.tied);
    /* as in transformers: num_global_key_value_heads applies only with attention_k_eq_v */
    assert_int_equal(parsed(MOE ", \"num_global_key_value_heads\": 1").attn[FULL].n_kv, 2);
    const struct arch c = parsed(MOE ", \"global_head_dim\": 64, \"per_layer_config\": {\"3\": {\"head_dim\": 16, "
                                     "\"num_key_value_heads\": 4}, \"1\": {}}");
    assert_true(c.attn[FULL].head_dim == 16 && c.attn[FULL].n_kv == 4 && c.attn[SLIDING].head_dim == 8);
    assert_int_equal(parsed(MOE ", \"per_layer_config\": {}").attn[FULL].head_dim, 8);
    const struct arch d = parsed(MOE ", \"rope_parameters\": {\"full_attention\": {\"rope_type\": \"proportional\", "
                                     "\"rope_theta\": 50, \"partial_rotary_factor\": 0.5}, \"sliding_attention\": "
                                     "{\"rope_theta\": 20}}");
    assert_true(d.rope[FULL].n_pair == 128 && d.rope[FULL].theta == 50 && d.rope[SLIDING].theta == 20);
}

/* With a vision tower tie_word_embeddings outside text_config counts, and is true where it is missing. */
static void tied_head(void **state)
{
    (void)state;
    static const struct {
        const char *inside, *outside;
        bool tied;
    } rows[] = {
        {"", "", true},
        {", \"tie_word_embeddings\": false", "", true},
        {", \"tie_word_embeddings\": true", ", \"tie_word_embeddings\": false", false},
        {"", ", \"tie_word_embeddings\": false", false},
        {", \"tie_word_embeddings\": false", ", \"tie_word_embeddings\": true", true},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct arch a;
        struct err err;
        char more[256], after[128];
        snprintf(more, sizeof(more), MOE "%s", rows[i].inside);
        snprintf(after, sizeof(after), "%s}", rows[i].outside);
        if (parse(&a, "{\"model_type\": \"gemma4\", \"text_config\": {", more, after, &err)) fail_msg("%s", err.msg);
        if (a.tied != rows[i].tied) fail_msg("row %d: %d", i, a.tied);
    }
}

static void refused_values(void **state)
{
    (void)state;
    static const struct {
        const char *more, *says;
    } rows[] = {
        {"", "enable_moe_block is not true: a dense model"},
        {", \"enable_moe_block\": true", "hidden_size_per_layer_input 256 is not supported (0)"},
        {MOE ", \"num_kv_shared_layers\": 2", "num_kv_shared_layers 2 is not supported (0)"},
        {MOE ", \"use_bidirectional_attention\": \"all\"", "use_bidirectional_attention \"all\" is not supported"},
        {MOE ", \"hidden_activation\": \"silu\"", "hidden_activation \"silu\" is not supported (gelu_pytorch_tanh)"},
        {MOE ", \"attention_dropout\": 0.1", "attention_dropout 0.1 is not supported (0)"},
        {MOE ", \"layer_types\": [\"full_attention\"]", "layer_types`: is not a list of 4 names"},
        {MOE ", \"layer_types\": [\"conv\", \"full_attention\", \"full_attention\", \"full_attention\"]",
         "\"conv\" is not supported (sliding_attention, full_attention)"},
        {MOE ", \"per_layer_config\": {\"4\": {\"head_dim\": 16}}", "\"4\" is no layer of 4"},
        {MOE ", \"per_layer_config\": {\"1\": {\"intermediate_size\": 16}}", "intermediate_size of a layer is not"},
        {MOE ", \"per_layer_config\": {\"1\": {\"head_dim\": 16}}", "layers of a kind need equal heads"},
        {MOE ", \"global_head_dim\": 15", "the width of heads of layer 3, 15, is odd"},
        {MOE ", \"attention_k_eq_v\": true, \"num_global_key_value_heads\": 3", "is no multiple of the 3 key heads"},
        {MOE ", \"final_logit_softcapping\": 0", "final_logit_softcapping"},
        {MOE ", \"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2}", "rope_scaling"},
        {MOE ", \"rope_parameters\": {\"sliding_attention\": {\"rope_theta\": 20}}", "has no settings of full_att"},
        {MOE ", \"rope_parameters\": {\"full_attention\": {\"rope_type\": \"yarn\", \"rope_theta\": 9}, "
             "\"sliding_attention\": {\"rope_theta\": 20}}",
         "rope_type \"yarn\" is not supported (default, proportional)"},
        {MOE ", \"rope_parameters\": {\"full_attention\": {\"rope_theta\": 9, \"partial_rotary_factor\": 0.5}, "
             "\"sliding_attention\": {\"rope_theta\": 20}}",
         "partial_rotary_factor 0.5 needs rope_type \"proportional\""},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct arch a;
        struct err err = {.msg = ""};
        if (!parse(&a, "{\"model_type\": \"gemma4_text\", ", rows[i].more, "", &err)) fail_msg("%s: ok", rows[i].more);
        if (!strstr(err.msg, rows[i].says)) fail_msg("%s: %s", rows[i].more, err.msg);
    }
}

/* ---- exports */

static int export_to(const char *format, char out[MT_PATH])
{
    char config[8 * MT_PATH], path[MT_PATH];
    struct err err;
    const char *dir = scratch_dir(), *of = fixture(CASE);
    snprintf(config, sizeof(config),
             "[model]\npath = %s\n[data]\neval = %s/eval.jsonl\nformat = text\nseq_len = 24\n[output]\ndir = %s\n", of,
             of, dir);
    snprintf(path, sizeof(path), "%s/c.ini", dir);
    snprintf(out, MT_PATH, "%s/%s", dir, format);
    if (file_write_atomic(path, config, (int64_t)strlen(config), &err)) fail_msg("%s", err.msg);
    return RUN("export", path, "--to", format, "--adapter", fixture(CASE "/adapter_final"), "--out", out);
}

#define L "base_model.model.model.language_model.layers."
/* Names of PEFT and llama.cpp, which keeps gate and up of an expert in one matrix; export itself compares the values.
 * vLLM does not apply adapters of the experts. */
static void names_in_exports(void **state)
{
    (void)state;
    static const char *const peft[] = {L "0.self_attn.v_proj.lora_A.weight", L "2.experts.base_layer.lora_A.weight",
                                       L "2.experts.lora_B.weight", L "1.mlp.gate_proj.lora_B.weight"};
    static const char *const gguf[] = {"blk.0.attn_v.weight.lora_a", "blk.1.attn_k.weight.lora_b",
                                       "blk.1.ffn_gate.weight.lora_b", "blk.2.ffn_gate_up_exps.weight.lora_b",
                                       "blk.2.ffn_down_exps.weight.lora_a"};
    char out[MT_PATH], path[MT_PATH + 32];
    struct safetensors st;
    struct gguf g;
    struct err err;
    if (export_to("peft", out)) fail_msg("%s%s", said.out, said.err);
    snprintf(path, sizeof(path), "%s/adapter_model.safetensors", out);
    if (safetensors_open(&st, path, &err)) fail_msg("%s", err.msg);
    for (int i = 0; i < MT_LEN(peft); i++)
        if (!safetensors_find(&st, peft[i])) fail_msg("no %s", peft[i]);
    assert_null(safetensors_find(&st, L "1.self_attn.v_proj.lora_A.weight")); /* values are keys */
    safetensors_close(&st);
    if (export_to("gguf", out)) fail_msg("%s%s", said.out, said.err);
    snprintf(path, sizeof(path), "%s/adapter.gguf", out);
    if (gguf_open(&g, path, &err)) fail_msg("%s", err.msg);
    assert_string_equal(gguf_value(&g, "general.architecture")->text, "gemma4");
    for (int i = 0; i < MT_LEN(gguf); i++)
        if (!gguf_tensor(&g, gguf[i])) fail_msg("no %s", gguf[i]);
    gguf_close(&g);
    assert_int_equal(export_to("vllm", out), 1);
    assert_says(said.err, "vLLM does not apply adapters of gate_up_proj, down_proj in gemma4");
}

/* The merged checkpoint has the tensors of the source; those without an adapter keep their bytes. */
static void merged_tensors(void **state)
{
    (void)state;
    struct safetensors from, to;
    struct err err;
    char out[MT_PATH];
    if (export_to("merged-bf16", out)) fail_msg("%s%s", said.out, said.err);
    if (safetensors_open(&from, fixture(CASE), &err) || safetensors_open(&to, out, &err)) fail_msg("%s", err.msg);
    assert_int_equal(from.n_tensors, to.n_tensors);
    for (int64_t i = 0; i < from.n_tensors; i++) {
        const struct st_tensor *a = &from.tensors[i], *b = safetensors_find(&to, a->name);
        if (!b || a->dtype != b->dtype || a->bytes != b->bytes) fail_msg("%s", a->name);
        const bool same = !memcmp(a->data, b->data, (size_t)a->bytes);
        const bool adapted = strstr(a->name, "language_model.layers.") && strstr(a->name, "_proj");
        if (same == adapted) fail_msg("%s is %s", a->name, same ? "unchanged" : "changed");
    }
    safetensors_close(&from);
    safetensors_close(&to);
}

int test_gemma(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(config_values),    cmocka_unit_test(tied_head),      cmocka_unit_test(refused_values),
        cmocka_unit_test(names_in_exports), cmocka_unit_test(merged_tensors),
    };
    return cmocka_run_group_tests_name("gemma", tests, NULL, NULL);
}

/* test_arch_values.c - in every family a key of config.json changes the values of arch_values.c, which a resumed run
 * compares, if and only if it changes the model. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/arch/arch_values.h"
#include "tests/process.h"

/* Keys that change the model in at least one family. */
static const char *const read_keys[] = {"num_hidden_layers",
                                        "hidden_size",
                                        "num_attention_heads",
                                        "num_key_value_heads",
                                        "head_dim",
                                        "num_local_experts",
                                        "n_routed_experts",
                                        "num_experts",
                                        "num_experts_per_tok",
                                        "intermediate_size",
                                        "moe_intermediate_size",
                                        "n_shared_experts",
                                        "shared_expert_intermediate_size",
                                        "vocab_size",
                                        "rms_norm_eps",
                                        "norm_eps",
                                        "num_dense_layers",
                                        "conv_L_cache",
                                        "conv_bias",
                                        "use_expert_bias",
                                        "tie_embedding",
                                        "attention_bias",
                                        "tie_word_embeddings",
                                        "sliding_window",
                                        "use_qk_norm",
                                        "norm_topk_prob",
                                        "routed_scaling_factor",
                                        "n_group",
                                        "topk_group",
                                        "first_k_dense_replace",
                                        "decoder_sparse_step",
                                        "full_attention_interval",
                                        "q_lora_rank",
                                        "kv_lora_rank",
                                        "qk_nope_head_dim",
                                        "qk_rope_head_dim",
                                        "v_head_dim",
                                        "rope_interleave",
                                        "linear_num_key_heads",
                                        "linear_num_value_heads",
                                        "linear_key_head_dim",
                                        "linear_value_head_dim",
                                        "linear_conv_kernel_dim",
                                        "ssm_state_size",
                                        "mamba_num_heads",
                                        "mamba_head_dim",
                                        "n_groups",
                                        "conv_kernel",
                                        "use_conv_bias",
                                        "use_bias",
                                        "time_step_min",
                                        "layer_norm_epsilon",
                                        "moe_shared_expert_intermediate_size",
                                        "moe_latent_size",
                                        "rope_theta",
                                        "partial_rotary_factor",
                                        "factor",
                                        "beta_fast",
                                        "beta_slow",
                                        "truncate",
                                        "original_max_position_embeddings",
                                        "mscale",
                                        "mscale_all_dim",
                                        "llama_4_scaling_beta",
                                        "attention_factor",
                                        "o_groups",
                                        "o_lora_rank",
                                        "compressed_sparse_attention",
                                        "heavily_compressed_attention",
                                        "index_n_heads",
                                        "index_head_dim",
                                        "index_topk",
                                        "hc_mult",
                                        "hc_sinkhorn_iters",
                                        "hc_eps",
                                        "swiglu_limit",
                                        "top_k_experts",
                                        "final_logit_softcapping",
                                        "attention_k_eq_v"};

static int find_key(const char *key, size_t size)
{
    for (int i = 0; i < MT_LEN(read_keys); i++)
        if (strlen(read_keys[i]) == size && !strncmp(read_keys[i], key, size)) return i;
    return -1;
}

static bool parsed(struct arch *a, const char *text)
{
    struct err err;
    struct json_doc *doc = json_parse(text, (int64_t)strlen(text), "config.json", &err);
    assert_non_null(doc);
    const bool good = !arch_parse(a, json_root(doc), &err);
    json_free(doc);
    return good;
}

static bool differs(const struct arch *a, const struct arch *b)
{
    struct arch_value v, w;
    for (int64_t i = 0;; i++) {
        const bool have = arch_value(a, i, &v);
        if (have != arch_value(b, i, &w)) return true;
        if (!have) return false;
        if (strcmp(v.name, w.name) || strcmp(v.text, w.text)) return true;
    }
}

/* Other values of the key whose value is the n bytes at `at`: twice, half, one more; true for false. Returns whether
 * one of them gives a model with another value. */
static bool changes_model(const struct arch *want, const char *text, const char *at, size_t n)
{
    static char edited[1 << 14];
    char other[3][40] = {"true", "false"};
    const bool number = isdigit((unsigned char)*at);
    const double value = strtod(at, NULL);
    if (number) {
        snprintf(other[0], sizeof(other[0]), "%.10g", 2 * value);
        snprintf(other[1], sizeof(other[1]), "%.10g", value / 2);
        snprintf(other[2], sizeof(other[2]), "%.10g", value + 1);
    }
    for (int i = 0; i < 2 + number; i++) {
        struct arch a;
        assert_true(snprintf(edited, sizeof(edited), "%.*s%s%s", (int)(at - text), text, other[i], at + n) <
                    (int)sizeof(edited));
        if (parsed(&a, edited) && differs(&a, want)) return true;
    }
    return false;
}

/* Changes the scalars of the text, one at a time. */
static void check_config(const char *text, bool found[])
{
    struct arch want;
    assert_true(parsed(&want, text));
    assert_false(differs(&want, &want));
    for (const char *p = strchr(text, '"'); p; p = strchr(p, '"')) {
        const char *key = p + 1, *end = strchr(key, '"');
        assert_non_null(end);
        const char *at = end + 1 + strspn(end + 1, " :");
        const size_t n = strspn(at, "0123456789.eE+-truefals");
        const int known = find_key(key, (size_t)(end - key));
        p = end + 1;
        if (end[1] != ':' || (!isdigit((unsigned char)*at) && *at != 't' && *at != 'f')) continue;
        if (!changes_model(&want, text, at, n)) continue;
        if (known < 0) fail_msg("%.*s is not in read_keys", (int)(end - key), key);
        found[known] = true;
    }
}

static void every_key_that_is_read(void **state)
{
    (void)state;
    static const char *const cases[] = {"case_a",   "qwen3",       "qwen3_vl",    "olmoe",    "mixtral",
                                        "glm4",     "glm4_lite",   "deepseek_v3", "qwen3_5",  "qwen3_next",
                                        "mistral4", "deepseek_v4", "minimax_m2",  "nemotron", "nemotron_latent",
                                        "gemma4",   "lfm2"};
    static char text[1 << 14];
    bool found[MT_LEN(read_keys)] = {false};
    char name[64];
    for (int i = 0; i < MT_LEN(cases); i++) {
        snprintf(name, sizeof(name), "parity/%s/config.json", cases[i]);
        process_read(fixture(name), text, sizeof(text));
        check_config(text, found);
    }
    for (int i = 0; i < MT_LEN(read_keys); i++)
        if (!found[i]) fail_msg("%s changes no value", read_keys[i]);
}

#define ORIGINAL "\"original_max_position_embeddings\": "

/* text, in a static buffer, with its first `old` replaced. */
static const char *edit_fixture(const char *folder, const char *old, const char *new)
{
    static char text[1 << 14], edited[1 << 14];
    char name[64];
    snprintf(name, sizeof(name), "parity/%s/config.json", folder);
    process_read(fixture(name), text, sizeof(text));
    const char *at = strstr(text, old);
    if (!at) fail_msg("%s: no %s", name, old);
    snprintf(edited, sizeof(edited), "%.*s%s%s", (int)(at - text), text, new, at + strlen(old));
    return edited;
}

/* Kinds of layers, and settings that no fixture has. */
static void layers_and_defaults(void **state)
{
    (void)state;
    static const struct {
        const char *name, *old, *new, *value, *text;
    } rows[] = {
        {"case_a", "\"full_attention\"", "\"sliding_attention\"", "layers.1", "sliding_attention of 8, sparse"},
        {"case_a", "\"attention_dropout\"", "\"swiglu_limit\": 6, \"attention_dropout\"", "swiglu_limit", "6"},
        {"case_a", "\"attention_dropout\"", "\"swiglu_alpha\": 1.5, \"attention_dropout\"", "swiglu_alpha", "1.5"},
        {"case_a", "\"beta_fast\"", "\"attention_factor\": 1.5, \"beta_fast\"", "attention_factor", "1.5"},
        {"case_a", "\"rope_type\": \"yarn\"", "\"rope_type\": \"default\"", "rope_type = yarn", "false"},
        {"qwen3_5", "\"full_attention\"", "\"linear_attention\"", "layers.3", "linear_attention, sparse"},
        {"deepseek_v4", "\"moe\"", "\"hash_moe\"", "num_hash_layers", "2"},
        {"deepseek_v4", "\"heavily_compressed_attention\"\n", "\"sliding_attention\"\n", "layers.2",
         "sliding_attention, window 8, sparse"},
        {"deepseek_v4", "\"attention_bias\"", "\"num_hash_layers\": 1, \"attention_bias\"", "layers.1",
         "compressed_sparse_attention, window 8, sparse"},
        {"glm4_lite", "\"dense\"", "\"sparse\"", "layers.0", "full_attention, sparse"},
        /* null is false, as in transformers */
        {"deepseek_v3", "\"norm_topk_prob\": true", "\"norm_topk_prob\": null", "norm_topk_prob", "false"},
        {"mistral4", "\"norm_topk_prob\": true", "\"norm_topk_prob\": null", "norm_topk_prob", "false"},
        {"deepseek_v3", "\"rope_interleave\": true", "\"rope_interleave\": null", "rope_interleave", "false"},
        {"mistral4", "\"rope_type\": \"yarn\"", "\"truncate\": null, \"rope_type\": \"yarn\"", "truncate", "false"},
        {"deepseek_v3", "\"original_max_position_embeddings\": 256\n }", "\"truncate\": true\n }, " ORIGINAL "512",
         "original_max_position_embeddings", "512"},
        /* outside text_config */
        {"qwen3_5", "\n \"tie_word_embeddings\": false", "\n \"tie_word_embeddings\": true", "tie_word_embeddings",
         "true"},
        {"mistral4", "\n \"tie_word_embeddings\": false", "\n \"tie_word_embeddings\": true", "tie_word_embeddings",
         "true"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct arch a;
        struct arch_value v = {.name = ""};
        assert_true(parsed(&a, edit_fixture(rows[i].name, rows[i].old, rows[i].new)));
        for (int64_t k = 0; strcmp(v.name, rows[i].value); k++) assert_true(arch_value(&a, k, &v));
        assert_string_equal(v.text, rows[i].text);
    }
}

/* Values that transformers reads in another way, or stops at. */
static void what_would_be_misread(void **state)
{
    (void)state;
    static const struct {
        const char *name, *old, *new, *says;
    } rows[] = {
        {"deepseek_v3", "\"n_group\": 4", "\"n_group\": null", "`n_group`: is null: write 1"},
        {"qwen3_5", "\"text_config\"", "\"text_config\": null, \"unread\"", "key `text_config`: is not an object"},
        {"qwen3_5", "\"text_config\"", "\"unread\"", "key `text_config`: is missing: the sizes of a qwen3_5_moe"},
        {"deepseek_v3", "\"topk_group\": 2", "\"topk_group\": null", "`topk_group`: is null"},
        {"deepseek_v3", "\"rope_type\": \"yarn\"", "\"rope_type\": \"yarn\", \"llama_4_scaling_beta\": 0.1",
         "llama_4_scaling_beta 0.1 is not supported (0)"},
        {"mistral4", "\"rope_type\": \"yarn\"", "\"rope_type\": \"default\"",
         "llama_4_scaling_beta 0.3 needs rope_type \"yarn\""},
        {"deepseek_v3", "\"n_group\"", ORIGINAL "512, \"n_group\"",
         "`rope_scaling.original_max_position_embeddings`: is 256, but original_max_position_embeddings outside it "
         "is "
         "512: correct one"},
        {"deepseek_v4", "\"rope_type\": \"yarn\"", "\"truncate\": false, \"rope_type\": \"yarn\"",
         "truncate = false is not supported (true)"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        const char *text = edit_fixture(rows[i].name, rows[i].old, rows[i].new);
        struct arch a;
        struct err err = {.msg = ""};
        struct json_doc *doc = json_parse(text, (int64_t)strlen(text), "config.json", &err);
        assert_non_null(doc);
        if (!arch_parse(&a, json_root(doc), &err)) fail_msg("accepted: %s", rows[i].says);
        json_free(doc);
        if (!strstr(err.msg, rows[i].says)) fail_msg("%s: %s", rows[i].says, err.msg);
    }
}

int test_arch_values(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_key_that_is_read),
        cmocka_unit_test(layers_and_defaults),
        cmocka_unit_test(what_would_be_misread),
    };
    return cmocka_run_group_tests_name("arch_values", tests, NULL, NULL);
}

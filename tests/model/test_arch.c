/* test_arch.c - reads config.json of gpt-oss-20b in the spellings of transformers 4 and 5; compares its RoPE table with
 * known numbers; rejects bad values. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "model/arch/arch.h"
#include "tests/test.h"

#define SIZES                                                                                                          \
    "\"model_type\": \"gpt_oss\", \"num_hidden_layers\": 4, \"hidden_size\": 2880, \"num_attention_heads\": 64, "      \
    "\"num_key_value_heads\": 8, \"head_dim\": 64, \"num_local_experts\": 32, \"intermediate_size\": 2880, "           \
    "\"vocab_size\": 201088, \"max_position_embeddings\": 131072, \"sliding_window\": 128, \"rms_norm_eps\": 1e-05, "  \
    "\"swiglu_limit\": 7.0, \"attention_bias\": true, \"attention_dropout\": 0.0, \"hidden_act\": \"silu\", "          \
    "\"tie_word_embeddings\": false, \"layer_types\": [\"sliding_attention\", \"full_attention\", "                    \
    "\"sliding_attention\", \"full_attention\"], "
#define YARN                                                                                                           \
    "\"factor\": 32.0, \"beta_fast\": 32.0, \"beta_slow\": 1.0, \"original_max_position_embeddings\": 4096, "          \
    "\"truncate\": false"

/* config.json as published (transformers 4) and as transformers 5 saves it. */
static const char v4[] = "{" SIZES "\"num_experts_per_tok\": 4, \"experts_per_token\": 4, \"rope_theta\": 150000, "
                         "\"rope_scaling\": {\"rope_type\": \"yarn\", " YARN "}, \"torch_dtype\": \"bfloat16\"}";
static const char v5[] = "{" SIZES "\"num_experts_per_tok\": 4, \"dtype\": \"bfloat16\", "
                         "\"rope_parameters\": {\"rope_type\": \"yarn\", \"rope_theta\": 150000.0, " YARN "}}";

/* text with its first `old` replaced, in one of two static buffers. */
static const char *edit(const char *text, const char *old, const char *new)
{
    static char out[2][4096];
    static int next;
    char *p = out[next++ % 2];
    const char *at = strstr(text, old);
    if (!at) fail_msg("\"%s\" is not in: %s", old, text);
    assert_true(snprintf(p, sizeof(out[0]), "%.*s%s%s", (int)(at - text), text, new, at + strlen(old)) < 4096);
    return p;
}

static int load(struct arch *a, const char *text, struct err *err)
{
    char path[MT_PATH];
    const char *dir = scratch_dir();
    snprintf(path, sizeof(path), "%s/config.json", dir);
    if (file_write_atomic(path, text, (int64_t)strlen(text), err)) fail_msg("%s", err->msg);
    return arch_load(a, dir, err);
}

static struct arch loaded(const char *text)
{
    struct arch a;
    struct err err;
    if (load(&a, text, &err)) fail_msg("%s", err.msg);
    return a;
}

static void assert_refused(const char *text, const char *word)
{
    struct arch a;
    struct err err = {.msg = ""};
    if (!load(&a, text, &err)) fail_msg("accepted, where %s is bad: %s", word, text);
    if (!strstr(err.msg, "/config.json")) fail_msg("no file in: %s", err.msg);
    if (!strstr(err.msg, word)) fail_msg("no \"%s\" in: %s", word, err.msg);
}

/* ---- reading */

static void test_published(void **state)
{
    (void)state;
    const struct arch a = loaded(v4);
    assert_string_equal(a.family, "gpt_oss");
    const int64_t sizes[][2] = {{a.n_layer, 4},
                                {a.d_model, 2880},
                                {a.attn[0].n_head, 64},
                                {a.attn[0].n_kv, 8},
                                {a.attn[0].head_dim, 64},
                                {a.n_exp, 32},
                                {a.top_k, 4},
                                {a.d_ff, 2880},
                                {a.vocab, 201088},
                                {a.max_len, 131072},
                                {arch_attn(&a, 0)->window, 128},
                                {arch_attn(&a, 1)->window, 0},
                                {arch_attn(&a, 2)->window, 128},
                                {arch_attn(&a, 3)->window, 0},
                                {arch_qkv_cols(&a, 0), 5120}};
    for (int i = 0; i < MT_LEN(sizes); i++) assert_int_equal(sizes[i][0], sizes[i][1]);
    assert_true(a.attn_bias && a.out_bias && a.expert_bias && a.router_bias && a.sinks && !a.tied);
    assert_true(a.norm.eps == 1e-5f && a.attn[0].scale == 0.125f);
    assert_true(a.glu.kind == GLU_CLAMPED && a.glu.interleaved && a.glu.alpha == 1.702f && a.glu.limit == 7);
    assert_true(a.rope[0].yarn && !a.rope[0].truncate && a.rope[0].theta == 150000 && a.rope[0].factor == 32);
    assert_true(a.rope[0].beta_fast == 32 && a.rope[0].beta_slow == 1 && a.rope[0].original_len == 4096);
}

static void assert_same_arch(const struct arch *a, const struct arch *b)
{
    const struct rope_arch *r = &a->rope[0], *q = &b->rope[0];
    assert_string_equal(a->family, b->family);
    assert_memory_equal(&a->n_layer, &b->n_layer, offsetof(struct arch, attn_bias) - offsetof(struct arch, n_layer));
    assert_memory_equal(a->attn, b->attn, sizeof(a->attn));
    assert_memory_equal(a->attn_of, b->attn_of, sizeof(a->attn_of));
    assert_true(a->attn_bias == b->attn_bias && a->expert_bias == b->expert_bias && a->router_bias == b->router_bias);
    assert_int_equal(a->out_bias, b->out_bias);
    assert_true(a->sinks == b->sinks && a->tied == b->tied && a->glu.kind == b->glu.kind);
    assert_true(a->glu.interleaved == b->glu.interleaved && a->glu.alpha == b->glu.alpha &&
                a->glu.limit == b->glu.limit);
    assert_memory_equal(r, q, offsetof(struct rope_arch, yarn));
    assert_true(r->yarn == q->yarn && r->truncate == q->truncate);
}

/* Replacing `old` by `new` gives the same architecture. */
static void test_spellings(void **state)
{
    (void)state;
    static const struct {
        const char *text, *old, *new;
    } same[] = {
        {v4, "", ""},
        {v5, "", ""},
        {v4, "\"rope_type\": \"yarn\"", "\"type\": \"yarn\""},
        {v4, "\"rope_type\": \"yarn\"", "\"type\": \"yarn\", \"rope_type\": \"yarn\""},
        {v4, "\"rope_type\": \"yarn\"", "\"type\": \"yarn\", \"rope_type\": null"},
        {v4, "\"rope_type\": \"yarn\"", "\"rope_type\": \"yarn\", \"rope_theta\": 150000.0"},
        {v5, "\"rope_parameters\"", "\"rope_theta\": 150000, \"rope_parameters\""},
        {v5, "\"rope_parameters\"", "\"attention_factor\": 2, \"rope_type\": \"default\", \"rope_parameters\""},
        {v4, "\"num_experts_per_tok\": 4, ", ""},
        {v4, "\"experts_per_token\": 4, ", ""},
        {v4, "num_local_experts", "num_experts"},
        {v4, "\"rope_theta\": 150000,", "\"rope_theta\": 150000.0,"},
        {v4, "\"rope_scaling\"", "\"rope_parameters\": null, \"rope_scaling\""},
        {v5, "\"rope_parameters\"", "\"rope_scaling\": null, \"rope_parameters\""},
        {v5, "\"truncate\": false", "\"truncate\": false, \"attention_factor\": null"},
        /* defaults of transformers' configuration class */
        {v4, "\"head_dim\": 64, ", ""},
        {v4, "\"sliding_window\": 128, ", ""},
        {v4, "\"rms_norm_eps\": 1e-05, ", ""},
        {v4, "\"swiglu_limit\": 7.0, ", "\"swiglu_alpha\": 1.702, "},
        {v4, "\"attention_bias\": true, ", ""},
        {v4, "\"hidden_act\": \"silu\", ", ""},
        {v4, "\"tie_word_embeddings\": false, ", ""},
        {v4, "\"max_position_embeddings\": 131072, ", ""},
        {v4, "\"rope_theta\": 150000, ", ""},
        {v4, "\"beta_fast\": 32.0, \"beta_slow\": 1.0, ", ""},
        {v4,
         "\"layer_types\": [\"sliding_attention\", \"full_attention\", \"sliding_attention\", \"full_attention\"], ",
         ""},
    };
    const struct arch want = loaded(v4);
    for (int i = 0; i < MT_LEN(same); i++) {
        const struct arch a = loaded(edit(same[i].text, same[i].old, same[i].new));
        assert_same_arch(&a, &want);
    }
}

static void test_variants(void **state)
{
    (void)state;
    struct arch a = loaded(edit(v4, "[\"sliding_attention\"", "[\"full_attention\""));
    assert_int_equal(arch_attn(&a, 0)->window, 0);
    a = loaded(edit(v4, "\"sliding_window\": 128", "\"sliding_window\": 96"));
    assert_int_equal(arch_attn(&a, 2)->window, 96);
    a = loaded(edit(v4, "\"attention_bias\": true", "\"attention_bias\": false"));
    assert_false(a.attn_bias);
    a = loaded(edit(v4, "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true"));
    assert_true(a.tied);
    a = loaded(edit(v4, "\"truncate\": false", "\"truncate\": false, \"attention_factor\": 1.5"));
    assert_true(a.rope[0].attention_factor == 1.5);
    a = loaded(edit(v4, ", \"truncate\": false", "")); /* transformers rounds by default */
    assert_true(a.rope[0].truncate);
    a = loaded(edit(v5, "\"yarn\"", "\"default\""));
    assert_true(!a.rope[0].yarn && a.rope[0].attention_factor == 1 && a.rope[0].theta == 150000);
}

/* ---- RoPE */

/* Computes frequency and attention factor from the table's first two positions. */
static void frequencies(const struct arch *a, double inv_freq[32], double *factor)
{
    float table[2 * 64];
    assert_int_equal(a->attn[0].head_dim, 64);
    arch_rope_table(&a->rope[0], 2, table);
    *factor = (double)table[0];
    for (int i = 0; i < 32; i++) {
        assert_true(table[i] == table[0] && table[32 + i] == 0); /* position 0: cos 1, sin 0 */
        inv_freq[i] = atan2((double)table[96 + i], (double)table[64 + i]);
    }
}

static void assert_frequency(const char *what, const double inv_freq[32], int i, double want)
{
    if (!(fabs(inv_freq[i] / want - 1) < 3e-7))
        fail_msg("%s: inv_freq[%d] is %.10g, expected %.10g", what, i, inv_freq[i], want);
}

/* transformers' numbers for gpt-oss: the ramp goes from 8.0927791 to 17.3980245. */
static void test_yarn(void **state)
{
    (void)state;
    static const struct {
        int i;
        double value;
    } known[] = {{0, 1},
                 {8, 5.081327482e-02},
                 {9, 3.170569618e-02},
                 {12, 6.794959490e-03},
                 {17, 1.293187012e-04},
                 {18, 3.830881237e-05},
                 {31, 3.023511428e-07}};
    const struct arch a = loaded(v4);
    double f[32], factor;
    frequencies(&a, f, &factor);
    assert_close(factor, 1.34657359, 1e-7);
    for (int i = 0; i < MT_LEN(known); i++) assert_frequency("yarn", f, known[i].i, known[i].value);
    for (int i = 0; i < 32; i++) {
        const double plain = pow(150000, -i / 32.0), share = (i - 8.0927791) / (17.3980245 - 8.0927791);
        const double ramp = fmin(fmax(share, 0), 1);
        assert_frequency("ramp", f, i, plain * (1 - ramp + ramp / 32));
    }
}

static void test_yarn_truncated(void **state)
{
    (void)state;
    const struct arch a = loaded(edit(v4, "\"truncate\": false", "\"truncate\": true"));
    double f[32], factor;
    frequencies(&a, f, &factor);
    for (int i = 0; i < 32; i++) {
        const double ramp = fmin(fmax((i - 8) / 10.0, 0), 1);
        assert_frequency("truncated", f, i, pow(150000, -i / 32.0) * (1 - ramp + ramp / 32));
    }
}

static void test_plain_rope(void **state)
{
    (void)state;
    const struct arch a = loaded(edit(v5, "\"yarn\"", "\"default\""));
    double f[32], factor;
    frequencies(&a, f, &factor);
    assert_true(factor == 1);
    for (int i = 0; i < 32; i++) assert_frequency("plain", f, i, pow(150000, -i / 32.0));
}

/* At large positions the angle is the f32 product, as in transformers, not the exact one. */
static void test_far_position(void **state)
{
    (void)state;
    enum { N = 131072 };
    const struct arch a = loaded(v4);
    float *table = mem_array((int64_t)N * 64, sizeof(*table)), *last = table + (int64_t)(N - 1) * 64;
    double f[32], factor;
    arch_rope_table(&a.rope[0], N, table);
    frequencies(&a, f, &factor);
    for (int i = 0; i < 32; i++) {
        const float angle = (float)(N - 1) * (float)f[i]; /* f is the f32 frequency to 3e-7: angle to 0.04 at most */
        assert_close((double)last[i] * (double)last[i] + (double)last[32 + i] * (double)last[32 + i], factor * factor,
                     1e-6);
        assert_close((double)last[i], factor * cos((double)angle), 131071 * f[i] * 5e-7 + 1e-6);
    }
    mem_free(table);
}

/* ---- bad values */

static void test_bad_values(void **state)
{
    (void)state;
    static const struct {
        const char *old, *new, *word;
    } rows[] = {
        {"\"gpt_oss\"", "\"llama\"", "model_type \"llama\" is not supported"},
        {"\"gpt_oss\"", "7", "model_type"},
        {"\"model_type\"", "\"typo\"", "model_type"},
        {"\"num_hidden_layers\": 4", "\"num_hidden_layers\": 0", "num_hidden_layers"},
        {"\"num_hidden_layers\": 4", "\"num_hidden_layers\": 513", "num_hidden_layers"},
        {"\"num_hidden_layers\": 4, ", "", "num_hidden_layers"},
        {"\"num_hidden_layers\": 4", "\"num_hidden_layers\": 6", "layer_types"},
        {"\"hidden_size\": 2880", "\"hidden_size\": -1", "hidden_size"},
        {"\"hidden_size\": 2880", "\"hidden_size\": \"2880\"", "hidden_size"},
        {"\"hidden_size\": 2880, ", "", "hidden_size"},
        {"\"num_attention_heads\": 64", "\"num_attention_heads\": 64.5", "num_attention_heads"},
        {"\"num_attention_heads\": 64", "\"num_attention_heads\": 63", "num_attention_heads"},
        {"\"num_key_value_heads\": 8", "\"num_key_value_heads\": 0", "num_key_value_heads"},
        {"\"num_key_value_heads\": 8, ", "", "num_key_value_heads"},
        {"\"head_dim\": 64", "\"head_dim\": 63", "head_dim"},
        {"\"head_dim\": 64", "\"head_dim\": 0", "head_dim"},
        {"\"num_local_experts\": 32", "\"num_local_experts\": 0", "num_local_experts"},
        {"\"num_local_experts\": 32, ", "", "key `num_local_experts`: is missing"},
        {"\"num_experts_per_tok\": 4", "\"num_experts_per_tok\": 33", "experts"},
        {"\"num_experts_per_tok\": 4", "\"num_experts_per_tok\": 0", "num_experts_per_tok"},
        {"\"num_experts_per_tok\": 4, \"experts_per_token\": 4, ", "", "key `num_experts_per_tok`: is missing"},
        {"\"experts_per_token\": 4", "\"experts_per_token\": 2", "experts_per_token"},
        {"\"intermediate_size\": 2880", "\"intermediate_size\": 99999999999", "intermediate_size"},
        {"\"intermediate_size\": 2880, ", "", "intermediate_size"},
        {"\"vocab_size\": 201088", "\"vocab_size\": 1e30", "vocab_size"},
        {"\"vocab_size\": 201088, ", "", "vocab_size"},
        {"\"max_position_embeddings\": 131072", "\"max_position_embeddings\": 0", "max_position_embeddings"},
        {"\"sliding_window\": 128", "\"sliding_window\": 0", "sliding_window"},
        {"\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 0", "rms_norm_eps"},
        {"\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": \"1e-05\"", "rms_norm_eps"},
        {"\"swiglu_limit\": 7.0", "\"swiglu_limit\": -7.0", "swiglu_limit"},
        {"\"swiglu_limit\": 7.0", "\"swiglu_alpha\": true", "swiglu_alpha"},
        {"\"attention_bias\": true", "\"attention_bias\": 1", "attention_bias"},
        {"\"attention_dropout\": 0.0", "\"attention_dropout\": 0.1", "attention_dropout"},
        {"\"silu\"", "\"gelu\"", "hidden_act"},
        {"\"tie_word_embeddings\": false", "\"tie_word_embeddings\": \"no\"", "tie_word_embeddings"},
        {"[\"sliding_attention\"", "[\"chunked_attention\"", "layer_types[0]"},
        {"[\"sliding_attention\"", "[3", "layer_types[0]"},
        {"[\"sliding_attention\", ", "[", "layer_types"},
        {"\"layer_types\": [", "\"layer_types\": {}, \"other\": [", "layer_types"},
        {"\"rope_theta\": 150000", "\"rope_theta\": 1", "rope_theta"},
        {"\"rope_theta\": 150000", "\"rope_theta\": \"150000\"", "rope_theta"},
        {"\"rope_scaling\"", "\"rope_scaling\": 32, \"other\"", "rope_scaling"},
        {"\"rope_scaling\"", "\"rope_parameters\": [], \"rope_scaling\"", "rope_parameters"},
        {"\"rope_scaling\"", "\"other\"", "rope_scaling"},
        {"\"rope_scaling\"", "\"rope_scaling\": null, \"other\"", "rope_scaling"},
        {"\"yarn\"", "\"llama3\"", "llama3"},
        {"\"yarn\"", "3", "rope_scaling.rope_type"},
        {"\"factor\": 32.0, ", "", "rope_scaling.factor"},
        {"\"original_max_position_embeddings\": 4096, ", "", "rope_scaling.original_max_position_embeddings"},
        {"\"original_max_position_embeddings\": 4096", "\"original_max_position_embeddings\": 0",
         "rope_scaling.original_max_position_embeddings"},
        {"\"beta_fast\": 32.0", "\"beta_fast\": 0", "beta_fast"},
        {"\"beta_slow\": 1.0", "\"beta_slow\": -1", "beta_slow"},
        {"\"beta_slow\": 1.0", "\"beta_slow\": 64", "beta_fast 32 is below beta_slow 64"},
        {"\"truncate\": false", "\"truncate\": 0", "rope_scaling.truncate"},
        {"\"truncate\": false", "\"mscale\": 1.0", "mscale"},
        {"\"truncate\": false", "\"llama_4_scaling_beta\": 0.1", "llama_4_scaling_beta 0.1 is not supported (0)"},
        {"\"truncate\": false", "\"attention_factor\": 0", "attention_factor"},
        {"\"truncate\": false", "\"attention_factor\": [1]", "rope_scaling.attention_factor"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) assert_refused(edit(v4, rows[i].old, rows[i].new), rows[i].word);
    assert_refused("[]", "model_type");
    for (size_t n = 0; n < sizeof(v4) - 1; n += 7) { /* truncated */
        char text[sizeof(v4)] = "";
        memcpy(text, v4, n);
        assert_refused(text, "JSON");
    }
}

/* The error for a model type of another family says if the model is dense, also if config.json turns experts off. */
static void test_other_families(void **state)
{
    (void)state;
    static const char dense[] = " is a dense model, and dense models are not supported; this version trains: gpt_oss",
                      other[] = " is not supported; this version trains: gpt_oss";
    static const struct {
        const char *config, *type, *says;
    } rows[] = {
        {"{\"model_type\": \"llama\", \"hidden_size\": 4096}", "llama", dense},
        {"{\"model_type\": \"qwen3\", \"num_attention_heads\": 32}", "qwen3", dense},
        {"{\"model_type\": \"gemma3\", \"text_config\": {\"hidden_size\": 64, \"num_experts\": null}}", "gemma3",
         dense},
        {"{\"model_type\": \"mistral3\", \"text_config\": {\"model_type\": \"ministral3\"}}", "ministral3", dense},
        {"{\"model_type\": \"jamba\", \"num_local_experts\": 16}", "jamba", other},
        {"{\"model_type\": \"llama4\", \"text_config\": {\"num_experts\": 128}}", "llama4", other},
        {"{\"model_type\": \"ernie4_5_moe\", \"moe_num_experts\": 64}", "ernie4_5_moe", other},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        char says[160];
        snprintf(says, sizeof(says), "model_type \"%s\"%s", rows[i].type, rows[i].says);
        assert_refused(rows[i].config, says);
    }
}

/* Keys that contradict each other, and YaRN that would have no effect. */
static void test_bad_rope_type(void **state)
{
    (void)state;
    static const struct {
        const char *old, *new, *says;
    } rows[] = {
        {"\"rope_type\": \"yarn\"", "\"type\": \"default\", \"rope_type\": \"yarn\"",
         "`rope_scaling`: type is \"default\", but rope_type is \"yarn\": correct one"},
        {"\"rope_type\": \"yarn\", ", "", "`rope_scaling`: has factor, but no rope_type: add \"rope_type\": \"yarn\""},
        {"\"rope_type\": \"yarn\"", "\"rope_type\": null", "`rope_scaling`: has factor, but no rope_type"},
        {"\"rope_type\": \"yarn\", \"factor\": 32.0, ", "", "has beta_fast, but no rope_type"},
        {"\"rope_type\": \"yarn\", \"factor\": 32.0, \"beta_fast\": 32.0, ", "", "has beta_slow, but no rope_type"},
        {"\"rope_type\": \"yarn\", \"factor\": 32.0, \"beta_fast\": 32.0, \"beta_slow\": 1.0, ", "",
         "has original_max_position_embeddings, but no rope_type"},
        {"\"rope_type\": \"yarn\"", "\"rope_type\": \"yarn\", \"rope_theta\": 150001",
         "`rope_scaling.rope_theta`: is 150001, but rope_theta outside it is 150000: correct one"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) assert_refused(edit(v4, rows[i].old, rows[i].new), rows[i].says);
}

static void test_no_file(void **state)
{
    (void)state;
    struct arch a;
    struct err err = {.msg = ""};
    assert_int_equal(arch_load(&a, scratch_dir(), &err), -1);
    assert_non_null(strstr(err.msg, "/config.json"));
}

/* Values with which nothing can be learned, or which rotate nothing. */
static void real_values_have_ranges(void **state)
{
    (void)state;
    static const struct {
        const char *old, *new, *says;
    } rows[] = {
        {"\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1e6", "rms_norm_eps 1e+06 is not at least 1.18e-38 and below 1"},
        {"\"swiglu_limit\": 7.0", "\"swiglu_limit\": 1e-30", "swiglu_limit 1e-30 is not at least 0.001"},
        {"\"swiglu_limit\": 7.0", "\"swiglu_alpha\": 1e30", "swiglu_alpha 1e+30 is not between 0.001 and 1000"},
        {"\"rope_theta\": 150000", "\"rope_theta\": 1e300", "rope_theta 1e+300 is not above 1 and at most 1e+12"},
        {"\"factor\": 32.0", "\"factor\": 0.5", "`rope_scaling`: factor 0.5 is not between 1 and 10000"},
        {"\"factor\": 32.0", "\"factor\": 1e300", "`rope_scaling`: factor 1e+300 is not between 1 and 10000"},
        {"\"beta_fast\": 32.0", "\"beta_fast\": 1e300", "beta_fast 1e+300 is not between 0.001 and 1000"},
        {"\"beta_slow\": 1.0", "\"beta_slow\": 1e-300", "beta_slow 1e-300 is not between 0.001 and 1000"},
        {"\"truncate\": false", "\"attention_factor\": 1e30", "attention_factor 1e+30 is not between 0.001 and 1000"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) assert_refused(edit(v4, rows[i].old, rows[i].new), rows[i].says);
}

int test_arch(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_published),      cmocka_unit_test(test_spellings),
        cmocka_unit_test(test_variants),       cmocka_unit_test(test_yarn),
        cmocka_unit_test(test_yarn_truncated), cmocka_unit_test(test_plain_rope),
        cmocka_unit_test(test_far_position),   cmocka_unit_test(test_bad_values),
        cmocka_unit_test(test_other_families), cmocka_unit_test(test_bad_rope_type),
        cmocka_unit_test(test_no_file),        cmocka_unit_test(real_values_have_ranges),
    };
    return cmocka_run_group_tests_name("arch", tests, NULL, NULL);
}

/* test_gguf_tokenizer.c - the tokenizer in the output of export --to gguf-model, from tokenizer.json and from Kimi's
 * tiktoken.model. tests/parity/gguf_model.py compares the tokens of texts in llama.cpp. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "tests/process.h"
#include "train/gguf/gguf_tokenizer.h"

/* In one of eight static buffers. */
static const char *in(const char *dir, const char *name)
{
    static char path[8][2 * MT_PATH];
    static int next;
    struct err err;
    char *p = path[next++ % 8];
    assert_int_equal(str_format(p, sizeof(path[0]), &err, "path", "%s/%s", dir, name), 0);
    return p;
}

static void tokenizers(void **state)
{
    (void)state;
    static const struct {
        const char *family, *file, *name; /* NULL: refused */
    } rows[] = {{"qwen3_moe", "glm4", "glm4"},     {"lfm2_moe", "glm4", "lfm2"},
                {"qwen3_moe", "qwen35", "qwen35"}, {"qwen3_moe", "deepseek", "deepseek-v3"},
                {"qwen3_moe", "splits", NULL},     {"qwen3_moe", "metaspace", NULL},
                {"gemma4", "gemma", "gemma4"},     {"nemotron_h", "tekken", "tekken"},
                {"kimi_k2", "kimi", "kimi-k2"}};
    struct arch *a = test_malloc(sizeof(*a));
    struct err err;
    if (arch_load(a, fixture("parity/qwen3"), &err)) fail_msg("%s", err.msg);
    a->vocab = 1 << 18;
    for (int i = 0; i < MT_LEN(rows); i++) {
        char from[MT_PATH], name[64];
        struct gguf_meta m;
        const char *dir = scratch_dir();
        snprintf(name, sizeof(name), "tokenizer/%s.json", rows[i].file);
        snprintf(from, sizeof(from), "%s", fixture(name));
        assert_int_equal(symlink(from, in(dir, "tokenizer.json")), 0);
        static const char eos[] = "{\"eos_token_id\": 1}";
        assert_int_equal(file_write_in(dir, "config.json", eos, (int64_t)strlen(eos), &err), 0);
        a->family = rows[i].family;
        const struct gguf_meta_model model = {a, "x", dir, "{{ messages }}", GGML_Q8_0};
        gguf_meta_open(&m, &model);
        const int rc = gguf_tokenizer_put(&m, &model, &err);
        assert_int_equal(rc, rows[i].name ? 0 : -1);
        if (rc) assert_says(err.msg, "llama.cpp has no name for this tokenizer that moetrain knows");
        const bool gemma = !strcmp(rows[i].file, "gemma"); /* the name is that of the model; <0x41> is a byte */
        int found = 0;
        for (int64_t k = 0; k < m.n; k++) {
            const struct gguf_value *v = &m.values[k];
            found += !strcmp(v->key, gemma ? "tokenizer.ggml.model" : "tokenizer.ggml.pre") && rows[i].name &&
                     !strcmp(v->text, rows[i].name);
            if (gemma && !strcmp(v->key, "tokenizer.ggml.add_bos_token")) assert_true(v->u32);
            if (gemma && !strcmp(v->key, "tokenizer.ggml.token_type"))
                assert_true(((const int32_t *)v->array)[2] == 6 && ((const int32_t *)v->array)[258] == 1);
        }
        assert_int_equal(found, rows[i].name != NULL);
        if (!rc) assert_string_equal(m.values[m.n - 1].key, "tokenizer.chat_template");
        gguf_meta_close(&m);
    }
    test_free(a);
}

static void copy_in(const char *dir, const char *name)
{
    char from[64];
    struct err err;
    int64_t size;
    snprintf(from, sizeof(from), "tokenizer/tiktoken/%s", name);
    char *text = file_read(fixture(from), 1 << 20, &size, &err);
    if (!text || file_write_in(dir, name, text, size, &err)) fail_msg("%s", err.msg);
    mem_free(text);
}

/* The value of a key, which must be there. */
static const struct gguf_value *meta_value(const struct gguf_meta *m, const char *key)
{
    for (int64_t i = 0; i < m->n; i++)
        if (!strcmp(m->values[i].key, key)) return &m->values[i];
    fail_msg("no key %s", key);
    return NULL;
}

static void same_tokens(const struct gguf_meta *m)
{
    static const struct {
        int64_t id;
        int32_t type;
        const char *text; /* NULL: any */
    } rows[] = {{0, 1, NULL},           {557, 1, "ĠĠĠĠĠĠĠĠĠ"}, {558, 3, "[BOS]"},
                {560, 3, "<|im_end|>"}, {569, 4, "<think>"},   {570, 3, "<|reserved_token_570|>"},
                {813, 3, "[PAD]"},      {814, 5, "[PAD814]"},  {2047, 5, "[PAD2047]"}};
    const char *const *texts = meta_value(m, "tokenizer.ggml.tokens")->array;
    const int32_t *types = meta_value(m, "tokenizer.ggml.token_type")->array;
    for (int i = 0; i < MT_LEN(rows); i++) {
        assert_int_equal(types[rows[i].id], rows[i].type);
        if (rows[i].text) assert_string_equal(texts[rows[i].id], rows[i].text);
    }
}

/* Kimi-K2 with its tiktoken.model: 558 tokens by rank, 256 special ones, of which 7 have names; the model has 2048. */
static void kimi(void **state)
{
    (void)state;
    char config[1024], card[8192];
    const char *dir = scratch_dir(), *model = in(dir, "model"), *out = in(dir, "out"), *ini = in(dir, "run.ini");
    struct err err;
    struct gguf g;
    if (RUN("synth", "kimi-tiny", model, "--layers", "2")) fail_msg("%s", said.err);
    copy_in(model, "tiktoken.model");
    copy_in(model, "tokenizer_config.json");
    assert_int_equal(unlink(in(model, "tokenizer.json")), 0);
    const char *rows = fixture("parity/case_a/eval.jsonl");
    const int n = snprintf(config, sizeof(config),
                           "[model]\npath = %s\n[data]\ntrain = %s\neval = %s\nformat = text\nseq_len = 24\n[train]\n"
                           "device = cpu\nsteps = 1\n[lora]\nr = 3\n[output]\ndir = %s/run\n",
                           model, rows, rows, dir);
    if (file_write_atomic(ini, config, n, &err)) fail_msg("%s", err.msg);
    if (RUN(ini)) fail_msg("%s", said.err);
    if (RUN("export", ini, "--to", "gguf-model", "--quantize", "f32", "--out", out)) fail_msg("%s", said.err);
    assert_says(said.err, "llama.cpp does not read beta_fast and beta_slow of YaRN from the file: run it with "
                          "--yarn-beta-fast 1 --yarn-beta-slow 1");
    process_read(in(out, "README.md"), card, sizeof(card));
    assert_says(card, "/model.gguf --yarn-beta-fast 1 --yarn-beta-slow 1\n");
    if (gguf_open(&g, in(out, "model.gguf"), &err)) fail_msg("%s", err.msg);
    assert_string_equal(gguf_value(&g, "general.architecture")->text, "deepseek2");
    assert_string_equal(gguf_value(&g, "tokenizer.ggml.pre")->text, "kimi-k2");
    assert_int_equal(gguf_value(&g, "tokenizer.ggml.bos_token_id")->u32, 558);
    assert_int_equal(gguf_value(&g, "tokenizer.ggml.eos_token_id")->u32, 559);
    assert_int_equal(gguf_value(&g, "tokenizer.ggml.tokens")->n, 2048);
    gguf_close(&g);
    struct arch *a = test_malloc(sizeof(*a));
    if (arch_load(a, model, &err)) fail_msg("%s", err.msg);
    const struct gguf_meta_model m = {a, "x", model, NULL, GGML_F32};
    struct gguf_meta meta;
    gguf_meta_open(&meta, &m);
    if (gguf_tokenizer_put(&meta, &m, &err)) fail_msg("%s", err.msg);
    same_tokens(&meta);
    gguf_meta_close(&meta);
    a->vocab = 813;
    gguf_meta_open(&meta, &m);
    assert_int_equal(gguf_tokenizer_put(&meta, &m, &err), -1);
    assert_says(err.msg, "/tiktoken.model: token 813 of a model with 813");
    gguf_meta_close(&meta);
    test_free(a);
}

/* The merges are all pairs of tokens that form a token, by its rank. */
static void ranks(void **state)
{
    (void)state;
    static const char ranked[] =
        "YQ== 0\nYg== 1\nYw== 2\nIA== 3\nYWJj 4\nYWI= 5\nYmM= 6\nIGE= 7\n"; /* a b c abc ab bc */
    static const char settings[] = "{\"tokenizer_class\": \"TikTokenTokenizer\", \"eos_token\": \"[EOS]\", "
                                   "\"added_tokens_decoder\": {\"8\": {\"content\": \"[EOS]\", \"special\": true}}}";
    static const char *const want[] = {"a bc", "ab c", "a b", "b c", "Ġ a"};
    const char *dir = scratch_dir();
    struct err err;
    struct gguf_meta m;
    struct arch *a = test_malloc(sizeof(*a));
    if (arch_load(a, fixture("parity/glm4_lite"), &err) ||
        file_write_in(dir, "tiktoken.model", ranked, (int64_t)strlen(ranked), &err) ||
        file_write_in(dir, "tokenizer_config.json", settings, (int64_t)strlen(settings), &err))
        fail_msg("%s", err.msg);
    const struct gguf_meta_model model = {a, "x", dir, NULL, GGML_F32};
    gguf_meta_open(&m, &model);
    if (gguf_tokenizer_put(&m, &model, &err)) fail_msg("%s", err.msg);
    const struct gguf_value *merges = meta_value(&m, "tokenizer.ggml.merges");
    assert_int_equal(merges->n, MT_LEN(want));
    for (int64_t k = 0; k < MT_LEN(want); k++) assert_string_equal(((const char *const *)merges->array)[k], want[k]);
    gguf_meta_close(&m);
    test_free(a);
}

int test_gguf_tokenizer(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokenizers),
        cmocka_unit_test(kimi),
        cmocka_unit_test(ranks),
    };
    return cmocka_run_group_tests_name("gguf_tokenizer", tests, NULL, NULL);
}

/* test_tiktoken.c - Kimi's tiktoken.model: ids equal those of tiktoken 0.14 with Kimi's pattern and Kimi's cuts of long
 * texts (tests/parity/make_tiktoken_vectors.py writes them); damaged files; errors that name other tokenizers. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "data/json/text.h"
#include "data/tokenizer/bpe.h"
#include "data/tokenizer/tokenizer.h"

#define N_BASE 558 /* ranks of the fixture */

static struct tokenizer *open_fixture(void)
{
    struct err err;
    struct tokenizer *tok = tokenizer_open(fixture("tokenizer/tiktoken"), &err);
    if (!tok) fail_msg("%s", err.msg);
    return tok;
}

static void vectors(void **state)
{
    (void)state;
    struct err err;
    struct token_list list = {0};
    struct tokenizer *tok = open_fixture();
    struct json_doc *doc = json_load(fixture("tokenizer/tiktoken/ids.json"), 1 << 20, &err);
    assert_non_null(doc);
    const struct json cases = json_root(doc);
    assert_true(json_count(cases) > 300);
    for (int64_t i = 0; i < json_count(cases); i++) {
        const struct json want = json_find(json_at(cases, i), "ids");
        const char *text;
        int64_t size, id;
        assert_int_equal(json_str(json_find(json_at(cases, i), "text"), &text, &size, &err), 0);
        list.count = 0;
        if (tokenizer_encode(tok, text, size, true, &list, &err)) fail_msg("%s", err.msg);
        for (int64_t k = 0; k < json_count(want); k++) {
            assert_int_equal(json_i64(json_at(want, k), 0, INT32_MAX, &id, &err), 0);
            if (k >= list.count || list.ids[k] != id) fail_msg("\"%s\": token %d is not %d", text, (int)k, (int)id);
        }
        assert_int_equal(list.count, json_count(want));
    }
    json_free(doc);
    token_list_free(&list);
    tokenizer_free(tok);
}

static void names(void **state)
{
    (void)state;
    struct tokenizer *tok = open_fixture();
    int64_t size;
    assert_int_equal(tokenizer_id(tok, "[EOS]"), N_BASE + 1);
    assert_int_equal(tokenizer_id(tok, "<|reserved_token_568|>"), 568);
    assert_int_equal(tokenizer_id(tok, "<|reserved_token_569|>"), -1); /* named <think> */
    assert_int_equal(tokenizer_id(tok, "<|reserved_token_814|>"), -1);
    assert_true(tokenizer_is_special(tok, 568));
    assert_false(tokenizer_is_special(tok, 569));
    assert_string_equal(tokenizer_bytes(tok, 569, &size), "<think>");
    tokenizer_free(tok);
}

/* Long texts, which are cut before encoding: number of ids, and the sum of position times id. */
static void long_texts(void **state)
{
    (void)state;
    static const struct {
        const char *unit; /* repeated until one of the parts below is complete */
        int64_t times;
        const char *end;
        int64_t rounds;
        int64_t n, sum;
    } rows[] = {
        {"a", 25001, " ", 3, 75006, 787369},
        {" ", 60000, "b", 1, 30002, 992476},
        {"The quick ", 50000, "", 1, 400000, 720354},
        {"x ", 199999, "The quick brown", 1, 400012, 768810},
    };
    struct err err;
    struct token_list list = {0};
    struct tokenizer *tok = open_fixture();
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct text_buf text = {0};
        for (int64_t r = 0; r < rows[i].rounds; r++) {
            for (int64_t k = 0; k < rows[i].times; k++) text_put(&text, rows[i].unit);
            text_put(&text, rows[i].end);
        }
        list.count = 0;
        if (tokenizer_encode(tok, text.text, text.size, true, &list, &err)) fail_msg("%s", err.msg);
        int64_t sum = 0;
        for (int64_t k = 0; k < list.count; k++) sum = (sum + k * list.ids[k]) % 1000003;
        if (list.count != rows[i].n || sum != rows[i].sum)
            fail_msg("row %d: %d ids, sum %d", (int)i, (int)list.count, (int)sum);
        text_free(&text);
    }
    token_list_free(&list);
    tokenizer_free(tok);
}

/* Every byte has a different character of the alphabet; a tokenizer.json with these items reads the same bytes. */
static void printable(void **state)
{
    (void)state;
    struct text_buf text = {0};
    struct err err;
    text_put(&text, "{\"model\": {\"type\": \"BPE\", \"merges\": [], \"vocab\": {");
    for (int c = 0; c < 256; c++) {
        char item[32];
        const uint8_t byte = (uint8_t)c;
        char *one = bpe_printable(&byte, 1);
        snprintf(item, sizeof(item), "%s\"%s%s\": %d", c ? ", " : "", c == '"' || c == '\\' ? "\\" : "", one, c);
        text_put(&text, item);
        mem_free(one);
    }
    text_put(&text, "}}, \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false}}");
    struct tokenizer *tok = tokenizer_parse(text.text, text.size, "bytes", &err);
    if (!tok) fail_msg("%s", err.msg);
    for (int c = 0; c < 256; c++) {
        int64_t size;
        const char *bytes = tokenizer_bytes(tok, c, &size);
        assert_true(size == 1 && (uint8_t)bytes[0] == c);
    }
    text_free(&text);
    tokenizer_free(tok);
}

static void write_in(const char *dir, const char *name, const char *text)
{
    char path[512];
    struct err err;
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    assert_int_equal(file_write_atomic(path, text, (int64_t)strlen(text), &err), 0);
}

static void refused(void **state)
{
    (void)state;
    static const struct {
        const char *file, *text, *config, *error;
    } rows[] = {
        {"tiktoken.model", "QQ== 0\n", "{\"tokenizer_class\": \"QWenTokenizer\"}",
         "/tiktoken.model: tokenizer_class \"QWenTokenizer\" is not supported"},
        {"tiktoken.model", "QQ== 0\n", "{}", "tokenizer_class \"\" is not supported"},
        {"tiktoken.model", "QQ== 0\nQg=\n", NULL, "/tiktoken.model:2: is not \"BASE64 RANK\""},
        {"tiktoken.model", "QQ= 0\n", NULL, "/tiktoken.model:1: is not \"BASE64 RANK\""},
        {"tiktoken.model", "Q-== 0\n", NULL, "/tiktoken.model:1: is not \"BASE64 RANK\""},
        {"tiktoken.model", "QQ== 0\nQg== 0\n", NULL, "/tiktoken.model:2: rank 0 is taken by another token"},
        {"tiktoken.model", "QQ== 0\nQg== 1x\n", NULL, "/tiktoken.model:2: is not"},
        {"tiktoken.model", "QQ== 0\nQg== 99999999999\n", NULL, "/tiktoken.model:2: the rank is above 1048575"},
        {"tiktoken.model", "QQ== 0\nQQ== 1\n", NULL, "/tiktoken.model: ids 0 and 1 have the same text"},
        {"tiktoken.model", "QQ== 0\nQg== 2\n", NULL, "/tiktoken.model: rank 1 is missing"},
        {"tiktoken.model", "\n", NULL, "/tiktoken.model: has no tokens"},
        {"qwen.tiktoken", "QQ== 0\n", NULL,
         "/tokenizer.json is missing, and qwen.tiktoken is not read; write tokenizer"},
        {"tokenizer.model", "x", NULL, "/tokenizer.json is missing, and tokenizer.model is not read; write tokenizer"},
        {"README.md", "x", NULL, "/tokenizer.json is missing: model.path needs the tokenizer of its model"},
    };
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        const char *dir = scratch_dir();
        struct err err;
        write_in(dir, rows[i].file, rows[i].text);
        write_in(dir, "tokenizer_config.json",
                 rows[i].config ? rows[i].config : "{\"tokenizer_class\": \"TikTokenTokenizer\"}");
        if (tokenizer_open(dir, &err)) fail_msg("row %d was not refused", (int)i);
        if (!strstr(err.msg, rows[i].error)) fail_msg("row %d: %s", (int)i, err.msg);
    }
}

int test_tiktoken(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vectors),   cmocka_unit_test(names),   cmocka_unit_test(long_texts),
        cmocka_unit_test(printable), cmocka_unit_test(refused),
    };
    return cmocka_run_group_tests_name("tiktoken", tests, NULL, NULL);
}

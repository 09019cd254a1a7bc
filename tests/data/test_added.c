/* test_added.c - added tokens: their flags as in Hugging Face's library, long ones, and normalizers that grow a text.
 */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "data/eos_ids.h"
#include "data/file/file.h"
#include "data/json/text.h"
#include "data/tokenizer/tokenizer.h"

/* A tokenizer with a token per byte and these added tokens; the caller frees. */
static struct tokenizer *bytes_with(const char *added)
{
    struct err err;
    int64_t size;
    char *text = file_read(fixture("data/bytes.tokenizer.json"), 1 << 20, &size, &err);
    assert_non_null(text);
    const char *begin = strstr(text, "\"added_tokens\"");
    const char *end = begin ? strchr(begin, ']') : NULL;
    assert_non_null(end);
    struct text_buf all = {0};
    text_put_bytes(&all, text, begin - text);
    text_put(&all, "\"added_tokens\": [");
    text_put(&all, added);
    text_put(&all, end);
    struct tokenizer *tok = tokenizer_parse(all.text, all.size, "t", &err);
    if (!tok) fail_msg("%s", err.msg);
    text_free(&all);
    mem_free(text);
    return tok;
}

#define TOKEN(id, content, flags)                                                                                      \
    "{\"id\":" id ",\"content\":\"" content "\",\"special\":false,\"normalized\":false" flags "}"

/* White space and words beside added tokens. The ids are those of Hugging Face's library, 0.23. */
static void added_flags(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int64_t n;
        int32_t ids[24];
        int32_t end[24]; /* of the byte ranges */
    } rows[] = {
        {"a  <l> b", 4, {97, 300, 32, 98}, {1, 6, 7, 8}},
        {"a <r> \n\xe3\x80\x80"
         "b",
         4,
         {97, 32, 301, 98},
         {1, 2, 10, 11}},
        {"<r>  <l>", 2, {301, 300}, {5, 8}},
        {"<l> <l>", 2, {300, 300}, {3, 7}},
        {"w1 w1x", 5, {302, 32, 119, 49, 120}, {2, 3, 4, 5, 6}},
        {"_w1", 3, {95, 119, 49}, {1, 2, 3}},
        {"-w1-", 3, {45, 302, 45}, {1, 3, 4}},
        {"\xc3\xa9w1", 4, {195, 169, 119, 49}, {1, 2, 3, 4}},
        {"w1\xe2\x93\x90", 5, {119, 49, 226, 147, 144}, {1, 2, 3, 4, 5}}, /* a circled letter */
        {"w1\xe2\x82\xac", 4, {302, 226, 130, 172}, {2, 3, 4, 5}},        /* a currency sign */
        {"abcabd", 2, {303, 304}, {3, 6}},
        {"ababcd", 2, {305, 306}, {2, 6}},
    };
    struct tokenizer *tok =
        bytes_with(TOKEN("300", "<l>", ",\"lstrip\":true") "," TOKEN("301", "<r>", ",\"rstrip\":true") "," TOKEN(
            "302", "w1", ",\"single_word\":true") "," TOKEN("303", "abc",
                                                            "") "," TOKEN("304", "abd",
                                                                          "") "," TOKEN("305", "ab",
                                                                                        "") "," TOKEN("306", "abcd",
                                                                                                      ""));
    struct token_list list = {0};
    struct err err;
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        list.count = 0;
        assert_int_equal(tokenizer_encode(tok, rows[i].text, (int64_t)strlen(rows[i].text), true, &list, &err), 0);
        if (list.count != rows[i].n) fail_msg("%s: %d ids", rows[i].text, (int)list.count);
        for (int64_t k = 0; k < list.count; k++)
            if (list.ids[k] != rows[i].ids[k] || list.end[k] != rows[i].end[k])
                fail_msg("%s: id %d is %d, it ends at %d", rows[i].text, (int)k, list.ids[k], list.end[k]);
    }
    token_list_free(&list);
    tokenizer_free(tok);
}

/* A token of 40,000 bytes, and texts that nearly contain it at every byte. A search that compares again at each byte
 * takes hours. */
static void long_added(void **state)
{
    (void)state;
    enum { LONG = 40000, SIZE = 4000000 };
    struct text_buf added = {0};
    struct token_list list = {0};
    struct err err;
    char *text = mem_alloc(SIZE);
    text_put(&added, "{\"id\":300,\"special\":false,\"normalized\":false,\"content\":\"");
    for (int64_t i = 0; i < LONG; i++) text_put(&added, "a");
    text_put(&added, "b\"}," TOKEN("97", "a", ""));
    struct tokenizer *tok = bytes_with(added.text);
    memset(text, 'a', SIZE);
    assert_int_equal(tokenizer_encode(tok, text, SIZE, true, &list, &err), 0);
    assert_int_equal(list.count, SIZE);
    assert_int_equal(list.ids[SIZE - 1], 97);
    for (int64_t i = LONG - 1; i < SIZE; i += LONG) text[i] = 'b'; /* one byte too few, every time */
    list.count = 0;
    assert_int_equal(tokenizer_encode(tok, text, SIZE, true, &list, &err), 0);
    assert_int_equal(list.count, SIZE);
    text[LONG - 1] = 'a';
    text[LONG] = 'b';
    list.count = 0;
    assert_int_equal(tokenizer_encode(tok, text, SIZE, true, &list, &err), 0);
    assert_int_equal(list.count, SIZE - LONG);
    assert_int_equal(list.ids[0], 300);
    token_list_free(&list);
    tokenizer_free(tok);
    text_free(&added);
    mem_free(text);
}

/* A text of spaces, and an added token " " that also absorbs white space beside it. A tokenizer that scans the
 * remaining spaces again for each token takes hours. */
static void long_space(void **state)
{
    (void)state;
    enum { SIZE = 4000000 };
    static const char *const flags[] = {",\"lstrip\":true", ",\"rstrip\":true", ",\"lstrip\":true,\"rstrip\":true"};
    struct err err;
    char *text = mem_alloc(SIZE);
    memset(text, ' ', SIZE);
    for (int64_t i = 0; i < MT_LEN(flags); i++) {
        struct token_list list = {0};
        char added[256];
        snprintf(added, sizeof(added), TOKEN("32", " ", "%s"), flags[i]);
        struct tokenizer *tok = bytes_with(added);
        assert_int_equal(tokenizer_encode(tok, text, SIZE, true, &list, &err), 0);
        assert_int_equal(list.count, i ? 1 : SIZE);
        assert_int_equal(list.end[list.count - 1], SIZE);
        token_list_free(&list);
        tokenizer_free(tok);
    }
    mem_free(text);
}

/* Adds a step that replaces `count` bytes `from` by `n` bytes `to`. */
static void put_replace(struct text_buf *b, int64_t count, char from, int64_t n, char to)
{
    text_put(b, b->size ? "," : "");
    text_put(b, "{\"type\":\"Replace\",\"pattern\":{\"String\":\"");
    for (int64_t i = 0; i < count; i++) text_put_bytes(b, &from, 1);
    text_put(b, "\"},\"content\":\"");
    for (int64_t i = 0; i < n; i++) text_put_bytes(b, &to, 1);
    text_put(b, "\"}");
}

/* A tokenizer with a token per character, the added token x, and these steps as its normalizer; the caller frees. */
static struct tokenizer *chars_with(const struct text_buf *steps)
{
    struct err err;
    int64_t size;
    char *text = file_read(fixture("tokenizer/chars.json"), 1 << 20, &size, &err);
    assert_non_null(text);
    const char *added = strstr(text, "\"added_tokens\":["), *begin = strstr(text, "\"normalizer\"");
    const char *end = strstr(text, ",\"pre_tokenizer\"");
    assert_true(added && begin && end && added < begin && begin < end);
    added = strchr(added, '[') + 1;
    struct text_buf all = {0};
    text_put_bytes(&all, text, added - text);
    text_put(&all, TOKEN("900", "<x>", "") ",");
    text_put_bytes(&all, added, begin - added);
    text_put(&all, "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[");
    text_put_bytes(&all, steps->text, steps->size);
    text_put(&all, "]}");
    text_put(&all, end);
    struct tokenizer *tok = tokenizer_parse(all.text, all.size, "t", &err);
    if (!tok) fail_msg("%s", err.msg);
    text_free(&all);
    mem_free(text);
    return tok;
}

/* Eight replacements of one byte by 31 would make 8e11 bytes from one. Other steps grow a text and shrink it again: the
 * budget counts all sections of a text together. */
static void growing_normalizer(void **state)
{
    (void)state;
    enum { SECTIONS = 50000 };
    static const char too_large[] =
        "the normalizer makes more than 16 bytes of each byte of the text: use another tokenizer.json";
    struct err err;
    struct text_buf steps = {0}, turns = {0}, text = {0};
    struct token_list list = {0};
    for (int i = 0; i < 8; i++) put_replace(&steps, 1, 'a', 31, 'a');
    struct tokenizer *tok = chars_with(&steps);
    assert_int_equal(tokenizer_encode(tok, "a", 1, true, &list, &err), -1);
    assert_string_equal(err.msg, too_large);
    assert_int_equal(tokenizer_encode(tok, "b", 1, true, &list, &err), 0);
    tokenizer_free(tok);
    for (int i = 0; i < 2; i++) put_replace(&turns, 1, (char)('a' + i), 31, (char)('b' + i));
    for (int i = 2; i > 0; i--) put_replace(&turns, 31, (char)('a' + i), 1, (char)('a' + i - 1));
    tok = chars_with(&turns);
    assert_int_equal(tokenizer_encode(tok, "a<x>", 4, true, &list, &err), 0);
    for (int i = 0; i < SECTIONS; i++) text_put(&text, "a<x>");
    assert_int_equal(tokenizer_encode(tok, text.text, text.size, true, &list, &err), -1);
    assert_string_equal(err.msg, too_large);
    tokenizer_free(tok);
    token_list_free(&list);
    text_free(&steps);
    text_free(&turns);
    text_free(&text);
}

#define FLAGS(content, more) "{\"content\": \"" content "\", \"special\": false, \"normalized\": false" more "}"

/* Tokens that only tokenizer_config.json has, with the ids of transformers 5.24. The tokenizer.json has ids to 264. */
static void config_tokens(void **state)
{
    (void)state;
    static const struct {
        bool plain; /* special tokens are text */
        const char *config, *text;
        int64_t n;
        int32_t ids[16];
    } rows[] = {
        {false,
         "{\"added_tokens_decoder\": {\"314\": " FLAGS("<far>", "") ", \"265\": " FLAGS("<near>", "") "}}",
         "a<far>b<near>c",
         5,
         {97, 266, 98, 265, 99}},
        {false, "{\"added_tokens_decoder\": {\"5\": " FLAGS("<taken>", "") "}}", "x<taken>", 2, {120, 265}},
        {false,
         "{\"added_tokens_decoder\": {\"259\": " FLAGS("<|return|>", ", \"rstrip\": true") "}}",
         "x<|return|>  y",
         3,
         {120, 258, 121}},
        {false,
         "{\"added_tokens_decoder\": {\"97\": " FLAGS("ab", "") ", \"200\": " FLAGS("b", ", \"lstrip\": true") "}}",
         "ab  b",
         2,
         {265, 98}},
        {false,
         "{\"added_tokens_decoder\": {\"265\": {\"content\": \"<d>\"}, \"266\": {\"content\": \"\"}}}",
         "<d>",
         1,
         {265}},
        {false,
         "{\"eos_token\": \"<zz>\", \"pad_token\": \"<qq>\", \"foo_token\": \"<foo>\", \"extra_special_tokens\": "
         "[\"<e1>\"],"
         "\"add_bos_token\": false, \"unk_token\": null}",
         "<zz><qq><e1><foo>",
         4,
         {265, 266, 268, 267}},
        {false,
         "{\"eos_token\": {\"content\": \"<zz>\", \"lstrip\": true}, \"additional_special_tokens\": "
         "[\"<e1>\", {\"content\": \"<e2>\", \"rstrip\": true, \"special\": true}]}",
         "a <zz><e1> <e2>  b",
         6,
         {97, 265, 266, 32, 267, 98}},
        {true, "{\"eos_token\": \"<z>\"}", "<z>", 3, {60, 122, 62}},
    };
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct err err;
        struct token_list list = {0};
        char path[512], *text;
        int64_t size;
        const char *dir = scratch_dir();
        assert_non_null(text = file_read(fixture("data/bytes.tokenizer.json"), 1 << 20, &size, &err));
        snprintf(path, sizeof(path), "%s/tokenizer.json", dir);
        assert_int_equal(file_write_atomic(path, text, size, &err), 0);
        snprintf(path, sizeof(path), "%s/tokenizer_config.json", dir);
        assert_int_equal(file_write_atomic(path, rows[i].config, (int64_t)strlen(rows[i].config), &err), 0);
        struct tokenizer *tok = tokenizer_open(dir, &err),
                         *bare = tokenizer_load(fixture("data/bytes.tokenizer.json"), &err);
        if (!tok) fail_msg("%s", err.msg);
        assert_true(tokenizer_hash(tok) != tokenizer_hash(bare));
        const int64_t n = (int64_t)strlen(rows[i].text);
        assert_int_equal(tokenizer_encode(tok, rows[i].text, n, !rows[i].plain, &list, &err), 0);
        if (list.count != rows[i].n) fail_msg("row %d: %d ids", (int)i, (int)list.count);
        for (int64_t k = 0; k < list.count; k++)
            if (list.ids[k] != rows[i].ids[k]) fail_msg("row %d: id %d is %d", (int)i, (int)k, list.ids[k]);
        tokenizer_free(tok);
        tokenizer_free(bare);
        token_list_free(&list);
        mem_free(text);
    }
}

static void write_in(const char *dir, const char *name, const char *text)
{
    char path[512];
    struct err err;
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    if (text) assert_int_equal(file_write_atomic(path, text, (int64_t)strlen(text), &err), 0);
}

/* The token after a document, wherever transformers finds it. */
static void end_of_documents(void **state)
{
    (void)state;
#define DECODER "\"added_tokens_decoder\": {}"
    static const struct {
        const char *config, *map, *generation, *error; /* texts of the files; NULL: there is none */
        int32_t eos;
    } rows[] = {
        {"{\"eos_token\": \"a\"}", NULL, NULL, NULL, 97},
        {"{\"eos_token\": {\"content\": \"a\"}, " DECODER "}", "{\"eos_token\": \"b\"}", NULL, NULL, 97},
        {"{\"eos_token\": \"a\"}", "{\"eos_token\": \"b\"}", NULL, NULL, 98},
        {"{\"eos_token\": null, " DECODER "}", "{\"eos_token\": {\"content\": \"b\"}}", NULL, NULL, 98},
        {"{}", NULL, "{\"eos_token_id\": [99, 98]}", NULL, 99},
        {NULL, "{\"pad_token\": \"b\"}", "{\"eos_token_id\": 99}", NULL, 99},
        {"{\"eos_token\": \"<none>\"}", NULL, "{\"eos_token_id\": 99}", "eos_token \"<none>\" is not a token", 0},
        {"{\"eos_token\": null}", NULL, NULL, "set eos_token in tokenizer_config.json, or eos_token_id in ", 0},
        {"{\"eos_token\": 5}", NULL, NULL, "tokenizer_config.json", 0},
    };
    struct err err = {""};
    struct tokenizer *tok = tokenizer_load(fixture("data/bytes.tokenizer.json"), &err);
    for (int i = 0; i < MT_LEN(rows); i++) {
        const char *dir = scratch_dir();
        int32_t eos = -1;
        write_in(dir, "tokenizer_config.json", rows[i].config);
        write_in(dir, "special_tokens_map.json", rows[i].map);
        write_in(dir, "generation_config.json", rows[i].generation);
        const int rc = eos_ids_main(&eos, dir, tok, &err);
        if (rc != (rows[i].error ? -1 : 0)) fail_msg("row %d: %d, %s", i, rc, err.msg);
        if (rc && !strstr(err.msg, rows[i].error)) fail_msg("row %d: %s", i, err.msg);
        if (!rc) assert_int_equal(eos, rows[i].eos);
    }
    tokenizer_free(tok);
}

int test_added(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(added_flags),        cmocka_unit_test(long_added),    cmocka_unit_test(long_space),
        cmocka_unit_test(growing_normalizer), cmocka_unit_test(config_tokens), cmocka_unit_test(end_of_documents),
    };
    return cmocka_run_group_tests_name("added", tests, NULL, NULL);
}

/* test_split.c - the pre-tokenizer: white space, windows of the text, the work budget against hostile patterns. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "data/json/json.h"
#include "data/tokenizer/split.h"

#define SHIPPED "../../configs/tiny-gptoss/tokenizer.json"

struct pieces {
    int64_t ends[8], n;
};

static int add_piece(void *ctx, int64_t begin, int64_t end, struct err *err)
{
    struct pieces *p = ctx;
    (void)err;
    assert_int_equal(begin, p->n ? p->ends[p->n - 1] : 0);
    assert_true(begin < end && p->n < 8);
    p->ends[p->n++] = end;
    return 0;
}

/* \s is Unicode's White_Space, without U+180E since Unicode 6.3. With a white-space character as _, "1 _1" is 1| |_|1,
 * otherwise 1| _|1. */
static void white_space(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int64_t pieces;
    } rows[] = {
        {"\t", 4},           {"\v", 4},           {"\f", 4},           {" ", 4},
        {"\xc2\x85", 4},     {"\xc2\xa0", 4},     {"\xe1\x9a\x80", 4}, {"\xe2\x80\x80", 4},
        {"\xe2\x80\x8a", 4}, {"\xe2\x80\xa8", 4}, {"\xe2\x80\xa9", 4}, {"\xe2\x80\xaf", 4},
        {"\xe2\x81\x9f", 4}, {"\xe3\x80\x80", 4}, {"\xe1\xa0\x8e", 3}, {"\xe2\x80\x8b", 3},
        {"\xef\xbb\xbf", 3}, {"\x1c", 3},         {"\n", 3}, /* matched by a separate alternative */
    };
    struct err err;
    struct json_doc *doc = json_load(fixture(SHIPPED), 1 << 24, &err);
    struct split *s = doc ? split_load(json_find(json_root(doc), "pre_tokenizer"), &err) : NULL;
    if (!s) fail_msg("%s", err.msg);
    struct split_work *w = split_work_new();
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        char text[16];
        struct pieces p = {0};
        snprintf(text, sizeof(text), "1 %s1", rows[i].text);
        assert_int_equal(split_run(s, w, text, (int64_t)strlen(text), add_piece, &p, &err), 0);
        if (p.n != rows[i].pieces) fail_msg("row %d: %d pieces", (int)i, (int)p.n);
    }
    split_work_free(w);
    split_work_free(NULL);
    split_free(s);
    split_free(NULL);
    json_free(doc);
}

/* The split of one pattern, before a ByteLevel. */
static struct split *split_of(const char *regex, struct err *err)
{
    char text[9000];
    snprintf(text, sizeof(text),
             "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"pattern\": {\"Regex\": \"%s\"}, "
             "\"behavior\": \"Isolated\", \"invert\": false}, {\"type\": \"ByteLevel\", \"use_regex\": false}]}",
             regex);
    struct json_doc *doc = json_parse(text, (int64_t)strlen(text), "tokenizer.json", err);
    assert_non_null(doc);
    struct split *s = split_load(json_root(doc), err);
    json_free(doc);
    return s;
}

static int ignore_piece(void *ctx, int64_t begin, int64_t end, struct err *err)
{
    (void)ctx;
    (void)begin;
    (void)end;
    (void)err;
    return 0;
}

/* Matching runs on windows of the text: for any window length, the pieces equal those of the whole text. */
static void windows(void **state)
{
    (void)state;
    struct err err;
    struct split *s = split_of(" ?\\\\p{L}+|\\\\s+(?!\\\\S)|\\\\s+|(?<=\\\\.)[0-9]+(?=\\\\.\\\\.)|[0-9.]", &err);
    if (!s) fail_msg("%s", err.msg);
    for (int n = 2; n < 300; n++) {
        char text[2000];
        struct pieces p = {0};
        struct split_work *w = split_work_new();
        int size = 0;
        for (int i = 0; i < n; i++) size += snprintf(text + size, 8, i % 3 ? "a" : "\xc3\xa9");
        const int64_t letters = size;
        size += snprintf(text + size, sizeof(text) - (size_t)size, "%*sb.", n, "");
        const int64_t dot = size;
        for (int i = 0; i < n; i++) text[size++] = '7';
        const int64_t digits = size;
        text[size++] = '.';
        text[size++] = '.';
        if (split_run(s, w, text, size, add_piece, &p, &err)) fail_msg("%s", err.msg);
        const int64_t ends[] = {letters, letters + n - 1, dot - 1, dot, digits, size - 1, size};
        assert_int_equal(p.n, MT_LEN(ends));
        assert_memory_equal(p.ends, ends, sizeof(ends));
        split_work_free(w);
    }
    split_free(s);
}

/* The work budget does not count lookbehind, so its length is limited. */
static void lookbehind_is_short(void **state)
{
    (void)state;
    struct err err;
    struct split *s = split_of("(?<=[\\\\s\\\\S]{16})a", &err);
    if (!s) fail_msg("%s", err.msg);
    split_free(s);
    assert_null(split_of("(?<=[\\\\s\\\\S]{60000}q)[\\\\s\\\\S]|[\\\\s\\\\S]", &err));
    if (!strstr(err.msg, "looks 60001 characters back, the limit is 16")) fail_msg("%s", err.msg);
}

/* Patterns with quadratic or exponential work: an error that names file and pattern. */
static void hostile_patterns(void **state)
{
    (void)state;
    static const char *const patterns[] = {
        "(?:[\\\\s\\\\S]*b|[\\\\s\\\\S])", "(?:[\\\\s\\\\S]*[\\\\s\\\\S]*[\\\\s\\\\S]*b|[\\\\s\\\\S])",
        "(?:(?:a|aa)*b|[\\\\s\\\\S])",     "(?:(?:a*)*b|a)",
        "(?=(?:[\\\\s\\\\S]*b)?)a",        "(?:[\\\\s\\\\S]*(?:a++b|c)|a)",
        "(?<![\\\\s\\\\S]b)(?:a*?b|a)",    "(?=[^b]*+[bc])a",
        "(?=(?>[^b]*)(?:b|c))a",           "(?:\\\\p{L}++1|\\\\p{L}++2|\\\\p{L}++3|a)"};
    enum { SIZE = 20000 };
    char *text = mem_alloc(SIZE + 1), nested[256] = "", repeated[9000] = "";
    struct err err;
    memset(text, 'a', SIZE);
    for (int64_t i = 0; i < MT_LEN(patterns); i++) {
        struct split *s = split_of(patterns[i], &err);
        if (!s) fail_msg("%s", err.msg);
        struct split_work *w = split_work_new();
        if (!split_run(s, w, text, SIZE, ignore_piece, NULL, &err)) fail_msg("%s comes to its end", patterns[i]);
        if (strncmp(err.msg, "tokenizer.json: key `pretokenizers[0].pattern.Regex`: the pattern (?", 68) ||
            (!strstr(err.msg, "steps for each byte") && !strstr(err.msg, "heap limit")))
            fail_msg("%s: %s", patterns[i], err.msg);
        split_work_free(w);
        split_free(s);
    }
    for (int i = 0; i < 40; i++) strcat(nested, "(?:a");
    for (int i = 0; i < 40; i++) strcat(nested, ")+");
    assert_null(split_of(nested, &err));
    assert_non_null(strstr(err.msg, "parentheses are too deeply nested"));
    for (int i = 0; i < 40; i++) strcat(repeated, "(?:(?:[ab]c|d){1,40}){1,4}");
    assert_null(split_of(repeated, &err));
    assert_non_null(strstr(err.msg, "compile"));
    mem_free(text);
}

/* Texts that cause the most work for the tokenizers of the fixtures are within the budget. */
static void adversarial_texts(void **state)
{
    (void)state;
    static const char *const units[] = {" ",
                                        "\n",
                                        "\r\n",
                                        " \n",
                                        "a",
                                        "7",
                                        "!",
                                        "'s",
                                        "a1",
                                        "\xe4\xb8\xad",
                                        "\xe3\x80\x80",
                                        "\x01",
                                        "\xcc\x81",
                                        "a b",
                                        "! \n",
                                        " 1",
                                        "\n \r\n\t\n\n",
                                        "\xf0\x9f\x98\x80"};
    static const char *const files[] = {SHIPPED,
                                        "tokenizer/deepseek.json",
                                        "tokenizer/metaspace.json",
                                        "tokenizer/nfc.json",
                                        "tokenizer/olmo2.json",
                                        "tokenizer/qwen35.json",
                                        "tokenizer/splits.json",
                                        "tokenizer/whole.json"};
    enum { SIZE = 20000 };
    char text[SIZE + 1];
    struct err err;
    for (int64_t f = 0; f < MT_LEN(files); f++) {
        struct json_doc *doc = json_load(fixture(files[f]), 1 << 24, &err);
        struct split *s = doc ? split_load(json_find(json_root(doc), "pre_tokenizer"), &err) : NULL;
        if (!s) fail_msg("%s: %s", files[f], err.msg);
        for (int64_t u = 0; u < MT_LEN(units); u++) {
            struct split_work *w = split_work_new();
            const size_t unit = strlen(units[u]);
            size_t size = 0;
            for (; size + unit <= SIZE; size += unit) memcpy(text + size, units[u], unit);
            if (split_run(s, w, text, (int64_t)size, ignore_piece, NULL, &err))
                fail_msg("%s, text %d: %s", files[f], (int)u, err.msg);
            split_work_free(w);
        }
        split_free(s);
        json_free(doc);
    }
}

int test_split(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(white_space),         cmocka_unit_test(windows),           cmocka_unit_test(hostile_patterns),
        cmocka_unit_test(lookbehind_is_short), cmocka_unit_test(adversarial_texts),
    };
    return cmocka_run_group_tests_name("split", tests, NULL, NULL);
}

/* test_tokenizer.c - ids equal those of Hugging Face's library (tests/parity/make_tokenizer_vectors.py writes them);
 * byte ranges, unsupported features, damaged files, long texts, threads. */
#include "tests/test.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "data/tokenizer/normalize.h"
#include "data/tokenizer/split.h"
#include "data/tokenizer/tokenizer.h"

#define LARGE "../../configs/tiny-gptoss/tokenizer.json"

static const struct {
    const char *name;
    bool exact; /* no normalizer: ids decode to the exact text */
    bool all;   /* any text can be encoded */
} tokenizers[] = {
    {"tiny-gptoss", true, true}, {"deepseek", true, true}, {"qwen35", false, true}, {"olmo2", true, true},
    {"nfc", false, false},       {"splits", true, false},  {"whole", true, false},  {"chars", false, true},
    {"metaspace", false, true},  {"glm4", true, true},     {"kimi", true, true},    {"gemma", false, true},
    {"tekken", true, true},
};

static struct tokenizer *load(const char *path)
{
    struct err err;
    struct tokenizer *tok = tokenizer_load(path, &err);
    if (!tok) fail_msg("%s", err.msg);
    return tok;
}

/* A vector file and the tokenizer that it names. */
static struct tokenizer *load_vectors(const char *name, struct json_doc **doc, struct json *cases)
{
    struct err err;
    char file[128], tok[256];
    const char *path;
    snprintf(file, sizeof(file), "tokenizer/%s.ids.json", name);
    *doc = json_load(fixture(file), 1 << 24, &err);
    if (!*doc || json_get_str(json_root(*doc), "tokenizer", &path, &err) ||
        json_get_array(json_root(*doc), "cases", cases, &err))
        fail_msg("%s", err.msg);
    snprintf(tok, sizeof(tok), "../../%s", path); /* from the repository's root */
    return load(fixture(tok));
}

struct vector {
    const char *text;
    int64_t size;
    bool special;
    struct json ids;
};

static struct vector vector_at(struct json cases, int64_t i)
{
    struct err err;
    struct vector v;
    struct json j = json_at(cases, i);
    if (json_str(json_find(j, "text"), &v.text, &v.size, &err) || json_get_bool(j, "special", &v.special, &err) ||
        json_get_array(j, "ids", &v.ids, &err))
        fail_msg("%s", err.msg);
    return v;
}

/* Byte ranges ascend and cover the text; without a normalizer they are disjoint and contain the bytes of their ids. */
static void check_ranges(const struct tokenizer *tok, const struct token_list *list, const char *text, int64_t size,
                         bool exact)
{
    int64_t end = 0;
    for (int64_t i = 0; i < list->count; i++) {
        int64_t n, begin = list->begin[i];
        const char *bytes = tokenizer_bytes(tok, list->ids[i], &n);
        assert_non_null(bytes);
        assert_true(begin <= end && begin < list->end[i] && (i == 0 || list->begin[i - 1] <= begin));
        if (exact) {
            assert_int_equal(begin, end);
            assert_int_equal(n, list->end[i] - begin);
            assert_memory_equal(bytes, text + begin, (size_t)n);
        }
        end = list->end[i];
    }
    assert_int_equal(end, size);
}

static void vectors(void **state)
{
    (void)state;
    struct token_list list = {0};
    for (int64_t k = 0; k < MT_LEN(tokenizers); k++) {
        struct err err;
        struct json_doc *doc;
        struct json cases;
        struct tokenizer *tok = load_vectors(tokenizers[k].name, &doc, &cases);
        assert_true(json_count(cases) > 100);
        for (int64_t i = 0; i < json_count(cases); i++) {
            struct vector v = vector_at(cases, i);
            list.count = 0;
            if (tokenizer_encode(tok, v.text, v.size, v.special, &list, &err)) fail_msg("%s", err.msg);
            for (int64_t t = 0; t < json_count(v.ids); t++) {
                int64_t id;
                assert_int_equal(json_i64(json_at(v.ids, t), 0, INT32_MAX, &id, &err), 0);
                if (t >= list.count || list.ids[t] != id)
                    fail_msg("%s, case %d, \"%s\": token %d is not %d", tokenizers[k].name, (int)i, v.text, (int)t,
                             (int)id);
            }
            assert_int_equal(list.count, json_count(v.ids));
            check_ranges(tok, &list, v.text, v.size, tokenizers[k].exact);
        }
        tokenizer_free(tok);
        json_free(doc);
    }
    token_list_free(&list);
}

static void lookups(void **state)
{
    (void)state;
    struct err err;
    int64_t size;
    struct tokenizer *tok = load(fixture(LARGE));
    assert_int_equal(tokenizer_id(tok, "<|return|>"), 4089);
    assert_int_equal(tokenizer_id(tok, "a"), 64);
    assert_true(tokenizer_id(tok, " the") > 0);
    assert_int_equal(tokenizer_id(tok, ""), -1);
    assert_int_equal(tokenizer_id(tok, "<|nothing|>"), -1);
    assert_memory_equal(tokenizer_bytes(tok, tokenizer_id(tok, " the"), &size), " the", 4);
    assert_int_equal(size, 4);
    assert_null(tokenizer_bytes(tok, -1, &size));
    assert_null(tokenizer_bytes(tok, 4096, &size));
    assert_int_equal(size, 0);
    char *text = file_read(fixture(LARGE), 1 << 24, &size, &err);
    assert_non_null(text);
    struct tokenizer *same = tokenizer_parse(text, size, "t", &err);
    memcpy(strstr(text, "\"1.0\""), "\"1.1\"", 5);
    struct tokenizer *other = tokenizer_parse(text, size, "t", &err);
    assert_true(tokenizer_hash(same) == tokenizer_hash(tok));
    assert_true(tokenizer_hash(other) != tokenizer_hash(tok));
    mem_free(text);
    tokenizer_free(tok);
    tokenizer_free(same);
    tokenizer_free(other);
    tokenizer_free(NULL);
}

static void invalid_text(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int64_t at;
    } rows[] = {
        {"\x80", 0},
        {"abc\xff", 3},
        {"\xc0\x80", 0},
        {"\xc1\xbf", 0},
        {"a\xc3", 1},
        {"\xc3(", 0},
        {"\xe0\x9f\xbf", 0},
        {"12345678\xe2\x82", 8},
        {"\xed\xa0\x80", 0},
        {"x\xed\xbf\xbf", 1},
        {"\xf0\x8f\xbf\xbf", 0},
        {"\xf4\x90\x80\x80", 0},
        {"\xf5\x80\x80\x80", 0},
        {"\xf0\x9f\x98", 0},
        {"1234567\xc3\xa9\xa9", 9},
        {"\xe2\x28\xa1", 0},
    };
    struct tokenizer *tok = load(fixture(LARGE));
    struct token_list list = {0};
    struct err err;
    assert_int_equal(tokenizer_encode(tok, "before", 6, true, &list, &err), 0);
    int64_t before = list.count;
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        char expected[64];
        snprintf(expected, sizeof(expected), "not valid UTF-8 at byte %d of", (int)rows[i].at);
        assert_int_equal(tokenizer_encode(tok, rows[i].text, (int64_t)strlen(rows[i].text), true, &list, &err), -1);
        if (!strstr(err.msg, expected)) fail_msg("row %d: %s", (int)i, err.msg);
        assert_int_equal(list.count, before);
    }
    static const char *const valid[] = {"\xed\x9f\xbf", "\xee\x80\x80", "\xf4\x8f\xbf\xbf", "\xf0\x90\x80\x80",
                                        "\xc2\x80"};
    for (int64_t i = 0; i < MT_LEN(valid); i++)
        assert_int_equal(utf8_invalid_at(valid[i], (int64_t)strlen(valid[i])), -1);
    token_list_free(&list);
    tokenizer_free(tok);
}

/* text with the first `from` replaced by `to`; free it. */
static char *replaced(const char *text, const char *from, const char *to)
{
    const char *at = strstr(text, from);
    if (!at) fail_msg("%s is not in the fixture", from);
    char *out = mem_alloc((int64_t)(strlen(text) + strlen(to) + 1));
    snprintf(out, strlen(text) + strlen(to) + 1, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    return out;
}

#define SPLIT_1 "\"Regex\":\"\\\\p{N}{1,3}\""

struct refusal {
    const char *from, *to, *error;
};

static const struct refusal refusals[] = {
    {"\"type\":\"BPE\"", "\"type\":\"Unigram\"", "key `model`: type \"Unigram\" is not supported"},
    {"\"dropout\":null", "\"dropout\":0.1", "key `model.dropout`: this option"},
    {"\"unk_token\":null", "\"unk_token\":\"<unk>\"", "key `model.unk_token`: this option"},
    {"\"fuse_unk\":false", "\"fuse_unk\":true", "key `model.fuse_unk`: this option"},
    {"\"byte_fallback\":false", "\"byte_fallback\":true",
     "key `model.vocab`: byte_fallback needs the token <0x00>, which is missing"},
    {"\"end_of_word_suffix\":null", "\"end_of_word_suffix\":\"</w>\"", "key `model.end_of_word_suffix`: this"},
    {"\"continuing_subword_prefix\":null", "\"continuing_subword_prefix\":\"##\"", "subword_prefix`: this option"},
    {"\"content\":\"<|x|>\"", "\"content\":\"\"", "key `added_tokens[0]`: the content is empty"},
    {"\"content\":\"<|x|>\"", "\"content\":\"<|x|>y\"", "key `added_tokens`: \"<|x|>y\" is a duplicate"},
    {"\"content\":\"<|x|>\"", "\"content\":\"abc\"", "key `added_tokens[0]`: id 24 and content \"abc\" contradict"},
    {"{\"id\":24,", "{\"id\":3,", "key `added_tokens[0]`: id 3 and content \"<|x|>\" contradict model.vocab"},
    {"{\"id\":24,", "{\"id\":25,", "key `added_tokens[1]`: id 25 is taken by another added token"},
    {"{\"id\":24,", "{\"id\":-1,", "key `added_tokens[0].id`: -1 is not between 0 and"},
    {"{\"id\":24,", "{\"id\":1048576,", "key `added_tokens[0].id`: 1048576 is not between 0 and"},
    {"{\"id\":24,", "{", "key `added_tokens[0].id`: is missing"},
    {"\"normalizer\":null", "\"normalizer\":{\"type\":\"NFKC\"}", "key `normalizer`: normalizer \"NFKC\" is not"},
    {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Lowercase\"}]}",
     "key `normalizer.normalizers[0]`: normalizer \"Lowercase\""},
    {"{\"type\":\"Split\"", "{\"type\":\"Digits\"", "pretokenizers[0]`: pre-tokenizer \"Digits\" is not supported"},
    {"\"behavior\":\"Isolated\"", "\"behavior\":\"Removed\"", "]`: behavior \"Removed\" with invert false is not"},
    {"\"invert\":false", "\"invert\":true", "pretokenizers[0]`: behavior \"Isolated\" with invert true is not"},
    {"{\"Regex\":", "{\"String\":", "pretokenizers[0].pattern`: only a \"Regex\" is supported"},
    {"\"add_prefix_space\":false", "\"add_prefix_space\":true", "add_prefix_space is not supported"},
    {"{\"type\":\"Split\"", "{\"type\":\"ByteLevel\"", "pretokenizers[0]`: ByteLevel must be the last"},
    {"{\"type\":\"ByteLevel\"", "{\"type\":\"Split\"", "pretokenizers[2]`: ByteLevel must be the last"},
    {"\"type\":\"Sequence\",\"pretokenizers\":", "\"type\":\"Sequence\",\"pretokenizers\":[],\"x\":", "is empty"},
    {"\"pre_tokenizer\":", "\"pre_tokenizer\":null,\"x\":", "key `pre_tokenizer`: byte-level vocabularies need a Byte"},
    {"\"pre_tokenizer\":", "\"pre_tokenizer\":{},\"x\":", "key `pre_tokenizer.type`: is missing"},
    {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Prepend\",\"prepend\":\"x\"}", "normalizer \"Prepend\" is not"},
    {SPLIT_1, "\"Regex\":\"a*\"", "Regex`: the pattern may match the empty string"},
    {SPLIT_1, "\"Regex\":\"(a\"", "Regex`: the pattern does not compile: missing closing parenthesis"},
    {SPLIT_1, "\"Regex\":\"a\\\\w+\"", "not supported from byte 1 on: \\w+"},
    {SPLIT_1, "\"Regex\":\"\\\\p{Greek}\"", "not supported from byte 0 on: \\p{Greek}"},
    {SPLIT_1, "\"Regex\":\"\\\\P{Han}\"", "not supported from byte 0 on: \\P{Han}"},
    {SPLIT_1, "\"Regex\":\"[^a&&[^\\\\p{Han}]]\"", "not supported from byte 4 on: &[^\\p{Han}]]"},
    {SPLIT_1, "\"Regex\":\"[&&[^\\\\p{Han}]]\"", "not supported from byte 2 on: &[^\\p{Han}]]"},
    {SPLIT_1, "\"Regex\":\"[a&&[^\\\\p{Han}b]]\"", "not supported from byte 3 on: &[^\\p{Han}b]]"},
    {SPLIT_1, "\"Regex\":\"a$\"", "not supported from byte 1 on: $"},
    {SPLIT_1, "\"Regex\":\"a(*FAIL)\"", "not supported from byte 1 on: (*FAIL)"},
    {SPLIT_1, "\"Regex\":\"^a\"", "not supported from byte 0 on: ^a"},
    {SPLIT_1, "\"Regex\":\"[a[b]]\"", "not supported from byte 2 on: [b]]"},
    {SPLIT_1, "\"Regex\":\"[a&&b]\"", "not supported from byte 3 on: &b]"},
    {SPLIT_1, "\"Regex\":\"[]a]\"", "not supported from byte 0 on: []a]"},
    {SPLIT_1, "\"Regex\":\"a\\\\\"", "not supported from byte 1 on: \\"},
    {"\"post_processor\":{\"type\":\"ByteLevel\"", "\"post_processor\":{\"type\":\"BertProcessing\"",
     "key `post_processor`: post-processor \"BertProcessing\" is not supported"},
    {"\"post_processor\":{",
     "\"post_processor\":{\"type\":\"Sequence\",\"processors\":[{\"type\":\"Roberta\"}]},\"x\":{",
     "key `post_processor.processors[0]`: post-processor \"Roberta\" is not supported"},
    {"\"abc\":", "\"abcx\":", "is not in the vocabulary"},
    {"\"bc\":", "\"bcx\":", "is not in the vocabulary"},
    {"[\"ab\",\"c\"]", "[\"ab\"]", "is neither \"a b\" nor [\"a\", \"b\"]"},
    {"[\"ab\",\"c\"]", "\"abc\"", "has no space between its parts"},
    {"[\"ab\",\"c\"]", "\"a b c\"", "a part is not a string of the byte-level alphabet"},
    {"[\"ab\",\"c\"]", "[\"ab\",\"\"]", "a part is not a string of the byte-level alphabet"},
    {"[\"ab\",\"c\"]", "[\"ab\",7]", "must be a string, not a number"},
    {"\"abc\":", "\"new\":3,\"abc\":", "id 3 is taken by another token"},
    {"\"abc\":", "\"new\":1.5,\"abc\":", "key `model.vocab.new`: must be an integer"},
    {"\"vocab\":", "\"vocabulary\":", "key `model.vocab`: is missing"},
    {"\"merges\":", "\"merge\":", "key `model.merges`: is missing"},
    {"\"model\":", "\"models\":", "key `model`: is missing"},
};

static const struct refusal chars_refusals[] = {
    {"\"<0xFF>\"", "\"<0xff>\"", "key `model.vocab`: byte_fallback needs the token <0xFF>, which is missing"},
    {"\"byte_fallback\":true", "\"byte_fallback\":false", "key `model.unk_token`: this option"},
    {"\"byte_fallback\":true", "\"byte_fallback\":true,\"ignore_merges\":true", "together with byte_fallback"},
    {"\"normalized\":false", "\"normalized\":true", "normalized`: is not supported together with byte_fallback"},
    {"\"pre_tokenizer\":null", "\"pre_tokenizer\":{\"type\":\"ByteLevel\"}",
     "byte_fallback needs Metaspace, a Split of spaces, or null"},
    {"{\"String\":\" \"},\"content\":\"\\u2581\"}]},\"pre_tokenizer\":null",
     "{\"String\":\"x\"},\"content\":\"y\"}]},\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\" \"},"
     "\"behavior\":\"MergedWithPrevious\"}",
     "cuts at spaces: supported only after a normalizer that replaces spaces"},
    {"\"pre_tokenizer\":null",
     "\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\" \"},\"behavior\":\"Removed\"}",
     "ByteLevel must be the last element"},
    {"\"pre_tokenizer\":null", "\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"_\"}", "replacement \"_\""},
    {"\"pre_tokenizer\":null",
     "\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\xe2\x96\x81\",\"prepend_scheme\":\"last\"}",
     "prepend_scheme \"last\" is not supported"},
    {"\"pre_tokenizer\":null",
     "\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\xe2\x96\x81\",\"add_prefix_space\":false}",
     "add_prefix_space is not supported"},
    {"{\"String\":", "{\"Regex\":", "pattern`: only a \"String\" is supported"},
    {"{\"String\":\" \"", "{\"String\":\"\"", "String`: must have 1 to 31 bytes"},
    {"\"Prepend\"", "\"Strip\"", "normalizer \"Strip\" is not supported (use NFC, Sequence, Prepend, Replace)"},
    {"[\"a\",\"b\"]", "[\"<0x41>\",\"b\"]", "its result is not in the vocabulary"},
    {"[\"a\",\"b\"]", "[\"\",\"b\"]", "a part is empty"},
};

static void refuse(const char *file, const struct refusal *rows, int64_t n)
{
    struct err err;
    int64_t size;
    char *text = file_read(fixture(file), 1 << 20, &size, &err);
    assert_non_null(text);
    for (int64_t i = 0; i < n; i++) {
        char *bad = replaced(text, rows[i].from, rows[i].to);
        struct tokenizer *tok = tokenizer_parse(bad, (int64_t)strlen(bad), "t.json", &err);
        if (tok) fail_msg("%s was not refused", rows[i].to);
        if (strncmp(err.msg, "t.json: ", 8) || !strstr(err.msg, rows[i].error))
            fail_msg("%s gives: %s", rows[i].to, err.msg);
        mem_free(bad);
    }
    mem_free(text);
}

static void refused(void **state)
{
    (void)state;
    struct err err;
    refuse("tokenizer/splits.json", refusals, MT_LEN(refusals));
    refuse("tokenizer/chars.json", chars_refusals, MT_LEN(chars_refusals));
    assert_null(tokenizer_load(fixture("tokenizer/none.json"), &err));
    assert_non_null(strstr(err.msg, "none.json"));
}

/* Added spaces of the normalizer and byte tokens of unknown characters still have the right byte range. */
static void chars_ranges(void **state)
{
    (void)state;
    static const char text[] = "\xc3\xa9"
                               "ab<s> \xe4\xb8\xad";
    static const int32_t ranges[][2] = {{0, 2}, {0, 2}, {2, 4}, {4, 7}, {7, 8}, {8, 9}, {9, 10}, {10, 11}};
    struct err err;
    struct token_list list = {0};
    struct tokenizer *tok = load(fixture("tokenizer/chars.json"));
    assert_int_equal(tokenizer_encode(tok, text, sizeof(text) - 1, true, &list, &err), 0);
    assert_int_equal(list.count, MT_LEN(ranges));
    for (int64_t i = 0; i < list.count; i++) {
        assert_int_equal(list.begin[i], ranges[i][0]);
        assert_int_equal(list.end[i], ranges[i][1]);
    }
    assert_int_equal(list.ids[2], tokenizer_id(tok, "ab"));
    token_list_free(&list);
    tokenizer_free(tok);
}

/* Options without effect on encoding, and a merge in the other format. */
static void accepted(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"\"dropout\":null,", ""},
        {"\"end_of_word_suffix\":null", "\"end_of_word_suffix\":\"\""},
        {"\"truncation\":null", "\"truncation\":{\"max_length\":5}"},
        {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"}]}"},
        {"\"post_processor\":{", "\"post_processor\":null,\"x\":{"},
        {"[\"ab\",\"c\"]", "\"ab c\""},
        {"\"type\":\"BPE\"", "\"type\":\"BPE\",\"ignore_merges\":false"},
    };
    struct err err;
    int64_t size;
    char *text = file_read(fixture("tokenizer/splits.json"), 1 << 20, &size, &err);
    assert_non_null(text);
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct token_list list = {0};
        char *changed = replaced(text, rows[i][0], rows[i][1]);
        struct tokenizer *tok = tokenizer_parse(changed, (int64_t)strlen(changed), "t", &err);
        if (!tok || tokenizer_encode(tok, "abc12<|x|>", 10, true, &list, &err)) fail_msg("%s: %s", rows[i][1], err.msg);
        assert_int_equal(list.count, 3);
        assert_int_equal(list.ids[0], tokenizer_id(tok, "abc"));
        assert_int_equal(list.ids[2], tokenizer_id(tok, "<|x|>"));
        token_list_free(&list);
        tokenizer_free(tok);
        mem_free(changed);
    }
    mem_free(text);
}

static void truncated(void **state)
{
    (void)state;
    static const char *const names[] = {"nfc", "splits", "whole", "chars", "metaspace"};
    for (int64_t k = 0; k < MT_LEN(names); k++) {
        char file[64];
        int64_t size;
        struct err err;
        snprintf(file, sizeof(file), "tokenizer/%s.json", names[k]);
        char *text = file_read(fixture(file), 1 << 20, &size, &err);
        assert_non_null(text);
        while (size > 0 && text[size - 1] == '\n') size--;
        for (int64_t n = 0; n < size; n++) {
            char *cut = mem_alloc(n); /* of exactly n bytes, for the sanitizer */
            memcpy(cut, text, (size_t)n);
            assert_null(tokenizer_parse(cut, n, "t", &err));
            mem_free(cut);
        }
        struct tokenizer *tok = tokenizer_parse(text, size, "t", &err);
        assert_non_null(tok);
        tokenizer_free(tok);
        mem_free(text);
    }
}

/* A byte missing from the vocabulary is reported with its position, in short and in long pieces. */
static void missing_byte(void **state)
{
    (void)state;
    struct err err;
    struct token_list list = {0};
    struct tokenizer *tok = load(fixture("tokenizer/splits.json"));
    char text[128];
    memset(text, 'a', sizeof(text));
    text[100] = 'q';
    assert_int_equal(tokenizer_encode(tok, "ab <|x|> aq", 11, true, &list, &err), -1);
    assert_string_equal(err.msg, "the tokenizer has no token for byte 0x71 at byte 10 of the text");
    assert_int_equal(tokenizer_encode(tok, text, sizeof(text), true, &list, &err), -1);
    assert_string_equal(err.msg, "the tokenizer has no token for byte 0x71 at byte 100 of the text");
    assert_int_equal(list.count, 0);
    token_list_free(&list);
    tokenizer_free(tok);
}

/* Text that the pattern does not match: the library drops it; moetrain gives an error with the position. */
static void gaps(void **state)
{
    (void)state;
    struct err err;
    struct token_list list = {0};
    int64_t size;
    char *text = file_read(fixture("tokenizer/splits.json"), 1 << 20, &size, &err);
    assert_non_null(text);
    char *changed =
        replaced(text, "\"behavior\":\"Isolated\",\"invert\":false", "\"behavior\":\"Removed\",\"invert\":true");
    struct tokenizer *tok = tokenizer_parse(changed, (int64_t)strlen(changed), "t", &err);
    if (!tok) fail_msg("%s", err.msg);
    assert_int_equal(tokenizer_encode(tok, "12345", 5, true, &list, &err), 0);
    assert_int_equal(list.count, 3);
    static const char *const bad[] = {"12345ab", "123ab4", "ab12"};
    static const int at[] = {5, 3, 0};
    for (int64_t i = 0; i < MT_LEN(bad); i++) {
        char expected[64];
        snprintf(expected, sizeof(expected), "the text at byte %d would be dropped", at[i]);
        assert_int_equal(tokenizer_encode(tok, bad[i], (int64_t)strlen(bad[i]), true, &list, &err), -1);
        assert_non_null(strstr(err.msg, expected));
        assert_int_equal(list.count, 3);
    }
    mem_free(changed);
    mem_free(text);
    token_list_free(&list);
    tokenizer_free(tok);
}

static int64_t put_char(char *out, uint32_t c)
{
    int64_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    out[0] = (char)c;
    if (n == 1) return 1;
    for (int64_t i = n - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3f));
    out[0] = (char)((0xf00 >> n) | c);
    return n;
}

/* Random text: characters of all planes, words, special tokens; no surrogates, and no U+2581, which may be a space. */
static int64_t random_text(char *out, uint64_t key)
{
    static const uint32_t above[] = {0x80, 0x800, 0x3000, 0x10000, 0x20000, 0x110000};
    static const char *const words[] = {" ", "  ", "\n", "the", " of", "'s", "12", "<|end|>", "\r\n", "\t", "/", "x"};
    int64_t n = 0, count = 1 + (int64_t)(rng_uniform(key, 0) * 40);
    for (int64_t i = 1; i <= count; i++) {
        double u = rng_uniform(key, (uint64_t)(3 * i)), v = rng_uniform(key, (uint64_t)(3 * i + 1));
        if (u < 0.4) {
            const char *word = words[(int64_t)(v * (double)MT_LEN(words))];
            memcpy(out + n, word, strlen(word));
            n += (int64_t)strlen(word);
            continue;
        }
        int64_t k = (int64_t)((u - 0.4) / 0.6 * (double)MT_LEN(above));
        uint32_t low = k ? above[k - 1] : 0, c = low + (uint32_t)(v * (double)(above[k] - low));
        n += put_char(out + n, (c >= 0xd800 && c <= 0xdfff) || c == 0x2581 ? 0x4e00 : c);
    }
    return n;
}

/* The text of the ids; in vocabularies of characters, U+2581 is a space. */
static int64_t decode(const struct tokenizer *tok, const struct token_list *list, bool chars, char *out)
{
    int64_t n = 0, size;
    for (int64_t i = 0; i < list->count; i++) {
        const char *bytes = tokenizer_bytes(tok, list->ids[i], &size);
        assert_non_null(bytes);
        memcpy(out + n, bytes, (size_t)size);
        n += size;
    }
    if (!chars) return n;
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) {
        bool space = n - i >= 3 && !memcmp(out + i, SPLIT_SPACE, 3);
        out[kept++] = space ? ' ' : out[i];
        i += space ? 2 : 0;
    }
    return kept;
}

/* Decoding returns the text, or its form NFC where the tokenizer normalizes; in vocabularies of characters, with a
 * leading space. */
static void round_trips(void **state)
{
    (void)state;
    for (int64_t k = 0; k < MT_LEN(tokenizers); k++) {
        char file[64], text[512], back[4096];
        bool chars = !strcmp(tokenizers[k].name, "chars"), first = !strcmp(tokenizers[k].name, "metaspace");
        const bool gemma = !strcmp(tokenizers[k].name, "gemma");
        if (!tokenizers[k].all) continue;
        snprintf(file, sizeof(file), "tokenizer/%s.json", tokenizers[k].name);
        struct tokenizer *tok = load(fixture(k ? file : LARGE));
        struct token_list list = {0};
        for (uint64_t round = 0; round < 5000; round++) {
            struct err err;
            struct normal form = {0};
            int64_t size = random_text(text, rng_key(round, tokenizers[k].name));
            list.count = 0;
            if (tokenizer_encode(tok, text, size, !chars, &list, &err)) fail_msg("%s", err.msg);
            check_ranges(tok, &list, text, size, tokenizers[k].exact);
            int64_t n = decode(tok, &list, chars || first || gemma, back), skip = chars || (first && text[0] != ' ');
            if (!tokenizers[k].exact && !chars && !first && !gemma)
                assert_int_equal(nfc_make(&form, text, size, &err), 0);
            const char *want = form.text ? form.text : text;
            int64_t n_want = form.text ? form.size : size;
            if (n - skip != n_want || memcmp(back + skip, want, (size_t)n_want))
                fail_msg("%s: \"%.*s\" came back as \"%.*s\"", tokenizers[k].name, (int)n_want, want, (int)n, back);
            normal_free(&form);
        }
        token_list_free(&list);
        tokenizer_free(tok);
    }
}

/* One piece of a megabyte, which would take hours with a quadratic algorithm. */
static void long_runs(void **state)
{
    (void)state;
    static const char *const units[] = {"a", " ", "\n ", "\xc3\xa9", "e\xcc\x81", "<", "1a", "'s"};
    enum { SIZE = 1000000 };
    struct err err;
    struct tokenizer *tok = load(fixture(LARGE));
    struct token_list list = {0};
    char *text = mem_alloc(SIZE + 1);
    for (int64_t k = 0; k < MT_LEN(units); k++) {
        int64_t unit = (int64_t)strlen(units[k]), size = SIZE / unit * unit;
        for (int64_t i = 0; i < size; i += unit) memcpy(text + i, units[k], (size_t)unit);
        list.count = 0;
        if (tokenizer_encode(tok, text, size, true, &list, &err)) fail_msg("%s", err.msg);
        check_ranges(tok, &list, text, size, true);
    }
    mem_free(text);
    token_list_free(&list);
    tokenizer_free(tok);
    tok = load(fixture("tokenizer/nfc.json")); /* too many combining marks in a row are an error */
    text = mem_alloc(SIZE + 1);
    for (int64_t i = 0; i < SIZE; i += 2) memcpy(text + i, "\xcc\x81", 2);
    assert_int_equal(tokenizer_encode(tok, text, SIZE, true, &list, &err), -1);
    assert_non_null(strstr(err.msg, "too many combining marks"));
    mem_free(text);
    tokenizer_free(tok);
}

/* NFC: composed, reordered and unchanged characters, and the byte ranges of their sources. */
static void normalization(void **state)
{
    (void)state;
    static const struct {
        const char *in, *out; /* out NULL: equal to in */
    } rows[] = {
        {"", NULL},
        {"plain \xc3\xa9", NULL},
        {"\xe4\xb8\xad\xe6\x96\x87 \xea\xb0\x80", NULL},
        {"e\xcc\x81", "\xc3\xa9"},                                /* e + acute */
        {"a\xcc\x81\xcc\xa3", "\xe1\xba\xa1\xcc\x81"},            /* reordered: dot below first */
        {"\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8", "\xea\xb0\x81"}, /* Hangul L V T */
        {"\xea\xb0\x80\xe1\x86\xa8", "\xea\xb0\x81"},             /* Hangul LV T */
        {"x\xe2\x84\xab", "x\xc3\x85"},                           /* Angstrom sign */
        {"\xe0\xa5\x98", "\xe0\xa4\x95\xe0\xa4\xbc"},             /* composition exclusion */
        {"\xe0\xa7\x87\xe0\xa6\xbe", "\xe0\xa7\x8b"},             /* Bengali vowel of two parts */
        {"\xcd\x84", "\xcc\x88\xcc\x81"},                         /* a mark that decomposes */
    };
    struct err err;
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct normal n = {0};
        int64_t size = (int64_t)strlen(rows[i].in);
        assert_int_equal(nfc_make(&n, rows[i].in, size, &err), 0);
        if (!rows[i].out) {
            assert_null(n.text);
            continue;
        }
        assert_non_null(n.text);
        assert_int_equal(n.size, strlen(rows[i].out));
        assert_memory_equal(n.text, rows[i].out, (size_t)n.size);
        assert_int_equal(n.begin[0], 0);
        assert_int_equal(n.end[n.size - 1], size);
        normal_free(&n);
    }
    struct normal n = {0};
    assert_int_equal(nfc_make(&n, "ae\xcc\x81z", 5, &err), 0);
    static const int32_t begin[] = {0, 1, 1, 4}, end[] = {1, 4, 4, 5};
    assert_int_equal(n.size, 4);
    assert_memory_equal(n.begin, begin, sizeof(begin));
    assert_memory_equal(n.end, end, sizeof(end));
    normal_free(&n);
}

struct worker {
    const struct tokenizer *tok;
    const char *text;
    int64_t size;
    struct token_list list;
    int rc;
};

static void *work(void *arg)
{
    struct worker *w = arg;
    struct err err;
    for (int i = 0; i < 3 && !w->rc; i++) {
        w->list.count = 0;
        w->rc = tokenizer_encode(w->tok, w->text, w->size, true, &w->list, &err);
    }
    return NULL;
}

static void threads(void **state)
{
    (void)state;
    struct err err;
    int64_t size;
    struct tokenizer *tok = load(fixture(LARGE));
    char *text = file_read(fixture("tokenizer/tiny-gptoss.ids.json"), 1 << 24, &size, &err);
    assert_non_null(text);
    struct worker workers[4] = {0};
    pthread_t ids[4];
    for (int i = 0; i < 4; i++) {
        workers[i] = (struct worker){.tok = tok, .text = text, .size = size};
        assert_int_equal(pthread_create(&ids[i], NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < 4; i++) assert_int_equal(pthread_join(ids[i], NULL), 0);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(workers[i].rc, 0);
        assert_true(workers[i].list.count > 10000);
        assert_int_equal(workers[i].list.count, workers[0].list.count);
        assert_memory_equal(workers[i].list.ids, workers[0].list.ids, (size_t)workers[0].list.count * sizeof(int32_t));
    }
    for (int i = 0; i < 4; i++) token_list_free(&workers[i].list);
    mem_free(text);
    tokenizer_free(tok);
}

int test_tokenizer(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vectors),      cmocka_unit_test(lookups),      cmocka_unit_test(invalid_text),
        cmocka_unit_test(refused),      cmocka_unit_test(accepted),     cmocka_unit_test(truncated),
        cmocka_unit_test(missing_byte), cmocka_unit_test(long_runs),    cmocka_unit_test(normalization),
        cmocka_unit_test(threads),      cmocka_unit_test(chars_ranges), cmocka_unit_test(gaps),
        cmocka_unit_test(round_trips),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, NULL, NULL);
}

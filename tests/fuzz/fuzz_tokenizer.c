/* fuzz_tokenizer.c - fuzzes data/tokenizer/tokenizer.h: loads a tokenizer.json, then encodes texts with it.
 *
 * Input: tokenizer.json \0 text. The target encodes this text and a few fixed ones, with special tokens on and off. The
 * byte ranges must cover the text in order. Without a normalizer the tokens' bytes must equal the text. */
#include <stdlib.h>
#include <string.h>

#include "data/tokenizer/normalize.h"
#include "data/tokenizer/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const struct tokenizer *tok, const struct token_list *list, const char *text, int64_t size,
                  bool exact)
{
    int64_t end = 0, n;
    for (int64_t i = 0; i < list->count; i++) {
        int64_t begin = list->begin[i];
        const char *bytes = tokenizer_bytes(tok, list->ids[i], &n);
        MT_REQUIRE(bytes, "id %d", list->ids[i]);
        MT_REQUIRE(begin <= end && begin < list->end[i] && list->end[i] <= size, "range");
        MT_REQUIRE(i == 0 || (begin >= list->begin[i - 1] && list->end[i] >= end), "order");
        if (exact)
            MT_REQUIRE(begin == end && n == list->end[i] - begin && !memcmp(bytes, text + begin, (size_t)n), "bytes");
        end = list->end[i];
    }
    MT_REQUIRE(end == size, "%lld of %lld bytes", (long long)end, (long long)size);
}

static void encode(const struct tokenizer *tok, const char *text, int64_t size, bool exact)
{
    struct token_list list = {0};
    struct err err = {.msg = ""};
    int64_t bad = utf8_invalid_at(text, size);
    for (int special = 0; special < 2; special++) {
        list.count = 0;
        if (tokenizer_encode(tok, text, size, special, &list, &err))
            MT_REQUIRE(err.msg[0] && list.count == 0, "an error without words, or with ids");
        else {
            MT_REQUIRE(bad < 0, "invalid UTF-8 was taken");
            check(tok, &list, text, size, exact);
        }
    }
    token_list_free(&list);
}

static bool contains(const char *text, size_t size, const char *word)
{
    for (size_t i = 0, n = strlen(word); i + n <= size; i++)
        if (!memcmp(text + i, word, n)) return true;
    return false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const texts[] = {
        "",
        "abc ab 12345 zz",
        "the hello  caf\xc3\xa9 cafe\xcc\x81\n\n",
        "<|x|>y<s>zab",
        "I'm \xe4\xb8\xad\xf0\x9f\x98\x80\r\n",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"};
    struct err err = {.msg = ""};
    const uint8_t *nul = memchr(data, 0, size);
    size_t json = nul ? (size_t)(nul - data) : size, rest = nul ? size - json - 1 : 0;
    char *file = mem_alloc((int64_t)json); /* of exactly this size, for the sanitizer */
    memcpy(file, data, json);
    bool exact = !contains(file, json, "\\u00"); /* an escape could be a normalizer's name */
    static const char *const change[] = {"NFC", "Prepend", "Replace", "Metaspace"};
    for (int i = 0; i < MT_LEN(change); i++) exact = exact && !contains(file, json, change[i]);
    struct tokenizer *tok = tokenizer_parse(file, (int64_t)json, "t.json", &err);
    mem_free(file);
    if (!tok) {
        MT_REQUIRE(!strncmp(err.msg, "t.json: ", 8), "no reason: %s", err.msg);
        return 0;
    }
    for (int64_t i = 0; i < MT_LEN(texts); i++) encode(tok, texts[i], (int64_t)strlen(texts[i]), exact);
    char *text = mem_alloc((int64_t)rest);
    if (rest) memcpy(text, nul + 1, rest);
    encode(tok, text, (int64_t)rest, exact);
    mem_free(text);
    tokenizer_free(tok);
    return 0;
}

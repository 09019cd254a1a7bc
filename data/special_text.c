/* special_text.c - see special_text.h. */
#include "data/special_text.h"

#include <string.h>

#include "data/json/text.h"

static bool has_contents(const char *key)
{
    static const char *const keys[] = {"messages", "tools", "functions", "documents"};
    return str_in(key, keys, MT_LEN(keys));
}

struct finder {
    const struct tokenizer *tok;
    struct token_list list; /* of one string */
    int64_t n;
    int32_t first;
};

static void count_in(struct finder *f, struct json j)
{
    const char *text;
    int64_t size;
    struct json value;
    for (int64_t i = 0; json_item(j, i, &text, &value); i++) count_in(f, value);
    if (json_type(j) != JSON_STRING || json_str(j, &text, &size, NULL)) return;
    tokenizer_specials(f->tok, text, size, &f->list);
    if (f->list.count && !f->n) f->first = f->list.ids[0];
    f->n += f->list.count;
}

int64_t special_text_count(const struct tokenizer *tok, struct json row, int32_t *first)
{
    struct finder f = {.tok = tok};
    const char *key;
    struct json value;
    for (int64_t i = 0; json_member(row, i, &key, &value); i++)
        if (has_contents(key)) count_in(&f, value);
    token_list_free(&f.list);
    *first = f.first;
    return f.n;
}

/* Replaces the character at s by another one of the same size. */
static void alter(char *s)
{
    if (!(*s & 0x80)) {
        *s = *s == 'x' ? 'y' : 'x';
        return;
    }
    while ((s[1] & 0xc0) == 0x80) s++; /* the last byte of the character */
    *s ^= 1;
}

static void put_altered_string(struct finder *f, struct text_buf *t, const char *text, int64_t size)
{
    char *copy = mem_strndup(text, size);
    tokenizer_specials(f->tok, text, size, &f->list);
    for (int64_t i = 0; i < f->list.count; i++) {
        int64_t at = f->list.begin[i];
        while (at + 1 < f->list.end[i] && text_is_space(copy[at])) at++; /* that the token takes (lstrip) */
        alter(copy + at);
    }
    text_put_quoted(t, copy, size);
    mem_free(copy);
}

/* Writes a value, altered. inside: it is below a key with contents. */
static int put_altered(struct finder *f, struct text_buf *t, struct json j, bool inside, struct err *err)
{
    const bool list = json_type(j) == JSON_ARRAY;
    const char *text;
    int64_t size;
    struct json value;
    if (inside && json_type(j) == JSON_STRING) {
        if (json_str(j, &text, &size, err)) return -1;
        put_altered_string(f, t, text, size);
        return 0;
    }
    if (!list && json_type(j) != JSON_OBJECT) return text_put_json(t, j, err);
    text_put(t, list ? "[" : "{");
    for (int64_t i = 0; json_item(j, i, &text, &value); i++) {
        text_put_key(t, text);
        if (put_altered(f, t, value, inside || (text && has_contents(text)), err)) return -1;
    }
    text_put(t, list ? "]" : "}");
    return 0;
}

struct json_doc *special_text_altered(const struct tokenizer *tok, struct json row, struct err *err)
{
    struct finder f = {.tok = tok};
    struct text_buf t = {0};
    struct json_doc *doc = NULL;
    if (!put_altered(&f, &t, row, false, err))
        doc = json_parse_row(t.text, t.size, JSON_ROW_VALUES, "altered row", err);
    token_list_free(&f.list);
    text_free(&t);
    return doc;
}

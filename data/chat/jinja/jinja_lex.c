/* jinja_lex.c - a Jinja template's text -> tokens.
 *
 * White space is handled as in transformers: trim_blocks removes a line break right after a block or comment;
 * lstrip_blocks removes blanks between the start of a line and a block or comment. "-" strips all white space on its
 * side, "+" keeps it. */
#include "data/chat/jinja/jinja_lex.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NAME 256 /* bytes: a look-up reads the whole name */

struct lexer {
    struct token_array *out;
    struct jinja_arena *arena;
    const char *text; /* line breaks are "\n" */
    int64_t size, at;
    int line;
    bool line_start; /* the text at `at` begins a source line */
    const char *name;
    struct err *err;
};

static int lex_error(struct lexer *l, const char *what) { return err_set(l->err, "%s:%d: %s", l->name, l->line, what); }

static struct token *add(struct lexer *l, enum token_kind kind, const char *s, int64_t size)
{
    struct token_array *a = l->out;
    a->items = mem_reserve(a->items, &a->cap, a->count + 1, sizeof(*a->items));
    struct token *t = &a->items[a->count++];
    *t = (struct token){.kind = kind, .line = l->line, .size = size};
    t->s = s ? jinja_copy(l->arena, s, size) : "";
    return t;
}

static bool starts(const struct lexer *l, int64_t at, const char *with)
{
    int64_t n = (int64_t)strlen(with);
    return at + n <= l->size && !memcmp(l->text + at, with, (size_t)n);
}

static void advance(struct lexer *l, int64_t to)
{
    for (; l->at < to; l->at++) l->line += l->text[l->at] == '\n';
}

static int64_t skip_space(const struct lexer *l, int64_t at)
{
    while (at < l->size && utf8_space(utf8_code(l->text + at, l->size - at)))
        at += utf8_size(l->text + at, l->size - at);
    return at;
}

/* End of text[begin, end) without its trailing white space. */
static int64_t strip_end(const struct lexer *l, int64_t begin, int64_t end)
{
    int64_t keep = begin;
    for (int64_t i = begin; i < end; i += utf8_size(l->text + i, end - i))
        if (!utf8_space(utf8_code(l->text + i, end - i))) keep = i + utf8_size(l->text + i, end - i);
    return keep;
}

/* Moves past a closing tag of n bytes: "-" before it strips what follows, "+" keeps it, else one line break is
 * removed. */
static void close_tag(struct lexer *l, int64_t end, char sign, bool trim)
{
    if (sign == '-')
        end = skip_space(l, end);
    else if (trim && sign != '+' && end < l->size && l->text[end] == '\n')
        end++;
    l->line_start = l->text[end - 1] == '\n';
    advance(l, end);
}

/* ---- text between tags ---- */

/* Adds the text before the tag at `tag`, stripped as the tag specifies. */
static void add_text(struct lexer *l, int64_t tag)
{
    int64_t begin = l->at, end = tag;
    if (tag < l->size) {
        const char sign = tag + 2 < l->size ? l->text[tag + 2] : 0;
        if (sign == '-') {
            end = strip_end(l, begin, tag);
        } else if (sign != '+' && l->text[tag + 1] != '{') {
            int64_t line = tag;
            while (line > begin && l->text[line - 1] != '\n') line--;
            if ((line > begin || l->line_start) && strip_end(l, line, tag) == line) end = line;
        }
    }
    if (end > begin) add(l, TOKEN_TEXT, l->text + begin, end - begin);
    advance(l, tag);
}

static int skip_comment(struct lexer *l)
{
    for (int64_t i = l->at + 2; i + 1 < l->size; i++) {
        if (!starts(l, i, "#}")) continue;
        close_tag(l, i + 2, i > l->at + 2 ? l->text[i - 1] : 0, true);
        return 0;
    }
    return lex_error(l, "a comment {# is not closed");
}

/* At "{%": is it a block that consists of `word`? Returns where it ends, and the sign before that; or -1. */
static int64_t one_word_block(const struct lexer *l, int64_t at, const char *word, char *sign)
{
    at += 2;
    at += at < l->size && (l->text[at] == '-' || l->text[at] == '+');
    at = skip_space(l, at);
    if (!starts(l, at, word)) return -1;
    at = skip_space(l, at + (int64_t)strlen(word));
    *sign = at < l->size ? l->text[at] : 0;
    at += *sign == '-' || *sign == '+';
    return starts(l, at, "%}") ? at + 2 : -1;
}

/* Reads what follows {% raw %}, up to {% endraw %}, as text. */
static int lex_raw(struct lexer *l, int64_t end, char sign)
{
    if (sign == '-') end = skip_space(l, end);
    l->line_start = l->text[end - 1] == '\n';
    advance(l, end);
    for (int64_t i = l->at; i + 1 < l->size; i++) {
        int64_t close = starts(l, i, "{%") ? one_word_block(l, i, "endraw", &sign) : -1;
        if (close < 0) continue;
        add_text(l, i);
        close_tag(l, close, sign, true);
        return 0;
    }
    return lex_error(l, "{% raw %} has no {% endraw %}");
}

/* ---- inside tags ---- */

/* Writes the code point of `digits` hexadecimal digits as UTF-8. */
static int put_code(struct lexer *l, struct text_buf *t, int64_t digits)
{
    char hex[9] = {0}, utf8[4];
    if (l->at + digits > l->size) return lex_error(l, "an escape is truncated");
    memcpy(hex, l->text + l->at, (size_t)digits);
    for (int64_t i = 0; i < digits; i++)
        if (!isxdigit((unsigned char)hex[i])) return lex_error(l, "an escape lacks its hexadecimal digits");
    l->at += digits;
    unsigned long c = strtoul(hex, NULL, 16);
    if (c > 0x10ffff || (c >= 0xd800 && c < 0xe000)) return lex_error(l, "an escape is not a Unicode character");
    int n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const unsigned char lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (int i = n - 1; i > 0; i--, c >>= 6) utf8[i] = (char)(0x80 | (c & 0x3f));
    utf8[0] = (char)(lead[n] | c);
    text_put_bytes(t, utf8, n);
    return 0;
}

/* Reads the escape after a backslash, as in Python; an unknown escape is kept as written. */
static int put_escape(struct lexer *l, struct text_buf *t)
{
    static const char plain[] = "\\\\''\"\"a\ab\bf\fn\nr\rt\tv\v"; /* pairs: the letter, then its character */
    const char c = l->text[l->at++];
    if (c == '\n') return l->line++, 0;
    if (c == 'x' || c == 'u' || c == 'U') return put_code(l, t, c == 'x' ? 2 : c == 'u' ? 4 : 8);
    if (c == 'N' || isdigit((unsigned char)c)) return lex_error(l, "the escapes \\N and \\0 to \\7 are not supported");
    for (size_t i = 0; i + 1 < sizeof(plain); i += 2)
        if (plain[i] == c) return text_put_bytes(t, plain + i + 1, 1), 0;
    text_put(t, "\\");
    text_put_bytes(t, &c, 1);
    return 0;
}

static int lex_string(struct lexer *l)
{
    const char quote = l->text[l->at++];
    struct text_buf t = {0};
    int line = l->line, rc = 0;
    text_put(&t, "");
    while (!rc && l->at < l->size && l->text[l->at] != quote) {
        const char c = l->text[l->at++];
        l->line += c == '\n';
        if (c != '\\')
            text_put_bytes(&t, &c, 1);
        else
            rc = l->at < l->size ? put_escape(l, &t) : 0;
    }
    if (!rc && l->at >= l->size) {
        l->line = line;
        rc = lex_error(l, "a string is not closed");
    }
    if (!rc) add(l, TOKEN_STRING, t.text, t.size)->line = line;
    l->at++;
    text_free(&t);
    return rc;
}

static bool is_digit(const struct lexer *l, int64_t at) { return at < l->size && isdigit((unsigned char)l->text[at]); }

static int lex_number(struct lexer *l)
{
    int64_t end = l->at;
    bool real = false;
    const bool member = l->at > 0 && l->text[l->at - 1] == '.'; /* x.0.1 */
    while (is_digit(l, end)) end++;
    if (!member && end < l->size && l->text[end] == '.' && is_digit(l, end + 1)) {
        real = true;
        for (end++; is_digit(l, end);) end++;
    }
    if (!member && end < l->size && (l->text[end] | 32) == 'e') {
        int64_t digits = end + 1 + (end + 1 < l->size && (l->text[end + 1] == '-' || l->text[end + 1] == '+'));
        if (is_digit(l, digits)) {
            real = true;
            for (end = digits; is_digit(l, end);) end++;
        }
    }
    struct token *t = add(l, real ? TOKEN_FLOAT : TOKEN_INT, l->text + l->at, end - l->at);
    if (end - l->at > 18 && !real) return lex_error(l, "a number has more than 18 digits");
    t->f = real ? strtod(t->s, NULL) : 0;
    t->i = real ? 0 : strtoll(t->s, NULL, 10);
    l->at = end;
    return 0;
}

static bool is_name(char c) { return isalnum((unsigned char)c) || c == '_' || (unsigned char)c >= 0x80; }

static int lex_operator(struct lexer *l)
{
    static const char *const two[] = {"**", "//", "==", "!=", "<=", ">="};
    int64_t n = 1;
    for (int64_t i = 0; i < MT_LEN(two); i++)
        if (starts(l, l->at, two[i])) n = 2;
    if (n == 1 && (!l->text[l->at] || !strchr("+-*/%~<>=.,:;|()[]{}", l->text[l->at])))
        return lex_error(l, "a character that is not allowed in an expression");
    add(l, TOKEN_OP, l->text + l->at, n);
    l->at += n;
    return 0;
}

/* Reads what follows "{%" or "{{", up to and including the closing tag; a closing tag inside brackets does not
 * count. */
static int lex_tag(struct lexer *l, bool block)
{
    const char *const end = block ? "%}" : "}}";
    int64_t open = 0;
    for (;;) {
        l->line_start = false;
        advance(l, skip_space(l, l->at));
        if (l->at >= l->size) return lex_error(l, block ? "{% is not closed" : "{{ is not closed");
        const char c = l->text[l->at];
        int64_t sign = c == '-' || (block && c == '+');
        if (!open && starts(l, l->at + sign, end)) {
            add(l, block ? TOKEN_BLOCK_END : TOKEN_PRINT_END, NULL, 0);
            close_tag(l, l->at + sign + 2, sign ? c : 0, block);
            return 0;
        }
        int rc = 0;
        if (c == '"' || c == '\'') {
            rc = lex_string(l);
        } else if (isdigit((unsigned char)c)) {
            rc = lex_number(l);
        } else if (is_name(c)) {
            int64_t stop = l->at;
            while (stop < l->size && is_name(l->text[stop])) stop++;
            if (stop - l->at > MAX_NAME) return lex_error(l, "a name has more than 256 bytes");
            add(l, TOKEN_NAME, l->text + l->at, stop - l->at);
            l->at = stop;
        } else {
            open += (c == '(' || c == '[' || c == '{') - (c == ')' || c == ']' || c == '}');
            rc = lex_operator(l);
        }
        if (rc) return rc;
    }
}

static int lex_all(struct lexer *l)
{
    while (l->at < l->size) {
        int64_t tag = l->at;
        while (tag < l->size && !starts(l, tag, "{{") && !starts(l, tag, "{%") && !starts(l, tag, "{#")) tag++;
        add_text(l, tag);
        if (tag == l->size) break;
        char sign;
        int rc;
        const char kind = l->text[tag + 1];
        int64_t raw = kind == '%' ? one_word_block(l, tag, "raw", &sign) : -1;
        if (kind == '#') {
            rc = skip_comment(l);
        } else if (raw >= 0) {
            rc = lex_raw(l, raw, sign);
        } else {
            add(l, kind == '%' ? TOKEN_BLOCK_BEGIN : TOKEN_PRINT_BEGIN, NULL, 0);
            l->at += 2;
            l->at += l->at < l->size && (l->text[l->at] == '-' || l->text[l->at] == '+');
            rc = lex_tag(l, kind == '%');
        }
        if (rc) return rc;
    }
    add(l, TOKEN_END, NULL, 0);
    return 0;
}

int jinja_lex(struct token_array *out, struct jinja_arena *arena, const char *text, int64_t size, const char *name,
              struct err *err)
{
    char *lines = mem_alloc(size + 1); /* every line break becomes "\n"; the last one is dropped */
    int64_t n = 0;
    for (int64_t i = 0; i < size; i++) {
        if (text[i] == '\r' && i + 1 < size && text[i + 1] == '\n') continue;
        lines[n++] = text[i] == '\r' ? '\n' : text[i];
    }
    if (n && lines[n - 1] == '\n') n--;
    struct lexer l = {.out = out, .arena = arena, .text = lines, .size = n, .line = 1, .line_start = true};
    l.name = name;
    l.err = err;
    int rc = lex_all(&l);
    mem_free(lines);
    return rc;
}

/* jinja_lex.h - a Jinja template's text -> tokens, with whitespace control already applied. */
#ifndef MT_JINJA_LEX_H
#define MT_JINJA_LEX_H

#include "data/chat/jinja/jinja_value.h"

enum token_kind {
    TOKEN_TEXT,
    TOKEN_BLOCK_BEGIN, /* {% */
    TOKEN_BLOCK_END,
    TOKEN_PRINT_BEGIN, /* {{ */
    TOKEN_PRINT_END,
    TOKEN_NAME,
    TOKEN_STRING,
    TOKEN_INT,
    TOKEN_FLOAT,
    TOKEN_OP,
    TOKEN_END
};
struct token {
    enum token_kind kind;
    int line;
    const char *s; /* NUL-terminated, in the arena; of a string: its value */
    int64_t size;
    int64_t i;
    double f;
};
struct token_array {
    struct token *items;
    int64_t count, cap;
};

/* Appends the tokens of text and one TOKEN_END; the caller frees items with mem_free, also after an error. */
int jinja_lex(struct token_array *out, struct jinja_arena *arena, const char *text, int64_t size, const char *name,
              struct err *err) MT_CHECK;

#endif

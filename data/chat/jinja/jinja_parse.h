/* jinja_parse.h - a Jinja template as a tree. */
#ifndef MT_JINJA_PARSE_H
#define MT_JINJA_PARSE_H

#include "data/chat/jinja/jinja_value.h"

enum node_kind {
    /* statements */
    NODE_TEXT,       /* value */
    NODE_PRINT,      /* a */
    NODE_IF,         /* a: condition, body, other */
    NODE_FOR,        /* a: names, b: what to iterate over, c: condition or NULL, body, other */
    NODE_SET,        /* a: name, namespace attribute or tuple of names; b: value, or NULL: body's output */
    NODE_MACRO,      /* name, a: parameters (NODE_NAME, its b the default), body */
    NODE_GENERATION, /* body: text that the model writes */
    NODE_BREAK,
    NODE_CONTINUE,
    /* expressions */
    NODE_VALUE,   /* value */
    NODE_NAME,    /* name */
    NODE_LIST,    /* a: items */
    NODE_TUPLE,   /* a: items */
    NODE_DICT,    /* a: keys and values, alternating */
    NODE_ATTR,    /* a . name */
    NODE_ITEM,    /* a [ b ] */
    NODE_SLICE,   /* a [ b : c : body ], each may be NULL */
    NODE_CALL,    /* a ( b ): arguments, of which those with a name are NODE_KEYWORD */
    NODE_KEYWORD, /* name = a, among arguments */
    NODE_FILTER,  /* a | name ( b ); a NULL: none */
    NODE_TEST,    /* a is name ( b ) */
    NODE_NOT,     /* a */
    NODE_AND,     /* a, b */
    NODE_OR,      /* a, b */
    NODE_NEGATE,  /* a; name "-" or "+" */
    NODE_BINARY,  /* a name b: + - * / // % ** ~ and comparisons, "in", "not in" */
    NODE_CHOICE,  /* b if a else c; c may be NULL */
};
struct node {
    enum node_kind kind;
    int line;
    const char *name;
    struct value value;
    struct node *a, *b, *c, *body, *other;
    struct node *next; /* in a list of statements, items, arguments */
};

/* Parses a template to a tree in the arena; *generation: it contains {% generation %}. */
int jinja_tree(struct node **root, bool *generation, struct jinja_arena *arena, const char *text, int64_t size,
               const char *name, struct err *err) MT_CHECK;

#endif

/* jinja_parse.c - tokens -> tree, by recursive descent with Jinja's precedences. Errors name what Jinja has and this
 * engine lacks. The first error is kept and ends every loop, so that not every call needs a check. */
#include "data/chat/jinja/jinja_parse.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "data/chat/jinja/jinja_lex.h"
#include "data/chat/jinja/jinja_lib.h"

#define NESTING 150 /* of expressions and blocks in a template's text */

struct parser {
    const struct token *at;
    struct jinja_arena *arena;
    const char *name;
    struct err *err;
    int depth, loops;
    bool failed, generation;
    /* The first unknown filter that every rendering needs; NULL: none. As in jinja2, one in an `if` fails when it is
     * used. */
    const char *unknown;
    int unknown_line;
};

static const struct token the_end = {.kind = TOKEN_END, .s = ""};

static struct node *fail(struct parser *p, const char *fmt, ...)
{
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    if (!p->failed) err_set(p->err, "%s:%d: %s", p->name, p->at->line, text);
    p->failed = true;
    p->at = &the_end; /* after an error, no token matches */
    return NULL;
}

static struct node *node(struct parser *p, enum node_kind kind, struct node *a, struct node *b)
{
    struct node *n = jinja_alloc(p->arena, sizeof(*n));
    n->kind = kind;
    n->line = p->at->line;
    n->a = a;
    n->b = b;
    return n;
}

static struct node *named(struct parser *p, enum node_kind kind, const char *name, struct node *a, struct node *b)
{
    struct node *n = node(p, kind, a, b);
    n->name = name;
    return n;
}

static bool is_op(const struct parser *p, const char *op) { return p->at->kind == TOKEN_OP && !strcmp(p->at->s, op); }

static bool is_word(const struct parser *p, const char *word)
{
    return p->at->kind == TOKEN_NAME && !strcmp(p->at->s, word);
}

static bool take_op(struct parser *p, const char *op) { return is_op(p, op) && p->at++; }
static bool take_word(struct parser *p, const char *word) { return is_word(p, word) && p->at++; }

static void describe(const struct token *t, char out[80])
{
    static const char *const names[] = {
        "text", "{%", "%}", "{{", "}}", NULL, "a string", "number", "a number", NULL, "the end of the template"};
    if (names[t->kind])
        snprintf(out, 80, "%s", names[t->kind]);
    else
        snprintf(out, 80, "`%.60s`", t->s);
}

static struct node *unexpected(struct parser *p, const char *wanted)
{
    char found[80];
    describe(p->at, found);
    return fail(p, "expected %s, found %s", wanted, found);
}

static void want_op(struct parser *p, const char *op)
{
    char wanted[8];
    snprintf(wanted, sizeof(wanted), "`%s`", op);
    if (!take_op(p, op)) unexpected(p, wanted);
}

static const char *want_name(struct parser *p)
{
    if (p->at->kind != TOKEN_NAME) return unexpected(p, "a name"), "";
    return (p->at++)->s;
}

static bool deeper(struct parser *p)
{
    if (++p->depth > NESTING) fail(p, "nested more than %d deep", NESTING);
    return !p->failed;
}

/* A list that grows at its end. */
struct chain {
    struct node *first, **last;
};

static void chain_add(struct chain *c, struct node *n)
{
    if (!n) return;
    if (!c->last) c->last = &c->first;
    *c->last = n;
    c->last = &n->next;
}

/* ---- expressions ---- */

static struct node *expression(struct parser *p);
static struct node *unary(struct parser *p, bool with_filter);

/* Arguments of a call, after "(". */
static struct node *arguments(struct parser *p)
{
    struct chain c = {0};
    while (!p->failed && !is_op(p, ")")) {
        if (is_op(p, "*") || is_op(p, "**")) return fail(p, "`*` before an argument is not supported");
        if (p->at->kind == TOKEN_NAME && p->at[1].kind == TOKEN_OP && !strcmp(p->at[1].s, "=")) {
            const char *name = want_name(p);
            p->at++;
            struct node *value = expression(p);
            chain_add(&c, named(p, NODE_KEYWORD, name, value, NULL));
        } else {
            struct node *value = expression(p);
            chain_add(&c, node(p, NODE_KEYWORD, value, NULL));
        }
        if (!take_op(p, ",")) break;
    }
    want_op(p, ")");
    return c.first;
}

/* Items up to `end`; each is wrapped in a node, as a node may be in one list only. */
static struct node *items(struct parser *p, const char *end)
{
    struct chain c = {0};
    while (!p->failed && !is_op(p, end)) {
        struct node *item = expression(p);
        chain_add(&c, node(p, NODE_KEYWORD, item, NULL));
        if (!take_op(p, ",")) break;
    }
    want_op(p, end);
    return c.first;
}

static struct node *dict(struct parser *p)
{
    struct chain c = {0};
    while (!p->failed && !is_op(p, "}")) {
        for (int i = 0; i < 2; i++) {
            struct node *item = expression(p);
            chain_add(&c, node(p, NODE_KEYWORD, item, NULL));
            if (i == 0) want_op(p, ":");
        }
        if (!take_op(p, ",")) break;
    }
    want_op(p, "}");
    return node(p, NODE_DICT, c.first, NULL);
}

/* After "(": (), (a), (a,) or (a, b). */
static struct node *parenthesis(struct parser *p)
{
    if (take_op(p, ")")) return node(p, NODE_TUPLE, NULL, NULL);
    struct node *first = expression(p);
    if (!take_op(p, ",")) return want_op(p, ")"), first;
    struct node *head = node(p, NODE_KEYWORD, first, NULL);
    head->next = items(p, ")");
    return node(p, NODE_TUPLE, head, NULL);
}

static struct node *literal(struct parser *p, struct value v)
{
    struct node *n = node(p, NODE_VALUE, NULL, NULL);
    n->value = v;
    p->at++;
    return n;
}

/* Adjacent strings are concatenated. */
static struct node *string(struct parser *p)
{
    struct text_buf t = {0};
    struct node *n = node(p, NODE_VALUE, NULL, NULL);
    text_put(&t, "");
    for (; p->at->kind == TOKEN_STRING; p->at++) text_put_bytes(&t, p->at->s, p->at->size);
    n->value = value_view(jinja_copy(p->arena, t.text, t.size), t.size);
    text_free(&t);
    return n;
}

static struct node *primary(struct parser *p)
{
    if (p->at->kind == TOKEN_STRING) return string(p);
    if (p->at->kind == TOKEN_INT) return literal(p, value_int(p->at->i));
    if (p->at->kind == TOKEN_FLOAT) return literal(p, value_float(p->at->f));
    if (is_word(p, "true") || is_word(p, "True")) return literal(p, value_bool(true));
    if (is_word(p, "false") || is_word(p, "False")) return literal(p, value_bool(false));
    if (is_word(p, "none") || is_word(p, "None")) return literal(p, value_none());
    if (p->at->kind == TOKEN_NAME) {
        struct node *n = node(p, NODE_NAME, NULL, NULL);
        n->name = want_name(p);
        return n;
    }
    if (take_op(p, "(")) return parenthesis(p);
    if (take_op(p, "[")) {
        struct node *list = items(p, "]");
        return node(p, NODE_LIST, list, NULL);
    }
    if (take_op(p, "{")) return dict(p);
    return unexpected(p, "an expression");
}

/* After "[": an item or a slice of a. */
static struct node *subscript(struct parser *p, struct node *a)
{
    struct node *part[3] = {0};
    int n = 0;
    for (; n < 3; n++) {
        if (!is_op(p, ":") && !is_op(p, "]")) part[n] = expression(p);
        if (!take_op(p, ":")) break;
    }
    want_op(p, "]");
    if (!n) return part[0] ? node(p, NODE_ITEM, a, part[0]) : unexpected(p, "an index");
    struct node *slice = node(p, NODE_SLICE, a, part[0]);
    slice->c = part[1];
    slice->body = part[2];
    return slice;
}

static struct node *postfix(struct parser *p, struct node *n)
{
    while (!p->failed) {
        if (take_op(p, ".")) {
            if (p->at->kind == TOKEN_INT) {
                struct node *index = literal(p, value_int(p->at->i));
                n = node(p, NODE_ITEM, n, index);
            } else {
                const char *name = want_name(p);
                n = named(p, NODE_ATTR, name, n, NULL);
            }
        } else if (take_op(p, "[")) {
            n = subscript(p, n);
        } else if (take_op(p, "(")) {
            struct node *call = node(p, NODE_CALL, n, NULL);
            call->b = arguments(p);
            n = call;
        } else {
            break;
        }
    }
    return n;
}

static struct node *filter(struct parser *p, struct node *n)
{
    const char *name = want_name(p);
    if (!p->failed && !p->unknown && !jinja_is_filter(name)) p->unknown = name, p->unknown_line = p->at->line;
    struct node *f = named(p, NODE_FILTER, name, n, NULL);
    if (take_op(p, "(")) f->b = arguments(p);
    return f;
}

/* After "is": an argument may follow without brackets. */
static struct node *test(struct parser *p, struct node *n)
{
    bool negated = take_word(p, "not");
    const char *name = want_name(p);
    struct node *t = named(p, NODE_TEST, name, n, NULL);
    bool word = p->at->kind == TOKEN_NAME && !is_word(p, "else") && !is_word(p, "or") && !is_word(p, "and") &&
                !is_word(p, "is") && !is_word(p, "if") && !is_word(p, "not") && !is_word(p, "in");
    if (take_op(p, "(")) {
        t->b = arguments(p);
    } else if (word || p->at->kind == TOKEN_STRING || p->at->kind == TOKEN_INT || p->at->kind == TOKEN_FLOAT ||
               is_op(p, "[") || is_op(p, "{")) {
        struct node *value = postfix(p, primary(p));
        t->b = node(p, NODE_KEYWORD, value, NULL);
    }
    if (is_word(p, "is")) return fail(p, "a test of a test");
    return negated ? node(p, NODE_NOT, t, NULL) : t;
}

static struct node *unary(struct parser *p, bool with_filter)
{
    struct node *n;
    if (!deeper(p)) return NULL;
    if (is_op(p, "-") || is_op(p, "+")) {
        const char *op = (p->at++)->s;
        n = unary(p, false);
        n = named(p, NODE_NEGATE, op, n, NULL);
    } else {
        n = postfix(p, primary(p));
    }
    while (with_filter && !p->failed) {
        if (take_op(p, "|"))
            n = filter(p, n);
        else if (take_word(p, "is"))
            n = test(p, n);
        else if (is_op(p, "("))
            n = postfix(p, n);
        else
            break;
    }
    p->depth--;
    return n;
}

/* Binary operators by precedence, the loosest first; each level is left-associative. */
static struct node *binary(struct parser *p, int level)
{
    static const char *const levels[][5] = {{"+", "-"}, {"~"}, {"*", "/", "//", "%"}, {"**"}};
    if (level == MT_LEN(levels)) return unary(p, true);
    struct node *n = binary(p, level + 1);
    for (;;) {
        const char *const *op = levels[level];
        while (*op && !take_op(p, *op)) op++;
        if (!*op) return n;
        struct node *right = binary(p, level + 1);
        n = named(p, NODE_BINARY, *op, n, right);
    }
}

static const char *comparison(struct parser *p)
{
    static const char *const ops[] = {"==", "!=", "<=", ">=", "<", ">"};
    for (int64_t i = 0; i < MT_LEN(ops); i++)
        if (take_op(p, ops[i])) return ops[i];
    if (take_word(p, "in")) return "in";
    if (!is_word(p, "not") || p->at[1].kind != TOKEN_NAME || strcmp(p->at[1].s, "in")) return NULL;
    p->at += 2;
    return "not in";
}

/* a < b < c is a < b and b < c. */
static struct node *compare(struct parser *p)
{
    struct node *left = binary(p, 0), *all = NULL;
    const char *op;
    while (!p->failed && (op = comparison(p))) {
        struct node *right = binary(p, 0), *one = named(p, NODE_BINARY, op, left, right);
        all = all ? node(p, NODE_AND, all, one) : one;
        left = right;
    }
    return all ? all : left;
}

static struct node *negation(struct parser *p)
{
    if (!is_word(p, "not")) return compare(p);
    p->at++;
    if (!deeper(p)) return NULL;
    struct node *n = negation(p);
    p->depth--;
    return node(p, NODE_NOT, n, NULL);
}

static struct node *conjunction(struct parser *p)
{
    struct node *n = negation(p);
    while (take_word(p, "and")) {
        struct node *right = negation(p);
        n = node(p, NODE_AND, n, right);
    }
    return n;
}

static struct node *disjunction(struct parser *p)
{
    struct node *n = conjunction(p);
    while (take_word(p, "or")) {
        struct node *right = conjunction(p);
        n = node(p, NODE_OR, n, right);
    }
    return n;
}

static struct node *expression(struct parser *p)
{
    if (!deeper(p)) return NULL;
    const char *unknown = p->unknown;
    struct node *n = disjunction(p);
    while (take_word(p, "if")) {
        struct node *condition = disjunction(p);
        n = node(p, NODE_CHOICE, condition, n);
        if (take_word(p, "else")) n->c = expression(p);
        p->unknown = unknown;
    }
    p->depth--;
    return n;
}

/* a, b without brackets is a tuple. */
static struct node *expressions(struct parser *p)
{
    struct node *first = expression(p);
    if (!is_op(p, ",")) return first;
    struct chain c = {0};
    chain_add(&c, node(p, NODE_KEYWORD, first, NULL));
    while (!p->failed && take_op(p, ",")) {
        if (p->at->kind == TOKEN_BLOCK_END || p->at->kind == TOKEN_PRINT_END) break;
        struct node *item = expression(p);
        chain_add(&c, node(p, NODE_KEYWORD, item, NULL));
    }
    return node(p, NODE_TUPLE, c.first, NULL);
}

/* ---- statements ---- */

static struct node *statements(struct parser *p, const char *const *ends);

static void end_block(struct parser *p)
{
    if (p->at->kind != TOKEN_BLOCK_END)
        unexpected(p, "%}");
    else
        p->at++;
}

/* The body up to {% end %}, which is consumed. */
static struct node *body(struct parser *p, const char *end)
{
    const char *const ends[] = {end, NULL};
    end_block(p);
    struct node *n = statements(p, ends);
    if (!take_word(p, end)) fail(p, "{%% %s %%} is missing", end);
    end_block(p);
    return n;
}

/* After "if" or "elif". */
static struct node *parse_if(struct parser *p)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    if (!deeper(p)) return NULL;
    const char *unknown = p->unknown;
    struct node *n = node(p, NODE_IF, NULL, NULL);
    n->a = expressions(p);
    end_block(p);
    n->body = statements(p, ends);
    if (take_word(p, "elif")) {
        n->other = parse_if(p);
    } else if (take_word(p, "else")) {
        n->other = body(p, "endif");
    } else {
        if (!take_word(p, "endif")) fail(p, "{%% endif %%} is missing");
        end_block(p);
    }
    p->unknown = unknown;
    p->depth--;
    return n;
}

/* Names to assign to: a, or a, b, or (a, b). */
static struct node *targets(struct parser *p)
{
    bool bracket = take_op(p, "("), tuple = bracket;
    struct chain c = {0};
    do {
        struct node *n = node(p, NODE_NAME, NULL, NULL);
        n->name = want_name(p);
        chain_add(&c, n);
        tuple |= is_op(p, ",");
    } while (!p->failed && take_op(p, ",") && p->at->kind == TOKEN_NAME);
    if (bracket) want_op(p, ")");
    return tuple ? node(p, NODE_TUPLE, c.first, NULL) : c.first;
}

static struct node *parse_for(struct parser *p)
{
    static const char *const ends[] = {"else", "endfor", NULL};
    struct node *n = node(p, NODE_FOR, NULL, NULL);
    n->a = targets(p);
    if (!take_word(p, "in")) unexpected(p, "`in`");
    n->b = disjunction(p);
    if (is_op(p, ",")) return fail(p, "a for over a tuple without brackets is not supported");
    if (take_word(p, "if")) n->c = expression(p);
    if (is_word(p, "recursive")) return fail(p, "a recursive for is not supported");
    end_block(p);
    p->loops++;
    n->body = statements(p, ends);
    p->loops--;
    if (take_word(p, "else")) {
        n->other = body(p, "endfor");
        return n;
    }
    if (!take_word(p, "endfor")) fail(p, "{%% endfor %%} is missing");
    end_block(p);
    return n;
}

static struct node *parse_set(struct parser *p)
{
    struct node *n = node(p, NODE_SET, NULL, NULL);
    n->a = targets(p);
    if (!p->failed && n->a->kind == NODE_NAME && take_op(p, ".")) {
        const char *name = want_name(p);
        n->a = named(p, NODE_ATTR, name, n->a, NULL);
    }
    if (is_op(p, "|")) return fail(p, "a filter on a {%% set %%} block is not supported");
    if (take_op(p, "=")) {
        n->b = expressions(p);
        end_block(p);
    } else {
        n->body = body(p, "endset");
    }
    return n;
}

static struct node *parse_macro(struct parser *p)
{
    const char *unknown = p->unknown; /* nothing may call the macro */
    struct node *n = named(p, NODE_MACRO, want_name(p), NULL, NULL);
    struct chain c = {0};
    want_op(p, "(");
    while (!p->failed && !is_op(p, ")")) {
        struct node *parameter = node(p, NODE_NAME, NULL, NULL);
        parameter->name = want_name(p);
        if (take_op(p, "=")) parameter->b = expression(p);
        chain_add(&c, parameter);
        if (!take_op(p, ",")) break;
    }
    want_op(p, ")");
    n->a = c.first;
    int loops = p->loops;
    p->loops = 0;
    n->body = body(p, "endmacro");
    p->unknown = unknown;
    p->loops = loops;
    return n;
}

static struct node *block(struct parser *p)
{
    const char *word = want_name(p);
    if (!strcmp(word, "if")) return parse_if(p);
    if (!strcmp(word, "for")) return parse_for(p);
    if (!strcmp(word, "set")) return parse_set(p);
    if (!strcmp(word, "macro")) return parse_macro(p);
    if (!strcmp(word, "generation")) {
        struct node *n = node(p, NODE_GENERATION, NULL, NULL);
        p->generation = true;
        n->body = body(p, "endgeneration");
        return n;
    }
    if (!strcmp(word, "break") || !strcmp(word, "continue")) {
        struct node *n = node(p, word[0] == 'b' ? NODE_BREAK : NODE_CONTINUE, NULL, NULL);
        if (!p->loops) return fail(p, "{%% %s %%} outside of a for", word);
        end_block(p);
        return n;
    }
    return fail(p, "{%% %s %%} is not supported", word);
}

/* Parses up to {% and one of the words of `ends`, or up to the end of the template. That word becomes the current
 * token. */
static struct node *statements(struct parser *p, const char *const *ends)
{
    struct chain c = {0};
    if (!deeper(p)) return NULL;
    while (p->at->kind != TOKEN_END) {
        const struct token *t = p->at++;
        if (t->kind == TOKEN_TEXT) {
            struct node *n = node(p, NODE_TEXT, NULL, NULL);
            n->value = value_view(t->s, t->size);
            chain_add(&c, n);
        } else if (t->kind == TOKEN_PRINT_BEGIN) {
            struct node *n = node(p, NODE_PRINT, NULL, NULL);
            n->a = expressions(p);
            chain_add(&c, n);
            if (p->at->kind != TOKEN_PRINT_END)
                unexpected(p, "}}");
            else
                p->at++;
        } else {
            bool end = false;
            for (int i = 0; ends && ends[i]; i++) end |= is_word(p, ends[i]);
            if (end) break;
            chain_add(&c, block(p));
        }
    }
    p->depth--;
    return c.first;
}

int jinja_tree(struct node **root, bool *generation, struct jinja_arena *arena, const char *text, int64_t size,
               const char *name, struct err *err)
{
    struct token_array tokens = {0};
    struct parser p = {.arena = arena, .name = name, .err = err};
    int rc = jinja_lex(&tokens, arena, text, size, name, err);
    if (!rc) {
        p.at = tokens.items;
        *root = statements(&p, NULL);
        *generation = p.generation;
        rc = p.failed ? -1 : 0;
        if (!rc && p.unknown)
            rc = err_set(err, "%s:%d: the filter `%s` is not supported", name, p.unknown_line, p.unknown);
    }
    mem_free(tokens.items);
    return rc;
}

/* parser.c - words of PTX text, names, registers, constants, and directives. */
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/parser.h"

_Noreturn void refuse(const struct parser *s, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "emulator: %s: ", s->k->name);
    vfprintf(stderr, format, args);
    const char *end = strchr(s->start, '\n');
    fprintf(stderr, ": %.*s\n", (int)(end - s->start), s->start);
    va_end(args);
    abort();
}

/* ---- text ---- */

bool same(struct text a, const char *b) { return a.n == (int)strlen(b) && !memcmp(a.p, b, (size_t)a.n); }
bool equal(struct text a, struct text b) { return a.n == b.n && !memcmp(a.p, b.p, (size_t)a.n); }
bool begins(struct text a, const char *b) { return a.n >= (int)strlen(b) && !memcmp(a.p, b, strlen(b)); }
bool contains(struct text a, const char *b) { return memmem(a.p, (size_t)a.n, b, strlen(b)) != NULL; }
bool ends(struct text a, const char *b)
{
    const int n = (int)strlen(b);
    return a.n >= n && !memcmp(a.p + a.n - n, b, (size_t)n);
}
struct text trim(const char *p, const char *end)
{
    while (p < end && isspace((unsigned char)*p)) p++;
    while (p < end && isspace((unsigned char)end[-1])) end--;
    return (struct text){p, (int)(end - p)};
}
bool is_word(char c) { return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%' || c == '.'; }
struct text word(const char **p)
{
    while (isspace((unsigned char)**p)) ++*p;
    const char *start = *p;
    while (is_word(**p)) ++*p;
    return (struct text){start, (int)(*p - start)};
}

/* Skips spaces, comments and .loc lines; .loc gives the line of the source. */
void skip(struct parser *s)
{
    for (;;) {
        while (isspace((unsigned char)*s->p)) s->p++;
        if (!strncmp(s->p, "//", 2)) {
            s->p = strchr(s->p, '\n');
        } else if (!strncmp(s->p, ".loc", 4) && isspace((unsigned char)s->p[4])) {
            char *file_end; /* sscanf would read all of the text for each line */
            strtol(s->p + 4, &file_end, 10);
            s->line = (int)strtol(file_end, NULL, 10);
            s->p = strchr(s->p, '\n');
        } else {
            return;
        }
    }
}

/* The place after the brace that closes the one at p. */
const char *after_body(const char *p)
{
    int depth = 0;
    do {
        p += strcspn(p, "{}");
        if (!*p) break;
        depth += *p == '{' ? 1 : -1;
        p++;
    } while (depth);
    return p;
}

/* ---- symbols, registers, constants ---- */

int64_t align_to(int64_t x, int64_t a) { return (x + a - 1) / a * a; }

static int width_of(struct text type) { return ends(type, "64") ? 8 : 4; }
int bytes_of(struct text type) { return ends(type, "64") ? 8 : ends(type, "32") ? 4 : ends(type, "16") ? 2 : 1; }

int64_t new_row(struct parser *s, int width)
{
    const int64_t at = s->regs;
    s->regs += width == 8 ? ROW8 : ROW4;
    return at;
}

void add_symbol(struct parser *s, struct symbol x) { *grow(&s->symbols) = x; }

/* A variable. */
const struct symbol *find(const struct parser *s, struct text name)
{
    for (int64_t k = s->symbols.n; k-- > 0;) {
        struct symbol *x = &s->symbols.at[k];
        if (x->kind != VARIABLE || !equal(x->name, name)) continue;
        if (x->space == SHARED && !x->size) s->k->dynamic_at = (int32_t)(x->at = align_to(s->dynamic_from, x->width));
        return x;
    }
    for (int64_t k = 0; k < s->m->variables.n; k++)
        if (equal(s->m->variables.at[k].name, name)) return &s->m->variables.at[k];
    return NULL;
}

bool find_register(const struct parser *s, struct text name, struct reg *r)
{
    int digits = name.n;
    while (digits > 0 && isdigit((unsigned char)name.p[digits - 1])) digits--;
    const struct text prefix = {name.p, digits};
    const int number = digits < name.n ? atoi(name.p + digits) : -1;
    for (int64_t k = s->symbols.n; k-- > 0;) {
        const struct symbol *x = &s->symbols.at[k];
        if (x->kind == FAMILY && number >= 0 && number < x->count && equal(x->name, prefix)) {
            *r = (struct reg){(int32_t)(x->at + number * (x->width == 8 ? ROW8 : ROW4)), x->width, x->size == 2};
            return true;
        }
        if (x->kind == REGISTER && equal(x->name, name)) {
            *r = (struct reg){(int32_t)x->at, x->width, x->size == 2};
            return true;
        }
    }
    return false;
}

int32_t constant(struct parser *s, uint64_t value, int width)
{
    if (width == 4) value &= UINT32_MAX;
    for (int64_t k = 0; k < s->consts.n; k++)
        if (s->consts.at[k].value == value && s->consts.at[k].width == width) return (int32_t)(-2 - k);
    *grow(&s->consts) = (struct constant){value, width};
    return (int32_t)(-1 - s->consts.n);
}

static const char *const specials[N_SPECIAL] = {"%tid.x",    "%tid.y",    "%tid.z",   "%ntid.x",  "%ntid.y",
                                                "%ntid.z",   "%ctaid.x",  "%ctaid.y", "%ctaid.z", "%nctaid.x",
                                                "%nctaid.y", "%nctaid.z", "%laneid",  "%warpid"};

/* The row of an operand: register, special register, number, or address of a variable. */
int32_t operand(struct parser *s, struct text t, int width)
{
    struct reg r;
    char number[64];
    if (*t.p == '%' || isalpha((unsigned char)*t.p) || *t.p == '_') {
        for (int k = 0; k < N_SPECIAL; k++)
            if (same(t, specials[k])) return s->k->special_at + k * ROW4;
        if (same(t, "_")) return s->k->special_at + N_SPECIAL * ROW4 + ROW8; /* a result that nobody reads */
        if (find_register(s, t, &r)) return r.row;
    }
    const struct symbol *x = find(s, t);
    if (x && x->kind == VARIABLE) return constant(s, (uint64_t)x->at, width);
    if (t.n >= (int)sizeof(number) || !(isdigit((unsigned char)*t.p) || *t.p == '-'))
        refuse(s, "unknown name %.*s", t.n, t.p);
    snprintf(number, sizeof(number), "%.*s", t.n, t.p);
    if (!strncmp(number, "0f", 2) || !strncmp(number, "0F", 2) || !strncmp(number, "0d", 2) ||
        !strncmp(number, "0D", 2))
        return constant(s, strtoull(number + 2, NULL, 16), width);
    return constant(s, *number == '-' ? (uint64_t)strtoll(number, NULL, 0) : strtoull(number, NULL, 0), width);
}

/* ---- directives ---- */

/* .reg .TYPE NAME<COUNT>, ...; or .reg .TYPE NAME, ...; */
static void declare_registers(struct parser *s)
{
    const struct text type = word(&s->p);
    const int width = width_of(type);
    do {
        const struct text name = word(&s->p);
        if (*s->p == '<') {
            const int count = atoi(s->p + 1);
            struct symbol x = {
                .name = name, .kind = FAMILY, .width = width, .count = count, .size = bytes_of(type), .at = s->regs};
            s->regs += (int64_t)count * (width == 8 ? ROW8 : ROW4);
            add_symbol(s, x);
            s->p = strchr(s->p, '>') + 1;
        } else {
            add_symbol(
                s,
                (struct symbol){
                    .name = name, .kind = REGISTER, .width = width, .size = bytes_of(type), .at = new_row(s, width)});
        }
        while (isspace((unsigned char)*s->p)) s->p++;
    } while (*s->p == ',' && s->p++);
}

/* [.align A] .TYPE NAME[N]...: the size in bytes, 0 for NAME[] */
struct text variable(const char **p, int64_t *align, int64_t *size)
{
    struct text t = word(p);
    *align = 0;
    if (same(t, ".align")) {
        *align = strtol(*p, (char **)p, 10);
        t = word(p);
    }
    *size = bytes_of(t);
    if (!*align) *align = *size;
    const struct text name = word(p);
    if (**p == '[') {
        *size *= strtol(*p + 1, NULL, 10);
        *p = strchr(*p, ']') + 1;
    }
    return name;
}

static void declare_variable(struct parser *s, enum space space)
{
    int64_t align, size;
    const struct text name = variable(&s->p, &align, &size);
    int32_t *total = space == SHARED ? &s->k->shared_bytes : &s->k->local_bytes;
    const int64_t at = align_to(*total, align);
    *total = (int32_t)(at + size);
    add_symbol(s, (struct symbol){.name = name, .kind = VARIABLE, .space = space, .at = at, .size = (int)size});
}

void directive(struct parser *s)
{
    s->start = s->p;
    const struct text name = word(&s->p);
    if (same(name, ".reg"))
        declare_registers(s);
    else if (same(name, ".shared"))
        declare_variable(s, SHARED);
    else if (same(name, ".local") || same(name, ".param"))
        declare_variable(s, LOCAL);
    else if (!same(name, ".pragma"))
        refuse(s, "unknown directive");
    s->p = strchr(s->p, ';') + 1;
}

/* jinja.c - evaluates the tree of a Jinja template.
 *
 * Scopes are Jinja's: a for, a macro and a {% generation %} open one, an if does not; variables set in a for's body are
 * lost at the next iteration. Errors do not unwind (jinja_value.h): after one, statements stop and expressions yield
 * undefined. */
#include "data/chat/jinja/jinja.h"

#include <math.h>
#include <string.h>
#include <sys/resource.h>

#include "data/chat/jinja/jinja_lib.h"
#include "data/chat/jinja/jinja_names.h"
#include "data/chat/jinja/jinja_parse.h"

#define MAX_TEMPLATE (1 << 20) /* bytes of template text; its tree takes up to 300 times as much */

struct jinja {
    struct jinja_arena arena;
    struct node *root;
    bool generation;
    char *name;
};

struct scope {
    struct scope *parent;
    struct dict vars;
};

enum flow { FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE };

static struct value eval(struct jinja_state *st, struct scope *scope, const struct node *n);
static enum flow run(struct jinja_state *st, struct scope *scope, const struct node *n);

/* ---- names ---- */

static struct scope *scope_new(struct jinja_state *st, struct scope *parent)
{
    struct scope *s = jinja_new(st, sizeof(*s));
    jinja_charge(st, (int64_t)sizeof(*s));
    s->parent = parent;
    return s;
}

static struct value key_of(const char *name) { return value_view(name, (int64_t)strlen(name)); }

static void assign(struct jinja_state *st, struct scope *scope, const char *name, struct value v)
{
    dict_set(st, &scope->vars, key_of(name), v);
}

static struct value lookup(struct jinja_state *st, const struct scope *scope, const char *name)
{
    const struct value key = key_of(name);
    for (const struct scope *s = scope; s && jinja_charge(st, 1); s = s->parent) {
        const struct value *v = dict_get(st, &s->vars, key);
        if (v) return *v;
    }
    if (!jinja_is_function(name)) return value_undefined(name, (int64_t)strlen(name));
    struct callable *c = jinja_new(st, sizeof(*c));
    c->name = name;
    return (struct value){.kind = VALUE_CALLABLE, .callable = c};
}

/* Assigns to one name, or the items of a tuple to a tuple of names. */
static void assign_to(struct jinja_state *st, struct scope *scope, const struct node *target, struct value v)
{
    if (target->kind == NODE_NAME) {
        assign(st, scope, target->name, v);
        return;
    }
    const struct list *l = value_items(st, v);
    int64_t i = 0;
    for (const struct node *n = target->a; n; n = n->next, i++)
        if (i < l->count) assign(st, scope, n->name, l->items[i]);
    if (i != l->count) jinja_fail(st, "%lld values for %lld names", (long long)l->count, (long long)i);
}

/* ---- calls ---- */

static void eval_args(struct jinja_state *st, struct scope *scope, const struct node *n, struct jinja_args *args)
{
    args->count = 0;
    for (; n && !st->failed; n = n->next) {
        if (args->count == JINJA_ARGS) {
            jinja_fail(st, "a call with more than %d arguments", JINJA_ARGS);
            return;
        }
        args->names[args->count] = n->name;
        args->values[args->count++] = eval(st, scope, n->a);
    }
}

/* The body's output as a string. */
static struct value capture(struct jinja_state *st, struct scope *scope, const struct node *body)
{
    struct text_buf t = {0}, *before = st->out;
    st->out = &t;
    run(st, scope, body);
    st->out = before;
    return value_take(st, &t);
}

static struct value call_macro(struct jinja_state *st, const struct callable *c, const struct jinja_args *args)
{
    struct scope *scope = scope_new(st, c->scope);
    int64_t i = 0, used = 0;
    for (const struct node *p = c->macro->a; p; p = p->next, i++) {
        int64_t from = -1;
        for (int64_t k = 0; k < args->count; k++)
            if (args->names[k] ? !strcmp(args->names[k], p->name) : k == i) from = k;
        used += from >= 0;
        assign(st, scope, p->name,
               from >= 0 ? args->values[from]
               : p->b    ? eval(st, scope, p->b)
                         : value_undefined(p->name, (int64_t)strlen(p->name)));
    }
    if (used < args->count) return jinja_fail(st, "macro `%s`: unexpected argument", c->macro->name);
    return capture(st, scope, c->macro->body);
}

static struct value call(struct jinja_state *st, struct scope *scope, const struct node *n)
{
    struct jinja_args args;
    struct value f = eval(st, scope, n->a);
    eval_args(st, scope, n->b, &args);
    st->line = n->line;
    if (st->failed) return value_none();
    if (f.kind == VALUE_CALLABLE) {
        if (f.callable->macro) return call_macro(st, f.callable, &args);
        if (f.callable->self.kind == VALUE_UNDEFINED) return jinja_function(st, f.callable->name, &args);
        return jinja_method(st, f.callable->name, f.callable->self, &args);
    }
    if (n->a->kind == NODE_ATTR) {
        struct value self = eval(st, scope, n->a->a);
        return jinja_fail(st, "the method `%s` of a %s is not supported", n->a->name, value_kind_name(self));
    }
    if (n->a->kind == NODE_NAME) return jinja_fail(st, "the function `%s` is not supported", n->a->name);
    return jinja_fail(st, "a %s cannot be called", value_kind_name(f));
}

/* ---- operators ---- */

static struct value bad_operands(struct jinja_state *st, const char *op, struct value a, struct value b)
{
    struct value v = a.kind == VALUE_UNDEFINED ? a : b;
    if (v.kind == VALUE_UNDEFINED) return jinja_fail(st, "'%.*s' is undefined", (int)v.size, v.s);
    return jinja_fail(st, "`%s` is not defined between %s and %s", op, value_kind_name(a), value_kind_name(b));
}

static struct value concat(struct jinja_state *st, struct value a, struct value b)
{
    if (!jinja_charge(st, a.size + b.size)) return value_none();
    char *s = jinja_new(st, a.size + b.size + 1);
    if (a.size) memcpy(s, a.s, (size_t)a.size);
    if (b.size) memcpy(s + a.size, b.s, (size_t)b.size);
    return value_view(s, a.size + b.size);
}

static struct value repeat(struct jinja_state *st, struct value s, int64_t n)
{
    struct text_buf t = {0};
    for (int64_t i = 0; i < n && jinja_charge(st, s.size + 1); i++) text_put_bytes(&t, s.s, s.size);
    return value_take(st, &t);
}

/* As in Python: the quotient is rounded down, the remainder has the sign of the divisor. */
static struct value integers(struct jinja_state *st, const char *op, int64_t a, int64_t b)
{
    int64_t out = 0;
    bool over = false;
    if (*op == '+') over = __builtin_add_overflow(a, b, &out);
    if (*op == '-') over = __builtin_sub_overflow(a, b, &out);
    if (!strcmp(op, "*")) over = __builtin_mul_overflow(a, b, &out);
    if (*op == '/' || *op == '%') {
        if (b == 0) return jinja_fail(st, "division by zero");
        if (!strcmp(op, "/")) return value_float((double)a / (double)b);
        if (b == -1) {
            over = *op == '/' && a == INT64_MIN;
            out = over || *op == '%' ? 0 : -a;
        } else {
            int64_t rest = a % b, down = rest && (rest < 0) != (b < 0);
            out = *op == '%' ? rest + down * b : a / b - down;
        }
    }
    if (!strcmp(op, "**")) {
        if (b < 0) return value_float(pow((double)a, (double)b));
        for (out = 1; b > 0 && !over && jinja_charge(st, 1); b--) over = __builtin_mul_overflow(out, a, &out);
    }
    return over ? jinja_fail(st, "an integer does not fit 64 bits") : value_int(out);
}

static struct value reals(struct jinja_state *st, const char *op, double a, double b)
{
    if ((*op == '/' || *op == '%') && b == 0) return jinja_fail(st, "division by zero");
    if (*op == '+') return value_float(a + b);
    if (*op == '-') return value_float(a - b);
    if (!strcmp(op, "*")) return value_float(a * b);
    if (!strcmp(op, "/")) return value_float(a / b);
    if (!strcmp(op, "//")) return value_float(floor(a / b));
    if (!strcmp(op, "%")) return value_float(a - b * floor(a / b));
    return value_float(pow(a, b));
}

static struct value arithmetic(struct jinja_state *st, const char *op, struct value a, struct value b)
{
    double x, y;
    if (a.kind == VALUE_BOOL) a = value_int(a.truth);
    if (b.kind == VALUE_BOOL) b = value_int(b.truth);
    if (a.kind == VALUE_INT && b.kind == VALUE_INT) return integers(st, op, a.i, b.i);
    if (value_number(a, &x) && value_number(b, &y)) return reals(st, op, x, y);
    if (*op == '+' && a.kind == VALUE_STRING && b.kind == VALUE_STRING) return concat(st, a, b);
    if (!strcmp(op, "*") && a.kind == VALUE_STRING && b.kind == VALUE_INT) return repeat(st, a, b.i);
    if (*op != '+' || a.kind != VALUE_LIST || b.kind != VALUE_LIST || a.list->tuple != b.list->tuple)
        return bad_operands(st, op, a, b);
    struct value v = value_list(st, a.list->tuple);
    for (int64_t i = 0; i < a.list->count && !st->failed; i++) list_add(st, v.list, a.list->items[i]);
    for (int64_t i = 0; i < b.list->count && !st->failed; i++) list_add(st, v.list, b.list->items[i]);
    return v;
}

static struct value binary(struct jinja_state *st, const char *op, struct value a, struct value b)
{
    if (st->failed) return value_none();
    if (!strcmp(op, "~")) {
        a = value_str(st, a);
        b = value_str(st, b);
        return st->failed ? a : concat(st, a, b);
    }
    if (!strcmp(op, "==")) return value_bool(value_equal(st, a, b));
    if (!strcmp(op, "!=")) return value_bool(!value_equal(st, a, b));
    if (!strcmp(op, "in")) return value_bool(value_contains(st, b, a));
    if (!strcmp(op, "not in")) return value_bool(!value_contains(st, b, a));
    if (!strcmp(op, "<")) return value_bool(value_order(st, a, b) < 0);
    if (!strcmp(op, "<=")) return value_bool(value_order(st, a, b) <= 0);
    if (!strcmp(op, ">")) return value_bool(value_order(st, a, b) > 0);
    if (!strcmp(op, ">=")) return value_bool(value_order(st, a, b) >= 0);
    return arithmetic(st, op, a, b);
}

static struct value negate(struct jinja_state *st, const char *op, struct value v)
{
    if (v.kind != VALUE_INT && v.kind != VALUE_FLOAT && v.kind != VALUE_BOOL) return bad_operands(st, op, v, v);
    if (*op == '+') return v;
    return v.kind == VALUE_FLOAT ? value_float(-v.f) : arithmetic(st, "-", value_int(0), v);
}

/* ---- expressions ---- */

static struct value collection(struct jinja_state *st, struct scope *scope, const struct node *n)
{
    struct value v = n->kind == NODE_DICT ? value_dict(st) : value_list(st, n->kind == NODE_TUPLE);
    for (const struct node *item = n->a; item && !st->failed; item = item->next) {
        struct value first = eval(st, scope, item->a);
        if (n->kind != NODE_DICT) {
            list_add(st, v.list, first);
            continue;
        }
        item = item->next;
        dict_set(st, v.dict, first, eval(st, scope, item->a));
    }
    return v;
}

static struct value slice(struct jinja_state *st, struct scope *scope, const struct node *n)
{
    const struct node *parts[3] = {n->b, n->c, n->body};
    struct value part[3] = {{0}}, self = eval(st, scope, n->a);
    for (int i = 0; i < 3; i++)
        if (parts[i]) part[i] = eval(st, scope, parts[i]);
    return jinja_slice(st, self, part);
}

static struct value filter_or_test(struct jinja_state *st, struct scope *scope, const struct node *n)
{
    struct jinja_args args;
    struct value self = eval(st, scope, n->a);
    eval_args(st, scope, n->b, &args);
    st->line = n->line;
    if (st->failed) return value_none();
    if (n->kind == NODE_FILTER) return jinja_filter(st, n->name, self, &args);
    return value_bool(jinja_test(st, n->name, self, &args));
}

static struct value eval_node(struct jinja_state *st, struct scope *scope, const struct node *n)
{
    struct value a, b;
    switch (n->kind) {
    case NODE_VALUE: return n->value;
    case NODE_NAME: return lookup(st, scope, n->name);
    case NODE_LIST:
    case NODE_TUPLE:
    case NODE_DICT: return collection(st, scope, n);
    case NODE_ATTR: a = eval(st, scope, n->a); return jinja_attribute(st, a, n->name, true);
    case NODE_ITEM:
        a = eval(st, scope, n->a);
        b = eval(st, scope, n->b);
        return jinja_item(st, a, b);
    case NODE_SLICE: return slice(st, scope, n);
    case NODE_CALL: return call(st, scope, n);
    case NODE_FILTER:
    case NODE_TEST: return filter_or_test(st, scope, n);
    case NODE_NOT: return value_bool(!value_truth(eval(st, scope, n->a)));
    case NODE_AND: a = eval(st, scope, n->a); return value_truth(a) ? eval(st, scope, n->b) : a;
    case NODE_OR: a = eval(st, scope, n->a); return value_truth(a) ? a : eval(st, scope, n->b);
    case NODE_NEGATE: return negate(st, n->name, eval(st, scope, n->a));
    case NODE_BINARY:
        a = eval(st, scope, n->a);
        b = eval(st, scope, n->b);
        st->line = n->line;
        return binary(st, n->name, a, b);
    case NODE_CHOICE:
        if (value_truth(eval(st, scope, n->a))) return eval(st, scope, n->b);
        return n->c ? eval(st, scope, n->c) : value_undefined("the other case", 14);
    default: return jinja_fail(st, "a statement where an expression belongs");
    }
}

static bool enter(struct jinja_state *st, const struct node *n)
{
    st->line = n->line;
    const int64_t used = st->stack - (const char *)__builtin_frame_address(0);
    if (++st->depth > JINJA_DEPTH || used > st->stack_room)
        jinja_fail(st, "recursion without an end, or expressions nested too deeply");
    return jinja_charge(st, 1);
}

static struct value eval(struct jinja_state *st, struct scope *scope, const struct node *n)
{
    struct value v = value_undefined("", 0);
    if (enter(st, n)) v = eval_node(st, scope, n);
    st->depth--;
    return v;
}

/* ---- statements ---- */

/* Notes that a loop's iteration for this item wrote text[begin, size). */
static void note_place(struct jinja_state *st, struct value item, int64_t begin)
{
    if (item.kind != VALUE_DICT || !item.dict->place || st->out != st->text || st->text->size == begin) return;
    (*item.dict->place)[0] = begin;
    (*item.dict->place)[1] = st->text->size;
}

static enum flow run_for(struct jinja_state *st, struct scope *scope, const struct node *n)
{
    const struct list *all = value_items(st, eval(st, scope, n->b));
    struct value kept = value_list(st, false);
    struct loop *loop = jinja_new(st, sizeof(*loop));
    bool ended = false; /* an iteration ended without break or continue; if none did, Jinja runs `else` */
    for (int64_t i = 0; n->c && i < all->count && !st->failed; i++) {
        struct scope *one = scope_new(st, scope);
        assign_to(st, one, n->a, all->items[i]);
        if (value_truth(eval(st, one, n->c))) list_add(st, kept.list, all->items[i]);
    }
    loop->items = n->c ? kept.list : all;
    for (; loop->index < loop->items->count && !st->failed; loop->index++) {
        struct scope *round = scope_new(st, scope);
        assign(st, round, "loop", (struct value){.kind = VALUE_LOOP, .loop = loop});
        const struct value item = loop->items->items[loop->index];
        assign_to(st, round, n->a, item);
        const int64_t begin = st->out->size;
        const enum flow flow = run(st, round, n->body);
        note_place(st, item, begin);
        if (flow == FLOW_BREAK) break;
        ended |= flow == FLOW_NEXT;
    }
    return ended ? FLOW_NEXT : run(st, scope_new(st, scope), n->other);
}

static void run_set(struct jinja_state *st, struct scope *scope, const struct node *n)
{
    struct value v = n->b ? eval(st, scope, n->b) : capture(st, scope_new(st, scope), n->body);
    if (st->failed) return;
    if (n->a->kind != NODE_ATTR) {
        assign_to(st, scope, n->a, v);
        return;
    }
    struct value ns = eval(st, scope, n->a->a);
    if (ns.kind != VALUE_DICT || !ns.dict->is_namespace)
        jinja_fail(st, "only attributes of a namespace can be set, and `%s` is not a namespace", n->a->a->name);
    else
        dict_set(st, ns.dict, key_of(n->a->name), v);
}

static enum flow run_generation(struct jinja_state *st, struct scope *scope, const struct node *n)
{
    int64_t begin = st->out->size, spans = st->out->n_spans;
    if (st->out != st->text)
        jinja_fail(st, "{%% generation %%} inside a macro or a {%% set %%} block is not supported");
    enum flow flow = run(st, scope_new(st, scope), n->body);
    if (st->out->n_spans != spans) jinja_fail(st, "{%% generation %%} inside another {%% generation %%}");
    text_span(st->out, begin, st->out->size);
    return flow;
}

static enum flow run_one(struct jinja_state *st, struct scope *scope, const struct node *n)
{
    switch (n->kind) {
    case NODE_TEXT:
        if (jinja_charge(st, n->value.size)) text_put_bytes(st->out, n->value.s, n->value.size);
        break;
    case NODE_PRINT: value_print(st, st->out, eval(st, scope, n->a), false); break;
    case NODE_IF: return run(st, scope, value_truth(eval(st, scope, n->a)) ? n->body : n->other);
    case NODE_FOR: return run_for(st, scope, n);
    case NODE_SET: run_set(st, scope, n); break;
    case NODE_MACRO: {
        struct callable *c = jinja_new(st, sizeof(*c));
        *c = (struct callable){.macro = n, .scope = scope, .name = n->name};
        assign(st, scope, n->name, (struct value){.kind = VALUE_CALLABLE, .callable = c});
        break;
    }
    case NODE_GENERATION: return run_generation(st, scope, n);
    case NODE_BREAK: return FLOW_BREAK;
    case NODE_CONTINUE: return FLOW_CONTINUE;
    default: jinja_fail(st, "an expression where a statement belongs");
    }
    return FLOW_NEXT;
}

static enum flow run(struct jinja_state *st, struct scope *scope, const struct node *n)
{
    enum flow flow = FLOW_NEXT;
    for (; n && flow == FLOW_NEXT && !st->failed; n = n->next) {
        if (enter(st, n)) flow = run_one(st, scope, n);
        st->depth--;
    }
    return flow;
}

/* ---- the whole template ---- */

struct jinja *jinja_parse(const char *text, int64_t size, const char *name, struct err *err)
{
    struct jinja *t = mem_alloc(sizeof(*t));
    if (size > MAX_TEMPLATE) {
        err_set(err, "%s: the template has %lld bytes, the limit is %d", name, (long long)size, MAX_TEMPLATE);
        mem_free(t);
        return NULL;
    }
    t->name = jinja_copy(&t->arena, name, (int64_t)strlen(name));
    if (!jinja_tree(&t->root, &t->generation, &t->arena, text, size, name, err)) return t;
    jinja_free(t);
    return NULL;
}

void jinja_free(struct jinja *t)
{
    if (t) jinja_arena_free(&t->arena);
    mem_free(t);
}

bool jinja_has_generation(const struct jinja *t) { return t->generation; }
bool jinja_reads(const struct jinja *t, const char *name) { return jinja_tree_reads(t->root, name); }

int64_t jinja_inputs(const struct jinja *t, const char **names, int64_t max)
{
    const int64_t n = jinja_tree_inputs(t->root, names, max);
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++)
        if (!jinja_is_function(names[i]) && strcmp(names[i], "loop") != 0) names[kept++] = names[i];
    return kept;
}

static bool is_set(const struct value *v) { return v && v->kind != VALUE_NONE && (v->kind != VALUE_STRING || v->size); }

static void add_twins(struct jinja_state *st, const struct jinja_var *var, const struct list *l)
{
    for (int64_t i = 0; i < l->count && !st->failed; i++) {
        struct dict *d = l->items[i].kind == VALUE_DICT ? l->items[i].dict : NULL;
        const struct value *v = NULL;
        for (int k = 0; k < MT_LEN(var->twins) && d && var->twins[k]; k++)
            if (!is_set(v)) v = dict_get(st, d, key_of(var->twins[k]));
        if (!is_set(v)) continue;
        const struct value set = *v;
        for (int k = 0; k < MT_LEN(var->twins) && var->twins[k]; k++)
            if (!is_set(dict_get(st, d, key_of(var->twins[k])))) dict_set(st, d, key_of(var->twins[k]), set);
    }
}

static struct value var_value(struct jinja_state *st, const struct jinja_var *var)
{
    if (var->kind == JINJA_NONE) return value_none();
    if (var->kind == JINJA_TRUTH) return value_bool(var->truth);
    if (var->kind == JINJA_TEXT) return key_of(var->text);
    struct value v = value_json(st, var->json);
    if (v.kind != VALUE_LIST) return v;
    v.list->count = MT_MAX(0, v.list->count - var->leave_out);
    add_twins(st, var, v.list);
    for (int64_t i = 0; var->places && i < v.list->count; i++) {
        memset(var->places[i], 0, sizeof(var->places[i]));
        if (v.list->items[i].kind == VALUE_DICT) v.list->items[i].dict->place = &var->places[i];
    }
    return v;
}

/* Stack bytes that a template may use: a third of a thread's stack (2 MiB if it is unlimited), at most 4 MiB. */
static int64_t stack_room(void)
{
    struct rlimit limit;
    const bool unlimited = getrlimit(RLIMIT_STACK, &limit) || limit.rlim_cur == RLIM_INFINITY;
    return unlimited ? (2 << 20) / 3 : (int64_t)MT_MIN(limit.rlim_cur, 12 << 20) / 3;
}

int jinja_render(struct text_buf *out, const struct jinja *t, const struct jinja_var *vars, int64_t n_vars,
                 const char *date, struct err *err)
{
    int64_t size = out->size, spans = out->n_spans;
    struct jinja_state st = {.out = out, .text = out, .name = t->name, .date = date, .line = 1, .err = err};
    st.stack = __builtin_frame_address(0);
    st.stack_room = stack_room();
    st.work = JINJA_WORK;
    st.memory = JINJA_MEMORY;
    struct scope *scope = scope_new(&st, NULL);
    for (int64_t i = 0; i < n_vars; i++) assign(&st, scope, vars[i].name, var_value(&st, &vars[i]));
    run(&st, scope, t->root);
    jinja_arena_free(&st.arena);
    if (!st.failed) return 0;
    out->size = size;
    out->n_spans = spans;
    return -1;
}

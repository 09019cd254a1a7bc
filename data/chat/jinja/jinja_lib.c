/* jinja_lib.c - see jinja_lib.h. */
#include "data/chat/jinja/jinja_lib.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_PARAMETERS 4
#define MAX_INDENT     1000 /* of tojson; a small limit, as it is multiplied by the depth */

static const struct value absent = {0}; /* an omitted argument */

/* ---- calls by table ---- */

/* Index of `name` among the words of `parameters`, or -1; with name NULL the number of words. */
static int64_t parameter(const char *parameters, const char *name)
{
    int64_t index = 0;
    for (const char *p = parameters; *p; index++) {
        size_t n = strcspn(p, " ");
        if (name && strlen(name) == n && !memcmp(p, name, n)) return index;
        p += n + strspn(p + n, " ");
    }
    return name ? -1 : index;
}

/* Calls the function in the row of that name, or fails with "`WHAT` `name` is not supported". */
static struct value call_row(struct jinja_state *st, const struct jinja_fn *rows, int64_t n_rows, const char *what,
                             const char *name, struct value self, const struct jinja_args *args)
{
    struct value a[MAX_PARAMETERS] = {0};
    int64_t row = 0;
    while (row < n_rows && strcmp(rows[row].name, name)) row++;
    if (row == n_rows) return jinja_fail(st, "%s `%s` is not supported", what, name);
    const struct jinja_fn *fn = &rows[row];
    if (fn->call_all) return fn->call_all(st, args);
    int64_t n_parameters = parameter(fn->parameters, NULL);
    for (int64_t i = 0; i < args->count; i++) {
        int64_t to = args->names[i] ? parameter(fn->parameters, args->names[i]) : i;
        if (to < 0) return jinja_fail(st, "%s `%s`: the argument `%s` is not supported", what, name, args->names[i]);
        if (to >= n_parameters) return jinja_fail(st, "%s `%s`: too many arguments", what, name);
        a[to] = args->values[i];
    }
    return fn->call(st, self, a);
}

static int64_t number(struct jinja_state *st, struct value v, int64_t otherwise)
{
    if (value_absent(v)) return otherwise;
    if (v.kind == VALUE_INT) return v.i;
    if (v.kind == VALUE_BOOL) return v.truth;
    jinja_fail(st, "an integer is needed, not %s", value_kind_name(v));
    return otherwise;
}

/* NUL-terminated. */
static const char *text(struct jinja_state *st, struct value v, const char *otherwise)
{
    if (value_absent(v)) return otherwise;
    if (v.kind != VALUE_STRING) jinja_fail(st, "a string is needed, not %s", value_kind_name(v));
    const struct value copy = v.kind == VALUE_STRING ? value_string(st, v.s, v.size) : v;
    return copy.kind == VALUE_STRING ? copy.s : otherwise ? otherwise : "";
}

/* Whether v is the text of a number and nothing else. The copy for strtod does not stay in the arena. */
static bool parse_number(struct jinja_state *st, struct value v, double *f)
{
    char *end, *s = NULL;
    if (v.kind != VALUE_STRING || !v.size || !jinja_charge(st, v.size)) return false;
    s = mem_alloc(v.size + 1);
    memcpy(s, v.s, (size_t)v.size);
    *f = strtod(s, &end);
    const bool all = *s && !*end;
    mem_free(s);
    return all;
}

/* The value at the path "a.b.c" in v, in which numbers are indexes; `otherwise`, if given, replaces a missing value. */
static struct value attribute_path(struct jinja_state *st, struct value v, struct value path, struct value otherwise)
{
    if (path.kind == VALUE_INT) return jinja_item(st, v, path);
    for (const char *p = text(st, path, ""); *p && !st->failed;) {
        size_t n = strcspn(p, ".");
        const struct value name = value_string(st, p, (int64_t)n);
        if (st->failed) break;
        v = jinja_item(st, v, name.s[strspn(name.s, "0123456789")] ? name : value_int(atoi(name.s)));
        if (v.kind == VALUE_UNDEFINED && !value_absent(otherwise)) v = otherwise;
        p += n + (p[n] == '.');
    }
    return v;
}

/* ---- filters ---- */

#define FILTER(name) static struct value name(struct jinja_state *st, struct value self, const struct value *a)

FILTER(filter_default)
{
    (void)st;
    if (self.kind != VALUE_UNDEFINED && !(value_truth(a[1]) && !value_truth(self))) return self;
    return value_absent(a[0]) ? value_view("", 0) : a[0];
}

FILTER(filter_first)
{
    (void)a;
    const struct list *l = value_items(st, self);
    return l->count ? l->items[0] : value_undefined("first: the list is empty", 16);
}

FILTER(filter_last)
{
    (void)a;
    const struct list *l = value_items(st, self);
    return l->count ? l->items[l->count - 1] : value_undefined("last: the list is empty", 15);
}

FILTER(filter_int)
{
    double f;
    if (self.kind == VALUE_INT) return self;
    if (value_number(self, &f) && fabs(f) < 9e18) return value_int((int64_t)f);
    if (parse_number(st, self, &f) && fabs(f) < 9e15) return value_int((int64_t)f);
    return value_absent(a[0]) ? value_int(0) : a[0];
}

FILTER(filter_float)
{
    double f;
    if (value_number(self, &f)) return value_float(f);
    if (parse_number(st, self, &f)) return value_float(f);
    return value_absent(a[0]) ? value_float(0) : a[0];
}

FILTER(filter_abs)
{
    (void)a;
    if (self.kind == VALUE_INT && self.i != INT64_MIN) return value_int(llabs(self.i));
    return self.kind == VALUE_FLOAT ? value_float(fabs(self.f)) : jinja_fail(st, "abs needs a number");
}

FILTER(filter_join)
{
    struct text_buf t = {0};
    const struct list *l = value_items(st, self);
    for (int64_t i = 0; i < l->count && !st->failed; i++) {
        if (i && !value_absent(a[0])) value_print(st, &t, a[0], false);
        value_print(st, &t, value_absent(a[1]) ? l->items[i] : attribute_path(st, l->items[i], a[1], absent), false);
    }
    return value_take(st, &t);
}

FILTER(filter_length)
{
    (void)a;
    return value_int(value_length(st, self));
}

FILTER(filter_list)
{
    (void)a;
    struct value v = value_list(st, false);
    const struct list *l = value_items(st, self);
    for (int64_t i = 0; i < l->count && !st->failed; i++) list_add(st, v.list, l->items[i]);
    return v;
}

FILTER(filter_items)
{
    (void)a;
    if (self.kind == VALUE_UNDEFINED) return value_list(st, false);
    return jinja_dict_items(st, self);
}

FILTER(filter_reverse)
{
    (void)a;
    const struct value back[3] = {{0}, {0}, value_int(-1)};
    if (self.kind == VALUE_STRING) return jinja_slice(st, self, back);
    return jinja_slice(st, filter_list(st, self, a), back);
}

FILTER(filter_string)
{
    (void)a;
    return value_str(st, self);
}

FILTER(filter_tojson)
{
    struct text_buf t = {0};
    struct tojson how = {.indent = a[1].kind == VALUE_NONE ? -1 : number(st, a[1], -1)};
    if (how.indent > MAX_INDENT) return jinja_fail(st, "tojson: indent is above the limit of %d", MAX_INDENT);
    if (!value_absent(a[0]) && value_truth(a[0])) return jinja_fail(st, "tojson: ensure_ascii=true is not supported");
    if (a[2].kind == VALUE_LIST && a[2].list->count == 2) {
        how.item = a[2].list->items[0];
        how.key = a[2].list->items[1];
    }
    if (!value_absent(a[2]) && a[2].kind != VALUE_NONE &&
        (how.item.kind != VALUE_STRING || how.key.kind != VALUE_STRING))
        return jinja_fail(st, "tojson: separators must be two strings");
    value_tojson(st, &t, self, &how);
    return value_take(st, &t);
}

FILTER(filter_trim) { return jinja_strip(st, value_str(st, self), a[0], true, true); }
FILTER(filter_lower) { return (void)a, jinja_case(st, value_str(st, self), 'l'); }
FILTER(filter_upper) { return (void)a, jinja_case(st, value_str(st, self), 'u'); }
FILTER(filter_capitalize) { return (void)a, jinja_case(st, value_str(st, self), 'c'); }
FILTER(filter_title) { return (void)a, jinja_case(st, value_str(st, self), 'w'); }

FILTER(filter_replace)
{
    return jinja_replace(st, value_str(st, self), value_str(st, a[0]), value_str(st, a[1]), number(st, a[2], -1));
}

FILTER(filter_indent)
{
    struct value s = value_str(st, self);
    struct text_buf t = {0};
    int64_t width = number(st, a[0], 4);
    bool first = value_truth(a[1]), blank = value_truth(a[2]);
    if (s.kind != VALUE_STRING || !jinja_charge(st, s.size)) return s;
    for (int64_t i = 0, end; i <= s.size && !st->failed; i = end + 1) {
        for (end = i; end < s.size && s.s[end] != '\n';) end++;
        const bool indent = i == 0 ? first : end > i || blank;
        for (int64_t k = 0; indent && k < width && jinja_charge(st, 1); k++) text_put(&t, " ");
        text_put_bytes(&t, s.s + i, MT_MIN(end + 1, s.size) - i);
    }
    return value_take(st, &t);
}

/* What sort and unique compare: the item or its attribute, a string in lower case unless case_sensitive. */
static struct value key_of(struct jinja_state *st, struct value item, struct value attribute, bool sensitive)
{
    const struct value key = value_absent(attribute) ? item : attribute_path(st, item, attribute, absent);
    return key.kind == VALUE_STRING && !sensitive ? jinja_case(st, key, 'l') : key;
}

FILTER(filter_unique)
{
    struct value v = value_list(st, false), keys = value_list(st, false);
    const struct list *l = value_items(st, self);
    for (int64_t i = 0; i < l->count && !st->failed; i++) {
        const struct value key = key_of(st, l->items[i], a[1], value_truth(a[0]));
        if (value_contains(st, keys, key)) continue;
        list_add(st, keys.list, key);
        list_add(st, v.list, l->items[i]);
    }
    return v;
}

/* Stable; by value or by attribute. */
static struct value sorted(struct jinja_state *st, struct value l, struct value attribute, bool reverse, bool sensitive)
{
    struct value v = filter_list(st, l, NULL), keys = value_list(st, false);
    for (int64_t i = 0; i < v.list->count && !st->failed; i++) {
        list_add(st, keys.list, key_of(st, v.list->items[i], attribute, sensitive));
        for (int64_t k = i; k > 0 && jinja_charge(st, 1); k--) {
            struct value *a = &keys.list->items[k - 1], *b = &keys.list->items[k];
            int order = value_order(st, *a, *b);
            if (reverse ? order >= 0 : order <= 0) break;
            struct value swap[2] = {*a, v.list->items[k - 1]};
            *a = *b;
            *b = swap[0];
            v.list->items[k - 1] = v.list->items[k];
            v.list->items[k] = swap[1];
        }
    }
    return v;
}

FILTER(filter_sort) { return sorted(st, self, a[2], value_truth(a[0]), value_truth(a[1])); }

FILTER(filter_dictsort)
{
    bool by_value = value_is(a[1], "value");
    return sorted(st, jinja_dict_items(st, self), value_int(by_value), value_truth(a[2]), value_truth(a[0]));
}

/* map("filter"), map(attribute="a.b", default=...) */
FILTER(filter_map)
{
    const struct jinja_args none = {0};
    struct value v = value_list(st, false);
    if (!value_truth(self)) return v; /* jinja2 iterates over no false value, so none is empty */
    const struct list *l = value_items(st, self);
    const char *name = text(st, a[0], NULL);
    for (int64_t i = 0; i < l->count && !st->failed; i++) {
        struct value item = l->items[i];
        item = name ? jinja_filter(st, name, item, &none) : attribute_path(st, item, a[1], a[2]);
        list_add(st, v.list, item);
    }
    return v;
}

/* The items that pass the test (or fail it, for reject); the test applies to the item or to its attribute. */
static struct value choose(struct jinja_state *st, struct value self, const struct value *attribute, struct value test,
                           struct value argument, bool keep)
{
    struct value v = value_list(st, false);
    if (!value_truth(self)) return v;
    const struct list *l = value_items(st, self);
    const char *name = text(st, test, NULL);
    const struct jinja_args args = {.values = {argument}, .count = !value_absent(argument)};
    for (int64_t i = 0; i < l->count && !st->failed; i++) {
        struct value item = attribute ? attribute_path(st, l->items[i], *attribute, absent) : l->items[i];
        if ((name ? jinja_test(st, name, item, &args) : value_truth(item)) == keep) list_add(st, v.list, l->items[i]);
    }
    return v;
}

FILTER(filter_select) { return choose(st, self, NULL, a[0], a[1], true); }
FILTER(filter_reject) { return choose(st, self, NULL, a[0], a[1], false); }
FILTER(filter_selectattr) { return choose(st, self, &a[0], a[1], a[2], true); }
FILTER(filter_rejectattr) { return choose(st, self, &a[0], a[1], a[2], false); }

static const struct jinja_fn filters[] = {
    {"abs", filter_abs, "", NULL},
    {"capitalize", filter_capitalize, "", NULL},
    {"count", filter_length, "", NULL},
    {"d", filter_default, "default_value boolean", NULL},
    {"default", filter_default, "default_value boolean", NULL},
    {"dictsort", filter_dictsort, "case_sensitive by reverse", NULL},
    {"first", filter_first, "", NULL},
    {"float", filter_float, "default", NULL},
    {"indent", filter_indent, "width first blank", NULL},
    {"int", filter_int, "default", NULL},
    {"items", filter_items, "", NULL},
    {"join", filter_join, "d attribute", NULL},
    {"last", filter_last, "", NULL},
    {"length", filter_length, "", NULL},
    {"list", filter_list, "", NULL},
    {"lower", filter_lower, "", NULL},
    {"map", filter_map, "filter attribute default", NULL},
    {"reject", filter_reject, "test argument", NULL},
    {"rejectattr", filter_rejectattr, "attribute test argument", NULL},
    {"replace", filter_replace, "old new count", NULL},
    {"reverse", filter_reverse, "", NULL},
    {"safe", filter_string, "", NULL},
    {"select", filter_select, "test argument", NULL},
    {"selectattr", filter_selectattr, "attribute test argument", NULL},
    {"sort", filter_sort, "reverse case_sensitive attribute", NULL},
    {"string", filter_string, "", NULL},
    {"title", filter_title, "", NULL},
    {"tojson", filter_tojson, "ensure_ascii indent separators", NULL},
    {"trim", filter_trim, "chars", NULL},
    {"unique", filter_unique, "case_sensitive attribute", NULL},
    {"upper", filter_upper, "", NULL},
};

bool jinja_is_filter(const char *name)
{
    for (int64_t i = 0; i < MT_LEN(filters); i++)
        if (!strcmp(filters[i].name, name)) return true;
    return false;
}

struct value jinja_filter(struct jinja_state *st, const char *name, struct value self, const struct jinja_args *args)
{
    return call_row(st, filters, MT_LEN(filters), "the filter", name, self, args);
}

/* ---- tests ---- */

static bool is_number(struct value v) { return v.kind == VALUE_INT || v.kind == VALUE_FLOAT || v.kind == VALUE_BOOL; }

static bool is_iterable(struct value v)
{
    return v.kind == VALUE_UNDEFINED || v.kind == VALUE_STRING || v.kind == VALUE_LIST ||
           (v.kind == VALUE_DICT && !v.dict->is_namespace);
}

/* Runs a test of the value's type: 1 yes, 0 no, -1 there is no such test. */
static int test_kind(const char *name, struct value v)
{
    const struct {
        const char *name;
        bool holds;
    } rows[] = {
        {"defined", v.kind != VALUE_UNDEFINED},
        {"undefined", v.kind == VALUE_UNDEFINED},
        {"none", v.kind == VALUE_NONE},
        {"string", v.kind == VALUE_STRING},
        {"mapping", v.kind == VALUE_DICT && !v.dict->is_namespace},
        {"iterable", is_iterable(v)},
        {"sequence", is_iterable(v)},
        {"number", is_number(v)},
        {"integer", v.kind == VALUE_INT},
        {"float", v.kind == VALUE_FLOAT},
        {"boolean", v.kind == VALUE_BOOL},
        {"true", v.kind == VALUE_BOOL && v.truth},
        {"false", v.kind == VALUE_BOOL && !v.truth},
        {"callable", v.kind == VALUE_CALLABLE},
    };
    for (int64_t i = 0; i < MT_LEN(rows); i++)
        if (!strcmp(rows[i].name, name)) return rows[i].holds;
    return -1;
}

static bool test_order(struct jinja_state *st, const char *op, struct value a, struct value b)
{
    int order = value_order(st, a, b);
    return op[0] == 'l' ? order < (op[1] == 'e') : order > -(op[1] == 'e');
}

bool jinja_test(struct jinja_state *st, const char *name, struct value self, const struct jinja_args *args)
{
    static const char *const same[][2] = {{"==", "eq"}, {"equalto", "eq"},     {"!=", "ne"},
                                          {">", "gt"},  {"<", "lt"},           {">=", "ge"},
                                          {"<=", "le"}, {"greaterthan", "gt"}, {"lessthan", "lt"}};
    const struct value other = args->count ? args->values[0] : value_undefined("argument", 8);
    int kind = test_kind(name, self);
    if (kind >= 0) return kind;
    for (int64_t i = 0; i < MT_LEN(same); i++)
        if (!strcmp(name, same[i][0])) name = same[i][1];
    if (!strcmp(name, "eq")) return value_equal(st, self, other);
    if (!strcmp(name, "ne")) return !value_equal(st, self, other);
    if (!strcmp(name, "in")) return value_contains(st, other, self);
    if (!strcmp(name, "gt") || !strcmp(name, "lt") || !strcmp(name, "ge") || !strcmp(name, "le"))
        return test_order(st, name, self, other);
    if (!strcmp(name, "odd")) return number(st, self, 0) % 2 != 0;
    if (!strcmp(name, "even")) return number(st, self, 0) % 2 == 0;
    if (!strcmp(name, "divisibleby")) {
        int64_t by = number(st, other, 1);
        if (by == 0) jinja_fail(st, "division by zero");
        return by > 0 ? number(st, self, 0) % by == 0 : by != 0 && number(st, self, 0) % -(by + 1) == 0;
    }
    jinja_fail(st, "the test `%s` is not supported", name);
    return false;
}

/* ---- functions ---- */

static struct value function_namespace(struct jinja_state *st, const struct jinja_args *args)
{
    struct value v = value_dict(st);
    v.dict->is_namespace = true;
    for (int64_t i = 0; i < args->count; i++) {
        if (!args->names[i]) return jinja_fail(st, "namespace takes arguments by name only");
        dict_set(st, v.dict, value_view(args->names[i], (int64_t)strlen(args->names[i])), args->values[i]);
    }
    return v;
}

static struct value function_dict(struct jinja_state *st, const struct jinja_args *args)
{
    struct value v = function_namespace(st, args);
    if (!st->failed) v.dict->is_namespace = false;
    return v;
}

FILTER(function_raise)
{
    (void)self;
    return jinja_fail(st, "the template refuses this conversation: %s", text(st, a[0], ""));
}

/* The day is fixed, so that the ids do not depend on it; the time is midnight. */
FILTER(function_strftime)
{
    (void)self;
    struct tm tm = {0};
    char out[256];
    if (!st->date || sscanf(st->date, "%d-%d-%d", &tm.tm_year, &tm.tm_mon, &tm.tm_mday) != 3)
        return jinja_fail(st, "strftime_now: no date is set");
    tm.tm_year -= 1900;
    tm.tm_mon -= 1;
    tm.tm_hour = 12; /* noon: far from any clock change */
    timegm(&tm);     /* sets the day of the week and of the year */
    tm.tm_hour = 0;
    size_t n = strftime(out, sizeof(out), text(st, a[0], ""), &tm);
    return value_string(st, out, (int64_t)n);
}

FILTER(function_range)
{
    (void)self;
    struct value v = value_list(st, false);
    int64_t first = number(st, a[0], 0), last = number(st, a[1], first), step = number(st, a[2], 1);
    if (value_absent(a[1])) first = 0;
    if (step == 0) return jinja_fail(st, "range: the step is 0");
    for (int64_t i = first; (step > 0 ? i < last : i > last) && !st->failed;) {
        list_add(st, v.list, value_int(i));
        if (__builtin_add_overflow(i, step, &i)) break;
    }
    return v;
}

static const struct jinja_fn functions[] = {
    {"dict", NULL, NULL, function_dict},
    {"namespace", NULL, NULL, function_namespace},
    {"raise_exception", function_raise, "message", NULL},
    {"range", function_range, "start stop step", NULL},
    {"strftime_now", function_strftime, "format", NULL},
};

bool jinja_is_function(const char *name)
{
    for (int64_t i = 0; i < MT_LEN(functions); i++)
        if (!strcmp(functions[i].name, name)) return true;
    return false;
}

struct value jinja_function(struct jinja_state *st, const char *name, const struct jinja_args *args)
{
    return call_row(st, functions, MT_LEN(functions), "the function", name, value_none(), args);
}

struct value jinja_method(struct jinja_state *st, const char *name, struct value self, const struct jinja_args *args)
{
    int64_t n;
    const struct jinja_fn *rows = jinja_methods(self, &n);
    return call_row(st, rows, n, "the method", name, self, args);
}

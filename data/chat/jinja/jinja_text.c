/* jinja_text.c - methods of strings and dicts, attributes, items and slices of the Jinja engine, as in Python. */
#include <ctype.h>
#include <string.h>

#include "data/chat/jinja/jinja_lib.h"

#define METHOD(name) static struct value name(struct jinja_state *st, struct value self, const struct value *a)

/* ---- pieces ---- */

static bool is_one_of(struct value chars, const char *s, int64_t n)
{
    for (int64_t i = 0, size; i < chars.size; i += size) {
        size = utf8_size(chars.s + i, chars.size - i);
        if (size == n && !memcmp(chars.s + i, s, (size_t)n)) return true;
    }
    return false;
}

struct value jinja_strip(struct jinja_state *st, struct value self, struct value chars, bool left, bool right)
{
    int64_t begin = 0, end = 0;
    bool space = value_absent(chars) || chars.kind == VALUE_NONE, started = !left;
    if (self.kind != VALUE_STRING || (!space && chars.kind != VALUE_STRING))
        return jinja_fail(st, "strip: a string is needed");
    if (!jinja_charge(st, self.size * (space ? 1 : 1 + chars.size))) return self;
    for (int64_t i = 0, n; i < self.size; i += n) {
        n = utf8_size(self.s + i, self.size - i);
        if (space ? utf8_space(utf8_code(self.s + i, n)) : is_one_of(chars, self.s + i, n)) continue;
        if (!started) begin = i;
        started = true;
        end = i + n;
    }
    if (!right) end = started ? self.size : 0;
    return value_view(self.s + begin, MT_MAX(end - begin, 0));
}

struct value jinja_replace(struct jinja_state *st, struct value self, struct value from, struct value to, int64_t count)
{
    struct text_buf t = {0};
    int64_t at = 0, next;
    if (self.kind != VALUE_STRING || from.kind != VALUE_STRING || to.kind != VALUE_STRING)
        return jinja_fail(st, "replace: strings are needed");
    if (!from.size) return jinja_fail(st, "replace: an empty search string is not supported");
    for (; count != 0 && (next = value_find(st, self, from, at)) >= 0; count--, at = next + from.size) {
        text_put_bytes(&t, self.s + at, next - at);
        if (jinja_charge(st, to.size)) text_put_bytes(&t, to.s, to.size);
    }
    if (!st->failed) text_put_bytes(&t, self.s + at, self.size - at);
    return value_take(st, &t);
}

/* Characters beyond ASCII without case: from Hebrew to Myanmar, punctuation, Chinese, Japanese and Korean. */
static bool is_caseless(int32_t c)
{
    static const int32_t ranges[][2] = {{0xa1, 0xa9},     {0xab, 0xb4},     {0xb6, 0xb9},      {0xbb, 0xbf},
                                        {0x591, 0x109f},  {0x2010, 0x205e}, {0x3001, 0xa63f},  {0xac00, 0xd7a3},
                                        {0xf900, 0xfaff}, {0xff01, 0xff20}, {0x20000, 0x323af}};
    for (int i = 0; i < MT_LEN(ranges); i++)
        if (c >= ranges[i][0] && c <= ranges[i][1]) return true;
    return false;
}

/* Lower case of Latin-1 and Cyrillic, whose two bytes stay two. false: not known. */
static bool lower_pair(int32_t *c)
{
    const bool latin = *c >= 0xc0 && *c <= 0xde && *c != 0xd7, cyrillic = *c >= 0x410 && *c <= 0x42f;
    if (latin || cyrillic) *c += 0x20;
    if (*c >= 0x400 && *c <= 0x40f) *c += 0x50;
    return *c == 0xd7 || (*c >= 0xdf && *c <= 0xff) || (*c >= 0x430 && *c <= 0x45f);
}

struct value jinja_case(struct jinja_state *st, struct value self, char how)
{
    static const char before_word[] = "-({[< \t\n\v\f\r\x1c\x1d\x1e\x1f";
    if (self.kind != VALUE_STRING) return jinja_fail(st, "a string is needed");
    struct value v = value_string(st, self.s, self.size);
    char *s = (char *)v.s;
    bool inside = false; /* a word, or the text */
    for (int64_t i = 0, n; i < v.size; i += n) {
        const unsigned char c = (unsigned char)s[i];
        n = utf8_size(s + i, v.size - i);
        if (n > 1) {
            int32_t code = utf8_code(s + i, n);
            if (!is_caseless(code) && (how != 'l' || !lower_pair(&code)))
                return jinja_fail(st, "upper and lower case of this letter beyond ASCII is not supported: U+%04X",
                                  (unsigned)code);
            if (n == 2) s[i] = (char)(0xc0 | code >> 6), s[i + 1] = (char)(0x80 | (code & 0x3f));
            inside = how == 'w' || how == 'c';
            continue;
        }
        bool upper = how == 'u' || (how != 'l' && !inside);
        s[i] = (char)(upper ? toupper(c) : tolower(c));
        inside = how == 'w' ? !memchr(before_word, c, sizeof(before_word) - 1) : how == 'c' || isalpha(c);
    }
    return v;
}

/* A tuple. */
static struct value pair(struct jinja_state *st, struct value a, struct value b)
{
    struct value v = value_list(st, true);
    list_add(st, v.list, a);
    list_add(st, v.list, b);
    return v;
}

struct value jinja_dict_items(struct jinja_state *st, struct value self)
{
    if (self.kind != VALUE_DICT) return jinja_fail(st, "items: a dict is needed, not %s", value_kind_name(self));
    struct value v = value_list(st, false);
    for (int64_t i = 0; i < self.dict->count && !st->failed; i++)
        list_add(st, v.list, pair(st, self.dict->keys[i], self.dict->values[i]));
    return v;
}

/* ---- methods ---- */

/* Whether self begins (`end`: ends) with a, or with an element of the tuple a. */
static struct value edge(struct jinja_state *st, struct value self, struct value a, bool end)
{
    const struct list one = {.items = &a, .count = 1}, *l = a.kind == VALUE_LIST ? a.list : &one;
    for (int64_t i = 0; i < l->count; i++) {
        struct value s = l->items[i];
        if (s.kind != VALUE_STRING) return jinja_fail(st, "a string is needed, not %s", value_kind_name(s));
        if (!jinja_charge(st, 1 + MT_MIN(s.size, self.size) / 16)) break;
        if (s.size > self.size) continue;
        if (!s.size || !memcmp(self.s + (end ? self.size - s.size : 0), s.s, (size_t)s.size)) return value_bool(true);
    }
    return value_bool(false);
}

METHOD(method_startswith) { return edge(st, self, a[0], false); }
METHOD(method_endswith) { return edge(st, self, a[0], true); }
METHOD(method_strip) { return jinja_strip(st, self, a[0], true, true); }
METHOD(method_lstrip) { return jinja_strip(st, self, a[0], true, false); }
METHOD(method_rstrip) { return jinja_strip(st, self, a[0], false, true); }
METHOD(method_lower) { return (void)a, jinja_case(st, self, 'l'); }
METHOD(method_upper) { return (void)a, jinja_case(st, self, 'u'); }
METHOD(method_capitalize) { return (void)a, jinja_case(st, self, 'c'); }
METHOD(method_title) { return (void)a, jinja_case(st, self, 't'); }

METHOD(method_replace) { return jinja_replace(st, self, a[0], a[1], a[2].kind == VALUE_INT ? a[2].i : -1); }

METHOD(method_removeprefix)
{
    if (!value_truth(edge(st, self, a[0], false)) || st->failed) return self;
    return value_view(self.s + a[0].size, self.size - a[0].size);
}

METHOD(method_removesuffix)
{
    if (!value_truth(edge(st, self, a[0], true)) || st->failed) return self;
    return value_view(self.s, self.size - a[0].size);
}

/* The words between white space; after `max` splits the rest is one word, stripped on its left. */
static struct value split_words(struct jinja_state *st, struct value self, int64_t max)
{
    struct value v = value_list(st, false);
    int64_t i = 0, n = 0;
    while (jinja_charge(st, 1)) {
        const int64_t blanks = i;
        while (i < self.size && utf8_space(utf8_code(self.s + i, self.size - i)))
            i += utf8_size(self.s + i, self.size - i);
        if (!jinja_charge(st, i - blanks) || i == self.size) break;
        int64_t begin = i;
        while (i < self.size && !utf8_space(utf8_code(self.s + i, self.size - i)))
            i += utf8_size(self.s + i, self.size - i);
        if (n++ == max) i = self.size;
        if (!jinja_charge(st, i - begin)) break;
        list_add(st, v.list, value_view(self.s + begin, i - begin));
    }
    return v;
}

METHOD(method_split)
{
    int64_t max = value_absent(a[1]) ? -1 : a[1].i, at = 0, next;
    if (!value_absent(a[1]) && a[1].kind != VALUE_INT) return jinja_fail(st, "split: maxsplit must be an integer");
    if (value_absent(a[0]) || a[0].kind == VALUE_NONE) return split_words(st, self, max);
    if (a[0].kind != VALUE_STRING || !a[0].size)
        return jinja_fail(st, "split: the separator must be a non-empty string");
    struct value v = value_list(st, false);
    for (; max != 0 && (next = value_find(st, self, a[0], at)) >= 0; max--, at = next + a[0].size)
        list_add(st, v.list, value_view(self.s + at, next - at));
    list_add(st, v.list, value_view(self.s + at, self.size - at));
    return v;
}

/* As split, but at most `max` splits from the right. */
METHOD(method_rsplit)
{
    const struct value separator[2] = {a[0]};
    if (value_absent(a[0]) || a[0].kind != VALUE_STRING)
        return jinja_fail(st, "rsplit: the separator must be a string");
    struct value all = method_split(st, self, separator), v = value_list(st, false);
    if (st->failed || a[1].kind != VALUE_INT || a[1].i < 0 || all.list->count - 1 <= a[1].i) return all;
    int64_t first = all.list->count - 1 - a[1].i;
    const struct value *end = &all.list->items[first];
    list_add(st, v.list, value_view(self.s, end->s + end->size - self.s));
    for (int64_t i = first + 1; i < all.list->count; i++) list_add(st, v.list, all.list->items[i]);
    return v;
}

METHOD(method_splitlines)
{
    (void)a;
    struct value v = value_list(st, false);
    if (!jinja_charge(st, self.size)) return v;
    for (int64_t i = 0, end; i < self.size && !st->failed; i = end) {
        for (end = i; end < self.size && self.s[end] != '\n' && self.s[end] != '\r';) end++;
        list_add(st, v.list, value_view(self.s + i, end - i));
        end += end + 1 < self.size && self.s[end] == '\r' && self.s[end + 1] == '\n';
        end += end < self.size;
    }
    return v;
}

/* Index in characters, or -1. */
METHOD(method_find)
{
    if (a[0].kind != VALUE_STRING) return jinja_fail(st, "find: a string is needed");
    int64_t at = value_find(st, self, a[0], 0);
    return value_int(at < 0 || !jinja_charge_scan(st, at) ? -1 : utf8_count(self.s, at));
}

METHOD(method_count)
{
    int64_t n = 0, at = 0;
    if (a[0].kind != VALUE_STRING || !a[0].size) return jinja_fail(st, "count: a string is needed");
    for (; (at = value_find(st, self, a[0], at)) >= 0; at += a[0].size) n++;
    return value_int(n);
}

METHOD(method_isdigit)
{
    (void)a;
    int64_t n = 0;
    while (n < self.size && isdigit((unsigned char)self.s[n])) n++;
    return value_bool(jinja_charge(st, n) && n > 0 && n == self.size);
}

METHOD(method_join)
{
    struct text_buf t = {0};
    const struct list *l = value_items(st, a[0]);
    for (int64_t i = 0; i < l->count && !st->failed; i++) {
        if (l->items[i].kind != VALUE_STRING) jinja_fail(st, "join: item %lld is not a string", (long long)i);
        if (i) value_print(st, &t, self, false);
        value_print(st, &t, l->items[i], false);
    }
    return value_take(st, &t);
}

METHOD(method_items) { return (void)a, jinja_dict_items(st, self); }

METHOD(method_keys)
{
    (void)a;
    return (struct value){.kind = VALUE_LIST, .list = (struct list *)value_items(st, self)};
}

METHOD(method_values)
{
    (void)a;
    struct value v = value_list(st, false);
    for (int64_t i = 0; i < self.dict->count && !st->failed; i++) list_add(st, v.list, self.dict->values[i]);
    return v;
}

METHOD(method_get)
{
    const struct value *v = dict_get(st, self.dict, a[0]);
    return v ? *v : value_absent(a[1]) ? value_none() : a[1];
}

static const struct jinja_fn of_strings[] = {
    {"capitalize", method_capitalize, "", NULL},
    {"count", method_count, "sub", NULL},
    {"endswith", method_endswith, "suffix", NULL},
    {"find", method_find, "sub", NULL},
    {"isdigit", method_isdigit, "", NULL},
    {"join", method_join, "iterable", NULL},
    {"lower", method_lower, "", NULL},
    {"lstrip", method_lstrip, "chars", NULL},
    {"removeprefix", method_removeprefix, "prefix", NULL},
    {"removesuffix", method_removesuffix, "suffix", NULL},
    {"replace", method_replace, "old new count", NULL},
    {"rsplit", method_rsplit, "sep maxsplit", NULL},
    {"rstrip", method_rstrip, "chars", NULL},
    {"split", method_split, "sep maxsplit", NULL},
    {"splitlines", method_splitlines, "", NULL},
    {"startswith", method_startswith, "prefix", NULL},
    {"strip", method_strip, "chars", NULL},
    {"title", method_title, "", NULL},
    {"upper", method_upper, "", NULL},
};
static const struct jinja_fn of_dicts[] = {
    {"get", method_get, "key default", NULL},
    {"items", method_items, "", NULL},
    {"keys", method_keys, "", NULL},
    {"values", method_values, "", NULL},
};

const struct jinja_fn *jinja_methods(struct value self, int64_t *n)
{
    *n = self.kind == VALUE_STRING                             ? MT_LEN(of_strings)
         : self.kind == VALUE_DICT && !self.dict->is_namespace ? MT_LEN(of_dicts)
                                                               : 0;
    return self.kind == VALUE_STRING ? of_strings : of_dicts;
}

static bool is_method(struct value self, const char *name)
{
    int64_t n;
    const struct jinja_fn *rows = jinja_methods(self, &n);
    for (int64_t i = 0; i < n; i++)
        if (!strcmp(rows[i].name, name)) return true;
    return false;
}

/* ---- attributes, items, slices ---- */

static struct value loop_attribute(struct jinja_state *st, const struct loop *loop, const char *name)
{
    int64_t i = loop->index, n = loop->items->count;
    if (!strcmp(name, "index")) return value_int(i + 1);
    if (!strcmp(name, "index0")) return value_int(i);
    if (!strcmp(name, "revindex")) return value_int(n - i);
    if (!strcmp(name, "revindex0")) return value_int(n - i - 1);
    if (!strcmp(name, "first")) return value_bool(i == 0);
    if (!strcmp(name, "last")) return value_bool(i == n - 1);
    if (!strcmp(name, "length")) return value_int(n);
    if (!strcmp(name, "previtem")) return i > 0 ? loop->items->items[i - 1] : value_undefined("previtem", 8);
    if (!strcmp(name, "nextitem")) return i + 1 < n ? loop->items->items[i + 1] : value_undefined("nextitem", 8);
    return jinja_fail(st, "loop.%s is not supported", name);
}

struct value jinja_attribute(struct jinja_state *st, struct value self, const char *name, bool dot)
{
    const struct value key = value_view(name, (int64_t)strlen(name));
    const struct value *found = NULL;
    if (self.kind == VALUE_UNDEFINED) return jinja_fail(st, "'%.*s' is undefined", (int)self.size, self.s);
    if (self.kind == VALUE_LOOP) return loop_attribute(st, self.loop, name);
    bool method = is_method(self, name);
    if (self.kind == VALUE_DICT && !(dot && method)) found = dict_get(st, self.dict, key); /* x.items is the method */
    if (found) return *found;
    if (!method) return value_undefined(key.s, key.size);
    struct callable *c = jinja_new(st, sizeof(*c));
    *c = (struct callable){.name = name, .self = self};
    return (struct value){.kind = VALUE_CALLABLE, .callable = c};
}

/* Byte offset of character i. */
static int64_t byte_of(struct value s, int64_t i)
{
    int64_t at = 0;
    for (; i > 0 && at < s.size; i--) at += utf8_size(s.s + at, s.size - at);
    return at;
}

struct value jinja_item(struct jinja_state *st, struct value self, struct value key)
{
    if (key.kind == VALUE_STRING) {
        if (!jinja_charge(st, 1 + key.size / 16)) return key;
        if (memchr(key.s, 0, (size_t)key.size)) return value_undefined("item", 4);
        if (key.s[key.size]) key = value_string(st, key.s, key.size); /* a view into a longer text */
        return st->failed ? key : jinja_attribute(st, self, key.s, false);
    }
    if (self.kind == VALUE_UNDEFINED) return jinja_fail(st, "'%.*s' is undefined", (int)self.size, self.s);
    if (self.kind == VALUE_DICT && !self.dict->is_namespace) {
        const struct value *found = dict_get(st, self.dict, key);
        return found ? *found : value_undefined("item", 4);
    }
    if (key.kind != VALUE_INT && key.kind != VALUE_BOOL) return value_undefined("item", 4);
    if (self.kind != VALUE_LIST && self.kind != VALUE_STRING) return value_undefined("item", 4);
    int64_t n = value_length(st, self), i = key.kind == VALUE_INT ? key.i : key.truth;
    if (i < 0) i += n;
    const int64_t steps = self.kind == VALUE_STRING ? i : 0;
    if (i < 0 || i >= n || !jinja_charge_scan(st, steps)) return value_undefined("list index out of range", 24);
    if (self.kind == VALUE_LIST) return self.list->items[i];
    int64_t at = byte_of(self, i);
    return value_view(self.s + at, utf8_size(self.s + at, self.size - at));
}

struct value jinja_slice(struct jinja_state *st, struct value self, const struct value part[3])
{
    int64_t n = value_length(st, self), step = part[2].kind == VALUE_INT ? part[2].i : 1, bound[2];
    if (self.kind != VALUE_LIST && self.kind != VALUE_STRING)
        return jinja_fail(st, "%s cannot be sliced", value_kind_name(self));
    if (step == 0) return jinja_fail(st, "slice step must not be 0");
    for (int i = 0; i < 2; i++) {
        int64_t low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n;
        bound[i] = (i == 0) == (step < 0) ? high : low;
        if (part[i].kind == VALUE_INT)
            bound[i] = MT_MAX(low, MT_MIN(high, part[i].i < 0 ? part[i].i + n : part[i].i));
        else if (part[i].kind != VALUE_NONE && !value_absent(part[i]))
            return jinja_fail(st, "slice indexes must be integers");
    }
    if (self.kind == VALUE_STRING && step == 1) {
        if (bound[0] >= bound[1] || !jinja_charge_scan(st, self.size)) return value_view("", 0);
        const int64_t begin = byte_of(self, bound[0]), rest = self.size - begin;
        return value_view(self.s + begin, byte_of(value_view(self.s + begin, rest), bound[1] - bound[0]));
    }
    const struct list *l = value_items(st, self);
    struct value v = value_list(st, self.kind == VALUE_LIST && self.list->tuple);
    for (int64_t i = bound[0]; (step > 0 ? i < bound[1] : i > bound[1]) && i < l->count && !st->failed;) {
        list_add(st, v.list, l->items[i]);
        if (__builtin_add_overflow(i, step, &i)) break;
    }
    if (self.kind == VALUE_LIST) return v;
    return method_join(st, value_view("", 0), &v);
}

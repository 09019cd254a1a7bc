/* jinja_lib.h - filters, tests, methods and functions of the Jinja engine. */
#ifndef MT_JINJA_LIB_H
#define MT_JINJA_LIB_H

#include "data/chat/jinja/jinja_value.h"

#define JINJA_ARGS 12

struct jinja_args {
    struct value values[JINJA_ARGS];
    const char *names[JINJA_ARGS]; /* NULL: by position */
    int64_t count;
};

/* One row of a table of functions. */
struct jinja_fn {
    const char *name;
    /* a: the arguments in the order of `parameters`, absent where omitted */
    struct value (*call)(struct jinja_state *st, struct value self, const struct value *a);
    const char *parameters; /* "first second"; NULL: call_all gets the arguments as written */
    struct value (*call_all)(struct jinja_state *st, const struct jinja_args *args);
};

struct value jinja_filter(struct jinja_state *st, const char *name, struct value self, const struct jinja_args *args);
bool jinja_is_filter(const char *name);
bool jinja_test(struct jinja_state *st, const char *name, struct value self, const struct jinja_args *args);
bool jinja_is_function(const char *name); /* of the global names */
struct value jinja_function(struct jinja_state *st, const char *name, const struct jinja_args *args);

struct value jinja_method(struct jinja_state *st, const char *name, struct value self, const struct jinja_args *args);

/* jinja_text.c */
const struct jinja_fn *jinja_methods(struct value self,
                                     int64_t *n); /* of a string or a dict; others have none: n = 0 */
struct value jinja_strip(struct jinja_state *st, struct value self, struct value chars, bool left, bool right);
/* Replaces every `from` by `to`; with count >= 0 only the first `count`. */
struct value jinja_replace(struct jinja_state *st, struct value self, struct value from, struct value to,
                           int64_t count);
/* how: 'l' lower, 'u' upper, 'c' capitalize, 't' the method title (a word is a run of letters), 'w' the filter title (a
 * word begins after blanks and - ( { [ <). Characters beyond ASCII that have a case are an error, but 'l' takes letters
 * of Latin-1 and Cyrillic. */
struct value jinja_case(struct jinja_state *st, struct value self, char how);
struct value jinja_dict_items(struct jinja_state *st, struct value self);
/* self.name or self[name]; undefined when it has none. */
struct value jinja_attribute(struct jinja_state *st, struct value self, const char *name, bool dot);
struct value jinja_item(struct jinja_state *st, struct value self, struct value key);
struct value jinja_slice(struct jinja_state *st, struct value self, const struct value part[3]);

#endif

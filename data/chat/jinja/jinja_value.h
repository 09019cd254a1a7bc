/* jinja_value.h - values of a Jinja expression, and the state of one rendering.
 *
 * Values are passed by value and point into the rendering's arena, where only namespaces ever change. Errors do not
 * unwind: the first one is kept, every later expression yields undefined, and loops stop at the next jinja_charge. */
#ifndef MT_JINJA_VALUE_H
#define MT_JINJA_VALUE_H

#include "data/json/json.h"
#include "data/json/text.h"

#define JINJA_DEPTH  1000               /* depth of nested expressions, blocks and macro calls */
#define JINJA_WORK   ((int64_t)1 << 26) /* of one rendering: nodes evaluated, items visited, bytes written and read */
#define JINJA_MEMORY ((int64_t)1 << 28) /* bytes of one rendering's arena */
#define JINJA_SCAN   2                  /* bytes searched, counted or skipped per unit of work */
#define JINJA_ITEM   32                 /* units of work to print an item, its separator included */
#define JINJA_FLOAT  1024               /* units of work to print a float */
#define JINJA_NEST   200                /* depth of lists in lists when printing or comparing */

struct node;
struct scope;
struct jinja_chunk;

/* Memory that is freed as a whole. Zeroed is valid. */
struct jinja_arena {
    struct jinja_chunk *last;
};
void *jinja_alloc(struct jinja_arena *arena, int64_t bytes); /* zeroed */
/* A NUL-terminated copy. */
char *jinja_copy(struct jinja_arena *arena, const char *s, int64_t size);
void jinja_arena_free(struct jinja_arena *arena);

enum value_kind {
    VALUE_UNDEFINED,
    VALUE_NONE,
    VALUE_BOOL,
    VALUE_INT,
    VALUE_FLOAT,
    VALUE_STRING,
    VALUE_LIST,
    VALUE_DICT,
    VALUE_LOOP,
    VALUE_CALLABLE
};
struct value {
    enum value_kind kind;
    union {
        bool truth;
        int64_t i;
        double f;
        const char *s; /* UTF-8, `size` bytes; of UNDEFINED the missing name, NULL: an omitted argument */
        struct list *list;
        struct dict *dict;
        struct loop *loop;
        const struct callable *callable;
    };
    union {
        int64_t size;
        const char *digits; /* of FLOAT: an integer beyond 64 bits, as printed; NULL: by its value */
    };
};
struct list {
    struct value *items;
    int64_t count, cap;
    bool tuple; /* as Python prints it */
};
struct dict { /* in order of insertion */
    struct value *keys, *values;
    int64_t count, cap;
    bool is_namespace;
    int64_t (*place)[2]; /* jinja_var.places of this object; NULL: not wanted */
};
/* `loop` in the body of a for. */
struct loop {
    const struct list *items;
    int64_t index; /* from 0 */
};
struct callable {
    const struct node *macro; /* the macro and where it was defined; or NULL: */
    struct scope *scope;
    const char *name;  /* a function, or */
    struct value self; /* a method of self */
};

struct jinja_state {
    struct jinja_arena arena;
    struct text_buf *out; /* current output: the text, or the buffer of a macro or {% set %} block */
    struct text_buf *text;
    const char *name, *date; /* of the template; "YYYY-MM-DD" of strftime_now */
    int64_t work, memory;    /* remaining: units of work, bytes of the arena */
    int line, depth;
    const char *stack;  /* a frame of jinja_render */
    int64_t stack_room; /* bytes that evaluation may use below it */
    bool failed;
    struct err *err;
};

/* The first error of a rendering, "NAME:LINE: ..."; returns undefined. */
struct value jinja_fail(struct jinja_state *st, const char *fmt, ...) MT_PRINTF(2, 3);
/* Takes n from the remaining work; false after an error, so that loops end too. */
bool jinja_charge(struct jinja_state *st, int64_t n);
/* Charges the work of reading `bytes` of text: 1, plus 1 for each JINJA_SCAN bytes. */
bool jinja_charge_scan(struct jinja_state *st, int64_t bytes);
/* Zeroed memory of the rendering, never NULL. Above JINJA_MEMORY the rendering fails. Callers charge a size that
 * depends on data as work first, so that one allocation exceeds the limit by at most JINJA_WORK bytes. */
void *jinja_new(struct jinja_state *st, int64_t bytes);

struct value value_none(void);
struct value value_bool(bool truth);
struct value value_int(int64_t i);
struct value value_float(double f);
struct value value_view(const char *s, int64_t size);                           /* text that outlives the rendering */
struct value value_string(struct jinja_state *st, const char *s, int64_t size); /* a copy */
struct value value_take(struct jinja_state *st, struct text_buf *t);            /* a copy; frees t */
struct value value_undefined(const char *name, int64_t size);
struct value value_list(struct jinja_state *st, bool tuple);
struct value value_dict(struct jinja_state *st);
struct value value_json(struct jinja_state *st, struct json j);

void list_add(struct jinja_state *st, struct list *l, struct value v);
/* Sets a key. Lists and dicts as keys are an error, as in Python. */
void dict_set(struct jinja_state *st, struct dict *d, struct value key, struct value v);
const struct value *dict_get(struct jinja_state *st, const struct dict *d, struct value key); /* NULL: no such key */

bool value_absent(struct value v); /* an omitted argument */
bool value_is(struct value v, const char *text);
bool value_number(struct value v, double *f); /* bool, int, float */
bool value_truth(struct value v);
bool value_equal(struct jinja_state *st, struct value a, struct value b);
/* Compares numbers or strings: < 0, 0, > 0. Other values are an error. */
int value_order(struct jinja_state *st, struct value a, struct value b);
/* Byte at or after `from` where the string `what` begins in the string `text`, or -1. */
int64_t value_find(struct jinja_state *st, struct value text, struct value what, int64_t from);
bool value_contains(struct jinja_state *st, struct value container, struct value item);
/* What a for iterates over: items of a list, keys of a dict, characters of a string; nothing for undefined. */
const struct list *value_items(struct jinja_state *st, struct value v);
int64_t value_length(struct jinja_state *st, struct value v);
/* Appends str(v); quoted: repr(v). */
void value_print(struct jinja_state *st, struct text_buf *t, struct value v, bool quoted);
struct value value_str(struct jinja_state *st, struct value v);
/* Appends json.dumps(v, ensure_ascii=False). */
struct tojson {
    int64_t indent;         /* below 0: on one line */
    struct value item, key; /* separators; other than strings: those of json.dumps */
};
void value_tojson(struct jinja_state *st, struct text_buf *t, struct value v, const struct tojson *how);
const char *value_kind_name(struct value v); /* Python's name of the type */

/* Bytes of the character at s; `size` bytes remain. */
int64_t utf8_size(const char *s, int64_t size);
int32_t utf8_code(const char *s, int64_t size);
bool utf8_space(int32_t code); /* str.isspace */
int64_t utf8_count(const char *s, int64_t size);

#endif

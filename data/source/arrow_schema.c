/* arrow_schema.c - the columns of an Arrow file (arrow.apache.org/docs/format, Schema.fbs). */
#include "data/source/arrow_schema.h"

#include <stdio.h>

#define MAX_DEPTH   32
#define MAX_COLUMNS 65536 /* tables may share their bytes, so the file's size is no limit */

enum { SCHEMA_ENDIANNESS = 0, SCHEMA_FIELDS = 1 };
enum { FIELD_NAME = 0, FIELD_TYPE_KIND = 2, FIELD_TYPE = 3, FIELD_DICTIONARY = 4, FIELD_CHILDREN = 5 };

/* Types by their numbers in Schema.fbs. */
static const struct {
    const char *name;
    enum arrow_kind kind;
    int bytes;         /* 0: in the type's table */
    bool wide, values; /* struct arrow_column */
    bool refused;      /* the type's buffers have another order */
} types[] = {
    {.name = "none", .refused = true},
    {.name = "null", .kind = ARROW_NULL},
    {.name = "int", .kind = ARROW_INT},
    {.name = "float", .kind = ARROW_FLOAT},
    {.name = "binary", .kind = ARROW_UNREAD, .values = true},
    {.name = "utf8", .kind = ARROW_TEXT},
    {.name = "bool", .kind = ARROW_BOOL},
    {.name = "decimal", .kind = ARROW_UNREAD},
    {.name = "date", .kind = ARROW_INT},
    {.name = "time", .kind = ARROW_INT},
    {.name = "timestamp", .kind = ARROW_INT, .bytes = 8},
    {.name = "interval", .kind = ARROW_UNREAD},
    {.name = "list", .kind = ARROW_LIST},
    {.name = "struct", .kind = ARROW_STRUCT},
    {.name = "union", .refused = true},
    {.name = "fixed_size_binary", .kind = ARROW_UNREAD},
    {.name = "fixed_size_list", .kind = ARROW_BLOCKS},
    {.name = "map", .kind = ARROW_LIST},
    {.name = "duration", .kind = ARROW_INT, .bytes = 8},
    {.name = "large_binary", .kind = ARROW_UNREAD, .wide = true, .values = true},
    {.name = "large_utf8", .kind = ARROW_TEXT, .wide = true},
    {.name = "large_list", .kind = ARROW_LIST, .wide = true},
    {.name = "run_end_encoded", .refused = true},
    {.name = "binary_view", .refused = true},
    {.name = "string_view", .refused = true},
    {.name = "list_view", .refused = true},
    {.name = "large_list_view", .refused = true},
};
enum { TYPE_INT = 2, TYPE_FLOAT = 3, TYPE_DATE = 8, TYPE_TIME = 9, TYPE_BLOCKS = 16 };

static int damaged(const char *path, struct err *err)
{
    return err_set(err, "%s: the schema: the file is damaged or incomplete", path);
}

/* Reads the sizes from the type's table. */
static int read_type(struct arrow_column *c, const struct flatbuffer *f, int64_t kind, int64_t type, const char *path,
                     struct err *err)
{
    static const int float_bytes[] = {2, 4, 8};
    int64_t bytes = types[kind].bytes;
    if (kind == TYPE_INT) {
        bytes = flatbuffer_int(f, type, 0, 4, 0) / 8;
        c->is_unsigned = !flatbuffer_int(f, type, 1, 1, 0);
    } else if (kind == TYPE_FLOAT) {
        const int64_t precision = flatbuffer_int(f, type, 0, 2, 0);
        bytes = precision >= 0 && precision < MT_LEN(float_bytes) ? float_bytes[precision] : -1;
        if (bytes == 2) c->kind = ARROW_UNREAD, c->type = "float16";
    } else if (kind == TYPE_DATE) {
        bytes = flatbuffer_int(f, type, 0, 2, 1) ? 8 : 4;
    } else if (kind == TYPE_TIME) {
        bytes = flatbuffer_int(f, type, 1, 4, 32) / 8;
    } else if (kind == TYPE_BLOCKS) {
        bytes = flatbuffer_int(f, type, 0, 4, 0);
    }
    c->bytes = (int)bytes;
    const bool number = c->kind == ARROW_INT || c->kind == ARROW_FLOAT;
    if (bytes < 0 || (number && bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8)) return damaged(path, err);
    return 0;
}

static int read_field(struct arrow_schema *s, const struct flatbuffer *f, int64_t field, const char *path, int depth,
                      struct err *err)
{
    int64_t size, n_children;
    const int64_t name = flatbuffer_vector(f, field, FIELD_NAME, 1, &size);
    const int64_t children = flatbuffer_vector(f, field, FIELD_CHILDREN, 4, &n_children);
    const int64_t kind = flatbuffer_int(f, field, FIELD_TYPE_KIND, 1, 0), at = s->n;
    if (!field || kind < 1 || s->n >= MAX_COLUMNS) return damaged(path, err);
    s->columns = mem_reserve(s->columns, &s->cap, at + 1, sizeof(*s->columns));
    s->columns[s->n++] = (struct arrow_column){0};
    struct arrow_column c = {.name = mem_strndup(name ? (const char *)f->data + name : "", size)};
    s->columns[at].name = c.name;
    if (kind >= MT_LEN(types) || types[kind].refused)
        return err_set(err, "%s: column %.100s: the type %s is not read", path, str_mask(c.name),
                       kind < MT_LEN(types) ? types[kind].name : "of an unknown number");
    if (depth > MAX_DEPTH) return err_set(err, "%s: columns are nested more than %d deep", path, MAX_DEPTH);
    c.kind = types[kind].kind;
    c.wide = types[kind].wide;
    c.values = types[kind].values;
    c.type = types[kind].name;
    c.n_children = n_children;
    if (read_type(&c, f, kind, flatbuffer_table(f, field, FIELD_TYPE), path, err)) return -1;
    if (flatbuffer_table(f, field, FIELD_DICTIONARY)) { /* its numbers are here, the values in other messages */
        c.kind = ARROW_UNREAD;
        c.type = "dictionary";
        c.values = false;
        c.n_children = 0;
    }
    const bool list = c.kind == ARROW_LIST || c.kind == ARROW_BLOCKS;
    if (list ? c.n_children != 1 : c.kind != ARROW_STRUCT && c.n_children) return damaged(path, err);
    s->columns[at] = c;
    for (int64_t i = 0; i < c.n_children; i++)
        if (read_field(s, f, flatbuffer_item(f, children, i), path, depth + 1, err)) return -1;
    s->columns[at].next = s->n;
    return 0;
}

int arrow_schema_read(struct arrow_schema *s, const struct flatbuffer *f, int64_t header, const char *path,
                      struct err *err)
{
    const int64_t fields = flatbuffer_vector(f, header, SCHEMA_FIELDS, 4, &s->n_top);
    if (flatbuffer_int(f, header, SCHEMA_ENDIANNESS, 2, 0))
        return err_set(err, "%s: its numbers are big endian, which is not read", path);
    for (int64_t i = 0; i < s->n_top; i++)
        if (read_field(s, f, flatbuffer_item(f, fields, i), path, 1, err)) return -1;
    return 0;
}

void arrow_schema_free(struct arrow_schema *s)
{
    for (int64_t i = 0; i < s->n; i++) mem_free(s->columns[i].name);
    mem_free(s->columns);
    *s = (struct arrow_schema){0};
}

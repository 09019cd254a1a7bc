/* parquet_schema.c - the metadata of a parquet file (github.com/apache/parquet-format, parquet.thrift). */
#include "data/source/parquet_schema.h"

#include <stdio.h>
#include <string.h>

#define MAX_DEPTH 32 /* of nested columns */

/* An element of the schema as the file has it. */
struct element {
    int64_t type, length, repeat, n_children, converted, logical; /* -1: absent */
    bool is_unsigned;
    const uint8_t *name;
    int64_t name_size;
};

enum { CONVERTED_TEXT = 0, CONVERTED_LIST = 3, CONVERTED_ENUM = 4, CONVERTED_DECIMAL = 5, CONVERTED_JSON = 19 };
enum { CONVERTED_UNSIGNED = 11 }; /* the first of four */
enum { LOGICAL_TEXT = 1, LOGICAL_LIST = 3, LOGICAL_ENUM = 4, LOGICAL_DECIMAL = 5, LOGICAL_INTEGER = 10 };
enum { LOGICAL_JSON = 12, LOGICAL_FLOAT16 = 15 };

static int damaged(const char *path, const char *what, struct err *err)
{
    return err_set(err, "%s: %s: the file is damaged or incomplete", path, what);
}

/* ---- elements */

static void read_logical(struct thrift *t, struct element *e)
{
    enum thrift_type type;
    for (int64_t id = 0; thrift_field(t, &id, &type);) {
        e->logical = id;
        if (id != LOGICAL_INTEGER || type != THRIFT_STRUCT) {
            thrift_skip(t, type);
            continue;
        }
        for (int64_t of = 0; thrift_field(t, &of, &type);)
            if (of == 2)
                e->is_unsigned = !thrift_bool(t, type);
            else
                thrift_skip(t, type);
    }
}

static struct element read_element(struct thrift *t)
{
    enum thrift_type type;
    struct element e = {.type = -1, .repeat = PARQUET_REQUIRED, .converted = -1, .logical = -1};
    for (int64_t id = 0; thrift_field(t, &id, &type);) {
        switch (id) {
        case 1: e.type = thrift_int(t, type); break;
        case 2: e.length = thrift_int(t, type); break;
        case 3: e.repeat = thrift_int(t, type); break;
        case 4: e.name = thrift_bytes(t, type, &e.name_size); break;
        case 5: e.n_children = thrift_int(t, type); break;
        case 6: e.converted = thrift_int(t, type); break;
        case 10:
            if (thrift_struct(t, type)) read_logical(t, &e);
            break;
        default: thrift_skip(t, type);
        }
    }
    return e;
}

static bool is_text(const struct element *e)
{
    return e->converted == CONVERTED_TEXT || e->converted == CONVERTED_ENUM || e->converted == CONVERTED_JSON ||
           e->logical == LOGICAL_TEXT || e->logical == LOGICAL_ENUM || e->logical == LOGICAL_JSON;
}

/* Sets how the values of a column become JSON. */
static void set_as(struct parquet_node *node, const struct element *e)
{
    node->as = PARQUET_AS_NUMBER;
    if (e->type == PARQUET_INT96)
        node->kind = "int96";
    else if (e->converted == CONVERTED_DECIMAL || e->logical == LOGICAL_DECIMAL)
        node->kind = "decimal";
    else if (e->logical == LOGICAL_FLOAT16)
        node->kind = "float16";
    else if (e->type == PARQUET_BYTES && is_text(e))
        node->as = PARQUET_AS_TEXT;
    else if (e->type == PARQUET_BYTES || e->type == PARQUET_FIXED)
        node->kind = "binary";
    else if (e->is_unsigned || (e->converted >= CONVERTED_UNSIGNED && e->converted < CONVERTED_UNSIGNED + 4))
        node->as = PARQUET_AS_UNSIGNED;
    if (node->kind) node->as = PARQUET_AS_NOTHING;
}

/* ---- the tree */

static struct parquet_column *add_column(struct parquet_schema *s, const char *path, const struct parquet_node *node,
                                         const struct element *e)
{
    s->columns = mem_reserve(s->columns, &s->cap_columns, s->n_columns + 1, sizeof(*s->columns));
    struct parquet_column *c = &s->columns[s->n_columns++];
    *c = (struct parquet_column){.path = path,
                                 .type = (enum parquet_type)e->type,
                                 .length = e->length,
                                 .max_rep = node->max_rep,
                                 .max_def = node->max_def};
    return c;
}

/* Reads one element and, of a group, its descendants; name: those of its ancestors, each with a dot after it. */
static int read_node(struct parquet_schema *s, struct thrift *t, const char *path, int64_t parent, const char *above,
                     int64_t *left, int depth, struct err *err)
{
    const struct element e = read_element(t);
    char name[256];
    const int64_t at = s->n;
    if (t->bad || --*left < 0 || e.repeat < 0 || e.repeat > PARQUET_REPEATED || e.type > PARQUET_FIXED ||
        e.n_children < 0 || e.length < 0)
        return damaged(path, "the schema", err);
    if (depth > MAX_DEPTH) return err_set(err, "%s: columns are nested more than %d deep", path, MAX_DEPTH);
    snprintf(name, sizeof(name), "%s%.*s%s", above, (int)MT_MIN(e.name_size, 200), (const char *)e.name,
             e.type < 0 && depth ? "." : "");
    if (!depth) name[0] = 0;
    s->nodes = mem_reserve(s->nodes, &s->cap, at + 1, sizeof(*s->nodes));
    s->n++;
    struct parquet_node node = {.name = mem_strndup(e.name_size ? (const char *)e.name : "", e.name_size),
                                .repeat = depth ? (enum parquet_repeat)e.repeat : PARQUET_REQUIRED,
                                .n_children = e.type < 0 ? e.n_children : 0,
                                .first = s->n_columns};
    if (depth) {
        node.max_rep = s->nodes[parent].max_rep + (node.repeat == PARQUET_REPEATED);
        node.max_def = s->nodes[parent].max_def + (node.repeat != PARQUET_REQUIRED);
    }
    s->nodes[at] = node;
    if (e.type >= 0) {
        struct parquet_column *c = add_column(s, path, &node, &e);
        snprintf(c->name, sizeof(c->name), "%s", str_mask(name));
        set_as(&s->nodes[at], &e);
    } else if (!e.n_children && depth) {
        return err_set(err, "%s: column %s is a group without members", path, str_mask(name));
    }
    for (int64_t i = 0; i < node.n_children; i++)
        if (read_node(s, t, path, at, name, left, depth + 1, err)) return -1;
    s->nodes[at].last = s->n_columns;
    s->nodes[at].next = s->n;
    s->nodes[at].list = e.converted == CONVERTED_LIST || e.logical == LOGICAL_LIST;
    return 0;
}

/* Finds the lists: groups with a repeated member, which is the item, or a group that holds only the item. For old files
 * the format has rules to distinguish these (parquet-format, LogicalTypes.md). */
static void find_lists(struct parquet_schema *s)
{
    char tuple[256];
    for (int64_t i = 0; i < s->n; i++) {
        struct parquet_node *node = &s->nodes[i];
        const struct parquet_node *inner = &s->nodes[i + 1];
        node->list = node->list && node->n_children == 1 && inner->repeat == PARQUET_REPEATED;
        if (!node->list) continue;
        snprintf(tuple, sizeof(tuple), "%.200s_tuple", node->name);
        node->item = inner->n_children == 1 && strcmp(inner->name, "array") != 0 && strcmp(inner->name, tuple) != 0;
    }
}

/* ---- groups of rows */

static void read_chunk_meta(struct thrift *t, struct parquet_chunk *chunk)
{
    enum thrift_type type;
    for (int64_t id = 0; thrift_field(t, &id, &type);) {
        switch (id) {
        case 1: chunk->type = thrift_int(t, type); break;
        case 4: chunk->codec = thrift_int(t, type); break;
        case 5: chunk->n_values = thrift_int(t, type); break;
        case 7: chunk->bytes = thrift_int(t, type); break;
        case 9: chunk->data_page = thrift_int(t, type); break;
        case 11: chunk->dictionary_page = thrift_int(t, type); break;
        default: thrift_skip(t, type);
        }
    }
}

static void read_chunk(struct thrift *t, struct parquet_chunk *chunk)
{
    enum thrift_type type;
    *chunk = (struct parquet_chunk){.type = -1, .codec = -1, .n_values = -1, .bytes = -1};
    for (int64_t id = 0; thrift_field(t, &id, &type);) {
        chunk->elsewhere = chunk->elsewhere || id == 1;
        chunk->encrypted = chunk->encrypted || id == 8;
        if (id == 3 && thrift_struct(t, type))
            read_chunk_meta(t, chunk);
        else
            thrift_skip(t, type);
    }
}

int parquet_schema_group(struct parquet_schema *s, const char *path, struct parquet_chunk *chunks, int64_t *n_rows,
                         struct err *err)
{
    struct thrift *t = &s->groups;
    enum thrift_type type, of;
    int64_t n = -1;
    *n_rows = -1;
    for (int64_t id = 0; thrift_field(t, &id, &type);) {
        if (id == 1) {
            n = thrift_list(t, type, &of);
            for (int64_t i = 0; i < n && n == s->n_columns && thrift_struct(t, of); i++) read_chunk(t, &chunks[i]);
            if (n != s->n_columns) break;
        } else if (id == 3) {
            *n_rows = thrift_int(t, type);
        } else {
            thrift_skip(t, type);
        }
    }
    s->n_groups--;
    return t->bad || n != s->n_columns || *n_rows < 0 ? damaged(path, "a group of rows", err) : 0;
}

/* ---- the end of the file */

static int read_footer(struct parquet_schema *s, struct thrift *t, const char *path, struct err *err)
{
    enum thrift_type type, of;
    int64_t n;
    s->n_rows = -1;
    for (int64_t id = 0; thrift_field(t, &id, &type);) {
        if (id == 2 && !s->n) {
            n = thrift_list(t, type, &of);
            if (!thrift_struct(t, of) || read_node(s, t, path, 0, "", &n, 0, err))
                return t->bad ? damaged(path, "the schema", err) : -1;
            if (n) return damaged(path, "the schema", err);
        } else if (id == 3) {
            s->n_rows = thrift_int(t, type);
        } else if (id == 4) {
            const struct thrift list = *t;
            s->groups = list;
            s->n_groups = thrift_list(&s->groups, type, &of);
            if (s->n_groups && of != THRIFT_STRUCT) t->bad = true;
            thrift_skip(t, type);
        } else {
            thrift_skip(t, type);
        }
    }
    if (t->bad || !s->n || s->n_rows < 0) return damaged(path, "the metadata", err);
    find_lists(s);
    return 0;
}

int parquet_schema_read(struct parquet_schema *s, const struct file_map *map, const char *path, struct err *err)
{
    uint32_t size;
    *s = (struct parquet_schema){0};
    const uint8_t *end = map->data + map->size;
    if (map->size >= 12 && !memcmp(end - 4, "PARE", 4)) return err_set(err, "%s: the parquet file is encrypted", path);
    if (map->size < 12 || memcmp(end - 4, "PAR1", 4) != 0) return damaged(path, "no end of a parquet file", err);
    memcpy(&size, end - 8, 4);
    if (size > map->size - 12) return damaged(path, "the size of the metadata", err);
    struct thrift t = {.p = end - 8 - size, .end = end - 8};
    return read_footer(s, &t, path, err);
}

void parquet_schema_free(struct parquet_schema *s)
{
    for (int64_t i = 0; i < s->n; i++) mem_free(s->nodes[i].name);
    for (int64_t i = 0; i < s->n_columns; i++) parquet_column_free(&s->columns[i]);
    mem_free(s->nodes);
    mem_free(s->columns);
    *s = (struct parquet_schema){0};
}

/* parquet.c - rows from the columns of a parquet file. A column holds two levels for each entry: at which repeated node
 * the entry continues a list (rep), and how many optional and repeated nodes on its path are present (def). */
#include "data/source/parquet.h"

#include <string.h>

#include "data/source/cell.h"
#include "data/source/parquet_schema.h"

struct parquet {
    char *path;
    struct file_map map;
    struct parquet_schema schema;
    struct parquet_chunk *chunks; /* [n_columns] */
    int64_t in_group, row;        /* rows of the group that are left; rows returned */
    bool *begun;                  /* [n_columns] an entry of this row was read */
};

/* ---- entries */

/* Finds the entry of a column at which the row is; an error when the row has none left. */
static int peek(struct parquet *p, int64_t column, struct err *err)
{
    struct parquet_column *c = &p->schema.columns[column];
    const int status = parquet_column_peek(c, err);
    if (status < 0) return -1;
    if (status && (c->rep > 0) == p->begun[column]) return 0;
    return err_set(err, "%s[%lld]: column %s: its entries do not fit those of other columns: the file is damaged",
                   p->path, (long long)p->row, c->name);
}

static int drop(struct parquet *p, int64_t column, struct err *err)
{
    if (peek(p, column, err)) return -1;
    p->begun[column] = true;
    parquet_column_drop(&p->schema.columns[column]);
    return 0;
}

/* Drops an entry of each column of a node that is absent in this row. */
static int drop_all(struct parquet *p, const struct parquet_node *node, struct err *err)
{
    for (int64_t i = node->first; i < node->last; i++)
        if (drop(p, i, err)) return -1;
    return 0;
}

/* ---- values */

static void put_value(struct text_buf *t, const struct parquet_node *node, const struct parquet_column *c)
{
    const struct parquet_value *v = &c->value;
    const bool is_unsigned = node->as == PARQUET_AS_UNSIGNED;
    if (node->as == PARQUET_AS_NOTHING)
        cell_put_unread(t, node->kind);
    else if (node->as == PARQUET_AS_TEXT)
        text_put_quoted(t, (const char *)v->bytes, v->size);
    else if (c->type == PARQUET_BOOLEAN)
        text_put(t, v->i ? "true" : "false");
    else if (c->type == PARQUET_FLOAT || c->type == PARQUET_DOUBLE)
        cell_put_float(t, v->f);
    else
        cell_put_int(t, is_unsigned && c->type == PARQUET_INT32 ? (int64_t)(uint32_t)v->i : v->i, is_unsigned);
}

static int put_node(struct parquet *p, struct text_buf *t, int64_t at, bool item, struct err *err);

static int put_members(struct parquet *p, struct text_buf *t, int64_t at, struct err *err)
{
    const struct parquet_node *nodes = p->schema.nodes;
    text_put(t, "{");
    for (int64_t child = at + 1; child < nodes[at].next; child = nodes[child].next) {
        text_put_key(t, nodes[child].name);
        if (put_node(p, t, child, false, err)) return -1;
    }
    text_put(t, "}");
    return 0;
}

/* Writes the items of a repeated node; an item is the node itself or, with `inner`, its only member. */
static int put_list(struct parquet *p, struct text_buf *t, int64_t at, bool inner, struct err *err)
{
    const struct parquet_node *node = &p->schema.nodes[at];
    const struct parquet_column *first = &p->schema.columns[node->first];
    if (peek(p, node->first, err)) return -1;
    text_put(t, "[");
    if (first->def < node->max_def) {
        text_put(t, "]");
        return drop_all(p, node, err);
    }
    for (;;) {
        text_put_comma(t);
        if (inner ? put_node(p, t, at + 1, false, err) : put_node(p, t, at, true, err)) return -1;
        if (t->size > FILE_LINE_MAX)
            return err_set(err, "%s[%lld]: the row is longer than the limit of %lld bytes", p->path, (long long)p->row,
                           (long long)FILE_LINE_MAX);
        const int status = parquet_column_peek(&p->schema.columns[node->first], err);
        if (status < 0) return -1;
        if (!status || first->rep < node->max_rep) break;
    }
    text_put(t, "]");
    return 0;
}

/* Writes a node, reading its entries from all columns below it. item: of a repeated node, one of its items. */
static int put_node(struct parquet *p, struct text_buf *t, int64_t at, bool item, struct err *err)
{
    const struct parquet_node *node = &p->schema.nodes[at];
    const struct parquet_column *first = &p->schema.columns[node->first];
    if (node->repeat == PARQUET_REPEATED && !item) return put_list(p, t, at, false, err);
    if (peek(p, node->first, err)) return -1;
    if (first->def < node->max_def) {
        text_put(t, "null");
        return drop_all(p, node, err);
    }
    if (node->list) return put_list(p, t, at + 1, node->item, err);
    if (node->n_children) return put_members(p, t, at, err);
    put_value(t, node, first);
    return drop(p, node->first, err);
}

/* ---- the file */

static void tell_unread(const struct parquet *p)
{
    struct text_buf names = {0};
    for (int64_t i = 0; i < p->schema.n; i++) {
        const struct parquet_node *node = &p->schema.nodes[i];
        if (node->as != PARQUET_AS_NOTHING || node->n_children) continue;
        if (names.size) text_put(&names, ", ");
        text_put(&names, p->schema.columns[node->first].name);
        text_put(&names, " (");
        text_put(&names, node->kind);
        text_put(&names, ")");
    }
    if (names.size) log_info("%s: columns whose values are not read: %.500s", p->path, names.text);
    text_free(&names);
}

struct parquet *parquet_open(struct file_map *map, const char *path, struct err *err)
{
    struct parquet *p = mem_alloc(sizeof(*p));
    p->path = mem_strdup(path);
    p->map = *map;
    *map = (struct file_map){0};
    if (parquet_schema_read(&p->schema, &p->map, p->path, err)) {
        parquet_close(p);
        return NULL;
    }
    p->chunks = mem_array(MT_MAX(p->schema.n_columns, 1), sizeof(*p->chunks));
    p->begun = mem_array(MT_MAX(p->schema.n_columns, 1), sizeof(*p->begun));
    tell_unread(p);
    return p;
}

/* Reads the next group with rows; 0: there is none. */
static int next_group(struct parquet *p, struct err *err)
{
    struct parquet_schema *s = &p->schema;
    while (!p->in_group && s->n_groups) {
        if (parquet_schema_group(s, p->path, p->chunks, &p->in_group, err)) return -1;
        for (int64_t i = 0; p->in_group && i < s->n_columns; i++)
            if (parquet_column_open(&s->columns[i], &p->map, &p->chunks[i], err)) return -1;
    }
    if (p->in_group || p->row == s->n_rows) return p->in_group > 0;
    return err_set(err, "%s: %lld rows, but its metadata says %lld: the file is damaged", p->path, (long long)p->row,
                   (long long)s->n_rows);
}

int parquet_next(struct parquet *p, struct text_buf *row, struct err *err)
{
    const int status = p->schema.n_columns ? next_group(p, err) : 0;
    if (status != 1) return status;
    row->size = 0;
    memset(p->begun, 0, (size_t)p->schema.n_columns * sizeof(*p->begun));
    if (put_members(p, row, 0, err)) return -1;
    p->in_group--;
    p->row++;
    return 1;
}

int64_t parquet_rows(const struct parquet *p) { return p->row; }

int64_t parquet_position(const struct parquet *p)
{
    return (int64_t)((double)p->map.size * (double)p->row / (double)MT_MAX(p->schema.n_rows, 1));
}

void parquet_close(struct parquet *p)
{
    if (!p) return;
    parquet_schema_free(&p->schema);
    file_map_close(&p->map);
    mem_free(p->chunks);
    mem_free(p->begun);
    mem_free(p->path);
    mem_free(p);
}

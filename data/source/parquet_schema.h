/* parquet_schema.h - the metadata of a parquet file: the tree of its columns, and the places of each row group's column
 * chunks. */
#ifndef MT_PARQUET_SCHEMA_H
#define MT_PARQUET_SCHEMA_H

#include "data/source/parquet_column.h"
#include "data/source/thrift.h"

enum parquet_repeat { PARQUET_REQUIRED, PARQUET_OPTIONAL, PARQUET_REPEATED };

/* How a value becomes JSON. */
enum parquet_as {
    PARQUET_AS_NUMBER, /* numbers, dates as numbers, truth values */
    PARQUET_AS_UNSIGNED,
    PARQUET_AS_TEXT,
    PARQUET_AS_NOTHING /* JSON has no such value: decimals, binary, ... */
};

/* A node of the tree; children follow their parent, depth first. */
struct parquet_node {
    char *name;
    enum parquet_repeat repeat;
    int max_rep, max_def; /* levels (parquet.c) of an entry in which it is present */
    bool list;            /* the only child is repeated: the items of a list */
    bool item;            /* a list whose repeated child has one child, the item itself */
    int64_t n_children;
    int64_t next;        /* index after its last descendant */
    int64_t first, last; /* columns below it: first .. last-1 */
    enum parquet_as as;  /* of a column */
    const char *kind;    /* of PARQUET_AS_NOTHING, for messages */
};

struct parquet_schema {
    struct parquet_node *nodes; /* [n]; nodes[0] is the row */
    int64_t n, cap;
    struct parquet_column *columns; /* [n_columns] */
    int64_t n_columns, cap_columns;
    int64_t n_rows;
    struct thrift groups; /* at the next row group */
    int64_t n_groups;     /* row groups that are left */
};
/* Reads the metadata at the end of the file. `path` stays the caller's. */
int parquet_schema_read(struct parquet_schema *s, const struct file_map *map, const char *path,
                        struct err *err) MT_CHECK;
/* Reads the next row group: its number of rows, and a chunk per column. */
int parquet_schema_group(struct parquet_schema *s, const char *path, struct parquet_chunk *chunks, int64_t *n_rows,
                         struct err *err) MT_CHECK;
void parquet_schema_free(struct parquet_schema *s);

#endif

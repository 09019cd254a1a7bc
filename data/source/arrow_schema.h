/* arrow_schema.h - the columns of an Arrow file, as a tree. */
#ifndef MT_ARROW_SCHEMA_H
#define MT_ARROW_SCHEMA_H

#include "data/source/flatbuffer.h"

enum arrow_kind {
    ARROW_NULL,
    ARROW_INT, /* of `bytes` bytes */
    ARROW_FLOAT,
    ARROW_BOOL,
    ARROW_TEXT,
    ARROW_LIST,   /* an item is the items of its child between two offsets */
    ARROW_BLOCKS, /* an item is `bytes` items of its child */
    ARROW_STRUCT,
    ARROW_UNREAD /* buffers without a form in JSON */
};

/* Columns follow their parent, depth first. */
struct arrow_column {
    char *name;
    enum arrow_kind kind;
    int bytes; /* of a number; items of a block */
    bool is_unsigned;
    bool wide;        /* offsets of 8 bytes */
    bool values;      /* UNREAD: has offsets, and values behind them */
    const char *type; /* UNREAD: its name */
    int64_t n_children;
    int64_t next; /* index after its last descendant */
    /* of the batch */
    int64_t length;
    const uint8_t *valid;          /* a bit per item; NULL: all are valid */
    const uint8_t *offsets, *data; /* of lists and texts; of numbers and texts */
    int64_t n_offsets, n_data;     /* bytes */
};

struct arrow_schema {
    struct arrow_column *columns; /* [n] */
    int64_t n, cap, n_top;        /* columns of a row */
};
/* Reads the columns. header: the table of the schema in a message. */
int arrow_schema_read(struct arrow_schema *s, const struct flatbuffer *f, int64_t header, const char *path,
                      struct err *err) MT_CHECK;
void arrow_schema_free(struct arrow_schema *s);

#endif

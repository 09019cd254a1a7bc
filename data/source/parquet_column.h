/* parquet_column.h - a column chunk of a parquet file: pages -> entries, each with its levels (parquet.c) and value. */
#ifndef MT_PARQUET_COLUMN_H
#define MT_PARQUET_COLUMN_H

#include "data/file/file.h"
#include "data/source/parquet_values.h"

/* Where a chunk is, as the metadata says; not checked. */
struct parquet_chunk {
    int64_t type, codec, n_values, bytes, data_page, dictionary_page; /* offsets; 0: no dictionary */
    bool elsewhere, encrypted;                                        /* in another file */
};

struct parquet_column {
    const char *path; /* of the file, for messages */
    char name[256];   /* "messages.list.element.role" */
    enum parquet_type type;
    int64_t length;       /* of FIXED */
    int max_rep, max_def; /* number of repeated nodes on its path; number of repeated and optional nodes */
    /* the current entry */
    bool given; /* the entry is read */
    int rep, def;
    struct parquet_value value; /* where def == max_def */
    /* the chunk and its page */
    int64_t codec, left;    /* entries that pages after this one have */
    const uint8_t *p, *end; /* next page; end of the chunk */
    int64_t n_page;         /* entries of the page that are left */
    uint8_t *page, *dict;   /* [cap_page], [cap_dict] unpacked */
    int64_t cap_page, cap_dict;
    struct parquet_value *words; /* [cap_words] the dictionary */
    int64_t cap_words;
    struct parquet_runs reps, defs;
    struct parquet_values values;
};
/* Opens a column chunk. The error names a codec that is not supported. */
int parquet_column_open(struct parquet_column *c, const struct file_map *map, const struct parquet_chunk *chunk,
                        struct err *err) MT_CHECK;
/* Reads an entry. 1: rep, def and value are those of the next entry, which later calls return again until it is
 * dropped; 0: no more. */
int parquet_column_peek(struct parquet_column *c, struct err *err) MT_CHECK;
static inline void parquet_column_drop(struct parquet_column *c) { c->given = false; }
void parquet_column_free(struct parquet_column *c);

#endif

/* csv.h - CSV and TSV: records of cells under a header, as JSON objects. */
#ifndef MT_CSV_H
#define MT_CSV_H

#include "data/file/file.h"
#include "data/json/text.h"

/* Zeroed is valid once the reader, at its beginning, is set; the caller owns it. */
struct csv {
    struct line_reader *reader;
    char delimiter;    /* 0: of , ; and tab the one that the header has most of */
    const char *chunk; /* [size], of which `at` bytes are consumed */
    int64_t size, at;
    int64_t line, first_line; /* of the next byte, from 1; of the record last read */
    char *cells;              /* [n_bytes] the texts of the record's cells, one after the other */
    int64_t n_bytes, cap_bytes;
    int64_t *ends; /* [n] where each ends in cells */
    int64_t n, cap_ends;
    char **names; /* [n_names] the header */
    int64_t n_names;
};
/* Reads the header. Error: it is empty, or has a name twice. */
int csv_open(struct csv *c, struct err *err) MT_CHECK;
/* Reads a record as {"NAME": "cell", ...}; an empty cell is null. 1: a record; 0: the end; 2: a bad record, after which
 * reading can go on; -1: the file cannot be read further. As in Python's csv, a quote in a cell that does not begin
 * with one is part of the text, and blank lines are skipped. */
int csv_next(struct csv *c, struct text_buf *row, struct err *err) MT_CHECK;
void csv_free(struct csv *c);

#endif

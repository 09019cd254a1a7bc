/* csv.c - CSV and TSV (RFC 4180): quoted cells with line breaks and doubled quotes; LF, CR LF or CR. */
#include "data/source/csv.h"

#include <stdio.h>
#include <string.h>

#define MAX_COLUMNS 4096

enum { END = -1, FAILED = -2 };

/* Returns the next byte, END or FAILED, without consuming it. */
static int peek(struct csv *c, struct err *err)
{
    while (c->at == c->size) {
        const int status = line_reader_chunk(c->reader, &c->chunk, &c->size, err);
        c->at = 0;
        if (status == 1) continue;
        c->size = 0;
        return status ? FAILED : END;
    }
    return (unsigned char)c->chunk[c->at];
}

static void put(struct csv *c, char byte)
{
    if (c->n_bytes == c->cap_bytes) c->cells = mem_reserve(c->cells, &c->cap_bytes, c->n_bytes + 1, 1);
    c->cells[c->n_bytes++] = byte;
}

static int too_long(const struct csv *c, bool quoted, struct err *err)
{
    char limit[32];
    return err_set(err, "%s:%lld: the row is longer than the limit of %s%s", line_reader_path(c->reader),
                   (long long)c->first_line, str_bytes(limit, FILE_LINE_MAX), quoted ? ": a quote is not closed" : "");
}

/* Consumes a line break whose first byte is b. */
static int end_line(struct csv *c, int b, struct err *err)
{
    c->at++;
    c->line++;
    if (b != '\r') return 0;
    const int next = peek(c, err);
    if (next == '\n') c->at++;
    return next == FAILED ? -1 : 0;
}

/* Checks the byte b after the quote that closes a cell: it must begin the next cell or row. */
static int end_quoted(const struct csv *c, int b, struct err *err)
{
    if (b == END || b == c->delimiter || b == '\n' || b == '\r') return 0;
    return err_set(err, "%s:%lld: text after the quote that closes a cell: double the quotes inside of a cell",
                   line_reader_path(c->reader), (long long)c->line);
}

/* Reads the rest of a quoted cell, up to and including the quote that closes it. */
static int read_quoted(struct csv *c, struct err *err)
{
    int b;
    while ((b = peek(c, err)) >= 0) {
        c->at++;
        if (b == '"') {
            if ((b = peek(c, err)) != '"') return b == FAILED ? -1 : end_quoted(c, b, err);
            c->at++;
        }
        if (b == '\n') c->line++;
        put(c, (char)b);
        if (c->n_bytes > FILE_LINE_MAX) return too_long(c, true, err);
    }
    if (b == FAILED) return -1;
    return err_set(err, "%s:%lld: a quote of this row is not closed", line_reader_path(c->reader),
                   (long long)c->first_line);
}

static void end_cell(struct csv *c)
{
    c->ends = mem_reserve(c->ends, &c->cap_ends, c->n + 1, sizeof(*c->ends));
    c->ends[c->n++] = c->n_bytes;
}

/* Reads a record. 1: there is one, 0: the end, -1: error. */
static int read_record(struct csv *c, struct err *err)
{
    int b = peek(c, err);
    bool begins = true; /* of a cell */
    c->n = c->n_bytes = 0;
    c->first_line = c->line;
    if (b < 0) return b == FAILED ? -1 : 0;
    for (; (b = peek(c, err)) >= 0 && b != '\n' && b != '\r'; begins = b == c->delimiter) {
        c->at++;
        if (b == c->delimiter)
            end_cell(c);
        else if (b == '"' && begins) {
            if (read_quoted(c, err)) return -1;
        } else
            put(c, (char)b);
        if (c->n_bytes + c->n > FILE_LINE_MAX) return too_long(c, false, err);
    }
    if (b == FAILED || (b != END && end_line(c, b, err))) return -1;
    end_cell(c);
    return 1;
}

static const char *cell(const struct csv *c, int64_t i, int64_t *size)
{
    const int64_t begin = i ? c->ends[i - 1] : 0;
    *size = c->ends[i] - begin;
    return *size ? c->cells + begin : "";
}

/* ---- header */

/* Returns the delimiter that the first line has most of; reads no further than the first chunk. */
static int guess_delimiter(struct csv *c, struct err *err)
{
    static const char of[] = ",;\t";
    int64_t n[3] = {0};
    bool quoted = false;
    if (peek(c, err) == FAILED) return -1;
    for (int64_t i = c->at; i < c->size && (quoted || !strchr("\r\n", c->chunk[i])); i++) {
        const char *at = c->chunk[i] ? strchr(of, c->chunk[i]) : NULL;
        if (c->chunk[i] == '"') quoted = !quoted;
        if (at && !quoted) n[at - of]++;
    }
    c->delimiter = of[n[1] > n[0] && n[1] >= n[2] ? 1 : n[2] > n[0] ? 2 : 0];
    return 0;
}

static int check_name(const struct csv *c, int64_t i, struct err *err)
{
    const char *name = c->names[i];
    for (int n; *name; name += n)
        if (!(n = json_utf8_length(name)))
            return err_set(err,
                           "%s:%lld is not UTF-8 (column %lld of the header): convert the file, as with "
                           "iconv -f WINDOWS-1252 -t UTF-8",
                           line_reader_path(c->reader), (long long)c->first_line, (long long)i + 1);
    for (int64_t k = 0; k < i; k++)
        if (!strcmp(c->names[k], c->names[i]))
            return err_set(err, "%s:%lld: the header has the column %.100s twice", line_reader_path(c->reader),
                           (long long)c->first_line, str_mask(c->names[i]));
    return 0;
}

int csv_open(struct csv *c, struct err *err)
{
    int status;
    c->line = 1;
    if (!c->delimiter && guess_delimiter(c, err)) return -1;
    do status = read_record(c, err);
    while (status == 1 && !c->n_bytes && c->n == 1);
    if (status < 0) return -1;
    if (c->n > MAX_COLUMNS)
        return err_set(err, "%s:%lld: a header of %lld columns, above the limit of %d", line_reader_path(c->reader),
                       (long long)c->first_line, (long long)c->n, MAX_COLUMNS);
    c->names = mem_array(MT_MAX(c->n, 1), sizeof(*c->names));
    for (int64_t i = 0; status && i < c->n; i++) {
        int64_t size;
        const char *name = cell(c, i, &size);
        char unnamed[32]; /* pandas writes its index without a name, and reads an empty name as this */
        snprintf(unnamed, sizeof(unnamed), "Unnamed: %lld", (long long)i);
        c->names[c->n_names++] = size ? mem_strndup(name, size) : mem_strdup(unnamed);
        if (check_name(c, i, err)) return -1;
    }
    return 0;
}

int csv_next(struct csv *c, struct text_buf *row, struct err *err)
{
    int status;
    do status = read_record(c, err);
    while (status == 1 && !c->n_bytes && c->n == 1);
    if (status != 1) return status;
    if (c->n != c->n_names) {
        (void)err_set(err, "%s:%lld: has %lld cell%s, the header has %lld: quote cells that contain the delimiter",
                      line_reader_path(c->reader), (long long)c->first_line, (long long)c->n, str_plural(c->n),
                      (long long)c->n_names);
        return 2;
    }
    row->size = 0;
    text_put(row, "{");
    for (int64_t i = 0; i < c->n; i++) {
        int64_t size;
        const char *text = cell(c, i, &size);
        text_put_key(row, c->names[i]);
        if (size)
            text_put_quoted(row, text, size);
        else
            text_put(row, "null");
    }
    text_put(row, "}");
    return 1;
}

void csv_free(struct csv *c)
{
    for (int64_t i = 0; i < c->n_names; i++) mem_free(c->names[i]);
    mem_free(c->names);
    mem_free(c->cells);
    mem_free(c->ends);
    c->names = NULL;
    c->cells = NULL;
    c->ends = NULL;
    c->n_names = 0;
}

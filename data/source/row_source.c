/* row_source.c - the rows of one data file, of any kind. */
#include "data/source/row_source.h"

#include <stdio.h>
#include <string.h>

#include "data/json/json_array.h"
#include "data/source/arrow.h"
#include "data/source/csv.h"
#include "data/source/parquet.h"
#include "data/source/source_list.h"

struct row_source {
    char *path;
    struct line_reader *reader;
    struct json_array array;
    struct csv csv;
    struct parquet *parquet; /* parquet and arrow read their files without `reader` */
    struct arrow *arrow;
    struct text_buf row, text;
    int64_t unread; /* bytes that the reader returned and no row has yet */
    int64_t line;   /* first line of the paragraph */
    bool read;      /* the document of a text file is read */
    int (*next)(struct row_source *s, struct row_text *row, struct err *err);
};

static void set(struct row_source *s, struct row_text *row, const char *text, int64_t size, int64_t line)
{
    row->text = text;
    row->size = size;
    row->line = row->last_if_bad = false;
    snprintf(row->where, sizeof(row->where), "%s:%lld", line_reader_path(s->reader), (long long)line);
}

/* ---- JSON */

static int next_line(struct row_source *s, struct row_text *row, struct err *err)
{
    char *line;
    int64_t size;
    int status;
    while ((status = line_reader_next(s->reader, &line, &size, err)) == 1) {
        if (text_is_blank(line, size)) continue;
        set(s, row, line, size, line_reader_line(s->reader));
        row->line = true;
        return 1;
    }
    return status;
}

static int next_item(struct row_source *s, struct row_text *row, struct err *err)
{
    const int status = json_array_next(&s->array, &row->text, &row->size, err);
    row->line = false;
    row->last_if_bad = true;
    snprintf(row->where, sizeof(row->where), "%s[%lld]", line_reader_path(s->reader), (long long)s->array.index - 1);
    s->unread = s->array.size - s->array.at;
    return status;
}

/* ---- tables */

static int next_record(struct row_source *s, struct row_text *row, struct err *err)
{
    const int status = csv_next(&s->csv, &s->row, err);
    s->unread = s->csv.size - s->csv.at;
    if (status == 1) set(s, row, s->row.text, s->row.size, s->csv.first_line);
    return status;
}

static int set_row(struct row_source *s, struct row_text *row, int64_t index, int status)
{
    row->text = s->row.text;
    row->size = s->row.size;
    row->line = row->last_if_bad = false;
    snprintf(row->where, sizeof(row->where), "%s[%lld]", s->path, (long long)index);
    return status;
}

static int next_parquet(struct row_source *s, struct row_text *row, struct err *err)
{
    const int64_t index = parquet_rows(s->parquet);
    return set_row(s, row, index, parquet_next(s->parquet, &s->row, err));
}

static int next_arrow(struct row_source *s, struct row_text *row, struct err *err)
{
    const int64_t index = arrow_rows(s->arrow);
    return set_row(s, row, index, arrow_next(s->arrow, &s->row, err));
}

/* ---- texts */

static void set_text(struct row_source *s, struct row_text *row, const char *text, int64_t size, int64_t line)
{
    s->row.size = 0;
    text_put(&s->row, "{\"text\": ");
    text_put_quoted(&s->row, text, size);
    text_put(&s->row, "}");
    set(s, row, s->row.text, s->row.size, line);
}

static int next_text_line(struct row_source *s, struct row_text *row, struct err *err)
{
    const int status = next_line(s, row, err);
    if (status == 1) set_text(s, row, row->text, row->size, line_reader_line(s->reader));
    return status;
}

static int too_long(const struct row_source *s, const char *advice, struct err *err)
{
    char limit[32];
    return err_set(err, "%s: a text longer than the limit of %s: %s", line_reader_path(s->reader),
                   str_bytes(limit, FILE_LINE_MAX), advice);
}

static int next_paragraph(struct row_source *s, struct row_text *row, struct err *err)
{
    char *line;
    int64_t size;
    int status;
    s->text.size = 0;
    while ((status = line_reader_next(s->reader, &line, &size, err)) == 1) {
        const bool blank = text_is_blank(line, size);
        if (blank && s->text.size) break;
        if (blank) continue;
        if (s->text.size)
            text_put(&s->text, "\n");
        else
            s->line = line_reader_line(s->reader);
        text_put_bytes(&s->text, line, size);
        if (s->text.size > FILE_LINE_MAX) return too_long(s, "separate paragraphs by blank lines", err);
    }
    if (status < 0 || !s->text.size) return status;
    set_text(s, row, s->text.text, s->text.size, s->line);
    return 1;
}

static int next_document(struct row_source *s, struct row_text *row, struct err *err)
{
    const char *bytes;
    int64_t size;
    int status;
    if (s->read) return 0;
    s->read = true;
    while ((status = line_reader_chunk(s->reader, &bytes, &size, err)) == 1) {
        text_put_bytes(&s->text, bytes, size);
        if (s->text.size > FILE_LINE_MAX)
            return too_long(s, "data.sample_by = paragraph or line makes several documents of it", err);
    }
    if (status || text_is_blank(s->text.text, s->text.size)) return status;
    set_text(s, row, s->text.text, s->text.size, 1);
    return 1;
}

/* ---- kinds */

static int unknown(const char *path, struct err *err)
{
    static const char *const endings[] = {".xlsx", ".zst", ".xz", ".bz2", ".zip", ".tar"};
    for (int64_t i = 0; i < MT_LEN(endings); i++)
        if (str_ends(path, endings[i]))
            return err_set(err, "%s: %s files are not read: convert it to %s", path, endings[i], SOURCE_KINDS);
    return err_set(err, "%s: neither its name nor its content says what kind of file it is: expected %s", path,
                   SOURCE_KINDS);
}

/* Chooses how rows are read; the first byte that is not blank tells JSON. */
static int choose(struct row_source *s, const char *path, enum sample_by sample_by, struct err *err)
{
    enum source_kind kind = source_list_kind(path);
    char first;
    if (line_reader_peek(s->reader, &first, err)) return -1;
    if (first == '\xff' || first == '\xfe') /* a byte order mark; never in UTF-8 */
        return err_set(err, "%s: UTF-16, not UTF-8: convert it with iconv -f UTF-16 -t UTF-8", path);
    if (kind == SOURCE_OTHER && (!first || first == '[' || first == '{')) kind = SOURCE_JSON;
    switch (kind) {
    case SOURCE_JSON: s->next = first == '[' ? next_item : next_line; return 0; /* JSONL begins with { */
    case SOURCE_CSV:
    case SOURCE_TSV:
        s->next = next_record;
        s->csv = (struct csv){.reader = s->reader, .delimiter = kind == SOURCE_TSV ? '\t' : 0};
        return csv_open(&s->csv, err);
    case SOURCE_TEXT:
        s->next = sample_by == SAMPLE_LINE        ? next_text_line
                  : sample_by == SAMPLE_PARAGRAPH ? next_paragraph
                                                  : next_document;
        return 0;
    case SOURCE_PARQUET:
    case SOURCE_ARROW:
    case SOURCE_OTHER: break;
    }
    return unknown(path, err);
}

/* Opens a parquet or Arrow file; 0: the file is neither. */
static int open_binary(struct row_source *s, struct err *err)
{
    struct file_map map;
    const enum source_kind kind = source_list_kind(s->path);
    if (file_map_open(&map, s->path, err)) return -1;
    if (map.size >= 4 && !memcmp(map.data, "PAR", 3)) {
        s->next = next_parquet;
        s->parquet = parquet_open(&map, s->path, err);
        return s->parquet ? 1 : -1;
    }
    if (arrow_is(&map)) {
        s->next = next_arrow;
        s->arrow = arrow_open(&map, s->path, err);
        return s->arrow ? 1 : -1;
    }
    file_map_close(&map);
    if (kind != SOURCE_PARQUET && kind != SOURCE_ARROW) return 0;
    return err_set(err, "%s: not %s file, by its first bytes: name it as what it is", s->path,
                   kind == SOURCE_ARROW ? "an Arrow" : "a parquet");
}

struct row_source *row_source_open(const char *path, enum sample_by sample_by, struct err *err)
{
    struct row_source *s = mem_alloc(sizeof(*s));
    s->path = mem_strdup(path);
    const int binary = open_binary(s, err);
    if (binary == 1) return s;
    if (!binary && (s->reader = s->array.reader = line_reader_open(path, err)) && !choose(s, path, sample_by, err))
        return s;
    row_source_close(s);
    return NULL;
}

int row_source_next(struct row_source *s, struct row_text *row, struct err *err) { return s->next(s, row, err); }

int64_t row_source_position(const struct row_source *s)
{
    if (s->arrow) return arrow_position(s->arrow);
    return s->parquet ? parquet_position(s->parquet) : line_reader_position(s->reader, s->unread);
}

void row_source_close(struct row_source *s)
{
    if (!s) return;
    json_array_free(&s->array);
    csv_free(&s->csv);
    text_free(&s->row);
    text_free(&s->text);
    parquet_close(s->parquet);
    arrow_close(s->arrow);
    line_reader_close(s->reader);
    mem_free(s->path);
    mem_free(s);
}

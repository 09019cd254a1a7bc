/* later_rows.c - see later_rows.h. */
#include "train/generate/later_rows.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/rows.h"

static int add(struct later_rows *l, const char *line, int64_t size, const char *name, struct err *err)
{
    int64_t row;
    struct json_doc *doc = json_parse_row(line, size, JSON_ROW_VALUES, name, err);
    if (!doc) return -1;
    l->rows = mem_reserve(l->rows, &l->cap, l->n + 1, sizeof(*l->rows));
    l->rows[l->n++] = (struct later_row){-1, doc};
    if (json_get_i64(json_root(doc), "row", l->n > 1 ? l->rows[l->n - 2].row + 1 : 0, INT64_MAX, &row, err)) return -1;
    l->rows[l->n - 1].row = row;
    return 0;
}

int later_rows_open(struct later_rows *l, const char *output, struct err *err)
{
    char *line, name[MT_PATH + 32];
    int64_t size;
    int rc = 0, more = 0;
    *l = (struct later_rows){.n = 0};
    if (snprintf(l->path, sizeof(l->path), "%s.later.jsonl", output) >= (int)sizeof(l->path))
        return err_set(err, "--output %s: the path is too long", output);
    if (!file_exists(l->path)) return 0;
    struct line_reader *reader = line_reader_open(l->path, err);
    if (!reader) return -1;
    while (!rc && (more = line_reader_next(reader, &line, &size, err)) > 0) {
        snprintf(name, sizeof(name), "%s:%lld", l->path, (long long)line_reader_line(reader));
        rc = add(l, line, size, name, err);
        if (rc) err_prefix(err, "%s: delete this file, or name another --output", name);
    }
    line_reader_close(reader);
    return rc || more < 0 ? -1 : 0;
}

struct json later_rows_take(struct later_rows *l, int64_t row)
{
    while (l->at < l->n && l->rows[l->at].row < row) l->at++;
    if (l->at == l->n || l->rows[l->at].row != row) return (struct json){0};
    return json_find(json_root(l->rows[l->at++].doc), "samples");
}

void later_rows_close(struct later_rows *l)
{
    for (int64_t i = 0; i < l->n; i++) json_free(l->rows[i].doc);
    mem_free(l->rows);
    *l = (struct later_rows){.n = 0};
}

void later_rows_put(struct text_buf *out, int64_t row, const struct text_buf *samples, int64_t n)
{
    char number[64];
    snprintf(number, sizeof(number), "{\"row\": %lld, \"samples\": [", (long long)row);
    text_put(out, number);
    for (int64_t i = 0; i < n; i++) {
        text_put_comma(out);
        text_put_quoted(out, samples[i].text, samples[i].size);
    }
    text_put(out, "]}\n");
}

int later_rows_write(const struct later_rows *l, struct text_buf *lines, int64_t n_line, int64_t *n, struct err *err)
{
    *n = n_line + l->n - l->at;
    for (int64_t i = l->at; i < l->n; i++) {
        if (text_put_json(lines, json_root(l->rows[i].doc), err)) return -1;
        text_put(lines, "\n");
    }
    if (*n) return file_write_atomic(l->path, lines->text, lines->size, err);
    return unlink(l->path) && errno != ENOENT ? err_set(err, "%s cannot be deleted: %s", l->path, strerror(errno)) : 0;
}

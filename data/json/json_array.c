/* json_array.c - see json_array.h. A tree of the whole array would take up to 80 times the text. */
#include "data/json/json_array.h"

#include <string.h>

#include "data/json/text.h"

static bool is_blank(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

void json_array_free(struct json_array *a) { text_free(&a->item); }

static int broken(const struct json_array *a, const char *what, struct err *err)
{
    return err_set(err, "%s: not valid JSON: byte %lld: %s", line_reader_path(a->reader), (long long)(a->bytes + a->at),
                   what);
}

/* 1: a byte is available; 0: end of the file; -1: error. */
static int more(struct json_array *a, struct err *err)
{
    if (a->at < a->size) return 1;
    a->bytes += a->size;
    a->at = a->size = 0;
    return line_reader_chunk(a->reader, &a->chunk, &a->size, err);
}

/* Moves to the next byte that is not blank; returns as more(). */
static int skip_blanks(struct json_array *a, struct err *err)
{
    int rc;
    while ((rc = more(a, err)) == 1) {
        while (a->at < a->size && is_blank(a->chunk[a->at])) a->at++;
        if (a->at < a->size) return 1;
    }
    return rc;
}

/* Copies up to the comma or bracket that ends the item; that byte is not consumed. */
static int read_item(struct json_array *a, struct err *err)
{
    int64_t depth = 0;
    bool in_string = false, escaped = false, ended = false;
    while (!ended) {
        int rc = more(a, err);
        if (rc == 0) return broken(a, "the array is not closed: the file is truncated", err);
        if (rc < 0) return -1;
        const int64_t begin = a->at;
        for (; a->at < a->size; a->at++) {
            const char c = a->chunk[a->at];
            if (in_string) {
                in_string = escaped || c != '"';
                escaped = !escaped && c == '\\';
                continue;
            }
            if (depth == 0 && (c == ',' || c == ']' || c == '}')) break;
            in_string = c == '"';
            depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        }
        ended = a->at < a->size;
        if (a->item.size + a->at - begin > FILE_LINE_MAX) {
            char limit[32];
            return err_set(err, "%s[%lld]: the row is larger than the limit of %s", line_reader_path(a->reader),
                           (long long)a->index, str_bytes(limit, FILE_LINE_MAX));
        }
        text_put_bytes(&a->item, a->chunk + begin, a->at - begin);
    }
    while (a->item.size && is_blank(a->item.text[a->item.size - 1])) a->item.size--;
    if (!a->item.size) return broken(a, "a value is missing", err);
    a->item.text[a->item.size] = 0;
    return 1;
}

/* Checks that only blanks follow the closing bracket. */
static int at_end(struct json_array *a, struct err *err)
{
    a->closed = true;
    a->at++;
    int rc = skip_blanks(a, err);
    return rc == 1 ? broken(a, "unexpected text after the array", err) : rc;
}

int json_array_next(struct json_array *a, const char **text, int64_t *size, struct err *err)
{
    if (a->closed) return 0;
    int rc = skip_blanks(a, err);
    if (rc < 0) return -1;
    const char c = rc ? a->chunk[a->at] : 0;
    if (!a->opened) {
        if (c != '[') return broken(a, "expected [", err);
        a->opened = true;
        a->at++;
        if ((rc = skip_blanks(a, err)) < 0) return -1;
        if (rc && a->chunk[a->at] == ']') return at_end(a, err);
    } else {
        if (c == ']') return at_end(a, err);
        if (c != ',') return broken(a, "expected , or ]", err);
        a->at++;
        if ((rc = skip_blanks(a, err)) < 0) return -1;
    }
    a->item.size = 0;
    if (read_item(a, err) < 0) return -1;
    a->index++;
    *text = a->item.text;
    *size = a->item.size;
    return 1;
}

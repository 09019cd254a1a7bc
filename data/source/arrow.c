/* arrow.c - rows from the columns of an Arrow file (arrow.apache.org/docs/format/Columnar.html): a stream of messages
 * between a magic word and a footer, which repeats where the messages are and is not needed. */
#include "data/source/arrow.h"

#include <stdio.h>
#include <string.h>

#include "data/source/arrow_schema.h"
#include "data/source/cell.h"
#include "data/source/codec.h"

#define MAX_BUFFER FILE_GZIP_FREE /* bytes of a buffer, unpacked */

enum { MESSAGE_KIND = 1, MESSAGE_HEADER = 2, MESSAGE_BODY = 3 };
enum { KIND_SCHEMA = 1, KIND_DICTIONARY = 2, KIND_BATCH = 3 };
enum { BATCH_LENGTH = 0, BATCH_NODES = 1, BATCH_BUFFERS = 2, BATCH_COMPRESSION = 3 };

struct arrow {
    char *path;
    struct file_map map;
    int64_t at; /* next message */
    struct arrow_schema schema;
    int64_t length, in_batch, row; /* rows of the batch, of these returned; rows returned */
    uint8_t **unpacked;            /* [n_unpacked] buffers of the batch that were compressed */
    int64_t n_unpacked, cap_unpacked;
};

/* The batch whose buffers `deal` assigns to the columns. */
struct batch {
    const struct flatbuffer *f;
    const uint8_t *body;
    int64_t n_body;
    int64_t nodes, n_nodes, buffers, n_buffers; /* places; items that are left */
    enum codec codec;                           /* of its buffers */
};

static int damaged(const struct arrow *a, const char *what, struct err *err)
{
    return err_set(err, "%s: %s at byte %lld: the file is damaged or incomplete", a->path, what, (long long)a->at);
}

bool arrow_is(const struct file_map *map)
{
    return (map->size >= 8 && !memcmp(map->data, "ARROW1", 6)) ||
           (map->size >= 4 && !memcmp(map->data, "\xff\xff\xff\xff", 4));
}

/* ---- messages */

struct message {
    struct flatbuffer f;
    int64_t kind, header;
    const uint8_t *body;
    int64_t n_body;
};

/* Reads a message. 1: a->at moves past it; 0: the end of the stream. */
static int next_message(struct arrow *a, struct message *m, struct err *err)
{
    const int64_t left = a->map.size - a->at;
    uint32_t size;
    int64_t begin = a->at + 4;
    if (!left) return 0; /* a stream may end without its mark */
    if (left < 4) return damaged(a, "a message", err);
    memcpy(&size, a->map.data + a->at, 4);
    if (size == UINT32_MAX && left >= 8) {
        memcpy(&size, a->map.data + a->at + 4, 4);
        begin += 4;
    }
    if (!size) return 0;
    if (size > a->map.size - begin) return damaged(a, "a message", err);
    m->f = (struct flatbuffer){a->map.data + begin, size};
    const int64_t root = flatbuffer_root(&m->f);
    m->kind = flatbuffer_int(&m->f, root, MESSAGE_KIND, 1, 0);
    m->header = flatbuffer_table(&m->f, root, MESSAGE_HEADER);
    m->n_body = flatbuffer_int(&m->f, root, MESSAGE_BODY, 8, 0);
    m->body = a->map.data + begin + size;
    if (!m->header || m->n_body < 0 || m->n_body > a->map.size - begin - size) return damaged(a, "a message", err);
    a->at = begin + size + m->n_body;
    return 1;
}

/* ---- batches */

static void free_unpacked(struct arrow *a)
{
    while (a->n_unpacked) mem_free(a->unpacked[--a->n_unpacked]);
}

/* Decompresses a buffer. Its first 8 bytes are the decompressed size, or -1 if the rest is not compressed. */
static int unpack(struct arrow *a, enum codec codec, const uint8_t **data, int64_t *n, struct err *err)
{
    int64_t size;
    if (!*n) return 0;
    if (*n < 8) return damaged(a, "a buffer", err);
    memcpy(&size, *data, 8);
    *data += 8;
    *n -= 8;
    if (size == -1) return 0;
    if (size < 0 || size > MAX_BUFFER) return damaged(a, "the size of a buffer", err);
    uint8_t *out = mem_alloc(size + 1);
    a->unpacked = mem_reserve(a->unpacked, &a->cap_unpacked, a->n_unpacked + 1, sizeof(*a->unpacked));
    a->unpacked[a->n_unpacked++] = out;
    if (!codec_unpack(codec, out, size, *data, *n)) return damaged(a, "a buffer", err);
    *data = out;
    *n = size;
    return 0;
}

static int take_buffer(struct arrow *a, struct batch *b, const uint8_t **data, int64_t *n, struct err *err)
{
    if (!b->n_buffers) return damaged(a, "the buffers of a batch", err);
    const int64_t offset = flatbuffer_i64_at(b->f, b->buffers);
    *n = flatbuffer_i64_at(b->f, b->buffers + 8);
    b->buffers += 16;
    b->n_buffers--;
    if (*n < 0 || offset < 0 || offset > b->n_body || *n > b->n_body - offset)
        return damaged(a, "a buffer of a batch", err);
    *data = b->body + offset;
    return b->codec == CODEC_NONE ? 0 : unpack(a, b->codec, data, n, err);
}

/* Whether the buffers have what an item at length-1 needs. */
static bool is_complete(const struct arrow_column *c, int64_t n_valid)
{
    const int64_t width = c->wide ? 8 : 4;
    if (!c->length) return true;
    if (c->valid && n_valid < (c->length + 7) / 8) return false;
    switch (c->kind) {
    case ARROW_INT:
    case ARROW_FLOAT: return c->n_data / c->bytes >= c->length;
    case ARROW_BOOL: return c->n_data >= (c->length + 7) / 8;
    case ARROW_TEXT:
    case ARROW_LIST: return c->n_offsets / width - 1 >= c->length;
    default: return true;
    }
}

/* Assigns the next nodes and buffers of a batch to column i and its descendants. */
static int deal(struct arrow *a, struct batch *b, int64_t i, struct err *err)
{
    struct arrow_column *c = &a->schema.columns[i];
    int64_t n_valid = 0;
    if (!b->n_nodes) return damaged(a, "the columns of a batch", err);
    c->length = flatbuffer_i64_at(b->f, b->nodes);
    const int64_t n_null = flatbuffer_i64_at(b->f, b->nodes + 8);
    b->nodes += 16;
    b->n_nodes--;
    c->valid = c->offsets = c->data = NULL;
    c->n_offsets = c->n_data = 0;
    if (c->length < 0 || c->length > INT64_MAX / 16) return damaged(a, "the length of a column", err);
    if (c->kind == ARROW_NULL) return 0;
    if (take_buffer(a, b, &c->valid, &n_valid, err)) return -1;
    if (!n_null || !n_valid) c->valid = NULL;
    const bool offsets = c->kind == ARROW_TEXT || c->kind == ARROW_LIST || c->values;
    if (offsets && take_buffer(a, b, &c->offsets, &c->n_offsets, err)) return -1;
    if (c->kind != ARROW_LIST && c->kind != ARROW_BLOCKS && c->kind != ARROW_STRUCT &&
        take_buffer(a, b, &c->data, &c->n_data, err))
        return -1;
    if (!is_complete(c, n_valid)) return damaged(a, "a buffer of a batch", err);
    for (int64_t child = i + 1; child < a->schema.columns[i].next; child = a->schema.columns[child].next)
        if (deal(a, b, child, err)) return -1;
    return 0;
}

static int open_batch(struct arrow *a, const struct message *m, struct err *err)
{
    struct batch b = {.f = &m->f, .body = m->body, .n_body = m->n_body};
    const int64_t packed = flatbuffer_table(&m->f, m->header, BATCH_COMPRESSION);
    const int64_t codec = packed ? flatbuffer_int(&m->f, packed, 0, 1, 0) : -1;
    if (packed && (codec < 0 || codec > 1))
        return err_set(err, "%s: its buffers are compressed with neither LZ4 nor zstd", a->path);
    b.codec = codec < 0 ? CODEC_NONE : codec ? CODEC_ZSTD : CODEC_LZ4_FRAME;
    b.nodes = flatbuffer_vector(&m->f, m->header, BATCH_NODES, 16, &b.n_nodes);
    b.buffers = flatbuffer_vector(&m->f, m->header, BATCH_BUFFERS, 16, &b.n_buffers);
    free_unpacked(a);
    a->length = flatbuffer_int(&m->f, m->header, BATCH_LENGTH, 8, 0);
    a->in_batch = 0;
    for (int64_t i = 0; i < a->schema.n; i = a->schema.columns[i].next) {
        if (deal(a, &b, i, err)) return -1;
        if (a->schema.columns[i].length != a->length) return damaged(a, "the length of a column", err);
    }
    return a->length < 0 || (a->length && !a->schema.n) ? damaged(a, "the length of a batch", err) : 0;
}

/* ---- values */

static bool bit(const uint8_t *bits, int64_t i) { return bits[i / 8] >> i % 8 & 1; }

static int64_t load(const uint8_t *data, int64_t i, int bytes, bool is_unsigned)
{
    uint64_t x = 0;
    memcpy(&x, data + i * bytes, (size_t)bytes);
    if (bytes == 8 || is_unsigned) return (int64_t)x;
    return (int64_t)(x << (64 - 8 * bytes)) >> (64 - 8 * bytes);
}

/* Reads the range [*begin, *end) of item i of a list or text in its data, which has `most` elements or bytes. */
static int take_range(const struct arrow *a, const struct arrow_column *c, int64_t i, int64_t most, int64_t *begin,
                      int64_t *end, struct err *err)
{
    const int width = c->wide ? 8 : 4;
    if (c->kind == ARROW_BLOCKS) {
        *end = i64_mul(i, c->bytes, begin) && i64_add(*begin, c->bytes, end) ? *end : -1;
    } else {
        *begin = load(c->offsets, i, width, false);
        *end = load(c->offsets, i + 1, width, false);
    }
    if (*begin >= 0 && *begin <= *end && *end <= most) return 0;
    return err_set(err, "%s[%lld]: an offset of a column is outside its data: the file is damaged", a->path,
                   (long long)a->row);
}

static int put_item(const struct arrow *a, struct text_buf *t, int64_t at, int64_t i, struct err *err);

static int put_list(const struct arrow *a, struct text_buf *t, int64_t at, int64_t i, struct err *err)
{
    int64_t begin, end;
    if (take_range(a, &a->schema.columns[at], i, a->schema.columns[at + 1].length, &begin, &end, err)) return -1;
    text_put(t, "[");
    for (int64_t k = begin; k < end; k++) {
        text_put_comma(t);
        if (put_item(a, t, at + 1, k, err)) return -1;
        if (t->size > FILE_LINE_MAX)
            return err_set(err, "%s[%lld]: the row is longer than the limit of %lld bytes", a->path, (long long)a->row,
                           (long long)FILE_LINE_MAX);
    }
    text_put(t, "]");
    return 0;
}

/* Writes the columns from `child` to `end` at item i. */
static int put_members(const struct arrow *a, struct text_buf *t, int64_t child, int64_t end, int64_t i,
                       struct err *err)
{
    const struct arrow_column *columns = a->schema.columns;
    text_put(t, "{");
    for (; child < end; child = columns[child].next) {
        text_put_key(t, columns[child].name);
        if (put_item(a, t, child, i, err)) return -1;
    }
    text_put(t, "}");
    return 0;
}

/* Writes item i of a column. */
static int put_item(const struct arrow *a, struct text_buf *t, int64_t at, int64_t i, struct err *err)
{
    const struct arrow_column *c = &a->schema.columns[at];
    int64_t begin, end;
    float f;
    double d;
    if (i >= c->length)
        return err_set(err, "%s[%lld]: a column has too few items: the file is damaged", a->path, (long long)a->row);
    if (c->kind == ARROW_NULL || (c->valid && !bit(c->valid, i))) {
        text_put(t, "null");
        return 0;
    }
    switch (c->kind) {
    case ARROW_INT: cell_put_int(t, load(c->data, i, c->bytes, c->is_unsigned), c->is_unsigned); return 0;
    case ARROW_FLOAT:
        memcpy(&f, c->data + i * c->bytes, sizeof(f));
        if (c->bytes == 8) memcpy(&d, c->data + i * c->bytes, sizeof(d));
        cell_put_float(t, c->bytes == 8 ? d : (double)f);
        return 0;
    case ARROW_BOOL: text_put(t, bit(c->data, i) ? "true" : "false"); return 0;
    case ARROW_TEXT:
        if (take_range(a, c, i, c->n_data, &begin, &end, err)) return -1;
        text_put_quoted(t, (const char *)c->data + begin, end - begin);
        return 0;
    case ARROW_LIST:
    case ARROW_BLOCKS: return put_list(a, t, at, i, err);
    case ARROW_STRUCT: return put_members(a, t, at + 1, c->next, i, err);
    case ARROW_NULL:
    case ARROW_UNREAD: break;
    }
    cell_put_unread(t, c->type);
    return 0;
}

/* ---- the file */

static void tell_unread(const struct arrow *a)
{
    char name[128];
    for (int64_t i = 0; i < a->schema.n; i++) {
        const struct arrow_column *c = &a->schema.columns[i];
        snprintf(name, sizeof(name), "%s", c->name);
        if (c->kind == ARROW_UNREAD)
            log_info("%s: the values of column %s (%s) are not read", a->path, str_mask(name), c->type);
    }
}

struct arrow *arrow_open(struct file_map *map, const char *path, struct err *err)
{
    struct arrow *a = mem_alloc(sizeof(*a));
    struct message m = {.kind = 0};
    a->path = mem_strdup(path);
    a->map = *map;
    *map = (struct file_map){0};
    if (a->map.size >= 8 && !memcmp(a->map.data, "ARROW1", 6)) a->at = 8;
    int status = next_message(a, &m, err);
    if (status >= 0 && m.kind != KIND_SCHEMA) status = damaged(a, "no schema", err);
    if (status < 0 || arrow_schema_read(&a->schema, &m.f, m.header, path, err)) {
        arrow_close(a);
        return NULL;
    }
    tell_unread(a);
    return a;
}

int arrow_next(struct arrow *a, struct text_buf *row, struct err *err)
{
    while (a->in_batch == a->length) {
        struct message m;
        const int status = next_message(a, &m, err);
        if (status != 1) return status;
        if (m.kind == KIND_DICTIONARY) continue; /* of columns that are not read */
        if (m.kind != KIND_BATCH) return damaged(a, "a message of another kind", err);
        if (open_batch(a, &m, err)) return -1;
    }
    row->size = 0;
    if (put_members(a, row, 0, a->schema.n, a->in_batch, err)) return -1;
    a->in_batch++;
    a->row++;
    return 1;
}

int64_t arrow_rows(const struct arrow *a) { return a->row; }

int64_t arrow_position(const struct arrow *a) { return a->at; }

void arrow_close(struct arrow *a)
{
    if (!a) return;
    free_unpacked(a);
    mem_free(a->unpacked);
    arrow_schema_free(&a->schema);
    file_map_close(&a->map);
    mem_free(a->path);
    mem_free(a);
}

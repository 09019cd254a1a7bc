/* parquet_column.c - a column chunk of a parquet file: pages -> entries. */
#include "data/source/parquet_column.h"

#include <string.h>

#include "data/source/brotli.h"
#include "data/source/codec.h"
#include "data/source/thrift.h"

#define MAX_PAGE FILE_GZIP_FREE /* bytes of a page, unpacked */

enum { DATA_PAGE = 0, INDEX_PAGE = 1, DICTIONARY_PAGE = 2, DATA_PAGE_V2 = 3 };
enum { V1_HEADER = 5, DICTIONARY_HEADER = 7, V2_HEADER = 8 };
enum { LEVELS_RLE = 3 };

struct page {
    int64_t type, unpacked, packed; /* bytes */
    int64_t n, encoding;
    int64_t rep_encoding, def_encoding; /* version 1 */
    int64_t rep_bytes, def_bytes;       /* version 2 */
    bool stored;                        /* version 2: values are not compressed */
};

static int damaged(const struct parquet_column *c, const char *what, struct err *err)
{
    return err_set(err, "%s: column %s: %s: the file is damaged or incomplete", c->path, c->name, what);
}

/* ---- header of a page */

/* Reads the header of values. field: its number in the page header. */
static void read_values_header(struct thrift *t, struct page *page, int64_t field)
{
    const bool v1 = field == V1_HEADER, v2 = field == V2_HEADER;
    enum thrift_type type;
    for (int64_t id = 0; thrift_field(t, &id, &type);) {
        if (id == 1)
            page->n = thrift_int(t, type);
        else if (id == (v2 ? 4 : 2))
            page->encoding = thrift_int(t, type);
        else if (v1 && id == 3)
            page->def_encoding = thrift_int(t, type);
        else if (v1 && id == 4)
            page->rep_encoding = thrift_int(t, type);
        else if (v2 && id == 5)
            page->def_bytes = thrift_int(t, type);
        else if (v2 && id == 6)
            page->rep_bytes = thrift_int(t, type);
        else if (v2 && id == 7)
            page->stored = !thrift_bool(t, type);
        else
            thrift_skip(t, type);
    }
}

static int read_header(struct parquet_column *c, struct page *page, struct err *err)
{
    struct thrift t = {.p = c->p, .end = c->end};
    enum thrift_type type;
    *page = (struct page){.type = -1, .n = -1, .rep_encoding = LEVELS_RLE, .def_encoding = LEVELS_RLE};
    for (int64_t id = 0; thrift_field(&t, &id, &type);) {
        if (id == 1)
            page->type = thrift_int(&t, type);
        else if (id == 2)
            page->unpacked = thrift_int(&t, type);
        else if (id == 3)
            page->packed = thrift_int(&t, type);
        else if ((id == V1_HEADER || id == DICTIONARY_HEADER || id == V2_HEADER) && thrift_struct(&t, type))
            read_values_header(&t, page, id);
        else
            thrift_skip(&t, type);
    }
    c->p = t.p;
    if (t.bad || page->unpacked < 0 || page->packed < 0 || page->packed > c->end - c->p)
        return damaged(c, "the header of a page", err);
    if (page->unpacked > MAX_PAGE)
        return err_set(err, "%s: column %s: a page of %lld bytes, above the limit of %lld: write smaller pages",
                       c->path, c->name, (long long)page->unpacked, (long long)MAX_PAGE);
    return 0;
}

/* ---- pages */

/* in[n] -> *out[size]; uncompressed bytes stay where they are. NULL: damaged. */
static const uint8_t *unpack(int64_t codec, uint8_t **out, int64_t *cap, int64_t size, const uint8_t *in, int64_t n)
{
    if (codec == CODEC_NONE || (!n && !size)) return n == size ? in : NULL;
    *out = mem_reserve(*out, cap, size + 1, 1);
    return codec_unpack((enum codec)codec, *out, size, in, n) ? *out : NULL;
}

static int read_dictionary(struct parquet_column *c, const struct page *page, struct err *err)
{
    const uint8_t *p = unpack(c->codec, &c->dict, &c->cap_dict, page->unpacked, c->p, page->packed);
    struct parquet_values plain = {.type = c->type, .length = c->length};
    if (!p || page->n < 0 || (page->encoding != PARQUET_PLAIN && page->encoding != PARQUET_PLAIN_DICTIONARY))
        return damaged(c, "its dictionary", err);
    bool good = parquet_values_begin(&plain, PARQUET_PLAIN, p, p + page->unpacked, page->n);
    int64_t n = 0;
    for (; good && n < page->n; n++) {
        c->words = mem_reserve(c->words, &c->cap_words, n + 1, sizeof(*c->words));
        good = parquet_values_next(&plain, &c->words[n]);
    }
    c->words = mem_reserve(c->words, &c->cap_words, 1, sizeof(*c->words));
    c->values.dictionary = c->words;
    c->values.n_dictionary = n;
    return good ? 0 : damaged(c, "its dictionary", err);
}

static int width_of(int max_level)
{
    int width = 0;
    while (max_level >> width) width++;
    return width;
}

/* Levels of version 1: their size in 4 bytes, then runs. */
static bool begin_levels(struct parquet_runs *runs, int max, const uint8_t **p, const uint8_t *end)
{
    uint32_t n;
    if (!max) return true;
    if (end - *p < 4) return false;
    memcpy(&n, *p, 4);
    *p += 4;
    if (n > end - *p) return false;
    *runs = (struct parquet_runs){.p = *p, .end = *p + n, .width = width_of(max)};
    *p += n;
    return true;
}

static int begin_v1(struct parquet_column *c, const struct page *page, struct err *err)
{
    const uint8_t *p = unpack(c->codec, &c->page, &c->cap_page, page->unpacked, c->p, page->packed), *end;
    if (!p) return damaged(c, "a page does not unpack", err);
    end = p + page->unpacked;
    if ((c->max_rep && page->rep_encoding != LEVELS_RLE) || (c->max_def && page->def_encoding != LEVELS_RLE))
        return err_set(err, "%s: column %s: levels in the encoding %s are not read: write it with another program",
                       c->path, c->name, parquet_encoding_name(MT_MAX(page->rep_encoding, page->def_encoding)));
    if (!begin_levels(&c->reps, c->max_rep, &p, end) || !begin_levels(&c->defs, c->max_def, &p, end) ||
        !parquet_values_begin(&c->values, page->encoding, p, end, page->n))
        return damaged(c, "a page", err);
    return 0;
}

static int begin_v2(struct parquet_column *c, const struct page *page, struct err *err)
{
    const int64_t reps = page->rep_bytes, defs = page->def_bytes;
    if (reps < 0 || defs < 0 || reps > page->packed - defs || reps > page->unpacked - defs)
        return damaged(c, "the levels of a page", err);
    const uint8_t *levels = c->p, *p = levels + reps + defs;
    const int64_t size = page->unpacked - reps - defs;
    p = unpack(page->stored ? CODEC_NONE : c->codec, &c->page, &c->cap_page, size, p, page->packed - reps - defs);
    if (!p) return damaged(c, "a page does not unpack", err);
    c->reps = (struct parquet_runs){.p = levels, .end = levels + reps, .width = width_of(c->max_rep)};
    c->defs = (struct parquet_runs){.p = levels + reps, .end = levels + reps + defs, .width = width_of(c->max_def)};
    if (!parquet_values_begin(&c->values, page->encoding, p, p + size, page->n)) return damaged(c, "a page", err);
    return 0;
}

static bool supported(int64_t encoding)
{
    static const int64_t known[] = {PARQUET_PLAIN,          PARQUET_PLAIN_DICTIONARY, PARQUET_RLE,
                                    PARQUET_DELTA,          PARQUET_DELTA_LENGTH,     PARQUET_DELTA_BYTES,
                                    PARQUET_RLE_DICTIONARY, PARQUET_BYTE_SPLIT};
    for (int64_t i = 0; i < MT_LEN(known); i++)
        if (encoding == known[i]) return true;
    return false;
}

/* Reads the next page with entries. */
static int next_page(struct parquet_column *c, struct err *err)
{
    struct page page;
    int rc = 0;
    if (c->p == c->end) return damaged(c, "pages are missing", err);
    if (read_header(c, &page, err)) return -1;
    if (page.type == DICTIONARY_PAGE) {
        rc = read_dictionary(c, &page, err);
    } else if (page.type == DATA_PAGE || page.type == DATA_PAGE_V2) {
        if (page.n < 0 || page.n > c->left) return damaged(c, "the number of values of a page", err);
        if (!supported(page.encoding))
            return err_set(err, "%s: column %s: the encoding %s is not read: write it with another one", c->path,
                           c->name, parquet_encoding_name(page.encoding));
        rc = page.type == DATA_PAGE ? begin_v1(c, &page, err) : begin_v2(c, &page, err);
        c->n_page = page.n;
        c->left -= page.n;
    } else if (page.type != INDEX_PAGE) {
        return damaged(c, "a page of an unknown kind", err);
    }
    c->p += page.packed;
    return rc;
}

/* ---- entries */

static bool next_level(struct parquet_runs *runs, int max, int *level)
{
    uint32_t value = 0;
    if (max && (!parquet_runs_next(runs, &value) || value > (uint32_t)max)) return false;
    *level = (int)value;
    return true;
}

int parquet_column_peek(struct parquet_column *c, struct err *err)
{
    if (c->given) return 1;
    while (!c->n_page) {
        if (!c->left) return 0;
        if (next_page(c, err)) return -1;
    }
    if (!next_level(&c->reps, c->max_rep, &c->rep) || !next_level(&c->defs, c->max_def, &c->def))
        return damaged(c, "the levels of a page", err);
    if (c->def == c->max_def && !parquet_values_next(&c->values, &c->value))
        return damaged(c, "the values of a page", err);
    c->n_page--;
    c->given = true;
    return 1;
}

/* Finds the codec by its number in the file. */
static int find_codec(struct parquet_column *c, int64_t codec, struct err *err)
{
    static const char *const names[] = {"UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4_RAW"};
    switch (codec) {
    case 0: c->codec = CODEC_NONE; return 0;
    case 1: c->codec = CODEC_SNAPPY; return 0;
    case 2: c->codec = CODEC_GZIP; return 0;
    case 4:
        c->codec = CODEC_BROTLI;
        if (brotli_built()) return 0;
        return err_set(err,
                       "%s: column %s: the codec is BROTLI, and this build is without libbrotlidec: apt-get install "
                       "libbrotli-dev, then build again; or write it with snappy, gzip, zstd or LZ4_RAW",
                       c->path, c->name);
    case 6: c->codec = CODEC_ZSTD; return 0;
    case 7: c->codec = CODEC_LZ4; return 0;
    default: break;
    }
    return err_set(err, "%s: column %s: the codec %s is not read: write it with snappy, gzip, zstd, BROTLI or LZ4_RAW",
                   c->path, c->name, codec > 0 && codec < MT_LEN(names) ? names[codec] : "of an unknown number");
}

int parquet_column_open(struct parquet_column *c, const struct file_map *map, const struct parquet_chunk *chunk,
                        struct err *err)
{
    const int64_t begin =
        chunk->dictionary_page > 0 ? MT_MIN(chunk->dictionary_page, chunk->data_page) : chunk->data_page;
    if (chunk->encrypted) return err_set(err, "%s: column %s is encrypted", c->path, c->name);
    if (chunk->elsewhere) return err_set(err, "%s: column %s is in another file", c->path, c->name);
    if (find_codec(c, chunk->codec, err)) return -1;
    if (chunk->type != (int64_t)c->type || chunk->n_values < 0 || begin < 4 || chunk->bytes < 0 ||
        begin > map->size - chunk->bytes)
        return damaged(c, "its place", err);
    c->p = map->data + begin;
    c->end = c->p + chunk->bytes;
    c->left = chunk->n_values;
    c->n_page = 0;
    c->given = false;
    c->values.type = c->type;
    c->values.length = c->length;
    c->values.dictionary = NULL;
    c->values.n_dictionary = 0;
    return 0;
}

void parquet_column_free(struct parquet_column *c)
{
    mem_free(c->page);
    mem_free(c->dict);
    mem_free(c->words);
    parquet_values_free(&c->values);
    *c = (struct parquet_column){0};
}

/* parquet_values.c - the encodings of parquet (github.com/apache/parquet-format, Encodings.md). All numbers are little
 * endian. */
#include "data/source/parquet_values.h"

#include <string.h>

#include "data/source/thrift.h"

const char *parquet_encoding_name(int64_t encoding)
{
    static const char *const names[] = {
        "PLAIN",          "GROUP_VAR_INT",       "PLAIN_DICTIONARY",        "RLE",
        "BIT_PACKED",     "DELTA_BINARY_PACKED", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY",
        "RLE_DICTIONARY", "BYTE_STREAM_SPLIT"};
    return encoding >= 0 && encoding < MT_LEN(names) ? names[encoding] : "unknown";
}

/* ---- runs */

static bool begin_run(struct parquet_runs *r)
{
    bool bad = false;
    const uint64_t head = thrift_varint(&r->p, r->end, &bad);
    if (bad || head >> 1 == 0 || head >> 1 > INT32_MAX) return false;
    r->packed = head & 1;
    r->left = (int64_t)(head >> 1) * (r->packed ? 8 : 1);
    r->bit = 0;
    if (r->packed) return true;
    const int bytes = (r->width + 7) / 8;
    if (r->end - r->p < bytes) return false;
    r->value = 0;
    for (int i = 0; i < bytes; i++) r->value |= (uint32_t)*r->p++ << 8 * i;
    return true;
}

/* A number of `width` bits from *bit of *p on; width is at most 64. */
static bool take_bits(const uint8_t **p, const uint8_t *end, int *bit, int width, uint64_t *value)
{
    if ((int64_t)(end - *p) * 8 - *bit < width) return false;
    *value = 0;
    for (int got = 0; got < width;) {
        const int n = MT_MIN(8 - *bit, width - got);
        *value |= (uint64_t)(**p >> *bit & ((1 << n) - 1)) << got;
        got += n;
        *bit += n;
        if (*bit == 8) {
            *bit = 0;
            ++*p;
        }
    }
    return true;
}

bool parquet_runs_next(struct parquet_runs *r, uint32_t *value)
{
    uint64_t bits;
    if (!r->left && !begin_run(r)) return false;
    r->left--;
    if (!r->packed) {
        *value = r->value;
        return true;
    }
    if (!take_bits(&r->p, r->end, &r->bit, r->width, &bits)) return false;
    *value = (uint32_t)bits;
    return true;
}

/* ---- deltas */

/* Decodes up to `most` numbers into *numbers and moves *p past them; their count, or -1. */
static int64_t read_deltas(int64_t **numbers, const uint8_t **p, const uint8_t *end, int64_t most)
{
    bool bad = false;
    const uint64_t block = thrift_varint(p, end, &bad), minis = thrift_varint(p, end, &bad),
                   count = thrift_varint(p, end, &bad);
    uint64_t last = (uint64_t)thrift_zigzag(thrift_varint(p, end, &bad));
    if (bad || !minis || minis > 4096 || !block || block > 1 << 24 || block % minis || count > (uint64_t)most)
        return -1;
    int64_t *to = mem_array(MT_MAX((int64_t)count, 1), sizeof(*to)), n = 0;
    mem_free(*numbers);
    *numbers = to;
    if (count) to[n++] = (int64_t)last;
    while (n < (int64_t)count) {
        const uint64_t least = (uint64_t)thrift_zigzag(thrift_varint(p, end, &bad));
        const uint8_t *widths = *p;
        if (bad || end - *p < (ptrdiff_t)minis) return -1;
        *p += minis;
        for (uint64_t m = 0; m < minis && n < (int64_t)count; m++) {
            const uint64_t per = block / minis, bytes = per * widths[m] / 8;
            const uint8_t *q = *p;
            int bit = 0;
            if (widths[m] > 64 || bytes > (uint64_t)(end - *p)) return -1;
            for (uint64_t i = 0; i < per && n < (int64_t)count; i++) {
                uint64_t delta;
                if (!take_bits(&q, end, &bit, widths[m], &delta)) return -1;
                last += least + delta;
                to[n++] = (int64_t)last;
            }
            *p += bytes;
        }
    }
    return n;
}

static bool begin_delta(struct parquet_values *v, int64_t n)
{
    const bool bytes = v->encoding != PARQUET_DELTA, joined = v->encoding == PARQUET_DELTA_BYTES;
    v->n_joined = 0;
    if (!bytes || joined) v->n_numbers = read_deltas(&v->numbers, &v->p, v->end, n);
    if (bytes) v->n_lengths = read_deltas(&v->lengths, &v->p, v->end, n);
    return v->n_numbers >= 0 && v->n_lengths >= 0 && (!joined || v->n_numbers == v->n_lengths);
}

static bool take_bytes(struct parquet_values *v, int64_t n, struct parquet_value *value)
{
    if (n < 0 || n > v->end - v->p) return false;
    value->bytes = v->p;
    value->size = n;
    v->p += n;
    return true;
}

static bool next_delta(struct parquet_values *v, struct parquet_value *value)
{
    const int64_t i = v->at++;
    if (v->encoding == PARQUET_DELTA) {
        if (i >= v->n_numbers) return false;
        value->i = v->type == PARQUET_INT32 ? (int32_t)v->numbers[i] : v->numbers[i];
        return true;
    }
    if (i >= v->n_lengths || !take_bytes(v, v->lengths[i], value)) return false;
    if (v->encoding == PARQUET_DELTA_LENGTH) return true;
    const int64_t prefix = v->numbers[i];
    if (prefix < 0 || prefix > v->n_joined || value->size > ((int64_t)1 << 30) - prefix) return false;
    v->joined = mem_reserve(v->joined, &v->cap_joined, prefix + value->size + 1, 1);
    memcpy(v->joined + prefix, value->bytes, (size_t)value->size);
    v->n_joined = prefix + value->size;
    value->bytes = v->joined;
    value->size = v->n_joined;
    return v->type != PARQUET_FIXED || value->size == v->length;
}

/* ---- plain */

static bool take(struct parquet_values *v, void *to, int64_t n)
{
    if (n > v->end - v->p) return false;
    memcpy(to, v->p, (size_t)n);
    v->p += n;
    return true;
}

static bool next_plain(struct parquet_values *v, struct parquet_value *value)
{
    uint64_t bits;
    int32_t i;
    float f;
    switch (v->type) {
    case PARQUET_BOOLEAN:
        if (!take_bits(&v->p, v->end, &v->bit, 1, &bits)) return false;
        value->i = (int64_t)bits;
        return true;
    case PARQUET_INT32:
        if (!take(v, &i, sizeof(i))) return false;
        value->i = i;
        return true;
    case PARQUET_INT64: return take(v, &value->i, sizeof(value->i));
    case PARQUET_INT96: return take_bytes(v, 12, value);
    case PARQUET_FLOAT:
        if (!take(v, &f, sizeof(f))) return false;
        value->f = f;
        return true;
    case PARQUET_DOUBLE: return take(v, &value->f, sizeof(value->f));
    case PARQUET_BYTES: return take(v, &i, sizeof(i)) && take_bytes(v, i, value);
    case PARQUET_FIXED: return take_bytes(v, v->length, value);
    }
    return false;
}

/* ---- bytes apart */

/* Bytes of a value; 0: of several lengths, or a bit. */
static int64_t width_of(const struct parquet_values *v)
{
    switch (v->type) {
    case PARQUET_INT32:
    case PARQUET_FLOAT: return 4;
    case PARQUET_INT64:
    case PARQUET_DOUBLE: return 8;
    case PARQUET_FIXED: return v->length;
    case PARQUET_BOOLEAN:
    case PARQUET_INT96:
    case PARQUET_BYTES: break;
    }
    return 0;
}

/* Nulls have no value, so the number of values follows from the bytes. */
static bool begin_split(struct parquet_values *v)
{
    const int64_t width = width_of(v), bytes = v->end - v->p;
    if (width < 1 || bytes % width) return false;
    v->n_split = bytes / width;
    v->joined = mem_reserve(v->joined, &v->cap_joined, width, 1);
    return true;
}

/* Reads the next value, and puts its bytes together as PLAIN has them. */
static bool next_split(struct parquet_values *v, struct parquet_value *value)
{
    const int64_t width = width_of(v), i = v->at++;
    struct parquet_values plain = {
        .type = v->type, .length = v->length, .p = v->joined, .end = v->joined + width, .encoding = PARQUET_PLAIN};
    if (i >= v->n_split) return false;
    for (int64_t b = 0; b < width; b++) v->joined[b] = v->p[b * v->n_split + i];
    return next_plain(&plain, value);
}

/* ---- any */

bool parquet_values_begin(struct parquet_values *v, int64_t encoding, const uint8_t *p, const uint8_t *end, int64_t n)
{
    const bool bytes = v->type == PARQUET_BYTES;
    v->p = p;
    v->end = end;
    v->bit = 0;
    v->at = v->n_numbers = v->n_lengths = 0;
    v->encoding = encoding;
    v->codes = (struct parquet_runs){0};
    switch (encoding) {
    case PARQUET_PLAIN: return true;
    case PARQUET_PLAIN_DICTIONARY:
    case PARQUET_RLE_DICTIONARY:
        if (p == end) return true; /* all values are null */
        v->codes = (struct parquet_runs){.p = p + 1, .end = end, .width = *p};
        return v->dictionary && *p <= 32;
    case PARQUET_RLE:
        if (v->type != PARQUET_BOOLEAN || end - p < 4) return false;
        v->codes = (struct parquet_runs){.p = p + 4, .end = end, .width = 1};
        return true;
    case PARQUET_DELTA: return (v->type == PARQUET_INT32 || v->type == PARQUET_INT64) && begin_delta(v, n);
    case PARQUET_DELTA_LENGTH: return bytes && begin_delta(v, n);
    case PARQUET_BYTE_SPLIT: return begin_split(v);
    case PARQUET_DELTA_BYTES: return (bytes || v->type == PARQUET_FIXED) && begin_delta(v, n);
    default: return false;
    }
}

bool parquet_values_next(struct parquet_values *v, struct parquet_value *value)
{
    uint32_t code;
    switch (v->encoding) {
    case PARQUET_PLAIN: return next_plain(v, value);
    case PARQUET_RLE:
        if (!parquet_runs_next(&v->codes, &code)) return false;
        value->i = code;
        return true;
    case PARQUET_PLAIN_DICTIONARY:
    case PARQUET_RLE_DICTIONARY:
        if (!parquet_runs_next(&v->codes, &code) || code >= v->n_dictionary) return false;
        *value = v->dictionary[code];
        return true;
    case PARQUET_BYTE_SPLIT: return next_split(v, value);
    default: return next_delta(v, value);
    }
}

void parquet_values_free(struct parquet_values *v)
{
    mem_free(v->numbers);
    mem_free(v->lengths);
    mem_free(v->joined);
    *v = (struct parquet_values){0};
}

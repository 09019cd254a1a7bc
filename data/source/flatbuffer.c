/* flatbuffer.c - see flatbuffer.h. A table begins with the distance back to its list of offsets: the size of the list
 * and of the table in 2 bytes each, then 2 bytes for each field, 0 if absent. */
#include "data/source/flatbuffer.h"

#include <string.h>

/* The little-endian number of `bytes` bytes at a place, with its sign; 0 outside. */
static int64_t load(const struct flatbuffer *f, int64_t place, int bytes)
{
    uint64_t x = 0;
    if (place < 0 || place > f->size - bytes) return 0;
    memcpy(&x, f->data + place, (size_t)bytes);
    return bytes == 8 ? (int64_t)x : (int64_t)(x << (64 - 8 * bytes)) >> (64 - 8 * bytes);
}

static int64_t load_unsigned(const struct flatbuffer *f, int64_t place, int bytes)
{
    return load(f, place, bytes) & (((int64_t)1 << 8 * bytes) - 1);
}

/* Where the offset at a place leads. */
static int64_t follow(const struct flatbuffer *f, int64_t place)
{
    const int64_t distance = place > 0 ? load_unsigned(f, place, 4) : 0;
    return distance && place + distance <= f->size - 4 ? place + distance : 0;
}

static int64_t field_place(const struct flatbuffer *f, int64_t table, int field)
{
    if (table <= 0) return 0;
    const int64_t list = table - load(f, table, 4);
    if (list < 0 || list > f->size - 4 || 6 + 2 * field > load_unsigned(f, list, 2)) return 0;
    const int64_t offset = load_unsigned(f, list + 4 + 2 * field, 2);
    return offset && table + offset < f->size ? table + offset : 0;
}

int64_t flatbuffer_root(const struct flatbuffer *f)
{
    const int64_t root = load_unsigned(f, 0, 4);
    return root <= f->size - 4 ? root : 0;
}

int64_t flatbuffer_table(const struct flatbuffer *f, int64_t table, int field)
{
    return follow(f, field_place(f, table, field));
}

int64_t flatbuffer_vector(const struct flatbuffer *f, int64_t table, int field, int64_t bytes, int64_t *n)
{
    const int64_t at = flatbuffer_table(f, table, field);
    *n = at ? load_unsigned(f, at, 4) : 0;
    if (at && *n <= (f->size - at - 4) / bytes) return at + 4;
    *n = 0;
    return 0;
}

int64_t flatbuffer_int(const struct flatbuffer *f, int64_t table, int field, int bytes, int64_t fallback)
{
    const int64_t place = field_place(f, table, field);
    return place && place <= f->size - bytes ? load(f, place, bytes) : fallback;
}

int64_t flatbuffer_item(const struct flatbuffer *f, int64_t vector, int64_t i) { return follow(f, vector + 4 * i); }

int64_t flatbuffer_i64_at(const struct flatbuffer *f, int64_t place) { return load(f, place, 8); }

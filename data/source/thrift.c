/* thrift.c - see thrift.h. */
#include "data/source/thrift.h"

#define MAX_DEPTH 32

uint64_t thrift_varint(const uint8_t **p, const uint8_t *end, bool *bad)
{
    uint64_t x = 0;
    for (int shift = 0; shift < 64 && *p < end; shift += 7) {
        const uint8_t byte = *(*p)++;
        x |= (uint64_t)(byte & 127) << shift;
        if (!(byte & 128)) return x;
    }
    *bad = true;
    return 0;
}

static uint64_t varint(struct thrift *t)
{
    const uint64_t x = thrift_varint(&t->p, t->end, &t->bad);
    if (t->bad) t->p = t->end;
    return x;
}

static void fail(struct thrift *t)
{
    t->bad = true;
    t->p = t->end;
}

static uint8_t byte(struct thrift *t)
{
    if (t->p < t->end) return *t->p++;
    t->bad = true;
    return 0;
}

bool thrift_field(struct thrift *t, int64_t *id, enum thrift_type *type)
{
    const uint8_t head = byte(t);
    *type = (enum thrift_type)(head & 15);
    if (*type == THRIFT_STOP || t->bad) return false;
    *id = head >> 4 ? *id + (head >> 4) : thrift_zigzag(varint(t));
    if (*type > THRIFT_STRUCT || *id < 1 || *id > INT16_MAX) fail(t);
    return !t->bad;
}

int64_t thrift_int(struct thrift *t, enum thrift_type type)
{
    if (type == THRIFT_BYTE) return (int8_t)byte(t);
    if (type < THRIFT_I16 || type > THRIFT_I64) fail(t);
    return thrift_zigzag(varint(t));
}

bool thrift_bool(struct thrift *t, enum thrift_type type)
{
    if (type != THRIFT_TRUE && type != THRIFT_FALSE) fail(t);
    return type == THRIFT_TRUE;
}

const uint8_t *thrift_bytes(struct thrift *t, enum thrift_type type, int64_t *size)
{
    if (type != THRIFT_BINARY) fail(t);
    const uint64_t n = varint(t);
    const uint8_t *bytes = t->p;
    if (n > (uint64_t)(t->end - t->p)) fail(t);
    *size = t->bad ? 0 : (int64_t)n;
    t->p += *size;
    return bytes;
}

bool thrift_struct(struct thrift *t, enum thrift_type type)
{
    if (type != THRIFT_STRUCT) fail(t);
    return !t->bad;
}

int64_t thrift_list(struct thrift *t, enum thrift_type type, enum thrift_type *of)
{
    if (type != THRIFT_LIST && type != THRIFT_SET) fail(t);
    const uint8_t head = byte(t);
    const uint64_t n = head >> 4 == 15 ? varint(t) : head >> 4;
    *of = (enum thrift_type)(head & 15);
    if (n > (uint64_t)(t->end - t->p) || *of == THRIFT_STOP || *of > THRIFT_STRUCT) fail(t); /* an item has a byte */
    return t->bad ? 0 : (int64_t)n;
}

static void skip_map(struct thrift *t)
{
    const uint64_t n = varint(t);
    const uint8_t types = n ? byte(t) : 0;
    if (n > (uint64_t)(t->end - t->p)) fail(t);
    for (uint64_t i = 0; i < n && !t->bad; i++) {
        thrift_skip(t, (enum thrift_type)(types >> 4));
        thrift_skip(t, (enum thrift_type)(types & 15));
    }
}

void thrift_skip(struct thrift *t, enum thrift_type type)
{
    enum thrift_type of;
    int64_t n, id = 0;
    if (t->depth >= MAX_DEPTH) fail(t);
    if (t->bad) return;
    t->depth++;
    switch (type) {
    case THRIFT_TRUE:
    case THRIFT_FALSE: break;
    case THRIFT_BYTE: (void)byte(t); break;
    case THRIFT_I16:
    case THRIFT_I32:
    case THRIFT_I64: (void)varint(t); break;
    case THRIFT_DOUBLE:
        if (t->end - t->p < 8) fail(t);
        if (!t->bad) t->p += 8;
        break;
    case THRIFT_BINARY: (void)thrift_bytes(t, type, &n); break;
    case THRIFT_LIST:
    case THRIFT_SET:
        n = thrift_list(t, type, &of);
        for (int64_t i = 0; i < n && !t->bad; i++)
            if (of == THRIFT_TRUE || of == THRIFT_FALSE) /* a byte each in a list */
                (void)byte(t);
            else
                thrift_skip(t, of);
        break;
    case THRIFT_MAP: skip_map(t); break;
    case THRIFT_STRUCT:
        while (thrift_field(t, &id, &type)) thrift_skip(t, type);
        break;
    case THRIFT_STOP: fail(t); break;
    }
    t->depth--;
}

/* thrift.h - reads structs in Thrift's compact protocol, in which parquet files hold their metadata. */
#ifndef MT_THRIFT_H
#define MT_THRIFT_H

#include "kernels/base.h"

enum thrift_type {
    THRIFT_STOP,
    THRIFT_TRUE,
    THRIFT_FALSE,
    THRIFT_BYTE,
    THRIFT_I16,
    THRIFT_I32,
    THRIFT_I64,
    THRIFT_DOUBLE,
    THRIFT_BINARY,
    THRIFT_LIST,
    THRIFT_SET,
    THRIFT_MAP,
    THRIFT_STRUCT
};

/* The bytes from p to end. After a fault `bad` is set, and everything read is zero or empty. */
struct thrift {
    const uint8_t *p, *end;
    bool bad;
    int depth;
};

/* Reads the next field of a struct: its number in *id, which is 0 before the first, and its type. False: the end, or a
 * fault. The caller reads or skips its value. */
bool thrift_field(struct thrift *t, int64_t *id, enum thrift_type *type);
void thrift_skip(struct thrift *t, enum thrift_type type);
/* The value of a field of this type; a fault when it has another type. */
int64_t thrift_int(struct thrift *t, enum thrift_type type); /* of any width */
bool thrift_bool(struct thrift *t, enum thrift_type type);
const uint8_t *thrift_bytes(struct thrift *t, enum thrift_type type, int64_t *size);
bool thrift_struct(struct thrift *t, enum thrift_type type);                        /* the struct's fields follow */
int64_t thrift_list(struct thrift *t, enum thrift_type type, enum thrift_type *of); /* so many items follow */

uint64_t thrift_varint(const uint8_t **p, const uint8_t *end, bool *bad); /* of 7 bits a byte, lowest first */

static inline int64_t thrift_zigzag(uint64_t x) { return (int64_t)(x >> 1) ^ -(int64_t)(x & 1); }

#endif

/* flatbuffer.h - reads tables in the flatbuffers format, in which Arrow files hold their metadata. */
#ifndef MT_FLATBUFFER_H
#define MT_FLATBUFFER_H

#include "kernels/base.h"

/* A place is an offset into data[size]; 0: absent, or outside, or of an absent table. Every read checks its bounds. */
struct flatbuffer {
    const uint8_t *data;
    int64_t size;
};

int64_t flatbuffer_root(const struct flatbuffer *f);
/* Field number `field` of the table at `table`: a table; a vector of *n items of `bytes` each, as the place of the
 * first; a number of 1, 2, 4 or 8 bytes, or `fallback` if absent. */
int64_t flatbuffer_table(const struct flatbuffer *f, int64_t table, int field);
int64_t flatbuffer_vector(const struct flatbuffer *f, int64_t table, int field, int64_t bytes, int64_t *n);
int64_t flatbuffer_int(const struct flatbuffer *f, int64_t table, int field, int bytes, int64_t fallback);
/* Item i of a vector of tables; an 8-byte number at a place inside a vector. */
int64_t flatbuffer_item(const struct flatbuffer *f, int64_t vector, int64_t i);
int64_t flatbuffer_i64_at(const struct flatbuffer *f, int64_t place);

#endif

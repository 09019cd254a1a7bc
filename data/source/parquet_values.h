/* parquet_values.h - the encodings of parquet: levels and values of a page, one after the other. */
#ifndef MT_PARQUET_VALUES_H
#define MT_PARQUET_VALUES_H

#include "kernels/base.h"

enum parquet_type {
    PARQUET_BOOLEAN,
    PARQUET_INT32,
    PARQUET_INT64,
    PARQUET_INT96,
    PARQUET_FLOAT,
    PARQUET_DOUBLE,
    PARQUET_BYTES,
    PARQUET_FIXED /* bytes of one length */
};

enum parquet_encoding {
    PARQUET_PLAIN = 0,
    PARQUET_PLAIN_DICTIONARY = 2,
    PARQUET_RLE = 3,
    PARQUET_DELTA = 5,
    PARQUET_DELTA_LENGTH = 6,
    PARQUET_DELTA_BYTES = 7,
    PARQUET_RLE_DICTIONARY = 8,
    PARQUET_BYTE_SPLIT = 9 /* byte 0 of every value, then byte 1, ... */
};
const char *parquet_encoding_name(int64_t encoding);

struct parquet_value {
    int64_t i; /* of integers and booleans */
    double f;
    const uint8_t *bytes; /* [size] valid until the next page; of DELTA_BYTES and BYTE_SPLIT until the next value */
    int64_t size;
};

/* Runs of equal numbers, and numbers of `width` bits in groups of eight. */
struct parquet_runs {
    const uint8_t *p, *end;
    int width;
    int64_t left; /* of the run */
    bool packed;
    uint32_t value; /* of a run */
    int bit;        /* of *p, of packed numbers */
};
bool parquet_runs_next(struct parquet_runs *r, uint32_t *value); /* false: no more, or damaged */

struct parquet_values {
    enum parquet_type type;
    int64_t length; /* of FIXED */
    int64_t encoding;
    const uint8_t *p, *end;
    int bit;                                /* of *p, of plain booleans */
    struct parquet_runs codes;              /* of a dictionary, or booleans */
    const struct parquet_value *dictionary; /* [n_dictionary] */
    int64_t n_dictionary;
    int64_t *numbers, *lengths; /* [n_numbers] decoded deltas: values, or lengths of prefixes; lengths of bytes */
    int64_t n_numbers, n_lengths, at, n_split;
    uint8_t *joined; /* [cap_joined] the last value of DELTA_BYTES or BYTE_SPLIT */
    int64_t n_joined, cap_joined;
};
/* Begins the values of a page, at most n, in bytes p to end, after the dictionary is set. False: the type does not have
 * this encoding, or the bytes are damaged. */
bool parquet_values_begin(struct parquet_values *v, int64_t encoding, const uint8_t *p, const uint8_t *end, int64_t n);
bool parquet_values_next(struct parquet_values *v, struct parquet_value *value); /* false: no more, or damaged */
void parquet_values_free(struct parquet_values *v);

#endif

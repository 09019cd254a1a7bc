/* gguf.h - GGUF version 3, the container of llama.cpp: written in one pass, read mapped. */
#ifndef MT_GGUF_H
#define MT_GGUF_H

#include "data/file/file.h"

/* The part of the format that moetrain reads and writes: as metadata strings, u32, f32, flags and arrays of strings,
 * i32 and f32; tensors of 1 to 4 axes in these types. */
enum gguf_type { GGUF_U32 = 4, GGUF_I32 = 5, GGUF_F32 = 6, GGUF_BOOL = 7, GGUF_STRING = 8, GGUF_ARRAY = 9 };
enum ggml_type { GGML_F32 = 0, GGML_F16 = 1, GGML_Q4_0 = 2, GGML_Q8_0 = 8, GGML_MXFP4 = 39 };
struct ggml_layout {
    const char *name;
    int block, bytes; /* values and bytes of a block; blocks divide rows */
};
const struct ggml_layout *ggml_layout(enum ggml_type type); /* NULL: another type */

struct gguf_value {
    const char *key;
    enum gguf_type type;
    uint32_t u32; /* a flag too */
    float f32;
    const char *text;
    enum gguf_type of; /* of the n elements of an array, whose values are not kept when a file is read */
    int64_t n;
    const void *array; /* const char *[n], int32_t [n] or float [n] */
};

/* Row-major like every tensor here, shape[0] the slowest; the file stores the axes in reverse order. */
struct gguf_tensor {
    const char *name; /* at most 63 bytes */
    int ndim;
    int64_t shape[4];
    enum ggml_type type;
    const void *data; /* as read: aligned, mapped */
};

struct gguf {
    struct file_map map;
    int64_t n_values, n_tensors;
    struct gguf_value *values;
    struct gguf_tensor *tensors;
    char **strings; /* [n_strings] memory that keys and values point to */
    int64_t n_strings;
};

/* Takes only valid files (version, types, sizes, padding, unique names, to the last byte). */
int gguf_open(struct gguf *g, const char *path, struct err *err) MT_CHECK;
void gguf_close(struct gguf *g);                                               /* zeroed is valid */
const struct gguf_value *gguf_value(const struct gguf *g, const char *key);    /* NULL: missing */
const struct gguf_tensor *gguf_tensor(const struct gguf *g, const char *name); /* NULL: missing */

/* Writes path in one pass. fill(arg, i, out) makes the values of tensor i, in the caller's order, one tensor in memory
 * at a time; `data` is not used. */
typedef void gguf_fill_fn(void *arg, int64_t i, float *out);
int gguf_write(const char *path, const struct gguf_value *values, int64_t n_values, const struct gguf_tensor *tensors,
               int64_t n_tensors, gguf_fill_fn *fill, void *arg, struct err *err) MT_CHECK;
int64_t gguf_tensor_count(const struct gguf_tensor *t); /* elements; -1: does not fit 64 bits */
int64_t gguf_tensor_bytes(const struct gguf_tensor *t); /* -1: also when its blocks do not divide the rows */

/* gguf_write in pieces: put appends bytes of the tensors in their order, any number at a time. Every open needs a
 * close: with keep, after all bytes, the file gets its name; without keep it is deleted. */
struct gguf_writer {
    struct file_writer file;
    const struct gguf_tensor *tensors;
    int64_t n, at, done; /* tensors; index of the current one, and its bytes so far */
};
int gguf_writer_open(struct gguf_writer *w, const char *path, const struct gguf_value *values, int64_t n_values,
                     const struct gguf_tensor *tensors, int64_t n_tensors, struct err *err) MT_CHECK;
int gguf_writer_put(struct gguf_writer *w, const void *data, int64_t bytes, struct err *err) MT_CHECK;
int gguf_writer_close(struct gguf_writer *w, bool keep, struct err *err) MT_CHECK;

#endif

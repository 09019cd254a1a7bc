/* gguf.h - GGUF version 3, the container of llama.cpp: written in one pass, read mapped. */
#ifndef MT_GGUF_H
#define MT_GGUF_H

#include "data/file.h"

/* What this program reads and writes of the format: strings, u32 and f32 as metadata; F32 tensors of 1 to 4 axes. */
enum gguf_type { GGUF_U32 = 4, GGUF_F32 = 6, GGUF_STRING = 8 };

struct gguf_value {
    const char *key;
    enum gguf_type type;
    uint32_t u32;
    float f32;
    const char *text;
};

/* Row-major like every tensor here, shape[0] the slowest; the file has the axes the other way round. */
struct gguf_tensor {
    const char *name; /* at most 63 bytes */
    int rank;
    int64_t shape[4];
    const float *data; /* as read: aligned, mapped */
};

struct gguf {
    struct file_map map;
    int64_t n_values, n_tensors;
    struct gguf_value *values;
    struct gguf_tensor *tensors;
    char **strings; /* [n_strings] that the two point to */
    int64_t n_strings;
};

/* What is not such a file, to the last byte (version, types, sizes, padding, names twice), is refused with the reason.
 */
int gguf_open(struct gguf *g, const char *path, struct err *err) MT_CHECK;
void gguf_close(struct gguf *g);                                               /* zeroed is fine */
const struct gguf_value *gguf_value(const struct gguf *g, const char *key);    /* NULL: not there */
const struct gguf_tensor *gguf_tensor(const struct gguf *g, const char *name); /* likewise */

/* Writes path in one step. fill(arg, i, out) makes the values of tensor i when its turn comes: the caller's order, one
 * tensor in memory at a time; `data` is not looked at. */
typedef void gguf_fill_fn(void *arg, int64_t i, float *out);
int gguf_write(const char *path, const struct gguf_value *values, int64_t n_values, const struct gguf_tensor *tensors,
               int64_t n_tensors, gguf_fill_fn *fill, void *arg, struct err *err) MT_CHECK;
int64_t gguf_tensor_count(const struct gguf_tensor *t); /* elements; -1: more than 64 bits count */

#endif

/* safetensors.h - read (mapped) and write safetensors: one file, or a directory of shards with an index. */
#ifndef MT_SAFETENSORS_H
#define MT_SAFETENSORS_H

#include "data/file.h"
#include "kernels/tensor.h"

/* One tensor of a file; strings and bytes live as long as the struct safetensors. Every dtype that the format knows
 * parses; dtype is DT_NONE for those this program has no name for (st_dtype still tells). */
struct st_tensor {
    const char *name;
    const char *st_dtype; /* "BF16", "U8", "F8_E4M3", ... as written in the file */
    enum dtype dtype;
    int rank;
    int64_t shape[8];
    const uint8_t *data; /* mapped; may be unaligned: read with memcpy */
    int64_t bytes;
    int shard;      /* which file */
    int64_t offset; /* of data in that file, for file_map_drop */
};

struct safetensors {
    bool headers; /* the shards may end behind their header: data of tensors must not be read */
    int n_shards;
    char **shard_names;    /* file names, relative to the directory */
    struct file_map *maps; /* [n_shards] */
    int64_t n_tensors;
    struct st_tensor *tensors; /* sorted by name */
    struct json_doc **docs;    /* headers, own the names */
};

/* path: a .safetensors file, or a directory with model.safetensors.index.json or model.safetensors. What is not
 * exactly a safetensors file (holes, overlaps, duplicates, trailing bytes, a shard that the index does not explain) is
 * refused, naming file and tensor. */
int safetensors_open(struct safetensors *st, const char *path, struct err *err) MT_CHECK;
/* The same where shards may end behind their header, as hub_model_headers leaves them. */
int safetensors_open_headers(struct safetensors *st, const char *path, struct err *err) MT_CHECK;
void safetensors_close(struct safetensors *st);
const struct st_tensor *safetensors_find(const struct safetensors *st, const char *name); /* NULL: not there */
/* The nearest existing name, for "did you mean"; NULL when none is near. */
const char *safetensors_nearest(const struct safetensors *st, const char *name);
/* The tensor's bytes will not be read again. A struct safetensors made in memory has no shards: nothing happens. */
void safetensors_drop(const struct safetensors *st, const struct st_tensor *t);
int64_t safetensors_bytes(const struct safetensors *st); /* file bytes of all shards */
/* Tells checkpoints apart without reading their data: names, sizes, times of change and headers of the shards. */
uint64_t safetensors_fingerprint(const struct safetensors *st);
/* Value of `key` in the first shard's __metadata__, or NULL. */
const char *safetensors_metadata(const struct safetensors *st, const char *key);

/* Writing: tensors in any order, names unique; the file is laid out by dtype rank descending, then name, and written
 * atomically. */
struct st_entry {
    const char *name;
    enum dtype dtype; /* F32, F64, BF16, F16, U8, I32, I64 */
    int rank;
    int64_t shape[8];
    const void *data;
};
int safetensors_write(const char *path, const struct st_entry *entries, int64_t n, struct err *err) MT_CHECK;
/* For who writes the tensors himself: sorts the entries into the file's order, in which their bytes lie end to end
 * behind *head, *size bytes to be freed with mem_free. `data` is not looked at. */
int safetensors_head(struct st_entry *entries, int64_t n, char **head, int64_t *size, struct err *err) MT_CHECK;
int64_t safetensors_entry_bytes(const struct st_entry *e); /* -1: more than 64 bits can count */

#endif

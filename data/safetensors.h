/* safetensors.h - read (mapped) and write safetensors: one file, or a directory of shards with an index. */
#ifndef MT_SAFETENSORS_H
#define MT_SAFETENSORS_H

#include "data/file/file.h"
#include "kernels/tensor.h"

/* One tensor of a file; strings and bytes live as long as the struct safetensors. All dtypes of the format are
 * accepted; dtype is DT_NONE for those without an equivalent here, which only st_dtype names. */
struct st_tensor {
    const char *name;
    const char *stored;   /* its name in the file if safetensors_rename changed it, else NULL */
    const char *st_dtype; /* "BF16", "U8", "F8_E4M3", ... as written in the file */
    enum dtype dtype;
    int ndim;
    int64_t shape[8];
    const uint8_t *data; /* mapped; may be unaligned: read with memcpy */
    int64_t bytes;
    int shard;      /* index of its shard */
    int64_t offset; /* of data in that file, for file_map_drop */
};

enum { ST_ENDS = 1024 };
struct safetensors {
    bool headers; /* shards may end after their header: tensor data must not be read */
    int n_shards;
    char **shard_names;    /* file names, relative to the directory */
    struct file_map *maps; /* [n_shards] */
    int64_t n_tensors;
    struct st_tensor *tensors;   /* sorted by name */
    uint64_t ends[ST_ENDS / 64]; /* a bit set of hashes of the names' parts after the last dot, since most lookups find
                                    nothing */
    struct json_doc **docs;      /* [n_shards] parsed headers, or their metadata alone; NULL: without metadata */
    char **names;                /* [n_shards] names that docs do not own */
    int64_t n_missing;
    struct st_missing {
        char *name, *file; /* file: without a directory */
    } * missing;           /* tensors that the index names and no file has, sorted by name */
};

/* Opens path: a .safetensors file, or a directory with model.safetensors.index.json or model.safetensors. A file that
 * is not exactly in the format (gaps, overlaps, duplicates, trailing bytes) is refused; the error names file and
 * tensor. The index decides which file has a tensor; copies in other files are ignored. Tensors that the index names
 * and no file has are in `missing`, an error only for callers that read them. */
int safetensors_open(struct safetensors *st, const char *path, struct err *err) MT_CHECK;
/* safetensors_open for shards that may end after their header, as hub_model_headers writes them. */
int safetensors_open_headers(struct safetensors *st, const char *path, struct err *err) MT_CHECK;
void safetensors_close(struct safetensors *st);
/* Prepares tensors that the caller has set for safetensors_find. */
void safetensors_sort(struct safetensors *st);
const struct st_tensor *safetensors_find(const struct safetensors *st, const char *name); /* NULL: missing */
/* The tensor called name[0..n) + suffix; NULL: missing. */
const struct st_tensor *safetensors_beside(const struct safetensors *st, const char *name, size_t n,
                                           const char *suffix);
/* rename writes a tensor's new name to `to` [size], or returns false to keep the old one. Error: two tensors get one
 * name. */
typedef bool safetensors_rename_fn(char *to, size_t size, const char *name);
int safetensors_rename(struct safetensors *st, safetensors_rename_fn *rename, struct err *err) MT_CHECK;
static inline const char *safetensors_stored(const struct st_tensor *t) { return t->stored ? t->stored : t->name; }
/* Index in st->missing, or -1. */
int64_t safetensors_missing(const struct safetensors *st, const char *name);
/* An error that names the tensor st->missing[i] and its file. */
int safetensors_missing_error(const struct safetensors *st, int64_t i, struct err *err);
/* The most similar existing name, for "did you mean"; NULL when none is similar. */
const char *safetensors_nearest(const struct safetensors *st, const char *name);
/* A value of the first shard's metadata, valid until st is closed; NULL: none. */
const char *safetensors_metadata(const struct safetensors *st, const char *key);
/* Drops the mapped pages of a tensor that will not be read again. Does nothing for a struct safetensors made in memory,
 * without shards. */
void safetensors_drop(const struct safetensors *st, const struct st_tensor *t);
int64_t safetensors_bytes(const struct safetensors *st); /* file bytes of all shards */
/* Identifies a checkpoint but reads little of it: a hash of names, sizes, modification times and headers of the shards,
 * and the first 4 KiB of every tensor. */
uint64_t safetensors_fingerprint(const struct safetensors *st);

/* A tensor to write. Names are unique. The file, written atomically, has the tensors in the order of the format's list
 * of dtypes, last one first, then by name. */
struct st_entry {
    const char *name;
    enum dtype dtype; /* F32, F64, BF16, F16, U8, I32, I64 */
    int ndim;
    int64_t shape[8];
    const void *data;
    const char *st_dtype; /* instead of dtype: any dtype of the format, as in struct st_tensor */
};
int safetensors_write(const char *path, const struct st_entry *entries, int64_t n, struct err *err) MT_CHECK;
/* safetensors_write with additional metadata. */
struct st_note {
    const char *key, *value;
};
int safetensors_write_with(const char *path, const struct st_entry *entries, int64_t n, const struct st_note *notes,
                           int n_note, struct err *err) MT_CHECK;
/* For callers that write the tensors themselves: sorts the entries into the file's order, in which their bytes follow
 * *head without gaps. *head has *size bytes, for mem_free. `data` is not used. */
int safetensors_head(struct st_entry *entries, int64_t n, char **head, int64_t *size, struct err *err) MT_CHECK;
/* safetensors_head with the metadata, if any, of `like`, a file that was read. */
int safetensors_head_like(const struct safetensors *like, struct st_entry *entries, int64_t n, char **head,
                          int64_t *size, struct err *err) MT_CHECK;
enum dtype safetensors_entry_dtype(const struct st_entry *e); /* DT_NONE: st_dtype has no equivalent */
int64_t safetensors_entry_bytes(const struct st_entry *e);    /* -1: does not fit 64 bits */

#endif

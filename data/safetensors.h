/* safetensors.h - read (mapped) and write safetensors: one file, or a directory of shards with an index. */
#ifndef MT_SAFETENSORS_H
#define MT_SAFETENSORS_H

#include "data/file/file.h"
#include "kernels/tensor.h"

/* One tensor of a file; strings and bytes live as long as the struct safetensors. Every dtype of the format is
 * accepted; dtype is DT_NONE for those without an equivalent here (st_dtype names them). */
struct st_tensor {
    const char *name;
    const char *stored;   /* its name in the file where safetensors_rename gave it another, else NULL */
    const char *st_dtype; /* "BF16", "U8", "F8_E4M3", ... as written in the file */
    enum dtype dtype;
    int ndim;
    int64_t shape[8];
    const uint8_t *data; /* mapped; may be unaligned: read with memcpy */
    int64_t bytes;
    int shard;      /* index of its shard */
    int64_t offset; /* offset of data in that file, for file_map_drop */
};

enum { ST_ENDS = 1024 };
struct safetensors {
    bool headers; /* the shards may end after their header: tensor data must not be read */
    int n_shards;
    char **shard_names;    /* file names, relative to the directory */
    struct file_map *maps; /* [n_shards] */
    int64_t n_tensors;
    struct st_tensor *tensors;   /* sorted by name */
    uint64_t ends[ST_ENDS / 64]; /* bits of hashes of the names' parts after the last dot: most lookups find nothing */
    struct json_doc **docs;      /* [n_shards] parsed headers, or their metadata alone; NULL: without metadata */
    char **names;                /* [n_shards] texts of the names that docs do not own */
    int64_t n_missing;
    struct st_missing {
        char *name, *file; /* file: without a directory */
    } * missing;           /* tensors that the index names and no file has, sorted by name */
};

/* Opens path: a .safetensors file, or a directory with model.safetensors.index.json or model.safetensors. A file that
 * is not exactly in the format (gaps, overlaps, duplicates, trailing bytes) is refused; the error names file and
 * tensor. The index decides which file has a tensor; copies in other files are left out. Tensors that the index names
 * and no file has are in `missing`: an error only for callers that read them. */
int safetensors_open(struct safetensors *st, const char *path, struct err *err) MT_CHECK;
/* safetensors_open for shards that may end after their header, as hub_model_headers writes them. */
int safetensors_open_headers(struct safetensors *st, const char *path, struct err *err) MT_CHECK;
void safetensors_close(struct safetensors *st);
/* Of tensors that the caller has set: makes them ready for safetensors_find. */
void safetensors_sort(struct safetensors *st);
const struct st_tensor *safetensors_find(const struct safetensors *st, const char *name); /* NULL: missing */
/* The tensor called name[0..n) + suffix; NULL: missing. */
const struct st_tensor *safetensors_beside(const struct safetensors *st, const char *name, size_t n,
                                           const char *suffix);
/* Gives tensors other names: rename writes the new name of `name` to `to` [size], or returns false to keep the name.
 * Error: two tensors get one name. */
typedef bool safetensors_rename_fn(char *to, size_t size, const char *name);
int safetensors_rename(struct safetensors *st, safetensors_rename_fn *rename, struct err *err) MT_CHECK;
/* The name that the file has. */
static inline const char *safetensors_stored(const struct st_tensor *t) { return t->stored ? t->stored : t->name; }
/* The index of `name` in st->missing; -1: it is not there. */
int64_t safetensors_missing(const struct safetensors *st, const char *name);
/* An error that names a tensor of st->missing and its file. */
int safetensors_missing_error(const struct safetensors *st, int64_t i, struct err *err);
/* The most similar existing name, for "did you mean"; NULL when none is similar. */
const char *safetensors_nearest(const struct safetensors *st, const char *name);
/* The value of a key in the metadata of the first shard; NULL: none. Valid until st is closed. */
const char *safetensors_metadata(const struct safetensors *st, const char *key);
/* Drops the mapped pages of a tensor whose bytes will not be read again. Does nothing for a struct safetensors made in
 * memory, which has no shards. */
void safetensors_drop(const struct safetensors *st, const struct st_tensor *t);
int64_t safetensors_bytes(const struct safetensors *st); /* file bytes of all shards */
/* A hash that identifies a checkpoint and reads little of its data: names, sizes, modification times and headers of the
 * shards, and the first 4 KiB of every tensor. */
uint64_t safetensors_fingerprint(const struct safetensors *st);

/* A tensor to write. A caller may give tensors in any order, with unique names. The file has them by dtype rank
 * descending, then by name, and is written atomically. */
struct st_entry {
    const char *name;
    enum dtype dtype; /* F32, F64, BF16, F16, U8, I32, I64 */
    int ndim;
    int64_t shape[8];
    const void *data;
    const char *st_dtype; /* instead of dtype: any of the format, as in struct st_tensor */
};
int safetensors_write(const char *path, const struct st_entry *entries, int64_t n, struct err *err) MT_CHECK;
/* safetensors_write with more entries of the metadata. */
struct st_note {
    const char *key, *value;
};
int safetensors_write_with(const char *path, const struct st_entry *entries, int64_t n, const struct st_note *notes,
                           int n_note, struct err *err) MT_CHECK;
/* For callers that write the tensors themselves: sorts the entries into the file's order, in which their bytes follow
 * *head without gaps. *head has *size bytes; free it with mem_free. `data` is not used. */
int safetensors_head(struct st_entry *entries, int64_t n, char **head, int64_t *size, struct err *err) MT_CHECK;
/* safetensors_head with the metadata of `like`, a file that was read; without metadata when it has none. */
int safetensors_head_like(const struct safetensors *like, struct st_entry *entries, int64_t n, char **head,
                          int64_t *size, struct err *err) MT_CHECK;
enum dtype safetensors_entry_dtype(const struct st_entry *e); /* DT_NONE: st_dtype has no equivalent */
int64_t safetensors_entry_bytes(const struct st_entry *e);    /* -1: does not fit 64 bits */

#endif

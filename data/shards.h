/* shards.h - writes a checkpoint of one or several safetensors files, the tensors in pieces and in any order. */
#ifndef MT_SHARDS_H
#define MT_SHARDS_H

#include "data/safetensors.h"

struct shard {
    char name[64];
    int64_t first, n; /* of the tensors, in the caller's order */
    int fd;
};

struct shards {
    char dir[MT_PATH];
    int64_t n, bytes;         /* tensors; their bytes */
    struct st_entry *entries; /* owned by the caller; data: not used */
    int64_t *at;              /* [n] where a tensor begins in its file */
    int *in;                  /* [n] index of its file */
    struct shard *shards;
    int n_shards;
};

/* Distributes the entries, in their order, over files of at most `most` bytes (more only for one larger tensor) and
 * creates the files with their headers in dir. The caller owns the entries. */
int shards_open(struct shards *s, const char *dir, struct st_entry *entries, int64_t n, int64_t most,
                struct err *err) MT_CHECK;
/* Writes bytes [at, at + size) of tensor i. */
int shards_put(struct shards *s, int64_t i, int64_t at, const void *data, int64_t size, struct err *err) MT_CHECK;
/* Syncs and closes the files; if there are several, writes model.safetensors.index.json. */
int shards_finish(struct shards *s, struct err *err) MT_CHECK;
void shards_close(struct shards *s); /* zeroed is valid */

#endif

/* shards.h - a checkpoint of one or several safetensors files, whose tensors are written piece by piece in any order.
 */
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
    int64_t n, bytes;         /* tensors; bytes of all of them */
    struct st_entry *entries; /* the caller's; data: not looked at */
    int64_t *at;              /* [n] where a tensor begins in its file */
    int *in;                  /* [n] which file */
    struct shard *shards;
    int n_shards;
};

/* Deals the entries (the caller's, which stay where they are and keep their order) out to files of at most `most`
 * bytes, unless one tensor has more, creates the files with their heads in dir. */
int shards_open(struct shards *s, const char *dir, struct st_entry *entries, int64_t n, int64_t most,
                struct err *err) MT_CHECK;
/* Bytes [at, at + size) of tensor i. */
int shards_put(struct shards *s, int64_t i, int64_t at, const void *data, int64_t size, struct err *err) MT_CHECK;
/* Syncs and closes the files and, when there are several, writes model.safetensors.index.json. */
int shards_finish(struct shards *s, struct err *err) MT_CHECK;
void shards_close(struct shards *s); /* frees; zeroed is fine */

#endif

/* hub_headers.h - a model whose safetensors are not downloaded, but for their headers. */
#ifndef MT_HUB_HEADERS_H
#define MT_HUB_HEADERS_H

#include "data/hub/hub_cache.h"

/* All shards are in the cache: a plan can read them there. */
bool hub_headers_needless(const struct hub_repo *repo, struct hub_file const *const *shards, int64_t n);
/* dir: a folder with links to config.json and the index, which are in the cache, and the shards' first bytes: length
 * and header. What is there of an earlier call is not asked for again. */
int hub_headers(char dir[MT_PATH], const struct hub_repo *repo, struct hub_file const *const *shards, int64_t n,
                struct err *err) MT_CHECK;
/* dir: that folder, when an earlier call filled it. */
bool hub_headers_have(char dir[MT_PATH], const struct hub_repo *repo);

#endif

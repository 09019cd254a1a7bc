/* hub_headers.h - a model in the cache with only the headers of its safetensors. */
#ifndef MT_HUB_HEADERS_H
#define MT_HUB_HEADERS_H

#include "data/hub/hub_cache.h"

/* Whether all shards are in the cache, where a plan can read them. */
bool hub_headers_needless(const struct hub_repo *repo, struct hub_file const *const *shards, int64_t n);
/* Makes a folder for plans, dir, with links to config.json and the index in the cache, and the shards cut after length
 * and header. Headers from an earlier call are not requested again. */
int hub_headers(char dir[MT_PATH], const struct hub_repo *repo, struct hub_file const *const *shards, int64_t n,
                struct err *err) MT_CHECK;
/* dir: the folder of an earlier call of hub_headers that completed it. */
bool hub_headers_have(char dir[MT_PATH], const struct hub_repo *repo);

#endif

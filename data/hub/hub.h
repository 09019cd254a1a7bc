/* hub.h - models and data by their names on huggingface.co, in the cache that its Python library also uses. Missing
 * files are downloaded.
 *
 * The environment variables are the library's: HF_ENDPOINT, HF_TOKEN (or the file HF_TOKEN_PATH, $HF_HOME/token),
 * HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE. Cached files are not requested again. An interrupted download, of this process
 * or another, is resumed. Every file is checked against the hash that the hub lists. */
#ifndef MT_HUB_H
#define MT_HUB_H

#include "kernels/base.h"

/* Sets dir to the directory of the model `path`: path itself, or for hub:OWNER/NAME[@REVISION] the snapshot at this
 * branch, tag or commit. The snapshot has the files that training reads: configuration, tokenizer, chat template,
 * safetensors. Error: the path and `revision` name different revisions, unless `revision` is "main". Errors have the
 * hub's answer and what to do; for a missing path that looks like an id, they give the hub: form.
 *
 * Before it downloads weights, hub_model calls check->look with the directory of the small files, such as config.json;
 * an error of `look` ends the download. For a local path or cached files there may be no call. check may be NULL. */
struct hub_check {
    int (*look)(void *user, const char *dir, struct err *err);
    void *user;
};
int hub_model(char dir[MT_PATH], const char *path, const char *revision, const struct hub_check *check,
              struct err *err) MT_CHECK;
/* hub_model for a plan: downloads only a few kilobytes, the configuration, the index and the headers of the
 * safetensors. Sets *headers if the shards in dir end after their header (safetensors_open_headers). */
int hub_model_headers(char dir[MT_PATH], const char *path, const char *revision, bool *headers,
                      struct err *err) MT_CHECK;
/* The model's name for other programs: OWNER/NAME for hub:OWNER/NAME@REVISION, else the path. */
const char *hub_model_name(char name[MT_PATH], const char *path);

/* Sets id to OWNER/NAME of hub:OWNER/NAME. */
int hub_repository(char *id, size_t n, const char *path, struct err *err) MT_CHECK;

/* Returns the comma-separated `files` with each hub:OWNER/NAME[@REVISION] replaced by its path in the cache, for
 * mem_free. A weight may follow each (dataset.h). The part after the name selects
 * - /FILE: that file, or all matching files if it contains * or ?
 * - :CONFIG/SPLIT or :SPLIT: the rows that the hub's viewer shows (hub_rows.h)
 * - nothing: the only JSONL file; without one, the rows of the only split
 * NULL: an error. */
char *hub_data(const char *files, struct err *err) MT_CHECK;

#endif

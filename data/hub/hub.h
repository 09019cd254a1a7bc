/* hub.h - models and data by the names that huggingface.co gives them, downloaded into the cache that its Python
 * library uses too, or found there.
 *
 * Of the environment, the variables of that library: HF_ENDPOINT, HF_TOKEN (or the file HF_TOKEN_PATH, $HF_HOME/token),
 * HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE. What is in the cache is not asked for again; a download that broke off, in
 * this process or another, goes on where it was; every file is checked against the hash that the hub lists for it. */
#ifndef MT_HUB_H
#define MT_HUB_H

#include "kernels/base.h"

/* dir: the directory of the model `path`, which is path itself or, of hub:OWNER/NAME[@REVISION], the snapshot of that
 * model at a branch, tag or commit, with all that training reads: configuration, tokenizer, chat template, safetensors.
 * A revision in the path and one beside it other than "main" must agree. Errors name what the hub answered and what to
 * do; a path that is missing and looks like an id is answered with the hub's spelling. */
int hub_model(char dir[MT_PATH], const char *path, const char *revision, struct err *err) MT_CHECK;
/* For a plan: configuration, index and the headers of the safetensors alone, kilobytes of a model that is not here.
 * *headers: dir has shards that end behind their header (safetensors_open_headers). */
int hub_model_headers(char dir[MT_PATH], const char *path, const char *revision, bool *headers,
                      struct err *err) MT_CHECK;
/* The name by which other programs know it: of hub:OWNER/NAME@REVISION, OWNER/NAME; else the path. */
const char *hub_model_name(char name[MT_PATH], const char *path);

/* Comma-separated files with every hub:OWNER/NAME[@REVISION] replaced by where it lies in the cache; mem_free it. A
 * weight may follow (dataset.h). Of the data set it is
 * - with /FILE: that file, or the files when it holds * or ?
 * - with :CONFIG/SPLIT or :SPLIT: its rows as the hub's viewer shows them (hub_rows.h)
 * - else its only JSONL file; without one, the rows of its only split
 * NULL: an error. */
char *hub_data(const char *files, struct err *err) MT_CHECK;

#endif

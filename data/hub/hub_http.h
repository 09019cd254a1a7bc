/* hub_http.h - GET from the hub: one small answer, or many files at once into the cache. */
#ifndef MT_HUB_HTTP_H
#define MT_HUB_HTTP_H

#include "data/hub/hub_cache.h"

/* The answer to ENDPOINT/path, NUL-terminated; mem_free it. NULL: an error; *unreachable: the connection failed, so
 * that the error is not about the repository. */
char *hub_http_text(const struct hub_repo *repo, const char *path, int64_t *size, bool *unreachable, struct err *err);

/* Answers of the hub's data set viewer (datasets-server.ENDPOINT, or ENDPOINT itself if it is http), requested
 * concurrently. Broken connections, 429 and 5xx are retried; -1: an error, and no answer has a text. */
struct hub_answer {
    char path[4 * HUB_PATH]; /* "rows?dataset=..." */
    char *text;              /* NUL-terminated; mem_free it */
    int64_t size;
    char commit[41]; /* commit of the rows shown; "" when not given */
};
int hub_http_viewer(const struct hub_repo *repo, struct hub_answer *answers, int64_t n, struct err *err) MT_CHECK;

/* Downloads the files of repo->commit that are not in the cache, several at once, and verifies them. Broken
 * connections, 429 and 5xx are retried with delays; after a failure the next call resumes. */
int hub_http_fetch(const struct hub_repo *repo, const struct hub_file *const *files, int64_t n,
                   struct err *err) MT_CHECK;
/* Downloads only the headers of safetensors files at repo->commit, by range requests: text[i] has the first size[i]
 * bytes of files[i], length and header; mem_free it. If the server ignores ranges, the transfer is stopped after the
 * header. */
int hub_http_headers(const struct hub_repo *repo, const struct hub_file *const *files, int64_t n, char **text,
                     int64_t *size, struct err *err) MT_CHECK;
/* Time limit of a small answer in milliseconds; it holds even while bytes arrive. */
extern int64_t hub_http_limit_ms;
const char *hub_http_library(char name[64]); /* hub_curl_version */

#endif

/* hub_http.h - GET from the hub: one small answer, or many files at once into the cache. The only user of libcurl. */
#ifndef MT_HUB_HTTP_H
#define MT_HUB_HTTP_H

#include "data/hub/hub_cache.h"

/* The answer to ENDPOINT/path, NUL-terminated; mem_free it. NULL: an error in words about the repository; *unreachable
 * tells whether it was the way to the hub, and not the hub's answer, that failed. */
char *hub_http_text(const struct hub_repo *repo, const char *path, int64_t *size, bool *unreachable, struct err *err);

/* Answers of the hub's data set viewer (datasets-server.ENDPOINT, or ENDPOINT itself when that is http), asked for at
 * once. Breaks, 429 and 5xx are tried again; -1: an error in words, and no answer has a text. */
struct hub_answer {
    char path[4 * HUB_PATH]; /* "rows?dataset=..." */
    char *text;              /* NUL-terminated; mem_free it */
    int64_t size;
    char commit[41]; /* of what it shows; "" when it does not say */
};
int hub_http_viewer(const struct hub_repo *repo, struct hub_answer *answers, int64_t n, struct err *err) MT_CHECK;

/* Downloads the files of repo->commit that are not in the cache, some at a time, and verifies them. Breaks, 429 and 5xx
 * are waited for and tried again; what has come stays for the next time when it fails. */
int hub_http_fetch(const struct hub_repo *repo, const struct hub_file *const *files, int64_t n,
                   struct err *err) MT_CHECK;
/* Of safetensors files at repo->commit the header alone, by requests for ranges: text[i] has the first size[i] bytes of
 * files[i], length and header; mem_free it. A server without ranges is stopped behind the header. */
int hub_http_headers(const struct hub_repo *repo, const struct hub_file *const *files, int64_t n, char **text,
                     int64_t *size, struct err *err) MT_CHECK;
/* Milliseconds that a small answer may take as a whole, however steadily its bytes come. */
extern int64_t hub_http_limit_ms;
/* "libcurl 7.88.1": the library that this machine has, or that it has none. */
const char *hub_http_library(char name[64]);

#endif

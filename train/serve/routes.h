/* routes.h - calls the handler of each path: the page, /v1/models, /v1/chat/completions, /v1/completions; checks the
 * API key and the host. */
#ifndef MT_SERVE_ROUTES_H
#define MT_SERVE_ROUTES_H

#include "train/serve/api_request.h"
#include "train/serve/http.h"

struct routes {
    struct api_context api;
    const char *key;  /* NULL: none is needed */
    const char *host; /* that the server listens on */
    int64_t max_body;
};
/* For struct http_options; user is a struct routes. */
void routes_handle(void *user, const struct http_request *q, struct http_reply *r);

#endif

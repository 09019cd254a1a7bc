/* http_none.c - the functions of http.h in a build without libmicrohttpd's header: they return an error. */
#include <stdio.h>

#include "train/serve/http.h"

bool http_peer_gone(const struct http_peer *peer)
{
    (void)peer;
    return true;
}

struct http *http_open(const struct http_options *opt, int64_t *port, struct err *err)
{
    (void)opt, (void)port;
    err_set(err, "this build has no serve: microhttpd.h was not found: apt-get install libmicrohttpd-dev, then build "
                 "again");
    return NULL;
}

int http_start(struct http *h, struct err *err)
{
    (void)h;
    return err_set(err, "this build has no serve");
}

void http_close(struct http *h) { (void)h; }

const char *http_version(char name[64])
{
    snprintf(name, 64, "libmicrohttpd: not in this build");
    return name;
}

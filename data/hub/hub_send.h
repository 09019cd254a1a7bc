/* hub_send.h - one request to the hub that may have a body, with retries. */
#ifndef MT_HUB_SEND_H
#define MT_HUB_SEND_H

#include "data/hub/hub_cache.h"

struct hub_send {
    const char *method, *url;  /* GET, POST or PUT */
    const char *type, *accept; /* media types of body and answer; NULL: none */
    bool token;                /* send the token, if the address has the hub's origin */
    const char *body;          /* [size]; NULL: the body is in a file */
    int64_t size;
    int fd; /* the file, from byte `from` on */
    int64_t from;
    void (*sent)(void *user, int64_t bytes); /* called with the bytes sent so far in this try; may be NULL */
    void *user;

    long status; /* of the answer */
    char *text;  /* [n_text] its body, NUL-terminated; mem_free it */
    int64_t n_text;
    char etag[256]; /* header ETag; "": none */
    char why[512];  /* what an answer of 400 or more says */
};
/* Sends a request. 0: there is an answer, perhaps a refusal. Broken connections, 408, 429 and 5xx are retried with
 * delays; -1: all tries failed. */
int hub_send(const struct hub_env *env, struct hub_send *s, struct err *err) MT_CHECK;

#endif

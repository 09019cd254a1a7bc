/* hub_curl.h - libcurl, loaded at the first download, so that the program runs without it. */
#ifndef MT_HUB_CURL_H
#define MT_HUB_CURL_H

#include <curl/curl.h>

#include "kernels/base.h"

/* The functions in use; hub_curl.easy_init is curl_easy_init. */
#define MT_CURL_CALLS(X)                                                                                               \
    X(global_init)                                                                                                     \
    X(easy_init)                                                                                                       \
    X(easy_setopt)                                                                                                     \
    X(easy_getinfo)                                                                                                    \
    X(easy_cleanup)                                                                                                    \
    X(easy_strerror)                                                                                                   \
    X(slist_append)                                                                                                    \
    X(slist_free_all)                                                                                                  \
    X(multi_init)                                                                                                      \
    X(multi_add_handle)                                                                                                \
    X(multi_remove_handle)                                                                                             \
    X(multi_perform)                                                                                                   \
    X(multi_poll)                                                                                                      \
    X(multi_info_read)                                                                                                 \
    X(multi_cleanup)
#define MT_CURL_POINTER(name) __typeof__(&(curl_##name)) name;
struct hub_curl {
    MT_CURL_CALLS(MT_CURL_POINTER)
    void *library; /* NULL: not loaded */
};
extern struct hub_curl hub_curl;

/* Loads libcurl; does nothing when it is loaded. */
int hub_curl_open(struct err *err) MT_CHECK;
/* What all requests share. The callbacks are those of CURLOPT_HEADERFUNCTION and CURLOPT_WRITEFUNCTION. */
struct hub_curl_request {
    const char *url;
    struct curl_slist *headers;
    long stall_rate, stall_s; /* bytes per second, and how long below them before the request is aborted */
    char *why;                /* [CURL_ERROR_SIZE] */
    size_t (*on_header)(char *data, size_t one, size_t n, void *user);
    size_t (*on_body)(char *data, size_t one, size_t n, void *user);
    void *user;
};
/* Sets the options of `request`. After an error the request must not be sent: an older libcurl may lack an option. */
CURLcode hub_curl_set(CURL *easy, const struct hub_curl_request *request);
/* "libcurl 7.88.1": the version on this machine, or that there is none. */
const char *hub_curl_version(char name[64]);

#endif

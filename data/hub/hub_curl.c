/* hub_curl.c - finds libcurl and its functions at run time. */
#include "data/hub/hub_curl.h"

#include <stdio.h>
#include <string.h>

#include "data/hub/hub_url.h"

struct hub_curl hub_curl;

static void *find_curl(void)
{
    static const char *const names[] = {"libcurl.so.4", "libcurl-gnutls.so.4"};
    return library_open(names, MT_LEN(names));
}

const char *hub_curl_version(char name[64])
{
    __typeof__(&curl_version) version = NULL;
    const struct library_call call = {"curl_version", &version};
    void *library = find_curl();
    const bool found = library && !library_find(library, "libcurl", &call, 1, NULL);
    const char *text = found ? version() : ""; /* "libcurl/7.88.1 OpenSSL/3.0.11 ..." */
    const size_t slash = strcspn(text, "/");
    if (text[slash])
        snprintf(name, 64, "libcurl %.*s", (int)strcspn(text + slash + 1, " "), text + slash + 1);
    else
        snprintf(name, 64, "libcurl: not installed");
    return name;
}

int hub_curl_open(struct err *err)
{
#define X(name) {"curl_" #name, &hub_curl.name},
    static const struct library_call calls[] = {MT_CURL_CALLS(X)};
#undef X
    void *library;
    if (hub_curl.library) return 0;
    library = find_curl();
    if (!library) return err_set(err, "downloading needs libcurl, which is not installed: apt-get install libcurl4");
    if (library_find(library, "libcurl", calls, MT_LEN(calls), err)) return -1;
    if (hub_curl.global_init(CURL_GLOBAL_DEFAULT)) return err_set(err, "cannot initialise libcurl");
    hub_curl.library = library;
    return 0;
}

CURLcode hub_curl_set(CURL *easy, const struct hub_curl_request *request)
{
    CURLcode rc = CURLE_OK;
#define SET(option, value) rc = rc ? rc : hub_curl.easy_setopt(easy, option, value)
    SET(CURLOPT_URL, request->url);
    if (hub_url_is_loopback(request->url)) SET(CURLOPT_NOPROXY, "*"); /* a proxy would get the token, unencrypted */
    SET(CURLOPT_HTTPHEADER, request->headers);
    SET(CURLOPT_USERAGENT, "moetrain/" MT_VERSION);
    SET(CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1); /* one connection per file is faster than one for all */
    SET(CURLOPT_FOLLOWLOCATION, 0L);
    SET(CURLOPT_CONNECTTIMEOUT, 15L);
    SET(CURLOPT_LOW_SPEED_LIMIT, request->stall_rate);
    SET(CURLOPT_LOW_SPEED_TIME, request->stall_s);
    SET(CURLOPT_NOSIGNAL, 1L);
    SET(CURLOPT_ERRORBUFFER, request->why);
    SET(CURLOPT_HEADERFUNCTION, request->on_header);
    SET(CURLOPT_HEADERDATA, request->user);
    SET(CURLOPT_WRITEFUNCTION, request->on_body);
    SET(CURLOPT_WRITEDATA, request->user);
#undef SET
    return rc;
}

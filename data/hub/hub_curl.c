/* hub_curl.c - finds libcurl and its functions at run time. */
#include "data/hub/hub_curl.h"

#include <stdio.h>
#include <string.h>

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

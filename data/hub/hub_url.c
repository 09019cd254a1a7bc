/* hub_url.c - addresses as text. */
#include "data/hub/hub_url.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

bool hub_url_escape(char *url, size_t n, const char *text, bool slashes)
{
    size_t used = strlen(url);
    for (; *text; text++) {
        const char c = *text;
        const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                           strchr("-_.~", c) || (slashes && c == '/');
        if (used + 4 > n) return false;
        used += (size_t)snprintf(url + used, n - used, plain ? "%c" : "%%%02X", (unsigned char)c);
    }
    return true;
}

size_t hub_url_origin(const char *url)
{
    const char *host = strstr(url, "://");
    return host ? (size_t)(host + 3 - url) + strcspn(host + 3, "/?#\\") : 0;
}

bool hub_url_may_follow(const char *from, const char *to, bool *same)
{
    const bool https = !strncasecmp(to, "https://", 8), http = !strncasecmp(to, "http://", 7);
    const size_t n = hub_url_origin(to);
    *same = n == hub_url_origin(from) && !strncasecmp(from, to, n) && !memchr(to, '@', n);
    return https || (http && strncasecmp(from, "https://", 8));
}

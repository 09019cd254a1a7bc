/* hub_url.c - see hub_url.h. */
#include "data/hub/hub_url.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
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

/* Bytes of the host at the start of an authority; brackets of an IPv6 address are part of it. */
static size_t host_bytes(const char *authority)
{
    const size_t n = strcspn(authority, authority[0] == '[' ? "]/?#" : ":/?#");
    return n + (authority[n] == ']');
}

static bool is_host(const char *host, size_t n)
{
    static const char name[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    if (host[0] != '[') return n && strspn(host, name) == n;
    return n > 2 && host[n - 1] == ']' && strspn(host + 1, "0123456789abcdefABCDEF:.") == n - 2;
}

const char *hub_url_fault(const char *url)
{
    const size_t scheme = strncmp(url, "https://", 8) ? strncmp(url, "http://", 7) ? 0 : 7 : 8;
    const char *host = url + scheme;
    if (strchr(url, '@')) return "a user name or password in an address is not used";
    for (const char *p = url; *p; p++)
        if (*p <= ' ' || *p > '~' || strchr("?#\\", *p)) return "a character of it cannot be in the address of a hub";
    if (!scheme) return "it begins with neither https:// nor http://";
    const size_t n = host_bytes(host);
    if (!is_host(host, n)) return "it has no valid name of a machine";
    if (host[n] != ':') return !host[n] || host[n] == '/' ? NULL : "it has no valid name of a machine";
    const char *port = host + n + 1;
    const size_t digits = strspn(port, "0123456789");
    const bool number = digits && digits <= 5 && (!port[digits] || port[digits] == '/');
    return number && atoi(port) > 0 && atoi(port) < 65536 ? NULL : "its port is not a number from 1 to 65535";
}

bool hub_url_is_loopback(const char *url)
{
    char host[64];
    struct in_addr v4;
    struct in6_addr v6;
    const char *at = strstr(url, "://");
    if (!at || memchr(at + 3, '@', strcspn(at + 3, "/?#\\"))) return false;
    const size_t n = host_bytes(at + 3), bracket = at[3] == '[';
    if (n < 2 * bracket || n >= sizeof(host)) return false;
    snprintf(host, sizeof(host), "%.*s", (int)(n - 2 * bracket), at + 3 + bracket);
    if (bracket) return inet_pton(AF_INET6, host, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
    return !strcasecmp(host, "localhost") || (inet_pton(AF_INET, host, &v4) == 1 && ntohl(v4.s_addr) >> 24 == 127);
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

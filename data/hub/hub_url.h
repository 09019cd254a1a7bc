/* hub_url.h - addresses as text: escaping, origins, which redirects are followed. */
#ifndef MT_HUB_URL_H
#define MT_HUB_URL_H

#include <stdbool.h>
#include <stddef.h>

/* Appends text to url (of size n), with every byte but letters, digits and -_.~ (if slashes: and /) as %XX; false: it
 * does not fit. */
bool hub_url_escape(char *url, size_t n, const char *text, bool slashes);
/* NULL, or why the text is not the address of a hub: http(s)://HOST[:PORT][/PATH]. */
const char *hub_url_fault(const char *url);
bool hub_url_is_loopback(const char *url); /* the host is this machine: localhost, 127.x.x.x, [::1] */
size_t hub_url_origin(const char *url);    /* bytes of the leading "https://host:port"; 0: none */
/* Whether a redirect may be followed: to http or https, never from https to http. *same: the addresses have one origin
 * (scheme, host, port), so the token may be sent. */
bool hub_url_may_follow(const char *from, const char *to, bool *same);

#endif

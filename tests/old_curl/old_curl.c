/* old_curl.c - a libcurl.so.4 that rejects one option. tests/data/test_hub.c puts it first in the library path. */
#include <stdlib.h>
#include <unistd.h>

enum {
    OK,
    UNKNOWN_OPTION = 48,
    FOLLOWLOCATION = 52
}; /* values of curl.h, which only data/hub/hub_curl.h may include */

static int handle;

int curl_global_init(long flags) { return (void)flags, OK; }
void *curl_easy_init(void) { return &handle; }
int curl_easy_setopt(void *easy, int option, ...) { return (void)easy, option == FOLLOWLOCATION ? UNKNOWN_OPTION : OK; }
int curl_easy_getinfo(void *easy, int info, ...) { return (void)easy, (void)info, OK; }
void curl_easy_cleanup(void *easy) { (void)easy; }
const char *curl_easy_strerror(int code) { return code == UNKNOWN_OPTION ? "unknown option" : "other"; }
void *curl_slist_append(void *list, const char *line) { return (void)list, (void)line, &handle; }
void curl_slist_free_all(void *list) { (void)list; }
void *curl_multi_init(void) { return &handle; }
int curl_multi_add_handle(void *multi, void *easy)
{
    (void)multi;
    (void)easy;
    _exit(9); /* a request would be sent without the option */
}
int curl_multi_remove_handle(void *multi, void *easy) { return (void)multi, (void)easy, OK; }
int curl_multi_perform(void *multi, int *running) { return (void)multi, *running = 0, OK; }
int curl_multi_poll(void *multi, void *extra, unsigned n, int ms, int *ready)
{
    return (void)multi, (void)extra, (void)n, (void)ms, (void)ready, OK;
}
void *curl_multi_info_read(void *multi, int *left) { return (void)multi, *left = 0, NULL; }
int curl_multi_cleanup(void *multi) { return (void)multi, OK; }

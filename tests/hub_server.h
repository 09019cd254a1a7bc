/* hub_server.h - starts tests/hub_server.py, a local server that imitates huggingface.co, and checks its log and the
 * cache. */
#ifndef MT_TEST_HUB_SERVER_H
#define MT_TEST_HUB_SERVER_H

#include <sys/types.h>

#include "tests/test.h"

#define HUB_SHARDS 3

struct hub_server {
    pid_t pid;
    int keep; /* the server ends when this pipe closes */
    char endpoint[64], log[MT_PATH];
};
extern struct hub_server hub_server;
extern char *hub_home; /* HF_HOME during the test */

bool hub_can_run(void); /* starts the server; false: this machine lacks what the message names */
void hub_stop(void);
int hub_fresh(void **state); /* set-up of a test: empty HF_HOME, no other hub variables, empty log */
/* Requests in the log whose line contains both texts. */
int hub_requests(const char *a, const char *b);
const char *hub_shard(int i); /* file name of shard i */
/* A path below a model's folder in the cache, in one of four static buffers. */
const char *hub_in_cache(const char *repo, const char *below);
/* Fails unless every link of a snapshot leads to a blob whose name is the hash of its content, and there are no other
 * files. */
void assert_verified(const char *dir);
void assert_downloads(const char *repo);
void assert_refused(const char *repo, const char *revision, const char *a, const char *b);

#endif

/* clients.h - connections, and for how long each may keep the server waiting.
 *
 * A connection has a deadline while the server waits for its client: for a request, for a body, or for the client to
 * read. A thread closes connections after their deadline, even while bytes arrive. While there are more than `most`
 * connections, the connection that has been without a request for longest is closed. Any thread may call all
 * functions. */
#ifndef MT_SERVE_CLIENTS_H
#define MT_SERVE_CLIENTS_H

#include "kernels/base.h"

struct clients_options {
    int64_t most;   /* most connections, and most requests that are answered at once */
    double wait_ms; /* for a request, or for a client to read */
};
struct clients;
struct client;

struct clients *clients_open(const struct clients_options *opt, struct err *err);
void clients_close(struct clients *c); /* after clients_leave of all; NULL is fine */

/* fd: of the connection, open until clients_leave. */
struct client *clients_enter(struct clients *c, int fd);
void clients_leave(struct client *k);

/* Bytes of a body have arrived. */
void client_sent(struct client *k, int64_t bytes);
/* Call it when a request has arrived; while the server works on it, the client has no deadline. False: `most` other
 * requests are being answered, so this request must get an error. */
bool client_begin(struct client *k);
/* The server now waits until the client has read `bytes` bytes; 0: it no longer waits. stream: the reply is a stream
 * and occupies a sequence of the engine, so the client has a quarter of the time. */
void client_must_read(struct client *k, int64_t bytes, bool stream);
void client_end(struct client *k); /* after a reply: another request may come */

#endif

/* environment.h - a program that answers the model's turns with messages.
 *
 * It is started once, for all completions of this process. Requests and replies are JSON objects, one on each line:
 *
 *    {"op": "reset", "id": 7, "columns": {..}}               -> {"id": 7, "messages": [..], "tools": [..]}
 *    {"op": "step", "id": 7, "message": {..}, "text": ".."}
 *                                       -> {"id": 7, "messages": [..], "done": false, "reward": null}
 *    {"op": "close", "id": 7}                                -> nothing
 *
 * Replies come in any order. A close is sent if the completion ends before done is true. */
#ifndef MT_ENVIRONMENT_H
#define MT_ENVIRONMENT_H

#include "train/config/config.h"

struct environment;
/* NULL: an error, also without environment.command. */
struct environment *environment_open(const struct config *c, struct err *err);
void environment_close(struct environment *e); /* NULL is fine */

/* Send a request of a completion without waiting. id: chosen by the caller, from 0, unique in the run. A completion has
 * one request at a time. columns, message: JSON of objects. Errors are those of environment_work. */
int environment_reset(struct environment *e, int64_t id, const char *columns, struct err *err) MT_CHECK;
int environment_step(struct environment *e, int64_t id, const char *message, const char *text, int64_t size,
                     struct err *err) MT_CHECK;
/* Ends a completion, for which no reply follows. It may have a request, or have ended already. */
int environment_end(struct environment *e, int64_t id, struct err *err) MT_CHECK;

/* LOST: the program ended, or gave no reply within environment.timeout_s, and the completion has ended without a
 * reward. All open completions get it, also those without a request; environment_step then has no effect for them.
 * LIMIT: the reply to the last turn that environment.turns or environment.seconds allow; no turn follows its messages.
 * The caller applies environment.tokens. */
enum environment_end { ENVIRONMENT_GOES_ON, ENVIRONMENT_DONE, ENVIRONMENT_LIMIT, ENVIRONMENT_LOST };
struct environment_reply {
    int64_t id;
    char *messages, *tools; /* JSON of lists; tools: of a reset, NULL: none */
    enum environment_end end;
    double reward; /* of a step; NaN: none */
};
/* The next reply; false: none is there. Free it. */
bool environment_next(struct environment *e, struct environment_reply *reply);
void environment_reply_free(struct environment_reply *reply); /* reply may be zeroed */

/* Reads and writes until there is a reply, for at most `ms`. Errors, after which the run must stop: a reply of another
 * form, the third failure in a row. */
int environment_work(struct environment *e, int64_t ms, struct err *err) MT_CHECK;
int64_t environment_waits(const struct environment *e); /* completions with a request */
int64_t environment_lost(const struct environment *e);  /* completions so far */

#endif

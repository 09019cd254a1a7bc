/* chat_dropped.h - finds what a row has and its text lacks: messages, calls, refusals, parts, tools, documents. */
#ifndef MT_CHAT_DROPPED_H
#define MT_CHAT_DROPPED_H

#include "data/json/json.h"
#include "data/json/text.h"

/* A copy of a row in which each of its parts ends in a mark. The marks that a chat template then writes show which
 * parts it writes; reasoning has no mark, since templates leave out that of earlier answers on purpose. */
struct chat_marks {
    struct text_buf row; /* the JSON of the copy */
    struct chat_mark {
        int64_t message;  /* -1: of the row */
        const char *what; /* "content", "tool_calls", ... */
        bool found;
    } * items;
    int64_t n, cap;
};
/* Puts marks into the first n messages. Zeroed marks are valid, and their memory is reused. */
int chat_marks_put(struct chat_marks *m, struct json row, int64_t n, struct err *err) MT_CHECK;
/* Sets `found` of the marks that the text has. */
void chat_marks_find(struct chat_marks *m, const struct text_buf *text);
void chat_marks_free(struct chat_marks *m);

/* shapes [number of messages]: for each message a hash of what a template may look at, except the texts themselves: its
 * role and keys, those of its neighbours and of the last message, whether it is the first, whether there are tools. */
void chat_dropped_shapes(uint64_t *shapes, struct json row);
/* Whether the text of a message, without white space around it and reasoning in <think> before it, is in `text` after
 * *at, raw or as a JSON string; if so, moves *at past it. Contents that are empty or not a string count
 * as found. */
bool chat_dropped_text_in(const struct text_buf *text, int64_t *at, struct json message);

/* Set the error and return -1: the template does not write the part `what` of a message; it writes only one of several
 * calls. */
int chat_dropped_part(struct json message, const char *what, struct err *err);
int chat_dropped_calls(struct json message, struct err *err);

#define CHAT_DROPPED_ADVICE                                                                                            \
    "so the model would not see it: choose a template that writes it (data.chat_template), or remove it; "             \
    "data.dropped = warn takes the rest"

#endif

/* chat_dropped.h - finds parts of a row that the chat template did not write: messages, calls, refusals, parts of
 * contents, tools, documents. */
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

/* shapes [number of messages]: for each message a hash of what a template may look at, but not of the texts themselves.
 * The hash includes the role and keys of the message, of its neighbours and of the last message; whether the message is
 * the first; whether the row has tools and documents; the keys of chat_template_kwargs. */
void chat_dropped_shapes(uint64_t *shapes, struct json row);
/* Whether `text` has the content of a message after *at, raw or as a JSON string; if so, moves *at past it. The content
 * is searched without the reasoning that it begins with (all up to its last </think>), and without white space at both
 * ends. An empty content counts as found. A number or boolean counts as not found, any other value that is not a string
 * as found. */
bool chat_dropped_text_in(const struct text_buf *text, int64_t *at, struct json message);

/* Both set the error and return -1. chat_dropped_part: the template does not write the part `what` of the message.
 * chat_dropped_calls: it writes only one of the message's calls. */
int chat_dropped_part(struct json message, const char *what, struct err *err);
int chat_dropped_calls(struct json message, struct err *err);

#define CHAT_DROPPED_ADVICE                                                                                            \
    "so the model would not see it: choose a template that writes it (data.chat_template), or remove it; "             \
    "data.dropped = warn takes the rest"

#endif

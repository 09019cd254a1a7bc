/* chat_dropped.h - finds parts of a row that the chat template did not write: messages, calls, refusals, parts of
 * contents, tools, documents. */
#ifndef MT_CHAT_DROPPED_H
#define MT_CHAT_DROPPED_H

#include "data/json/json.h"
#include "data/json/text.h"

/* A copy of a row with a mark at the end of each part, which shows in a rendered text whether the template writes this
 * part. Reasoning has no mark, since templates omit that of earlier answers on purpose. */
struct chat_marks {
    struct text_buf row; /* the JSON of the copy */
    struct chat_mark {
        int64_t message;  /* -1: of the row */
        const char *what; /* "content", "tool_calls", ... */
        bool found;
    } * items;
    int64_t n, cap;
};
/* Marks the first n messages. Zeroed marks are valid; later calls reuse their memory. */
int chat_marks_put(struct chat_marks *m, struct json row, int64_t n, struct err *err) MT_CHECK;
/* Sets `found` of the marks that the text has. */
void chat_marks_find(struct chat_marks *m, const struct text_buf *text);
void chat_marks_free(struct chat_marks *m);

/* shapes [messages]: for each message a hash of what may decide which parts a template writes, without the texts. It
 * covers role and keys of the message, its neighbours and the last message; whether it is the first; whether the row
 * has tools and documents; the keys of chat_template_kwargs. */
void chat_dropped_shapes(uint64_t *shapes, struct json row);
/* Whether `text` has the message's content after *at, raw or as a JSON string; if so, moves *at past it. The content is
 * searched without the reasoning at its start (all up to its last </think>) and without white space at its ends. An
 * empty content and other JSON than strings, numbers and booleans count as found; a number or boolean counts as not
 * found. */
bool chat_dropped_text_in(const struct text_buf *text, int64_t *at, struct json message);

/* Return -1 and an error. chat_dropped_part: the template does not write the part `what` of the message.
 * chat_dropped_calls: it writes only one of the message's calls. */
int chat_dropped_part(struct json message, const char *what, struct err *err);
int chat_dropped_calls(struct json message, struct err *err);

#define CHAT_DROPPED_ADVICE                                                                                            \
    "so the model would not see it: choose a template that writes it (data.chat_template), or remove it; "             \
    "data.dropped = warn takes the rest"

#endif

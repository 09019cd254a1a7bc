/* chat.h - options of a rendering, and the key under which a message has its reasoning. */
#ifndef MT_CHAT_H
#define MT_CHAT_H

#include "data/json/json.h"
#include "data/json/text.h"

/* Zeroed is valid: NULL and false select the defaults. */
struct chat_options {
    const char *date;       /* "YYYY-MM-DD" for the template; fixed, so that ids never change */
    bool generation_prompt; /* end with the header of an answer */
    int64_t leave_out;      /* number of messages at the end to ignore */
    const bool *mute;       /* [messages] answers without loss (chat_samples.h); NULL: none */
    int64_t (*places)[2];   /* [messages] output: bytes [begin, end) of each message in the text (jinja.h); NULL: not
                               wanted */
};
#define CHAT_DATE "2025-06-28" /* used when the options have no date */

/* The key of a message that holds its reasoning: `own`, the key of this chat format, or else a key of other programs.
 * Without reasoning: own. */
const char *chat_reasoning_key(struct json message, const char *own);

#endif

/* chat.h - options of rendering a conversation, and the key of a message's reasoning. */
#ifndef MT_CHAT_H
#define MT_CHAT_H

#include "data/json/json.h"
#include "data/json/text.h"

/* Zeroed is valid: NULL and false select the defaults. */
struct chat_options {
    const char *date;       /* "YYYY-MM-DD" for the template; fixed, so that token ids never change */
    bool generation_prompt; /* end with the header of an answer */
    int64_t leave_out;      /* number of messages to ignore at the end */
    const bool *mute;       /* [messages] answers without loss (chat_samples.h); NULL: none */
    int64_t (*places)[2];   /* [messages] output: bytes [begin, end) of each message in the text, {0, 0} if unknown
                               (jinja.h); NULL: not wanted */
};
#define CHAT_DATE "2025-06-28" /* used when the options have no date */

/* The key of a message's reasoning: `own`, that of this chat format, or that of another program. Without reasoning:
 * own. */
const char *chat_reasoning_key(struct json message, const char *own);

#endif

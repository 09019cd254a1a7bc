/* chat.h - messages -> the text a model sees, with the byte spans that carry loss. Here: harmony (gpt-oss), exactly as
 * the published chat template renders it. */
#ifndef MT_CHAT_H
#define MT_CHAT_H

#include "data/json.h"
#include "data/text.h"

/* Zeroed is valid: NULL and false stand for the defaults. */
struct chat_options {
    const char *date;             /* "YYYY-MM-DD" of the system message; fixed, as data must not change overnight */
    const char *reasoning_effort; /* "low", "medium" (default), "high" */
    const char *model_identity;   /* first line of the system message */
    bool generation_prompt;       /* end with "<|start|>assistant", and show no reasoning of the last answer */
    int64_t leave_out;            /* so many messages at the end, as if the row had them not */
};
#define CHAT_DATE "2025-06-28" /* when options name no date */

/* row: an object with "messages" and maybe "tools" (an array, or its JSON as a string). What a message holds, by
 * "role":
 * - system, developer: content; only as the first message
 * - user: content
 * - assistant: content, thinking (or reasoning_content), tool_calls: [{function: {name, arguments}}], one call
 * - tool: content, any JSON; the result of the call before it
 *
 * null counts as absent. Arguments may be an object or its JSON as a string. What the template would drop without a
 * word (other roles, a late system message, a second call) is an error, and so is content with harmony's own channel
 * marks.
 *
 * Appends the text to out, and spans over what the model itself writes at inference: of the first message of an answer
 * all that follows "<|start|>assistant" (the prompt ends with that), of further messages of the same answer that too;
 * always with <|end|>, <|call|> or <|return|>. An error names the message's index and what is wrong, and leaves out as
 * it was. */
int chat_render_harmony(struct text_buf *out, struct json row, const struct chat_options *opt,
                        struct err *err) MT_CHECK;

#endif

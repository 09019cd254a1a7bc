/* chat.h - messages -> text with the byte spans that carry loss, for harmony (gpt-oss). The text equals that of the
 * published chat template. */
#ifndef MT_CHAT_H
#define MT_CHAT_H

#include "data/json/json.h"
#include "data/json/text.h"

/* Zeroed is valid: NULL and false select the defaults. */
struct chat_options {
    const char *date;             /* "YYYY-MM-DD" of the system message; fixed, so that ids never change */
    const char *reasoning_effort; /* "low", "medium" (default), "high" */
    const char *model_identity;   /* first line of the system message */
    bool generation_prompt;       /* end with "<|start|>assistant"; omit the last answer's reasoning */
    int64_t leave_out;            /* number of messages at the end to ignore */
    const bool *mute;             /* [messages] answers without loss (chat_samples.h); NULL: none */
};
#define CHAT_DATE "2025-06-28" /* used when the options have no date */

/* The key of an answer that has its reasoning: own, that of the format, or the name of another program. */
const char *chat_reasoning_key(struct json message, const char *own);

/* row: an object with "messages" and optionally "tools" (an array, or its JSON as a string) and "chat_template_kwargs",
 * whose reasoning_effort and model_identity replace the options. Keys of a message, by "role":
 * - system, developer: content; only as the first message
 * - user: content
 * - assistant: content, thinking (or reasoning_content, reasoning), tool_calls: [{function: {name, arguments}}], one
 *   call
 * - tool: content, any JSON; the result of the preceding call
 *
 * null counts as absent. Arguments may be an object or its JSON as a string. What the template would drop silently
 * (other roles, a late system message, a second call) is an error. Content with harmony's marks is an error.
 *
 * Appends the text to out, and spans over what the model writes at inference. In the first message of an answer the
 * span begins after "<|start|>assistant", where the prompt ends; in further messages of the same answer it includes
 * that header. It always includes <|end|>, <|call|> or <|return|>. An error names the message's index; out is then
 * unchanged. */
int chat_render_harmony(struct text_buf *out, struct json row, const struct chat_options *opt,
                        struct err *err) MT_CHECK;

#endif

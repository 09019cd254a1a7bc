/* chat_deepseek.h - messages -> the text that DeepSeek V4 sees. Its checkpoints have no chat template but a program,
 * encoding/encoding_dsv4.py; this does what that does. */
#ifndef MT_CHAT_DEEPSEEK_H
#define MT_CHAT_DEEPSEEK_H

#include "data/chat/chat.h"

#define DEEPSEEK_BOS "<｜begin▁of▁sentence｜>"
#define DEEPSEEK_EOS "<｜end▁of▁sentence｜>"

/* row: an object with "messages"; tools: an array, null or absent. What a message holds, by "role":
 * - system: content, response_format; anywhere
 * - user, developer: content; of the latter also tools and response_format
 * - tool: content, any JSON; tool_call_id. Results are written in the order of the calls
 * - assistant: content, reasoning_content (or thinking), tool_calls: [{id, function: {name, arguments}}]
 * - latest_reminder: content
 *
 * `task` in a message of a user or developer names what the next answer is: action, query, ...; `wo_eos` leaves an
 * answer's end open. tools belong to a system or developer message that comes first, else to an empty one.
 *
 * kwargs (absent: none) and the row's "chat_template_kwargs", which win, say how: `thinking` (or `enable_thinking`, or
 * `thinking_mode`: "thinking") shows reasoning, which is left out otherwise; then `drop_thinking` = false keeps it in
 * turns before the last user's too, as tools do; `reasoning_effort` = "max" asks for most (the text of the first V4
 * checkpoints).
 *
 * Appends the text to out, which ends as a prompt when the last message is a user's or a tool's, and a span over each
 * answer: from its first byte after the token of the mode, which the prompt has, to the end of sentence. An error names
 * the message and leaves out as it was. */
int chat_render_deepseek(struct text_buf *out, struct json row, struct json tools, struct json kwargs,
                         const struct chat_options *opt, struct err *err) MT_CHECK;

#endif

/* chat_deepseek.h - messages -> text for DeepSeek V4, whose checkpoints have a program, encoding/encoding_dsv4.py,
 * instead of a chat template. */
#ifndef MT_CHAT_DEEPSEEK_H
#define MT_CHAT_DEEPSEEK_H

#include "data/chat/chat.h"

#define DEEPSEEK_BOS "<｜begin▁of▁sentence｜>"
#define DEEPSEEK_EOS "<｜end▁of▁sentence｜>"

/* row: an object with "messages"; tools: an array, null or absent. Keys of a message, by "role":
 * - system: content, response_format; at any position
 * - user, developer: content; developer also tools and response_format
 * - tool: content, any JSON; tool_call_id. Results are written in the order of the calls
 * - assistant: content, reasoning_content (or thinking), tool_calls: [{id, function: {name, arguments}}].
 *   <think>reasoning</think> at the start of the content is its reasoning; the encoder would write a second <think>
 * - latest_reminder: content
 *
 * `task` in a user or developer message names the kind of the next answer: action, query, ...; `wo_eos` omits the end
 * token of an answer. tools are written in the system or developer message that comes first, else in an empty one.
 *
 * Options are in kwargs (may be absent) and in the row's "chat_template_kwargs", which take precedence:
 * - `thinking` (or `enable_thinking`, or `thinking_mode`: "thinking") shows reasoning; the default omits it
 * - `drop_thinking` = false also keeps reasoning before the last user turn, as tools do
 * - `reasoning_effort` = "max" adds the text of the first V4 checkpoints that asks for long reasoning
 *
 * Appends the text to out, and a span over each answer: from the byte after <think> or </think>, which belongs to the
 * prompt, to the end of sentence. If the last message is a user's or a tool's, the text ends as a prompt. An error
 * names the message; out is then unchanged. */
int chat_deepseek_render(struct text_buf *out, struct json row, struct json tools, struct json kwargs,
                         const struct chat_options *opt, struct err *err) MT_CHECK;

/* Refuses kwargs other than those above. */
int chat_deepseek_check(struct json kwargs, struct err *err) MT_CHECK;

#endif

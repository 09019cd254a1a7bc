/* turn.h - the next turn of a conversation whose tokens the caller has: the messages that follow an answer, as a suffix
 * of these tokens. Tokens that the model has seen are never made again from text. */
#ifndef MT_TURN_H
#define MT_TURN_H

#include "train/models/message.h"
#include "train/run/run.h"

/* An answer as JSON of a message: role, content, reasoning_content and tool_calls where it has them. */
void turn_put_message(struct text_buf *out, const struct message *m);

/* conversation: {"messages", "tools"?}, which ends with messages after an answer. held: the tokens of the prompt and of
 * that answer, its end token included. Appends to `suffix` the tokens of what the chat template writes after them, up
 * to the start of the next answer. *fits is false, and nothing is appended, where the text of the held tokens does not
 * begin the rendered conversation, as with templates that leave out earlier reasoning: the next turn cannot follow.
 * `why` then says where they differ. */
int turn_suffix(struct token_list *suffix, bool *fits, const struct run *r, struct json conversation,
                const int32_t *held, int64_t n, struct err *why) MT_CHECK;

#endif

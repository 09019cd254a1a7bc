/* turn.h - the next turn of a conversation whose tokens the caller has: renders the messages that follow an answer as a
 * suffix of these tokens. Tokens that the model has seen are never tokenised again from text. */
#ifndef MT_TURN_H
#define MT_TURN_H

#include "data/chat/chat_reader.h"
#include "train/models/message.h"
#include "train/run/run.h"

/* Appends an answer as the JSON of a message: role, content, and reasoning_content and tool_calls if it has them. */
void turn_put_message(struct text_buf *out, const struct message *m);
/* Turns an answer into a stand-in: it keeps the names of its calls, and a letter replaces all that the model wrote.
 * other: the second stand-in, with another letter. */
void turn_stand_in(struct message *m, bool other);

struct turn_input {
    const struct run *run;
    struct chat_reader *reader;  /* reader of the run's template; it learns what the template writes */
    struct json conversation[2]; /* {"messages", "tools"?}. All answers are stand-ins; the last answer of
                                    conversation[1] is the other stand-in */
    int64_t n_before, n_told; /* n_before: messages before the first answer; n_told: messages up to the last answer */
    int32_t end;              /* the token that ended the last answer */
    const int32_t *ends;      /* [n_ends] tokens that may end an answer */
    int64_t n_ends;
};
/* Appends to `suffix` the tokens of the text that the chat template writes after the last answer, up to the start of
 * the next answer. The last difference between the texts of conversation[0] and [1] shows where the answer ends. The
 * template may leave out the answer's reasoning or write another end token; the suffix begins after that token
 * (gpt-oss: <|end|>, although the model sampled <|return|>).
 *
 * *fits is false, and nothing is appended, if the template changes the text before the first answer, does not show
 * where the last one ends, or begins the next message with another token than the model sampled; `why` says which.
 * Errors: the template refuses the new messages or leaves out a part of them; but after an answer with calls, which may
 * be the cause, *fits is false instead. */
int turn_suffix(struct token_list *suffix, bool *fits, const struct turn_input *in, struct err *why) MT_CHECK;

#endif

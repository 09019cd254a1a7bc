/* preference_rows.h - rows with a better and a worse answer, or with an answer and a label -> each answer as a row of
 * prompt and completion. */
#ifndef MT_PREFERENCE_ROWS_H
#define MT_PREFERENCE_ROWS_H

#include "data/json/json.h"
#include "data/json/text.h"

/* Writes {"prompt", "completion"}, both texts or both lists of messages, and the keys that the row has beside them.
 * worse: the rejected answer. 1: the row has no preference, as all its answers have the same rating. Forms:
 * - {prompt, chosen, rejected}: texts, messages, or lists of messages; a text beside a list is one message of it
 * - {chosen, rejected}: whole texts or conversations; the prompt is their common beginning. If both conversations
 * repeat the `prompt` of the row, the prompt is written once
 * - {messages, rejected_messages} or {messages, rejected_response}: messages end with the chosen answer
 * - {prompt, responses, ratings}: two or more answers, as texts or lists, and as many numbers; the best and the worst
 * answer are taken. `messages`, `conversations` or `instruction` with `input`, `history` also name a prompt. Turns of
 * sharegpt, {from, value}, become messages. */
int preference_row_answer(struct text_buf *out, struct json row, bool worse, struct err *err) MT_CHECK;
/* preference_row_answer for {prompt, completion, label}, and for messages, conversations or alpaca with a label. label
 * or kto_tag: true or false, 1 or 0, desirable or undesirable; or such a text. */
int labelled_row_answer(struct text_buf *out, struct json row, bool *good, struct err *err) MT_CHECK;

/* The key that marks answers as bad in data for DPO and KTO, as TRL, LLaMA-Factory and ms-swift name it; NULL: none.
 * labels: a `label` that is true, false, or such a text, is such a key. */
const char *preference_row_key(struct json row, bool labels);
enum preference_form { PREFERENCE_FORM_NONE, PREFERENCE_FORM_PAIR, PREFERENCE_FORM_LABELLED };
/* The form of a row, by its keys. */
enum preference_form preference_row_form(struct json row);

#endif

/* preference_rows.h - a row with a better and a worse answer, or with an answer and a label -> each answer as a row of
 * prompt and completion. */
#ifndef MT_PREFERENCE_ROWS_H
#define MT_PREFERENCE_ROWS_H

#include "data/json/json.h"
#include "data/json/text.h"

/* Writes {"prompt", "completion"}, both texts or both lists of messages, and the row's other keys. worse: writes the
 * rejected answer. Returns 1 if the row has no preference, as all its answers have one rating. Forms:
 * - {prompt, chosen, rejected}: texts, messages, or lists of messages; a text beside a list is one message of it
 * - {chosen, rejected}: whole texts or conversations; the prompt is their common beginning. If both conversations
 *   repeat the `prompt` of the row, the prompt is written once
 * - {messages, rejected_messages} or {messages, rejected_response}: messages end with the chosen answer
 * - {prompt, responses, ratings}: two or more answers, as texts or lists, and as many numbers; the answers with the
 *   highest and the lowest rating are taken
 * `messages`, `conversations` or `instruction` with `input`, `history` may replace `prompt`. Turns of sharegpt, {from,
 * value}, become messages. */
int preference_row_answer(struct text_buf *out, struct json row, bool worse, struct err *err) MT_CHECK;
/* preference_row_answer for {prompt, completion, label}, and for messages, conversations or alpaca with a label. Key:
 * label or kto_tag. Value: true or false, 1 or 0, desirable or undesirable, or one of these as text. */
int labelled_row_answer(struct text_buf *out, struct json row, bool *good, struct err *err) MT_CHECK;

/* The key by which TRL, LLaMA-Factory or ms-swift mark answers as good or bad for DPO and KTO: that of a rejected
 * answer, or kto_tag; NULL: none. labels: also `label` with a value that labelled_row_answer takes. */
const char *preference_row_key(struct json row, bool labels);
enum preference_form { PREFERENCE_FORM_NONE, PREFERENCE_FORM_PAIR, PREFERENCE_FORM_LABELLED };
enum preference_form preference_row_form(struct json row);

#endif

/* preference_rows.h - rows with a better and a worse answer, or with an answer and a label -> each answer as a row of
 * prompt and completion. */
#ifndef MT_PREFERENCE_ROWS_H
#define MT_PREFERENCE_ROWS_H

#include "data/json/json.h"
#include "data/json/text.h"

/* Writes {"prompt", "completion"}, both texts or both lists of messages, and the keys that the row has beside them.
 * worse: the rejected answer. 1: the row has no preference, as its best and worst answers are rated alike. Forms:
 * - {prompt, chosen, rejected}: texts, or lists of messages; a text beside a list is one message of it
 * - {chosen, rejected}: whole texts or conversations; the prompt is their common beginning
 * - {messages, rejected_messages} or {messages, rejected_response}: messages end with the chosen answer
 * - {prompt, responses, ratings}: two or more answers, as texts or lists, and as many numbers; the best and the worst
 */
int preference_row_answer(struct text_buf *out, struct json row, bool worse, struct err *err) MT_CHECK;
/* The same of {prompt, completion, label} and {messages, label}; label: true or false, 1 or 0. */
int labelled_row_answer(struct text_buf *out, struct json row, bool *good, struct err *err) MT_CHECK;

#endif

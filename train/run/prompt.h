/* prompt.h - a prompt as tokens, and the tokens that end an answer to it. */
#ifndef MT_PROMPT_H
#define MT_PROMPT_H

#include "train/run/run.h"

enum { PROMPT_ENDS = 16 };

struct prompt {
    struct token_list ids;
    int32_t ends[PROMPT_ENDS];
    int64_t n_ends;
};

/* A text, in which special tokens are recognised; or a row {"messages", "tools"}, which the chat template renders up to
 * the last message that is not an answer; or ids. Errors show `name`. The run's headers and tokenizer are open. The
 * tokens that end an answer are eos_token, those of config.json and generation_config.json, and after messages the
 * special token that the template writes after an answer. */
int prompt_text(struct prompt *p, const struct run *r, const char *text, const char *name, struct err *err) MT_CHECK;
int prompt_messages(struct prompt *p, const struct run *r, struct json row, const char *name, struct err *err) MT_CHECK;
/* The `prompt` of a row: a text, or messages with the keys that the row has beside them. */
int prompt_row(struct prompt *p, const struct run *r, struct json row, const char *name, struct err *err) MT_CHECK;
int prompt_ids(struct prompt *p, const struct run *r, struct json ids, const char *name, struct err *err) MT_CHECK;
/* The ids of a document as a prompt. If the model has a chat template, the template's end of an answer ends the
 * answer. */
int prompt_document(struct prompt *p, const struct run *r, const int32_t *ids, int64_t n, struct err *err) MT_CHECK;
/* The prompt ends with <think>, so that the answer begins with reasoning. */
bool prompt_opens_reasoning(const struct prompt *p, const struct tokenizer *tok);
void prompt_free(struct prompt *p); /* p may be zeroed */

#endif

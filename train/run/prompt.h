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

/* Make a prompt of a text, in which special tokens are recognised; of a row {"messages", "tools"}, which the chat
 * template renders up to the last message that is not an answer; or of ids. Errors show `name`. The run's headers and
 * tokenizer must be open. The tokens that end an answer are eos_token, those of config.json and generation_config.json,
 * and after messages the special token that the template writes after an answer. */
int prompt_text(struct prompt *p, const struct run *r, const char *text, const char *name, struct err *err) MT_CHECK;
int prompt_messages(struct prompt *p, const struct run *r, struct json row, const char *name, struct err *err) MT_CHECK;
/* Makes a prompt of a row's key `prompt`: a text, or messages together with the row's other keys. */
int prompt_row(struct prompt *p, const struct run *r, struct json row, const char *name, struct err *err) MT_CHECK;
int prompt_ids(struct prompt *p, const struct run *r, struct json ids, struct err *err) MT_CHECK;
/* Makes a prompt of the ids of a document. If the model has a chat template, the answer ends with the template's end
 * token. */
int prompt_document(struct prompt *p, const struct run *r, const int32_t *ids, int64_t n, struct err *err) MT_CHECK;
/* Whether the prompt ends with <think>, so that the answer begins with reasoning. */
bool prompt_opens_reasoning(const struct prompt *p, const struct tokenizer *tok);
void prompt_free(struct prompt *p); /* p may be zeroed */

#endif

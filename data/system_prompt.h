/* system_prompt.h - data.system: a system message for conversations that have none. */
#ifndef MT_SYSTEM_PROMPT_H
#define MT_SYSTEM_PROMPT_H

#include "data/chat/chat_template.h"

/* *out: the row of messages with `text` as a system message before them; NULL: the row has a system message. */
int system_prompt_add(struct json_doc **out, struct json row, const char *text, struct err *err) MT_CHECK;
/* Error: the template writes no system message. */
int system_prompt_check(const struct chat_template *t, const char *text, struct err *err) MT_CHECK;

#endif

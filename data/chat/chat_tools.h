/* chat_tools.h - tools as TypeScript, for harmony. */
#ifndef MT_CHAT_TOOLS_H
#define MT_CHAT_TOOLS_H

#include "data/json/json.h"
#include "data/json/text.h"

/* Writes harmony's namespace "functions". tools: a non-empty array of {function: {name, description, parameters}}. */
int chat_tools_put(struct text_buf *t, struct json tools, struct err *err) MT_CHECK;

#endif

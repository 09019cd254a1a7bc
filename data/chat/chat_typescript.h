/* chat_typescript.h - tools as the TypeScript of Kimi-K2.5 and K2.6. */
#ifndef MT_CHAT_TYPESCRIPT_H
#define MT_CHAT_TYPESCRIPT_H

#include "data/json/text.h"

/* A copy of the value with the members of all objects sorted by key, as Kimi's tokenizer gives tools to the
 * template. */
struct json_doc *chat_typescript_sorted(struct json value, struct err *err) MT_CHECK;
/* Appends the declarations of `tools`, a sorted list that is not empty. -1: Kimi's tokenizer fails too, and its
 * template then writes them as JSON. */
int chat_typescript_put(struct text_buf *t, struct json tools, struct err *err) MT_CHECK;

#endif

/* chat_tools.h - pieces of rendered chats: growing text, JSON as Python writes it, tools as TypeScript. */
#ifndef MT_CHAT_TOOLS_H
#define MT_CHAT_TOOLS_H

#include "data/chat.h"

void chat_put(struct chat_text *t, const char *text); /* NUL-terminated */
void chat_put_bytes(struct chat_text *t, const char *text, int64_t size);
/* As json.dumps(value, ensure_ascii=False): ", " and ": " between items, floats as Python's repr. */
int chat_put_json(struct chat_text *t, struct json value, struct err *err) MT_CHECK;
/* The namespace "functions" of harmony: tools is a non-empty array of {function: {name, description, parameters}}. */
int chat_put_tools(struct chat_text *t, struct json tools, struct err *err) MT_CHECK;
void chat_put_quoted(struct chat_text *t, const char *s, int64_t size); /* one string of it */
void chat_put_float(struct chat_text *t, double v);                     /* Python's repr */
/* Python's truth: false, 0, "", [], {}, null and absent are false. */
bool chat_truthy(struct json j);

#endif

/* chat_arguments.h - the arguments of tool calls in the form that a chat template takes. */
#ifndef MT_CHAT_ARGUMENTS_H
#define MT_CHAT_ARGUMENTS_H

#include "data/json/json.h"

/* Data sets have an object, or its JSON as a string. Some templates take both, others only one form. */
enum chat_arguments { CHAT_ARGUMENTS_ANY, CHAT_ARGUMENTS_OBJECT, CHAT_ARGUMENTS_STRING };

/* Copies the array `messages` so that all `arguments` of tool_calls have this form; *out is NULL when they already do.
 * For OBJECT, null and an empty string are an empty object, and any other string must be the JSON of an object. */
int chat_arguments_as(struct json_doc **out, struct json messages, enum chat_arguments form, struct err *err) MT_CHECK;

#endif

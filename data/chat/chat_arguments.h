/* chat_arguments.h - the arguments of tool calls in the form that a chat template takes. */
#ifndef MT_CHAT_ARGUMENTS_H
#define MT_CHAT_ARGUMENTS_H

#include "data/json/json.h"

/* Data sets have arguments as an object, or its JSON as a string. Some templates take both, others only one form. */
enum chat_arguments { CHAT_ARGUMENTS_ANY, CHAT_ARGUMENTS_OBJECT, CHAT_ARGUMENTS_STRING };

/* Copies the array `messages` with all `arguments` of tool_calls in this form; *out is NULL if they have it. For
 * OBJECT, null and "" become {}, and any other string must be the JSON of an object. */
int chat_arguments_as(struct json_doc **out, struct json messages, enum chat_arguments form, struct err *err) MT_CHECK;

#endif

/* chat.c - which key of an answer holds its reasoning. */
#include "data/chat/chat.h"

const char *chat_reasoning_key(struct json message, const char *own)
{
    const char *const keys[] = {own, "thinking", "reasoning_content", "reasoning"};
    for (int64_t i = 0; i < MT_LEN(keys); i++)
        if (json_truthy(json_find(message, keys[i]))) return keys[i];
    return own;
}

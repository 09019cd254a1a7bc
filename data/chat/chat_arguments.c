/* chat_arguments.c - see chat_arguments.h. */
#include "data/chat/chat_arguments.h"

#include <string.h>

#include "data/json/text.h"

/* Whether `arguments` must be rewritten for this form. OBJECT also rewrites null, as {}. */
static bool is_other(struct json arguments, enum chat_arguments form)
{
    const enum json_type type = json_type(arguments);
    return form == CHAT_ARGUMENTS_OBJECT ? type == JSON_STRING || type == JSON_NULL : type == JSON_OBJECT;
}

static bool call_is_other(struct json call, enum chat_arguments form)
{
    return is_other(json_find(call, "arguments"), form) ||
           is_other(json_find(json_find(call, "function"), "arguments"), form);
}

static bool message_is_other(struct json message, enum chat_arguments form)
{
    const struct json calls = json_find(message, "tool_calls");
    for (int64_t i = 0; json_type(calls) == JSON_ARRAY && i < json_count(calls); i++)
        if (call_is_other(json_at(calls, i), form)) return true;
    return false;
}

/* Writes a string as the JSON in it, an object as a string. */
static int put_other(struct text_buf *t, struct json arguments, struct err *err)
{
    struct text_buf text = {0};
    const char *s = "{}";
    int64_t size = 2;
    struct err why;
    if (json_type(arguments) == JSON_OBJECT) {
        int rc = text_put_json(&text, arguments, err);
        if (!rc) text_put_quoted(t, text.text, text.size);
        text_free(&text);
        return rc;
    }
    if (json_type(arguments) == JSON_STRING && json_str(arguments, &s, &size, err)) return -1;
    if (!size) { /* a call without arguments */
        text_put(t, "{}");
        return 0;
    }
    struct json_doc *doc = json_parse(s, size, "arguments", &why);
    const bool object = doc && json_type(json_root(doc)) == JSON_OBJECT;
    json_free(doc);
    if (!object)
        return json_error(arguments, err, "is a string that is not the JSON of an object; the chat template needs one");
    text_put_bytes(t, s, size);
    return 0;
}

/* Writes a value: with in_call a call, its `function`, or a list of calls, else a message, or a list of messages. */
static int put_value(struct text_buf *t, struct json value, bool in_call, enum chat_arguments form, struct err *err)
{
    const bool array = json_type(value) == JSON_ARRAY;
    const char *key;
    struct json member;
    int rc = 0;
    if (!array && json_type(value) != JSON_OBJECT) return text_put_json(t, value, err);
    text_put(t, array ? "[" : "{");
    for (int64_t i = 0; !rc && json_item(value, i, &key, &member); i++) {
        text_put_key(t, key);
        if (!key)
            rc = put_value(t, member, in_call, form, err);
        else if (in_call && !strcmp(key, "arguments") && is_other(member, form))
            rc = put_other(t, member, err);
        else if (!strcmp(key, in_call ? "function" : "tool_calls"))
            rc = put_value(t, member, true, form, err);
        else
            rc = text_put_json(t, member, err);
    }
    text_put(t, array ? "]" : "}");
    return rc;
}

int chat_arguments_as(struct json_doc **out, struct json messages, enum chat_arguments form, struct err *err)
{
    struct text_buf t = {0};
    bool other = false;
    *out = NULL;
    for (int64_t i = 0; form != CHAT_ARGUMENTS_ANY && !other && i < json_count(messages); i++)
        other = message_is_other(json_at(messages, i), form);
    if (!other) return 0;
    int rc = put_value(&t, messages, false, form, err);
    if (!rc) rc = (*out = json_parse(t.text, t.size, "messages", err)) ? 0 : -1;
    text_free(&t);
    return rc;
}

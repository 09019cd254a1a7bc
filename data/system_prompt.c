/* system_prompt.c - see system_prompt.h. */
#include "data/system_prompt.h"

#include <string.h>

static bool has_system(struct json messages)
{
    static const char *const roles[] = {"system", "developer"};
    const char *role;
    for (int64_t i = 0; i < json_count(messages); i++)
        if (!json_get_str(json_at(messages, i), "role", &role, NULL) && str_in(role, roles, MT_LEN(roles))) return true;
    return false;
}

int system_prompt_add(struct json_doc **out, struct json row, const char *text, struct err *err)
{
    const struct json messages = json_find(row, "messages");
    const char *key;
    struct json value;
    struct text_buf copy = {0};
    int rc = 0;
    *out = NULL;
    if (!json_count(messages) || has_system(messages)) return 0;
    text_put(&copy, "{\"messages\": [{\"role\": \"system\", \"content\": ");
    text_put_string(&copy, text);
    text_put(&copy, "}");
    for (int64_t i = 0; !rc && i < json_count(messages); i++) {
        text_put(&copy, ", ");
        rc = text_put_json(&copy, json_at(messages, i), err);
    }
    text_put(&copy, "]");
    for (int64_t i = 0; !rc && json_member(row, i, &key, &value); i++) {
        if (!strcmp(key, "messages")) continue;
        text_put_key(&copy, key);
        rc = text_put_json(&copy, value, err);
    }
    text_put(&copy, "}");
    if (!rc && !(*out = json_parse_row(copy.text, copy.size, 64 * JSON_ROW_VALUES, json_name(row), err))) rc = -1;
    text_free(&copy);
    return rc;
}

int system_prompt_check(const struct chat_template *t, const char *text, struct err *err)
{
    static const char question[] =
        "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": \"a\"}]}";
    const struct chat_options opt = {.date = CHAT_DATE};
    struct json_doc *doc = json_parse(question, sizeof(question) - 1, "data.system", err), *with = NULL;
    struct text_buf out = {0}, bare = {0};
    struct err why = {""};
    const char *from = text;
    int64_t size = (int64_t)strlen(text);
    if (!doc) return -1;
    text_trim(&from, &size);
    int rc = system_prompt_add(&with, json_root(doc), text, err);
    if (!rc) {
        rc = chat_template_render(&out, t, json_root(with), &opt, &why);
        text_put_bytes(&bare, from, size);
        if (rc || !out.size || !strstr(out.text, bare.text))
            rc = err_set(err,
                         "data.system: the chat template writes no system message%s%s: write the text into the first "
                         "question of the rows, or set data.chat_template",
                         why.msg[0] ? ": " : "", why.msg);
    }
    text_free(&out);
    text_free(&bare);
    json_free(with);
    json_free(doc);
    return rc;
}

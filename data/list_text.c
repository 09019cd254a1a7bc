/* list_text.c - rows whose lists are text. */
#include "data/list_text.h"

#include <string.h>

#include "data/json/json_literal.h"
#include "data/json/text.h"

static const char *const always[] = {"messages", "conversations"}; /* text is an error */
static const char *const often[] = {"history",   "tools",     "functions", "documents",     "chat_template_kwargs",
                                    "input_ids", "loss_mask", "topk_ids",  "topk_logprobs", "responses",
                                    "ratings"};

static bool is_list(const char *text, int64_t size)
{
    text_trim(&text, &size);
    return size && (*text == '[' || *text == '{' || *text == '(');
}

/* Appends the JSON that a text spells; false: it spells none. */
static bool put_list(struct text_buf *out, const char *text, int64_t size)
{
    struct err unused;
    if (!is_list(text, size)) return false;
    struct json_doc *doc = json_parse_row(text, size, JSON_ROW_VALUES, "", &unused);
    json_free(doc);
    if (!doc) return json_literal(out, text, size);
    text_put_bytes(out, text, size);
    return true;
}

/* Whether a text spells a list of {role, ...}. */
static bool spells_messages(struct json value)
{
    const char *text;
    int64_t size;
    struct text_buf list = {0};
    struct err unused;
    bool yes = false;
    if (json_type(value) == JSON_STRING && !json_str(value, &text, &size, &unused) && put_list(&list, text, size)) {
        struct json_doc *doc = json_parse_row(list.text, list.size, JSON_ROW_VALUES, "", &unused);
        yes = doc && json_has(json_at(json_root(doc), 0), "role");
        json_free(doc);
    }
    text_free(&list);
    return yes;
}

/* Keys whose texts spell lists of messages; the others stay text. answers: chosen and rejected, both or neither. */
struct spelled {
    bool prompt, completion, answers;
};

static struct spelled spelled_of(struct json row)
{
    struct spelled s = {.prompt = spells_messages(json_find(row, "prompt"))};
    s.completion = s.prompt && spells_messages(json_find(row, "completion"));
    s.answers = spells_messages(json_find(row, "chosen")) && spells_messages(json_find(row, "rejected"));
    s.prompt = s.prompt && (s.completion || s.answers);
    return s;
}

static bool takes_list(const char *key, const struct spelled *s)
{
    return str_in(key, always, MT_LEN(always)) || str_in(key, often, MT_LEN(often)) ||
           (s->prompt && !strcmp(key, "prompt")) || (s->completion && !strcmp(key, "completion")) ||
           (s->answers && (!strcmp(key, "chosen") || !strcmp(key, "rejected")));
}

int list_text_read(struct json_doc **out, struct json row, struct err *err)
{
    struct text_buf copy = {0};
    const char *key, *text;
    struct json value;
    int64_t size;
    bool any = false;
    int rc = 0;
    const struct spelled spelled = spelled_of(row);
    *out = NULL;
    for (int64_t i = 0; json_member(row, i, &key, &value) && !any; i++)
        any = json_type(value) == JSON_STRING && takes_list(key, &spelled);
    if (!any) return 0;
    text_put(&copy, "{");
    for (int64_t i = 0; !rc && json_member(row, i, &key, &value); i++) {
        text_put_key(&copy, key);
        const bool list = json_type(value) == JSON_STRING && takes_list(key, &spelled);
        if (list && (rc = json_str(value, &text, &size, err))) break;
        if (list && put_list(&copy, text, size)) continue;
        if (list && str_in(key, always, MT_LEN(always)))
            rc = json_error(row, err, "`%s` is text, and neither a list in JSON nor one that Python prints", key);
        else
            rc = text_put_json(&copy, value, err);
    }
    text_put(&copy, "}");
    if (!rc && !(*out = json_parse_row(copy.text, copy.size, 64 * JSON_ROW_VALUES, json_name(row), err))) rc = -1;
    text_free(&copy);
    return rc;
}

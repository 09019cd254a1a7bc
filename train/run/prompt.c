/* prompt.c - see prompt.h. */
#include "train/run/prompt.h"

#include <string.h>

#include "data/eos_ids.h"
#include "data/json/text.h"

static void add_end(struct prompt *p, const struct run *r, int64_t id)
{
    for (int64_t i = 0; i < p->n_ends; i++)
        if (p->ends[i] == id) return;
    if (id >= 0 && id < r->arch.vocab && p->n_ends < PROMPT_ENDS) p->ends[p->n_ends++] = (int32_t)id;
}

static int add_published_ends(struct prompt *p, const struct run *r, struct err *err)
{
    struct eos_ids eos;
    if (eos_ids_load(&eos, r->model_dir, err)) return -1;
    for (int64_t i = 0; i < eos.n; i++) add_end(p, r, eos.ids[i]);
    return 0;
}

/* The special token that the chat template writes after an answer. */
static int add_turn_end(struct prompt *p, const struct run *r, struct err *err)
{
    static const char row[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"Ready?\"}, "
                              "{\"role\": \"assistant\", \"content\": \"Yes\"}]}";
    const struct chat_options opt = {.date = r->cfg->data.chat_date};
    struct text_buf text = {0};
    struct token_list list = {0};
    struct json_doc *doc = json_parse(row, sizeof(row) - 1, "an answer", err);
    int rc = doc ? chat_template_render(&text, r->chat, json_root(doc), &opt, err) : -1;
    char *end = NULL;
    for (char *at = text.text; at && (at = strstr(at, "Yes")); at++) end = at + 3;
    if (!rc && end) rc = tokenizer_encode(r->tok, end, (int64_t)strlen(end), true, &list, err);
    if (!rc && list.count && tokenizer_is_special(r->tok, list.ids[0])) add_end(p, r, list.ids[0]);
    token_list_free(&list);
    text_free(&text);
    json_free(doc);
    return rc;
}

static int find_ends(struct prompt *p, const struct run *r, bool conversation, struct err *err)
{
    add_end(p, r, r->eos);
    add_end(p, r, tokenizer_id(r->tok, "<|call|>")); /* gpt-oss: not in every generation_config.json */
    if (add_published_ends(p, r, err)) return -1;
    return conversation ? add_turn_end(p, r, err) : 0;
}

static int take_prompt(struct prompt *p, const struct run *r, const struct text_buf *text, const char *name,
                       bool conversation, struct err *err)
{
    if (tokenizer_encode(r->tok, text->text, text->size, true, &p->ids, err)) return err_prefix(err, "%s", name);
    if (!p->ids.count) return err_set(err, "%s: the prompt is empty", name);
    return find_ends(p, r, conversation, err);
}

int prompt_text(struct prompt *p, const struct run *r, const char *text, const char *name, struct err *err)
{
    struct text_buf prompt = {0};
    text_put(&prompt, text);
    const int rc = take_prompt(p, r, &prompt, name, false, err);
    text_free(&prompt);
    return rc;
}

int prompt_messages(struct prompt *p, const struct run *r, struct json row, const char *name, struct err *err)
{
    const struct chat_options opt = {.date = r->cfg->data.chat_date};
    struct chat_reader reader = {.template = r->chat, .on_dropped = (enum chat_on_dropped)r->cfg->data.dropped};
    struct json messages = json_type(row) == JSON_ARRAY ? row : json_find(row, "messages");
    if (json_type(messages) == JSON_ARRAY && !json_count(messages))
        return err_set(err, "%s: the list of messages is empty", name);
    if (json_get_array(row, "messages", &messages, err)) return -1;
    if (!r->chat)
        return err_set(err, "%s: %s has no chat template: set data.chat_template, or give a prompt", name,
                       r->model_dir);
    int rc = chat_reader_prompt(&reader, row, &opt, err);
    if (!rc && reader.lost) log_warn("%s", reader.why.msg);
    if (!rc) rc = take_prompt(p, r, &reader.samples.items[0], name, true, err);
    chat_reader_free(&reader);
    return rc;
}

int prompt_row(struct prompt *p, const struct run *r, struct json row, const char *name, struct err *err)
{
    const struct json prompt = json_find(row, "prompt");
    struct text_buf out = {0};
    const char *text, *key;
    struct json value;
    int rc = 0;
    if (json_type(prompt) != JSON_ARRAY)
        return json_get_str(row, "prompt", &text, err) || prompt_text(p, r, text, name, err) ? -1 : 0;
    text_put(&out, "{");
    for (int64_t i = 0; !rc && json_member(row, i, &key, &value); i++) {
        text_put_key(&out, strcmp(key, "prompt") != 0 ? key : "messages");
        rc = text_put_json(&out, value, err);
    }
    text_put(&out, "}");
    struct json_doc *doc = rc ? NULL : json_parse_row(out.text, out.size, JSON_ROW_VALUES, name, err);
    rc = doc ? prompt_messages(p, r, json_root(doc), name, err) : -1;
    json_free(doc);
    text_free(&out);
    return rc;
}

int prompt_ids(struct prompt *p, const struct run *r, struct json ids, struct err *err)
{
    const int64_t n = json_count(ids);
    int64_t id;
    if (json_type(ids) != JSON_ARRAY) return json_error(ids, err, "not a list of token ids");
    if (!n) return json_error(ids, err, "an empty list: a prompt has at least one token");
    token_list_reserve(&p->ids, n);
    for (int64_t i = 0; i < n; i++) {
        if (json_i64(json_at(ids, i), 0, r->arch.vocab - 1, &id, err)) return -1;
        p->ids.ids[p->ids.count++] = (int32_t)id;
    }
    return find_ends(p, r, false, err);
}

int prompt_document(struct prompt *p, const struct run *r, const int32_t *ids, int64_t n, struct err *err)
{
    token_list_reserve(&p->ids, n);
    memcpy(p->ids.ids, ids, (size_t)n * sizeof(*ids));
    p->ids.count = n;
    return find_ends(p, r, r->chat != NULL, err);
}

bool prompt_opens_reasoning(const struct prompt *p, const struct tokenizer *tok)
{
    struct text_buf end = {0};
    const char *text;
    int64_t size;
    for (int64_t i = MT_MAX(p->ids.count - 8, 0); i < p->ids.count; i++)
        if ((text = tokenizer_bytes(tok, p->ids.ids[i], &size))) text_put_bytes(&end, text, size);
    text = end.text ? end.text : "";
    size = end.size;
    text_trim(&text, &size);
    const bool found = size >= 7 && !memcmp(text + size - 7, "<think>", 7);
    text_free(&end);
    return found;
}

void prompt_free(struct prompt *p)
{
    token_list_free(&p->ids);
    p->n_ends = 0;
}

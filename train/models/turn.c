/* turn.c - see turn.h. */
#include "train/models/turn.h"

#include <stdio.h>
#include <string.h>

#include "data/chat/chat_reader.h"
#include "train/generate/answer_text.h"

void turn_put_message(struct text_buf *out, const struct message *m)
{
    char id[32];
    text_put(out, "{\"role\": \"assistant\", \"content\": ");
    text_put_quoted(out, m->content.size ? m->content.text : "", m->content.size);
    if (m->reasoning.size) {
        text_put_key(out, "reasoning_content");
        text_put_quoted(out, m->reasoning.text, m->reasoning.size);
    }
    if (m->n_call) text_put_key(out, "tool_calls");
    for (int64_t i = 0; i < m->n_call; i++) {
        const struct message_call *call = &m->calls[i];
        snprintf(id, sizeof(id), "call_%lld", (long long)i);
        text_put(out, i ? ", {" : "[{");
        text_put_key(out, "id");
        text_put_string(out, id);
        text_put(out, ", \"type\": \"function\", \"function\": {\"name\": ");
        text_put_quoted(out, call->name.text, call->name.size);
        text_put_key(out, "arguments");
        text_put_quoted(out, call->arguments.text, call->arguments.size);
        text_put(out, "}}");
    }
    text_put(out, m->n_call ? "]}" : "}");
}

static void decode(struct answer_text *t, const struct tokenizer *tok, const int32_t *ids, int64_t n)
{
    *t = (struct answer_text){.tok = tok};
    answer_text_begin(t);
    for (int64_t i = 0; i < n; i++) (void)answer_text_add(t, ids[i]);
    answer_text_end(t);
}

static bool begins(const struct text_buf *all, const struct text_buf *held, struct err *why)
{
    int64_t same = 0;
    while (same < held->size && same < all->size && held->text[same] == all->text[same]) same++;
    if (same == held->size) return true;
    const int64_t from = MT_MAX(same - 20, 0);
    char a[64], b[64];
    snprintf(a, sizeof(a), "%.*s", (int)MT_MIN(held->size - from, 40), held->text + from);
    snprintf(b, sizeof(b), "%.*s", (int)MT_MIN(all->size - from, 40), all->text + from);
    err_set(why, "the chat template renders the earlier turns as \"%s\", and their tokens are \"%s\"", str_mask(b),
            str_mask(a));
    return false;
}

/* The suffix begins after an end token, where tokens do not join. Its tokens must have its text: a tokenizer may add a
 * blank to the start of a text. */
static int add_suffix(struct token_list *suffix, bool *fits, const struct run *r, const char *text, int64_t size,
                      struct err *why)
{
    struct answer_text back = {.tok = NULL};
    const int64_t before = suffix->count;
    if (tokenizer_encode(r->tok, text, size, true, suffix, why)) return -1;
    decode(&back, r->tok, suffix->ids + before, suffix->count - before);
    *fits = back.text.size == size && !memcmp(back.text.text, text, (size_t)size);
    if (!*fits) {
        suffix->count = before;
        err_set(why, "the tokens of the messages alone do not have their text");
    }
    answer_text_free(&back);
    return 0;
}

int turn_suffix(struct token_list *suffix, bool *fits, const struct run *r, struct json conversation,
                const int32_t *held, int64_t n, struct err *why)
{
    const struct chat_options opt = {.date = r->cfg->data.chat_date, .generation_prompt = true};
    struct text_buf all = {0};
    struct answer_text seen;
    *fits = false;
    if (!r->chat) return err_set(why, "%s has no chat template: set data.chat_template", r->model_dir);
    struct chat_reader reader = {.template = r->chat, .on_dropped = DROPPED_WARN}; /* what is dropped does not fit */
    int rc = chat_reader_prompt(&reader, conversation, &opt, why);
    decode(&seen, r->tok, held, n);
    if (!rc) text_put_bytes(&all, reader.samples.items[0].text, reader.samples.items[0].size);
    if (!rc && begins(&all, &seen.text, why))
        rc = add_suffix(suffix, fits, r, all.text + seen.text.size, all.size - seen.text.size, why);
    answer_text_free(&seen);
    text_free(&all);
    chat_reader_free(&reader);
    return rc;
}

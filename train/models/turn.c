/* turn.c - see turn.h. */
#include "train/models/turn.h"

#include <stdio.h>
#include <string.h>

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

void turn_stand_in(struct message *m, bool other)
{
    const char *letter = other ? "b" : "a";
    m->content.size = m->reasoning.size = 0;
    if (!m->n_call) text_put(&m->content, letter);
    for (int64_t i = 0; i < m->n_call; i++) {
        m->calls[i].arguments.size = 0;
        text_put(&m->calls[i].arguments, "{\"a\": \"");
        text_put(&m->calls[i].arguments, letter);
        text_put(&m->calls[i].arguments, "\"}");
    }
}

/* ---- texts ---- */

/* Renderings of the conversation: with the new messages, without them, and up to the first turn. [2]: with each of the
 * two stand-ins. */
struct texts {
    struct text_buf with[2], without[2], before;
};

static void free_texts(struct texts *t)
{
    for (int i = 0; i < 2; i++) {
        text_free(&t->with[i]);
        text_free(&t->without[i]);
    }
    text_free(&t->before);
}

/* Renders the conversation with stand-in i. -1: the template refuses the new messages. *fits false: it refuses the
 * conversation without them. */
static int render(struct texts *t, bool *fits, const struct turn_input *in, int i, struct err *why)
{
    const struct run *r = in->run;
    const int64_t n = json_count(json_find(in->conversation[i], "messages"));
    struct chat_options opt = {.date = r->cfg->data.chat_date, .generation_prompt = true};
    const int rc = chat_reader_prompt(in->reader, in->conversation[i], &opt, why);
    if (!rc) {
        const struct json row = in->reader->doc ? json_root(in->reader->doc) : in->conversation[i];
        const struct text_buf *with = &in->reader->samples.items[0];
        text_put_bytes(&t->with[i], with->text, with->size);
        opt.generation_prompt = false;
        opt.leave_out = n - in->n_told;
        *fits = !chat_template_render(&t->without[i], r->chat, row, &opt, why);
        opt.leave_out = n - in->n_before;
        if (*fits && !i) *fits = !chat_template_render(&t->before, r->chat, row, &opt, why);
    }
    return rc;
}

/* The number of bytes at their ends that are equal. */
static int64_t common_end(const struct text_buf *a, const struct text_buf *b)
{
    int64_t n = 0;
    while (n < a->size && n < b->size && a->text[a->size - 1 - n] == b->text[b->size - 1 - n]) n++;
    return n;
}

/* Whether the text before the model's first turn is the same with and without the new messages. */
static bool keeps(const struct texts *t, struct err *why)
{
    const struct text_buf *held = &t->before, *all = &t->with[0];
    int64_t same = 0;
    while (same < held->size && same < all->size && held->text[same] == all->text[same]) same++;
    if (same == held->size) return true;
    const int64_t from = MT_MAX(same - 20, 0);
    char a[64], b[64];
    snprintf(a, sizeof(a), "%.*s", (int)MT_MIN(held->size - from, 40), held->text + from);
    snprintf(b, sizeof(b), "%.*s", (int)MT_MIN(all->size - from, 40), all->text + from);
    err_set(
        why,
        "with the new messages the chat template writes \"%s\" before the model's turns, where the prompt has \"%s\"",
        str_mask(b), str_mask(a));
    return false;
}

/* ---- tokens ---- */

static bool is_end(const struct turn_input *in, int32_t id)
{
    for (int64_t i = 0; i < in->n_ends; i++)
        if (in->ends[i] == id) return true;
    return false;
}

/* with, without: the tokens after the text of the last answer, rendered with and without the new messages. Returns the
 * index in `with` of the token that ends the answer's turn; -1: none. It is the token that the model sampled, or a
 * special token at the place where `without` has one of the model's end tokens. Only tokens up to the first difference
 * between `with` and `without` can belong to the turn. */
static int64_t end_of_turn(const struct turn_input *in, const struct token_list *with, const struct token_list *without)
{
    int64_t n = 0;
    while (n < with->count && n < without->count && with->ids[n] == without->ids[n]) n++;
    for (int64_t i = 0; i <= n && i < with->count; i++)
        if (with->ids[i] == in->end) return i;
    for (int64_t i = 0; i <= n && i < with->count && i < without->count; i++)
        if (is_end(in, without->ids[i]) && tokenizer_is_special(in->run->tok, with->ids[i])) return i;
    return -1;
}

/* Whether the tokens decode to the end of `text`; a tokenizer may add a blank to the start of a text. */
static bool have_text(const struct tokenizer *tok, const int32_t *ids, int64_t n, const struct text_buf *text)
{
    struct answer_text back = {.tok = tok};
    answer_text_begin(&back);
    for (int64_t i = 0; i < n; i++) (void)answer_text_add(&back, ids[i]);
    answer_text_end(&back);
    const bool same = back.text.size <= text->size &&
                      !memcmp(back.text.text, text->text + text->size - back.text.size, (size_t)back.text.size);
    answer_text_free(&back);
    return same;
}

static int encode_end(struct token_list *to, const struct run *r, const struct text_buf *t, int64_t n, struct err *why)
{
    return tokenizer_encode(r->tok, t->text + t->size - n, n, true, to, why);
}

static void other_end(const struct turn_input *in, const struct text_buf *all, int64_t n, struct err *why)
{
    int64_t size = 0;
    const char *text = tokenizer_bytes(in->run->tok, in->end, &size);
    char end[64], next[64];
    snprintf(end, sizeof(end), "%.*s", (int)MT_MIN(size, 40), text ? text : "");
    snprintf(next, sizeof(next), "%.*s", (int)MT_MIN(n, 40), all->text + all->size - n);
    err_set(why, "the model's turn ended with \"%s\", and the chat template writes \"%s\" after it", str_mask(end),
            str_mask(next));
}

static int add_suffix(struct token_list *suffix, bool *fits, const struct turn_input *in, const struct texts *t,
                      struct err *why)
{
    const struct text_buf *all = &t->with[0];
    const int64_t n = common_end(all, &t->with[1]), m = common_end(&t->without[0], &t->without[1]);
    struct token_list with = {0}, without = {0};
    if (n == all->size) {
        err_set(why, "the chat template does not write the model's turn");
        return 0;
    }
    const int rc =
        encode_end(&with, in->run, all, n, why) || encode_end(&without, in->run, &t->without[0], m, why) ? -1 : 0;
    const int64_t at = rc ? 0 : end_of_turn(in, &with, &without) + 1, rest = with.count - at;
    if (!rc && !at)
        other_end(in, all, n, why);
    else if (!rc && !(*fits = have_text(in->run->tok, with.ids + at, rest, all)))
        err_set(why, "the tokens of the messages alone do not have their text");
    if (*fits) token_list_reserve(suffix, rest);
    for (int64_t i = 0; *fits && i < rest; i++) suffix->ids[suffix->count++] = with.ids[at + i];
    token_list_free(&with);
    token_list_free(&without);
    return rc;
}

int turn_suffix(struct token_list *suffix, bool *fits, const struct turn_input *in, struct err *why)
{
    const struct json messages = json_find(in->conversation[0], "messages");
    const char *role = "";
    struct texts t = {.before = {0}};
    *fits = false;
    if (!in->run->chat) return err_set(why, "%s has no chat template: set data.chat_template", in->run->model_dir);
    if (!json_opt_str(json_at(messages, json_count(messages) - 1), "role", &role, NULL) && !strcmp(role, "assistant"))
        return err_set(why, "the last one is an assistant's, and the model writes the next turn");
    int rc = render(&t, fits, in, 0, why);
    if (!rc && *fits) rc = render(&t, fits, in, 1, why);
    if (rc && json_has(json_at(messages, in->n_told - 1), "tool_calls")) rc = 0;
    if (!rc && *fits) {
        *fits = false;
        if (keeps(&t, why)) rc = add_suffix(suffix, fits, in, &t, why);
    }
    free_texts(&t);
    return rc;
}

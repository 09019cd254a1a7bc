/* chat_reply.c - see chat_reply.h. */
#include "train/answers/chat_reply.h"

#include <stdio.h>

#include "train/answers/chat_input.h"
#include "train/generate/printable.h"

#define DIM   "\033[2m"
#define PLAIN "\033[0m"

struct showing {
    const struct chat_replies *of;
    struct chat_reply *reply;
    struct message_input in;
    struct message message;
    int64_t n_reasoning, n_content; /* bytes shown */
};

/* What is new in a text that only grows. */
static void show_part(const struct text_buf *text, int64_t *shown, bool dim)
{
    if (text->size <= *shown) return;
    if (dim) fputs(DIM, stdout);
    printable_put(stdout, text->text + *shown, text->size - *shown);
    if (dim) fputs(PLAIN, stdout);
    *shown = text->size;
}

static void show(void *user, const struct sample *a)
{
    struct showing *s = user;
    s->in.whole = a->end != SAMPLE_RUNS;
    message_parse(&s->message, &s->in, a->text, a->text_size);
    if (s->of->terminal) show_part(&s->message.reasoning, &s->n_reasoning, true);
    if (s->message.content.size > s->n_content && s->n_reasoning && !s->n_content) fputs("\n", stdout);
    show_part(&s->message.content, &s->n_content, false);
    fflush(stdout);
}

static void finish(void *user, const struct sample *a)
{
    struct showing *s = user;
    show(user, a);
    fputs("\n", stdout);
    s->reply->end = a->end;
    s->reply->n_tok = a->n;
    text_put_bytes(&s->reply->content, s->message.content.text, s->message.content.size);
    text_put_bytes(&s->reply->reasoning, s->message.reasoning.text, s->message.reasoning.size);
}

static int run_request(struct showing *s, const struct sample_request *q, struct err *err)
{
    struct engine *e = s->of->engine;
    (void)chat_input_interrupted();
    const int64_t number = engine_add(e, q, err);
    if (number < 0) return -1;
    while (engine_step(e)) {
        progress();
        if (chat_input_interrupted()) engine_cancel(e, number);
    }
    if (s->reply->end == SAMPLE_FAILED)
        return err_set(err, "the logits are not finite: check the adapter and the model");
    return fflush(stdout) || ferror(stdout) ? err_set(err, "standard output cannot be written") : 0;
}

struct plan_generation chat_reply_sizes(int64_t context)
{
    struct plan_generation g = engine_sizes(1, context, context);
    plan_keeps(&g, context);
    return g;
}

static int render(struct prompt *p, const struct chat_replies *r, const struct chat_talk *t, struct err *err)
{
    struct text_buf row = {0};
    chat_talk_put(&row, t);
    struct json_doc *doc = json_parse_row(row.text, row.size, JSON_ROW_VALUES, "conversation", err);
    const int rc = doc ? prompt_messages(p, r->run, json_root(doc), "conversation", err) : -1;
    json_free(doc);
    text_free(&row);
    return rc;
}

static int answer(struct chat_reply *reply, const struct chat_replies *r, const struct prompt *p, int adapter,
                  struct err *err)
{
    struct showing s = {
        .of = r, .reply = reply, .in = {.rules = r->rules, .think_open = prompt_opens_reasoning(p, r->run->tok)}};
    const int64_t room = r->context - p->ids.count;
    if (room < 1)
        return err_set(err,
                       "the conversation has %lld tokens, and there is room for %lld with an answer: /reset begins "
                       "another, --context sets the room",
                       (long long)p->ids.count, (long long)r->context);
    struct sample_request q = {.ids = p->ids.ids,
                               .n_ids = p->ids.count,
                               .n = 1,
                               .params = r->params,
                               .end_ids = p->ends,
                               .n_end_ids = p->n_ends,
                               .adapter = adapter,
                               .user = &s,
                               .token = show,
                               .done = finish};
    if (!q.params.max_tokens || q.params.max_tokens > room) q.params.max_tokens = room;
    const int rc = run_request(&s, &q, err);
    reply->full = reply->end == SAMPLE_LENGTH && q.params.max_tokens == room;
    message_free(&s.message);
    return rc;
}

int chat_reply_make(struct chat_reply *reply, const struct chat_replies *r, const struct chat_talk *t, int adapter,
                    struct err *err)
{
    struct prompt p = {.n_ends = 0};
    *reply = (struct chat_reply){.n_tok = 0};
    text_put(&reply->content, "");
    text_put(&reply->reasoning, "");
    const int rc = render(&p, r, t, err) || answer(reply, r, &p, adapter, err) ? -1 : 0;
    prompt_free(&p);
    return rc;
}

void chat_reply_free(struct chat_reply *reply)
{
    text_free(&reply->content);
    text_free(&reply->reasoning);
}

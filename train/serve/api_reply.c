/* api_reply.c - see api_reply.h. */
#include "train/serve/api_reply.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

void api_put_head(struct text_buf *out, const struct api_form *form, bool chunk)
{
    char text[64];
    snprintf(text, sizeof(text), "{\"id\": \"%s-%016llx\"", form->chat ? "chatcmpl" : "cmpl",
             (unsigned long long)form->id);
    text_put(out, text);
    text_put_key(out, "object");
    text_put(out, !form->chat ? "\"text_completion\"" : chunk ? "\"chat.completion.chunk\"" : "\"chat.completion\"");
    api_put_i64(out, "created", form->created);
    text_put_key(out, "model");
    api_put_text(out, form->model, (int64_t)strlen(form->model));
}

/* ---- log-probabilities ---- */

/* The bytes of a token, as they are in the text. */
static void put_token_bytes(struct text_buf *to, const struct tokenizer *tok, int32_t id)
{
    int64_t size = 0;
    const char *text = tokenizer_bytes(tok, id, &size);
    const bool spaces = tokenizer_marks_spaces(tok);
    for (int64_t i = 0; i < size; i++) {
        const bool space = spaces && i + 3 <= size && !memcmp(text + i, "\xe2\x96\x81", 3);
        text_put_bytes(to, space ? " " : text + i, 1);
        i += space ? 2 : 0;
    }
}

static void put_logprob(struct text_buf *out, double v)
{
    char text[32];
    snprintf(text, sizeof(text), "%.9g", isfinite(v) ? v : -9999.0);
    text_put(out, text);
}

/* "token", "logprob", "bytes" of an object that is open. */
static void put_token(struct text_buf *out, const struct tokenizer *tok, int32_t id, double logprob)
{
    struct text_buf bytes = {0};
    char text[8];
    text_put(&bytes, "");
    put_token_bytes(&bytes, tok, id);
    text_put_key(out, "token");
    api_put_text(out, bytes.text, bytes.size);
    text_put_key(out, "logprob");
    put_logprob(out, logprob);
    text_put_key(out, "bytes");
    text_put(out, "[");
    for (int64_t i = 0; i < bytes.size; i++) {
        snprintf(text, sizeof(text), "%s%d", i ? ", " : "", (unsigned char)bytes.text[i]);
        text_put(out, text);
    }
    text_put(out, "]");
    text_free(&bytes);
}

static void put_chat_logprobs(struct text_buf *out, const struct tokenizer *tok, const struct job_sample *s,
                              int64_t first, int64_t n_top)
{
    text_put(out, "{\"content\": [");
    for (int64_t i = first; i < s->n; i++) {
        text_put_comma(out);
        text_put(out, "{");
        put_token(out, tok, s->ids[i], (double)s->logprob[i]);
        text_put_key(out, "top_logprobs");
        text_put(out, "[");
        for (int64_t k = i * n_top; k < (i + 1) * n_top; k++) {
            text_put_comma(out);
            text_put(out, "{");
            put_token(out, tok, s->top_id[k], (double)s->top_logprob[k]);
            text_put(out, "}");
        }
        text_put(out, "]}");
    }
    text_put(out, "]}");
}

/* A member "token": logprob. */
static void put_pair(struct text_buf *out, const struct tokenizer *tok, int32_t id, double logprob)
{
    struct text_buf bytes = {0};
    text_put(&bytes, "");
    put_token_bytes(&bytes, tok, id);
    text_put_comma(out);
    api_put_text(out, bytes.text, bytes.size);
    text_put(out, ": ");
    put_logprob(out, logprob);
    text_free(&bytes);
}

/* The arrays in a completion's `logprobs`, while they are being written. */
struct lists {
    struct text_buf tokens, logprobs, top, offsets;
    int64_t offset; /* bytes so far */
};

static void put_row(struct lists *l, const struct tokenizer *tok, int32_t id, double logprob, bool known)
{
    struct text_buf bytes = {0};
    char text[32];
    text_put(&bytes, "");
    put_token_bytes(&bytes, tok, id);
    text_put_comma(&l->tokens);
    api_put_text(&l->tokens, bytes.text, bytes.size);
    text_put_comma(&l->logprobs);
    if (known)
        put_logprob(&l->logprobs, logprob);
    else
        text_put(&l->logprobs, "null");
    text_put_comma(&l->offsets);
    snprintf(text, sizeof(text), "%lld", (long long)l->offset);
    text_put(&l->offsets, text);
    l->offset += bytes.size;
    text_free(&bytes);
}

/* The likeliest tokens and the chosen one. */
static void put_top(struct lists *l, const struct tokenizer *tok, const struct job_sample *s, int64_t i, int64_t n_top)
{
    bool there = false;
    text_put_comma(&l->top);
    text_put(&l->top, "{");
    for (int64_t k = i * n_top; k < (i + 1) * n_top; k++) {
        put_pair(&l->top, tok, s->top_id[k], (double)s->top_logprob[k]);
        there |= s->top_id[k] == s->ids[i];
    }
    if (!there) put_pair(&l->top, tok, s->ids[i], (double)s->logprob[i]);
    text_put(&l->top, "}");
}

/* Writes the arrays. prompt: with echo, its log-probabilities come first; NULL: no echo. */
static void put_lists(struct text_buf *out, const struct tokenizer *tok, const struct job_sample *s, int64_t first,
                      int64_t n_top, const struct prompt *prompt)
{
    struct lists l = {.offset = 0};
    struct text_buf before = {0}, *all[] = {&l.tokens, &l.logprobs, &l.top, &l.offsets};
    for (int i = 0; i < MT_LEN(all); i++) text_put(all[i], "[");
    for (int64_t i = 0; prompt && i < prompt->ids.count; i++) {
        const double v = (double)s->prompt_logprob[i];
        put_row(&l, tok, prompt->ids.ids[i], v, i > 0);
        text_put_comma(&l.top);
        text_put(&l.top, i ? "{" : "null");
        if (i) put_pair(&l.top, tok, prompt->ids.ids[i], v);
        if (i) text_put(&l.top, "}");
    }
    for (int64_t i = 0; i < first; i++) put_token_bytes(&before, tok, s->ids[i]);
    l.offset += before.size;
    text_free(&before);
    for (int64_t i = first; i < s->n; i++) {
        put_row(&l, tok, s->ids[i], (double)s->logprob[i], true);
        put_top(&l, tok, s, i, n_top);
    }
    static const char *const names[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
    text_put(out, "{");
    for (int i = 0; i < MT_LEN(all); i++) {
        text_put_key(out, names[i]);
        text_put(all[i], "]");
        text_put(out, i == 2 && !n_top ? "null" : all[i]->text);
        text_free(all[i]);
    }
    text_put(out, "}");
}

void api_put_logprobs(struct text_buf *out, const struct api_context *c, const struct api_form *form,
                      const struct job_sample *s, int64_t first)
{
    text_put_key(out, "logprobs");
    if (!form->logprobs)
        text_put(out, "null");
    else if (form->chat)
        put_chat_logprobs(out, c->run->tok, s, first, form->n_top);
    else
        put_lists(out, c->run->tok, s, first, form->n_top, NULL);
}

/* ---- messages ---- */

void api_put_calls(struct text_buf *out, const struct api_form *form, int64_t choice, const struct message *m,
                   int64_t first, bool index)
{
    char id[64];
    text_put_key(out, "tool_calls");
    text_put(out, "[");
    for (int64_t i = first; i < m->n_call; i++) {
        const struct message_call *call = &m->calls[i];
        text_put_comma(out);
        text_put(out, "{");
        if (index) api_put_i64(out, "index", i);
        snprintf(id, sizeof(id), "call_%016llx",
                 (unsigned long long)rng_u64(form->id, (uint64_t)(choice * 65536 + i + 1)));
        text_put_key(out, "id");
        text_put_string(out, id);
        text_put_key(out, "type");
        text_put(out, "\"function\", \"function\": {\"name\": ");
        api_put_text(out, call->name.text, call->name.size);
        text_put_key(out, "arguments");
        api_put_text(out, call->arguments.text, call->arguments.size);
        text_put(out, "}}");
    }
    text_put(out, "]");
}

void api_put_finish(struct text_buf *out, const struct job_sample *s, bool calls)
{
    text_put_key(out, "finish_reason");
    text_put(out, s->end == SAMPLE_LENGTH ? "\"length\"" : calls ? "\"tool_calls\"" : "\"stop\"");
    text_put_key(out, "stop_reason"); /* vLLM's */
    if (s->stop)
        api_put_text(out, s->stop, (int64_t)strlen(s->stop));
    else
        text_put(out, "null");
}

void api_put_usage(struct text_buf *out, const struct job *job)
{
    int64_t prompt, cached, n = 0;
    job_prompt_tokens(job, &prompt, &cached);
    for (int64_t i = 0; i < job->n_prompt * job->q.n; i++) n += job->samples[i].n;
    text_put_key(out, "usage");
    text_put(out, "{");
    api_put_i64(out, "prompt_tokens", prompt);
    api_put_i64(out, "completion_tokens", n);
    api_put_i64(out, "total_tokens", prompt + n);
    text_put_key(out, "prompt_tokens_details");
    text_put(out, "{");
    api_put_i64(out, "cached_tokens", cached);
    text_put(out, "}");
    text_put(out, "}");
}

static void put_message(struct text_buf *out, struct api_form *form, int64_t choice, const struct job_sample *s)
{
    struct message m = {.n_call = 0};
    struct message_input in = form->in;
    in.whole = true;
    message_parse(&m, &in, s->text.text ? s->text.text : "", s->text.size);
    text_put_key(out, "message");
    text_put(out, "{\"role\": \"assistant\"");
    text_put_key(out, "content");
    if (m.n_call && !m.content.size)
        text_put(out, "null");
    else
        api_put_text(out, m.content.text, m.content.size);
    text_put_key(out, "refusal");
    text_put(out, "null");
    if (m.reasoning.size) {
        text_put_key(out, "reasoning_content");
        api_put_text(out, m.reasoning.text, m.reasoning.size);
    }
    if (m.n_call) api_put_calls(out, form, choice, &m, 0, false);
    text_put(out, "}");
    api_put_finish(out, s, m.n_call > 0);
    message_free(&m);
}

static void put_completion(struct text_buf *out, const struct api_context *c, const struct api_form *form,
                           const struct prompt *p, const struct job_sample *s)
{
    struct text_buf text = {0};
    text_put(&text, "");
    for (int64_t i = 0; form->echo && i < p->ids.count; i++) put_token_bytes(&text, c->run->tok, p->ids.ids[i]);
    if (s->text.size) text_put_bytes(&text, s->text.text, s->text.size);
    text_put_key(out, "text");
    api_put_text(out, text.text, text.size);
    text_free(&text);
    api_put_finish(out, s, false);
}

void api_reply_put(struct text_buf *out, const struct api_context *c, struct api_form *form, const struct job *job)
{
    api_put_head(out, form, false);
    text_put_key(out, "choices");
    text_put(out, "[");
    for (int64_t i = 0; i < job->n_prompt * job->q.n; i++) {
        const struct job_sample *s = &job->samples[i];
        const struct prompt *p = &job->prompts[i / job->q.n];
        text_put_comma(out);
        text_put(out, "{");
        api_put_i64(out, "index", i);
        if (form->chat)
            put_message(out, form, i, s);
        else
            put_completion(out, c, form, p, s);
        if (form->echo && form->logprobs) {
            text_put_key(out, "logprobs");
            put_lists(out, c->run->tok, s, 0, form->n_top, p);
        } else {
            api_put_logprobs(out, c, form, s, 0);
        }
        text_put(out, "}");
    }
    text_put(out, "]");
    api_put_usage(out, job);
    text_put(out, "}");
}

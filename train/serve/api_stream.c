/* api_stream.c - see api_stream.h. */
#include "train/serve/api_stream.h"

#include <string.h>

#include "train/serve/http.h"

/* What the client has received of a choice (one sample). */
struct sent {
    struct text_buf text, logprobs; /* copies of what is new, made under the mutex */
    struct job_sample end;          /* only `end` and `stop`, when the sample has ended */
    int64_t n, content, reasoning, calls;
    bool ended, role, finished;
    struct message m;
};

struct api_stream {
    struct api_context *c;
    struct job *job;
    struct api_form form;
    struct sent *sent; /* [n] */
    int64_t n, seen;   /* seen: job's n_call */
    struct text_buf out;
    int64_t at; /* bytes of out that were read */
    bool done;
};

struct api_stream *api_stream_open(struct api_context *c, struct job *job, const struct api_form *form)
{
    struct api_stream *s = mem_array(1, sizeof(*s));
    *s = (struct api_stream){.c = c, .job = job, .form = *form, .n = job->n_prompt * job->q.n, .seen = -1};
    s->sent = mem_array(s->n, sizeof(*s->sent));
    return s;
}

void api_stream_end(void *stream)
{
    struct api_stream *s = stream;
    for (int64_t i = 0; i < s->n; i++) {
        text_free(&s->sent[i].text);
        text_free(&s->sent[i].logprobs);
        message_free(&s->sent[i].m);
        mem_free(s->sent[i].end.stop);
    }
    job_leave(s->c->jobs, s->job);
    api_form_free(&s->form);
    text_free(&s->out);
    mem_free(s->sent);
    mem_free(s);
}

/* ---- events ---- */

static void begin_event(struct api_stream *s)
{
    text_put(&s->out, "data: ");
    api_put_head(&s->out, &s->form, true);
    text_put_key(&s->out, "choices");
    text_put(&s->out, "[");
}

static void end_event(struct api_stream *s)
{
    text_put(&s->out, "]");
    if (s->form.usage) text_put(&s->out, ", \"usage\": null");
    text_put(&s->out, "}\n\n");
}

/* {"index": i, "delta": {..}; the caller closes the object. */
static void begin_choice(struct api_stream *s, int64_t i, const char *delta)
{
    begin_event(s);
    text_put(&s->out, "{");
    api_put_i64(&s->out, "index", i);
    text_put(&s->out, delta);
}

static void put_part(struct text_buf *out, const char *key, const struct text_buf *text, int64_t from)
{
    text_put_key(out, key);
    api_put_text(out, text->text + from, text->size - from);
}

static void put_rest(struct api_stream *s, struct sent *c)
{
    text_put(&s->out, c->logprobs.size ? c->logprobs.text : ", \"logprobs\": null");
    c->logprobs.size = 0;
}

static void put_end(struct api_stream *s, int64_t i, bool calls)
{
    struct sent *c = &s->sent[i];
    begin_choice(s, i, s->form.chat ? ", \"delta\": {}" : ", \"text\": \"\"");
    put_rest(s, c);
    api_put_finish(&s->out, &c->end, calls);
    text_put(&s->out, "}");
    end_event(s);
    c->finished = true;
}

static void put_delta(struct api_stream *s, int64_t i)
{
    struct sent *c = &s->sent[i];
    struct message *m = &c->m;
    struct message_input in = s->form.in;
    in.whole = c->ended;
    message_parse(m, &in, c->text.text ? c->text.text : "", c->text.size);
    if (!c->role) {
        begin_choice(s, i,
                     ", \"delta\": {\"role\": \"assistant\", \"content\": \"\"}, \"logprobs\": null, "
                     "\"finish_reason\": null}");
        end_event(s);
        c->role = true;
    }
    if (m->content.size > c->content || m->reasoning.size > c->reasoning || m->n_call > c->calls || c->logprobs.size) {
        begin_choice(s, i, ", \"delta\": {");
        if (m->reasoning.size > c->reasoning) put_part(&s->out, "reasoning_content", &m->reasoning, c->reasoning);
        if (m->content.size > c->content) put_part(&s->out, "content", &m->content, c->content);
        if (m->n_call > c->calls) api_put_calls(&s->out, &s->form, i, m, c->calls, true);
        text_put(&s->out, "}");
        put_rest(s, c);
        text_put(&s->out, ", \"finish_reason\": null}");
        end_event(s);
        c->reasoning = m->reasoning.size;
        c->content = m->content.size;
        c->calls = m->n_call;
    }
    if (c->ended) put_end(s, i, m->n_call > 0);
}

static void put_text(struct api_stream *s, int64_t i)
{
    struct sent *c = &s->sent[i];
    if (c->text.size > c->content || c->logprobs.size) {
        begin_choice(s, i, "");
        if (!c->text.text) text_put(&c->text, "");
        put_part(&s->out, "text", &c->text, c->content);
        put_rest(s, c);
        text_put(&s->out, ", \"finish_reason\": null}");
        end_event(s);
        c->content = c->text.size;
    }
    if (c->ended) put_end(s, i, false);
}

static void put_error(struct api_stream *s, int status, const struct err *why)
{
    const struct api_error e = {.status = status, .why = *why};
    text_put(&s->out, "data: ");
    api_put_error(&s->out, &e);
    text_put(&s->out, "\n\n");
}

/* ---- reading ---- */

/* Copies what is new in a sample; the mutex is locked. */
static void copy_new(struct api_stream *s, int64_t i)
{
    const struct job_sample *from = &s->job->samples[i];
    struct sent *c = &s->sent[i];
    if (from->text.size > c->text.size)
        text_put_bytes(&c->text, from->text.text + c->text.size, from->text.size - c->text.size);
    if (s->form.logprobs && from->n > c->n) {
        text_put(&c->logprobs, " "); /* text_put_comma looks at the byte before */
        api_put_logprobs(&c->logprobs, s->c, &s->form, from, c->n);
    }
    c->n = from->n;
    if (from->end == SAMPLE_RUNS || c->ended) return;
    c->ended = true;
    c->end = (struct job_sample){.end = from->end, .stop = from->stop ? mem_strdup(from->stop) : NULL};
}

/* Waits for news and writes their events. */
static void next_events(struct api_stream *s)
{
    struct err why = {{0}};
    struct text_buf usage = {0};
    jobs_lock(s->c->jobs);
    job_wait(s->c->jobs, s->job, s->seen);
    s->seen = s->job->n_call;
    for (int64_t i = 0; i < s->n; i++) copy_new(s, i);
    const bool done = s->job->state == JOB_DONE;
    const int status = s->job->status;
    if (status) why = s->job->err;
    text_put(&usage, " ");
    if (done) api_put_usage(&usage, s->job);
    jobs_unlock(s->c->jobs);
    for (int64_t i = 0; i < s->n && !status; i++) {
        if (s->sent[i].finished) continue;
        if (s->form.chat)
            put_delta(s, i);
        else
            put_text(s, i);
    }
    if (done && status) put_error(s, status, &why);
    if (done && !status && s->form.usage) {
        begin_event(s);
        text_put(&s->out, "]");
        text_put(&s->out, usage.text);
        text_put(&s->out, "}\n\n");
    }
    if (done) text_put(&s->out, "data: [DONE]\n\n");
    s->done = done;
    text_free(&usage);
}

int64_t api_stream_read(void *stream, char *to, int64_t most)
{
    struct api_stream *s = stream;
    while (s->at == s->out.size) {
        s->at = s->out.size = 0;
        if (s->done) return 0;
        if (http_peer_gone(s->job->peer)) return -1;
        next_events(s);
    }
    const int64_t n = MT_MIN(most, s->out.size - s->at);
    memcpy(to, s->out.text + s->at, (size_t)n);
    s->at += n;
    return n;
}

/* chat_reader.c - rows of conversations -> samples.
 *
 * Marks show whether a template omits a part: the row is rendered again with a mark in each part, and a part is written
 * if its mark is in a sample. For answers, and for messages after the last answer, it suffices that the mark is in the
 * conversation rendered up to this message. Only rows in doubt are rendered again: those with a message whose shape
 * (chat_dropped_shapes) no earlier row had, and those whose samples lack the text of a message. */
#include "data/chat/chat_reader.h"

#include <stdio.h>
#include <string.h>

const char *const chat_media[CHAT_MEDIA] = {"images", "image", "videos", "video", "audios", "audio"};

#define MAX_SEEN ((int64_t)1 << 20)

/* What to make of a row: samples to train on, or a prompt. */
struct job {
    enum loss_on loss;
    bool whole, prompt;
    struct chat_options opt;
};

void chat_reader_free(struct chat_reader *r)
{
    chat_samples_free(&r->samples);
    chat_samples_free(&r->marked);
    chat_marks_free(&r->marks);
    json_free(r->doc);
    mem_free(r->seen);
    mem_free(r->shapes);
    mem_free(r->mute);
    *r = (struct chat_reader){0};
}

void chat_reader_clear(struct chat_reader *r)
{
    chat_samples_clear(&r->samples);
    r->n_nulls = 0;
    r->lost = false;
    r->why.msg[0] = 0;
}

/* ---- a set of hashes ---- */

static bool is_seen(const struct chat_reader *r, uint64_t shape)
{
    if (!r->cap_seen) return false;
    for (uint64_t at = shape;; at++) {
        const uint64_t found = r->seen[at % (uint64_t)r->cap_seen];
        if (found == shape || !found) return found;
    }
}

static void add_seen(struct chat_reader *r, uint64_t shape)
{
    if (is_seen(r, shape) || !shape || r->n_seen == MAX_SEEN) return;
    if (2 * r->n_seen >= r->cap_seen) {
        uint64_t *old = r->seen;
        const int64_t n = r->cap_seen;
        r->cap_seen = 2 * n + 64;
        r->seen = mem_array(r->cap_seen, sizeof(*r->seen));
        r->n_seen = 0;
        for (int64_t i = 0; i < n; i++) add_seen(r, old[i]);
        mem_free(old);
    }
    uint64_t at = shape;
    while (r->seen[at % (uint64_t)r->cap_seen]) at++;
    r->seen[at % (uint64_t)r->cap_seen] = shape;
    r->n_seen++;
}

/* ---- texts ---- */

static bool is_answer(struct json message)
{
    const char *role;
    return !json_get_str(message, "role", &role, NULL) && !strcmp(role, "assistant");
}

static int make(struct chat_samples *out, const struct chat_reader *r, struct json row, const struct job *job,
                struct err *err)
{
    if (!job->prompt) return chat_samples_make(out, r->template, row, job->loss, job->whole, &job->opt, err);
    return chat_samples_prompt(out, r->template, row, &job->opt, err);
}

/* Number of messages in the samples: those up to the last answer with loss. */
static int64_t n_shown(const struct chat_samples *s, struct json messages, const struct job *job)
{
    return job->prompt ? json_count(messages) - job->opt.leave_out : s->n_messages;
}

/* Number of messages whose parts must be written: a prompt omits the answers at the end. */
static int64_t n_checked(struct json messages, const struct job *job)
{
    return json_count(messages) - (job->prompt ? job->opt.leave_out : 0);
}

/* Whether the row must be rendered with marks. The samples have the first n of its n_check messages. */
static bool has_doubt(struct chat_reader *r, struct json row, int64_t n, int64_t n_check)
{
    const struct json messages = json_find(row, "messages");
    const int64_t count = json_count(messages);
    const struct text_buf *last = &r->samples.items[r->samples.count - 1];
    if (count > r->cap_shapes) {
        r->shapes = mem_grow(r->shapes, r->cap_shapes, 2 * count, sizeof(*r->shapes));
        r->mute = mem_grow(r->mute, r->cap_shapes, 2 * count, sizeof(*r->mute));
        r->cap_shapes = 2 * count;
    }
    chat_dropped_shapes(r->shapes, row);
    for (int64_t i = 0, at = 0; i < n_check; i++) {
        const struct json message = json_at(messages, i);
        bool found = i >= n || chat_dropped_text_in(last, &at, message);
        for (int64_t k = 0, from = 0; !found && k + 1 < r->samples.count; k++, from = 0)
            found = chat_dropped_text_in(&r->samples.items[k], &from, message);
        if (!found || !is_seen(r, r->shapes[i])) return true;
    }
    return false;
}

/* ---- parts that are not written ---- */

/* If the template does not know a message's role, adds the roles that it knows to an error, unless that names them.
 * Returns -1. */
static int name_roles(const struct chat_reader *r, struct json messages, struct err *err)
{
    const char *names[CHAT_ROLES + CHAT_ALIASES], *role;
    const int n = chat_rules_roles(&r->rules, names);
    if (!err) return -1;
    const struct err before = *err;
    for (int64_t i = 0; i < json_count(messages) && n && !strstr(err->msg, "assistant"); i++) {
        if (json_get_str(json_at(messages, i), "role", &role, NULL) || str_in(role, names, n)) continue;
        char list[256] = "";
        for (int k = 0; k < n; k++)
            snprintf(list + strlen(list), sizeof(list) - strlen(list), "%s%s", k ? ", " : "", names[k]);
        return err_set(err, "%.*s; the template knows no role \"%.40s\", only %s", (int)sizeof(before.msg) - 400,
                       before.msg, role, list);
    }
    return -1;
}

/* Looks for marks in the text rendered up to this message. It may have a part of an earlier answer that the samples
 * lack: gpt-oss's template drops reasoning before a final answer. The samples also lack the messages from n on. */
static void find_in_own_text(struct chat_reader *r, struct json marked, int64_t message, int64_t n,
                             const struct job *job)
{
    const struct json messages = json_find(marked, "messages");
    struct chat_options opt = job->opt;
    struct text_buf text = {0};
    if (message < 0 || (message < n && !is_answer(json_at(messages, message)))) return;
    opt.leave_out = json_count(messages) - message - 1;
    opt.generation_prompt = false;
    if (!chat_template_render(&text, r->template, marked, &opt, NULL) && text.size) chat_marks_find(&r->marks, &text);
    text_free(&text);
}

static void name_lost(struct chat_reader *r, struct json row, const struct chat_mark *mark)
{
    const struct json message = json_at(json_find(row, "messages"), mark->message);
    bool other = false; /* another call of the message is written */
    if (mark->message < 0) {
        (void)json_error(row, &r->why, "the chat template does not write `%s` of this row, %s", mark->what,
                         CHAT_DROPPED_ADVICE);
        return;
    }
    for (int64_t i = 0; i < r->marks.n; i++) {
        const struct chat_mark *m = &r->marks.items[i];
        other |= m->message == mark->message && m->found && !strcmp(m->what, "tool_calls");
    }
    if (other && !strcmp(mark->what, "tool_calls"))
        (void)chat_dropped_calls(message, &r->why);
    else if (chat_dropped_part(message, mark->what, &r->why))
        (void)name_roles(r, json_find(row, "messages"), &r->why);
}

/* Looks for all marks; the samples have n messages. Sets lost, and mute for answers without a written part. */
static void find_lost(struct chat_reader *r, struct json row, struct json marked, int64_t n, const struct job *job)
{
    const struct json messages = json_find(row, "messages");
    const int64_t count = json_count(messages);
    const bool one = (job->whole || chat_template_has_generation(r->template)) && job->loss == LOSS_ASSISTANT;
    int64_t own = -1; /* the message whose own text was rendered */
    for (int64_t i = 0; i < count; i++) r->mute[i] = false;
    for (int64_t i = 0; i < r->marked.count; i++) chat_marks_find(&r->marks, &r->marked.items[i]);
    for (int64_t i = r->marks.n - 1; i >= 0; i--) {
        const struct chat_mark *m = &r->marks.items[i];
        const bool shown = m->found;
        if (!shown && m->message != own) find_in_own_text(r, marked, own = m->message, n, job);
        const bool written = m->found;
        /* gpt-oss's template treats text beside a call as reasoning; one text of all answers lacks it */
        if (!shown && written && one && m->message < n) r->samples.n_unshown++;
        if (!written && !r->lost) r->lost = true;
        if (!written) name_lost(r, row, m);
        if (m->message < 0) continue;
        /* mute: none of the message's marks, which are neighbours in this list, is written */
        const bool last = i + 1 == r->marks.n || r->marks.items[i + 1].message != m->message;
        r->mute[m->message] = !written && (last || r->mute[m->message]);
    }
    for (int64_t i = 0; i < n_checked(messages, job) && !r->lost; i++) add_seen(r, r->shapes[i]);
}

/* Records images, audio and video of a row or of a message as lost. */
static void note_media(struct chat_reader *r, struct json object)
{
    for (int64_t i = 0; i < CHAT_MEDIA; i++) {
        if (!json_truthy(json_find(object, chat_media[i]))) continue;
        r->lost = true;
        (void)json_error(object, &r->why,
                         "has `%s`: images, audio and video are not trained; data.dropped = warn trains the text alone",
                         chat_media[i]);
    }
}

/* Renders the row with marks, if in doubt. */
static int check(struct chat_reader *r, struct json row, struct json original, const struct job *job, struct err *err)
{
    const struct json messages = json_find(row, "messages");
    struct err why;
    const struct json given = json_find(original, "messages");
    note_media(r, original);
    for (int64_t i = 0; i < json_count(given); i++)
        if (json_count(json_at(given, i)) > 2) note_media(r, json_at(given, i));
    if (!r->samples.count) return 0;
    const int64_t n = n_shown(&r->samples, messages, job), n_check = n_checked(messages, job);
    if (!has_doubt(r, row, n, n_check)) return 0;
    if (chat_marks_put(&r->marks, row, n_check, err)) return -1;
    struct json_doc *doc = json_parse(r->marks.row.text, r->marks.row.size, json_name(row), err);
    if (!doc) return -1;
    if (!make(&r->marked, r, json_root(doc), job, &why)) find_lost(r, row, json_root(doc), n, job);
    json_free(doc);
    return 0;
}

/* ---- rows ---- */

/* Makes the samples of a row that the template takes unchanged. If the template omits a part and data.dropped asks only
 * for a warning, makes them again without loss on answers of which nothing is written. */
static int read_plain(struct chat_reader *r, struct json row, struct json original, const struct job *job,
                      struct err *err)
{
    struct job again = *job;
    if (make(&r->samples, r, row, job, err)) return name_roles(r, json_find(row, "messages"), err);
    if (check(r, row, original, job, err)) return -1;
    if (!r->lost) return 0;
    if (r->on_dropped == DROPPED_REFUSE) return err_set(err, "%s", r->why.msg);
    if (!r->samples.count || job->prompt) return 0;
    again.opt.mute = r->mute;
    return make(&r->samples, r, row, &again, err);
}

static int read_row(struct chat_reader *r, struct json row, struct job *job, struct err *err)
{
    const struct chat_row_options opt = {.rules = &r->rules, .lossy = r->on_dropped == DROPPED_WARN};
    struct chat_row_counts counts;
    chat_reader_clear(r);
    if (!r->has_rules) chat_rules_find(&r->rules, r->template);
    r->has_rules = true;
    json_free(r->doc);
    if (chat_row_rewrite(&r->doc, &counts, row, &opt, err)) return -1;
    const struct json plain = r->doc ? json_root(r->doc) : row, messages = json_find(plain, "messages");
    r->n_nulls = counts.nulls;
    r->lost = counts.lost;
    if (r->lost)
        (void)json_error(row, &r->why, "%lld part%s of contents that are not text are left out", (long long)counts.lost,
                         str_plural(counts.lost));
    const int64_t n = json_count(messages);
    while (job->prompt && job->opt.leave_out < n && is_answer(json_at(messages, n - 1 - job->opt.leave_out)))
        job->opt.leave_out++;
    if (job->prompt && job->opt.leave_out == n) return json_error(messages, err, "has no message to answer");
    return read_plain(r, plain, row, job, err);
}

int chat_reader_samples(struct chat_reader *r, struct json row, enum loss_on loss, bool whole,
                        const struct chat_options *opt, struct err *err)
{
    struct job job = {.loss = loss, .whole = whole, .opt = *opt};
    return read_row(r, row, &job, err);
}

int chat_reader_prompt(struct chat_reader *r, struct json row, const struct chat_options *opt, struct err *err)
{
    struct job job = {.prompt = true, .opt = *opt};
    return read_row(r, row, &job, err);
}

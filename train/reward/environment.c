/* environment.c - see environment.h. */
#include "train/reward/environment.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "train/config/words.h"
#include "train/reward/program.h"

#define KEY "environment.command"

struct episode {
    int64_t id, n_turn;
    bool waits, ended;      /* ended: the caller needs no reply any more */
    double began, asked_ms; /* on clock_ms */
};
struct environment {
    struct program program;
    struct words words;
    bool nan_is_null;
    int64_t turns, n_lost;
    double timeout_ms, most_ms; /* most_ms 0: no limit */
    struct episode *of;         /* [n] those that are open */
    int64_t n, cap;
    struct environment_reply *replies; /* [n_reply], from `first` on not yet returned */
    int64_t n_reply, first, cap_reply;
};

/* ---- opening ---- */

struct environment *environment_open(const struct config *c, struct err *err)
{
    struct environment *e = mem_alloc(sizeof(*e));
    struct err why;
    int rc = 0;
    e->nan_is_null = c->reward.on_nan == CFG_NAN_NULL;
    e->turns = c->environment.turns;
    e->timeout_ms = 1e3 * c->environment.timeout_s;
    e->most_ms = 1e3 * c->environment.seconds;
    if (words_split(&e->words, c->environment.command, &why)) rc = err_set(err, KEY ": %s", why.msg);
    if (!rc && !e->words.n) rc = err_set(err, KEY " is not set");
    if (!rc) rc = program_open(&e->program, KEY, e->words.words, err);
    if (!rc) return e;
    environment_close(e);
    return NULL;
}

void environment_close(struct environment *e)
{
    if (!e) return;
    program_close(&e->program);
    words_free(&e->words);
    for (int64_t i = e->first; i < e->n_reply; i++) environment_reply_free(&e->replies[i]);
    mem_free(e->replies);
    mem_free(e->of);
    mem_free(e);
}

void environment_reply_free(struct environment_reply *reply)
{
    mem_free(reply->messages);
    mem_free(reply->tools);
    *reply = (struct environment_reply){.id = 0};
}

static struct episode *find(const struct environment *e, int64_t id)
{
    for (int64_t i = 0; i < e->n; i++)
        if (e->of[i].id == id) return &e->of[i];
    return NULL;
}

static void forget(struct environment *e, struct episode *of) { *of = e->of[--e->n]; }

/* ---- replies ---- */

static void add_reply(struct environment *e, const struct environment_reply *reply)
{
    e->replies = mem_reserve(e->replies, &e->cap_reply, e->n_reply + 1, sizeof(*e->replies));
    e->replies[e->n_reply++] = *reply;
}

bool environment_next(struct environment *e, struct environment_reply *reply)
{
    if (e->first == e->n_reply) return false;
    *reply = e->replies[e->first++];
    if (e->first == e->n_reply) e->first = e->n_reply = 0;
    return true;
}

/* Drops the replies of a completion that has ended. */
static void drop_replies(struct environment *e, int64_t id)
{
    int64_t kept = e->first;
    for (int64_t i = e->first; i < e->n_reply; i++) {
        if (e->replies[i].id == id)
            environment_reply_free(&e->replies[i]);
        else
            e->replies[kept++] = e->replies[i];
    }
    e->n_reply = kept;
}

/* JSON of a list of objects, in one line. */
static int take_list(char **out, struct json reply, const char *key, struct err *err)
{
    const struct json list = json_find(reply, key);
    struct text_buf text = {0};
    if (!json_given(list)) return 0;
    if (json_type(list) != JSON_ARRAY) return err_set(err, "\"%s\": expected a list", key);
    for (int64_t i = 0; i < json_count(list); i++)
        if (json_type(json_at(list, i)) != JSON_OBJECT) return err_set(err, "\"%s\": expected objects", key);
    if (text_put_json(&text, list, err)) return -1;
    *out = text.text;
    return 0;
}

static int take_end(const struct environment *e, struct environment_reply *to, struct json reply, struct err *err)
{
    const struct json done = json_find(reply, "done"), reward = json_find(reply, "reward");
    bool ended = false;
    if (json_given(done) && json_bool(done, &ended, NULL)) return err_set(err, "\"done\": expected true or false");
    to->end = ended ? ENVIRONMENT_DONE : ENVIRONMENT_GOES_ON;
    return json_given(reward) ? program_reward(reward, e->nan_is_null, &to->reward, err) : 0;
}

static bool is_over(const struct environment *e, const struct episode *of)
{
    return of->n_turn >= e->turns || (e->most_ms > 0 && clock_ms() - of->began > e->most_ms);
}

/* Refuses keys that would have no effect. A program may write the keys of both kinds of replies, as null or false. */
static int check_keys(struct json reply, bool step, struct err *err)
{
    static const char *const known[] = {"id", "messages", "tools", "done", "reward"};
    const struct json done = json_find(reply, "done");
    bool ends = false;
    if (json_given(done) && json_bool(done, &ends, NULL)) ends = true;
    const char *odd = ends ? "done" : json_given(json_find(reply, "reward")) ? "reward" : NULL;
    if (step) odd = json_given(json_find(reply, "tools")) ? "tools" : NULL;
    if (odd)
        return err_set(err, "\"%s\" has no effect in the reply to a %s: leave it out", odd, step ? "step" : "reset");
    return program_check_keys(reply, known, MT_LEN(known), err);
}

static int take(struct environment *e, struct json reply, struct err *err)
{
    struct environment_reply to = {.reward = (double)NAN};
    if (json_type(reply) != JSON_OBJECT) return err_set(err, "expected an object");
    if (json_i64(json_find(reply, "id"), 0, INT64_MAX, &to.id, NULL)) return err_set(err, "it has no \"id\"");
    struct episode *of = find(e, to.id);
    if (!of) return err_set(err, "id %lld is of no completion that is open", (long long)to.id);
    if (!of->waits) return err_set(err, "id %lld has its reply already", (long long)to.id);
    const bool step = of->n_turn > 0;
    if (check_keys(reply, step, err)) return -1;
    int rc = take_list(&to.messages, reply, "messages", err);
    if (!rc && !step) rc = take_list(&to.tools, reply, "tools", err);
    if (!rc && step) rc = take_end(e, &to, reply, err);
    if (!rc && step && to.end == ENVIRONMENT_GOES_ON && (!to.messages || !strcmp(to.messages, "[]")))
        rc = err_set(err, "it has no \"messages\" for the next turn, and \"done\" is not true");
    if (rc) return environment_reply_free(&to), -1;
    if (!to.messages) to.messages = mem_strdup("[]");
    of->waits = false;
    if (step) e->program.n_failed = 0; /* a program that fails in every step answers resets */
    const bool needed = !of->ended;
    if (step && to.end == ENVIRONMENT_GOES_ON && is_over(e, of)) to.end = ENVIRONMENT_LIMIT;
    if (to.end == ENVIRONMENT_DONE || of->ended) forget(e, of);
    if (needed)
        add_reply(e, &to);
    else
        environment_reply_free(&to);
    return 0;
}

static int take_line(void *user, const char *text, int64_t size, struct err *err)
{
    struct environment *e = user;
    struct err why;
    struct json_doc *doc = json_parse_row(text, size, JSON_ROW_VALUES, "reply", &why);
    const int rc = doc ? take(e, json_root(doc), &why) : -1;
    json_free(doc);
    return rc ? program_bad_line(&e->program, err, text, size, why.msg) : 0;
}

/* ---- requests ---- */

static int send(struct environment *e, struct text_buf *line, struct err *err)
{
    text_put(line, "}\n");
    const int rc = program_put(&e->program, line->text, line->size, err);
    text_free(line);
    return rc ? rc : environment_work(e, 0, err);
}

static void begin_line(struct text_buf *line, const char *op, int64_t id)
{
    char head[64];
    snprintf(head, sizeof(head), "{\"op\": \"%s\", \"id\": %lld", op, (long long)id);
    text_put(line, head);
}

int environment_reset(struct environment *e, int64_t id, const char *columns, struct err *err)
{
    struct text_buf line = {0};
    MT_REQUIRE(!find(e, id), "completion %lld is open", (long long)id);
    e->of = mem_reserve(e->of, &e->cap, e->n + 1, sizeof(*e->of));
    e->of[e->n++] = (struct episode){.id = id, .waits = true, .began = clock_ms(), .asked_ms = clock_ms()};
    begin_line(&line, "reset", id);
    program_put_member(&line, "columns", columns ? columns : "{}");
    return send(e, &line, err);
}

int environment_step(struct environment *e, int64_t id, const char *message, const char *text, int64_t size,
                     struct err *err)
{
    struct text_buf line = {0};
    struct episode *of = find(e, id);
    if (!of) return 0; /* the completion is lost, and its reply says so */
    MT_REQUIRE(!of->waits, "completion %lld has no turn", (long long)id);
    of->waits = true;
    of->n_turn++;
    of->asked_ms = clock_ms();
    begin_line(&line, "step", id);
    program_put_member(&line, "message", message);
    text_put_key(&line, "text");
    text_put_quoted(&line, text, size);
    return send(e, &line, err);
}

/* The reply to the last request of the completion may still come. */
int environment_end(struct environment *e, int64_t id, struct err *err)
{
    struct text_buf line = {0};
    struct episode *of = find(e, id);
    drop_replies(e, id);
    if (!of || of->ended) return 0;
    of->ended = true;
    if (!of->waits) forget(e, of);
    begin_line(&line, "close", id);
    return send(e, &line, err);
}

/* ---- the program ---- */

/* After a failure of the program all its open completions are lost. */
static int fail(struct environment *e, const char *why, struct err *err)
{
    char lost[96];
    snprintf(lost, sizeof(lost), "%lld completion%s lost", (long long)e->n, e->n == 1 ? " is" : "s are");
    e->n_lost += e->n;
    for (int64_t i = 0; i < e->n; i++) drop_replies(e, e->of[i].id);
    for (int64_t i = 0; i < e->n; i++)
        if (!e->of[i].ended)
            add_reply(e, &(struct environment_reply){.id = e->of[i].id,
                                                     .messages = mem_strdup("[]"),
                                                     .end = ENVIRONMENT_LOST,
                                                     .reward = (double)NAN});
    e->n = 0;
    return program_restart(&e->program, why, lost, err);
}

static bool is_late(const struct environment *e)
{
    for (int64_t i = 0; i < e->n; i++)
        if (e->of[i].waits && clock_ms() - e->of[i].asked_ms > e->timeout_ms) return true;
    return false;
}

int environment_work(struct environment *e, int64_t ms, struct err *err)
{
    const struct program_reader reader = {.line = take_line, .user = e};
    const double until = clock_ms() + (double)ms;
    char why[64];
    for (;;) {
        struct pollfd fds[PROGRAM_FDS];
        if (program_work(&e->program, &reader, err)) return -1;
        if (program_ended(&e->program)) return fail(e, NULL, err);
        snprintf(why, sizeof(why), "gave no reply for %g s", e->timeout_ms / 1e3);
        if (is_late(e)) return fail(e, why, err);
        const double left = until - clock_ms();
        if (e->first < e->n_reply || left <= 0) return 0;
        poll(fds, (nfds_t)program_fds(&e->program, fds), (int)MT_MIN(left + 1, 50));
        progress();
    }
}

int64_t environment_waits(const struct environment *e)
{
    int64_t n = 0;
    for (int64_t i = 0; i < e->n; i++) n += e->of[i].waits && !e->of[i].ended;
    return n;
}

int64_t environment_lost(const struct environment *e) { return e->n_lost; }

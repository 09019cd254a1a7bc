/* eval_prompts.c - see eval_prompts.h. */
#include "train/generate/eval_prompts.h"

#include <string.h>

#include "train/generate/engine.h"

static bool has_role(struct json message, const char *role)
{
    const char *own;
    if (json_get_str(message, "role", &own, NULL)) return false;
    const struct chat_alias *alias = chat_rules_alias(own);
    return !strcmp(alias ? alias->role : own, role);
}

/* A content as text: a string, or the text parts of a list; other values, such as tool calls, as JSON. NULL: it is
 * empty. */
static char *text_of(struct json value)
{
    struct text_buf t = {0};
    const char *s;
    int64_t size;
    char *text = NULL;
    struct err why;
    for (int64_t i = 0; json_type(value) == JSON_ARRAY && i < json_count(value); i++)
        if (!json_str(json_find(json_at(value, i), "text"), &s, &size, NULL)) text_put_bytes(&t, s, size);
    if (!json_str(value, &s, &size, NULL)) text_put_bytes(&t, s, size);
    if (!t.size && json_truthy(value) && text_put_json(&t, value, &why)) t.size = 0;
    if (t.size) text = mem_strdup(t.text);
    text_free(&t);
    return text;
}

/* Finds the text of the row, which is its prompt or its last user message, and the answer that the row has after it, or
 * NULL. */
static void find_texts(struct json row, char **prompt, char **expected)
{
    const struct json given = json_find(row, "prompt");
    const bool list = json_type(given) == JSON_ARRAY;
    const struct json messages = list ? given : json_find(row, "messages");
    int64_t end = json_count(messages), user;
    *prompt = list ? NULL : text_of(given);
    *expected = text_of(json_find(row, "completion"));
    while (end && has_role(json_at(messages, end - 1), "assistant")) end--;
    for (user = end; user && !has_role(json_at(messages, user - 1), "user"); user--) {
    }
    if (!user) user = end;
    if (!*prompt && user) *prompt = text_of(json_find(json_at(messages, user - 1), "content"));
    for (int64_t i = end; !*expected && i < json_count(messages); i++) {
        *expected = text_of(json_find(json_at(messages, i), "content"));
        if (!*expected) *expected = text_of(json_find(json_at(messages, i), "tool_calls"));
    }
    if (!*prompt) *prompt = mem_strdup("(no text)");
}

static int add(struct eval_prompts *s, struct run *r, struct json row, const char *name, struct err *err)
{
    const int64_t room = r->cfg->data.seq_len - r->cfg->eval.prompt_tokens;
    if (s->n == SAMPLES_MAX) return err_set(err, "%s: more than %d prompts", name, SAMPLES_MAX);
    if (json_has(row, "messages") && json_has(row, "prompt"))
        return err_set(err, "%s: prompt and messages exclude each other: remove one", name);
    struct eval_prompt *e = &s->of[s->n++];
    struct prompt *one = &e->of;
    find_texts(row, &e->shown, &e->expected);
    if (json_has(row, "messages")) {
        if (prompt_messages(one, r, row, name, err)) return -1;
    } else if (prompt_row(one, r, row, name, err)) {
        return -1;
    }
    if (one->ids.count <= room) return 0;
    return err_set(err, "%s: %lld tokens of prompt and eval.prompt_tokens = %lld are more than data.seq_len = %lld",
                   name, (long long)one->ids.count, (long long)r->cfg->eval.prompt_tokens,
                   (long long)r->cfg->data.seq_len);
}

static int open_all(struct eval_prompts *s, struct run *r, const char *path, struct err *err)
{
    char *line, name[MT_PATH + 32];
    int64_t size;
    int rc;
    struct line_reader *reader = line_reader_open(path, err);
    if (!reader) return -1;
    s->of = mem_array(SAMPLES_MAX, (int64_t)sizeof(*s->of));
    while ((rc = line_reader_next(reader, &line, &size, err)) > 0) {
        snprintf(name, sizeof(name), "%s:%lld", path, (long long)line_reader_line(reader));
        if (!size) continue;
        struct json_doc *doc = row_parse(line, size, name, err);
        rc = doc ? add(s, r, json_root(doc), name, err) : -1;
        json_free(doc);
        if (rc) break;
    }
    line_reader_close(reader);
    return rc || s->n ? rc : err_set(err, "%s has no rows", path);
}

int eval_prompts_open(struct eval_prompts *s, struct run *r, struct err *err)
{
    const char *path = r->cfg->eval.prompts;
    *s = (struct eval_prompts){.run = r};
    return path[0] && open_all(s, r, path, err) ? err_prefix(err, "eval.prompts") : 0;
}

struct plan_generation eval_prompts_sizes(const struct eval_prompts *s)
{
    const struct config *cfg = s->run->cfg;
    struct plan_generation g = {.n_seq = s->n, .n_tok = MT_MAX(cfg->data.seq_len, s->n), .chunk = 1, .spare = true};
    for (int64_t i = 0; i < s->n; i++)
        g.cache_tok += (s->of[i].of.ids.count + cfg->eval.prompt_tokens + MT_PAGE - 1) / MT_PAGE * MT_PAGE;
    return g;
}

static void keep_answer(void *user, const struct sample *a)
{
    struct eval_prompt *p = user;
    p->text = mem_strdup(a->text);
    p->tokens = a->n - (a->end == SAMPLE_END_TOKEN);
    p->failed = a->end == SAMPLE_FAILED;
}

/* False: stop() was true. */
static bool answer_all(struct eval_prompts *s, struct engine *e, bool (*stop)(void))
{
    struct sample_params params = sample_params_default();
    struct err err;
    params.max_tokens = s->run->cfg->eval.prompt_tokens;
    for (int64_t i = 0; i < s->n; i++) {
        struct eval_prompt *p = &s->of[i];
        const struct sample_request q = {.ids = p->of.ids.ids,
                                         .n_ids = p->of.ids.count,
                                         .n = 1,
                                         .params = params,
                                         .end_ids = p->of.ends,
                                         .n_end_ids = p->of.n_ends,
                                         .user = p,
                                         .done = keep_answer};
        if (engine_add(e, &q, &err) < 0) MT_REQUIRE(false, "%s", err.msg); /* add() has checked it */
    }
    do {
        if (comm_host_max(s->run->par.all, stop()) > 0) return false;
        progress();
    } while (engine_step(e));
    return true;
}

static void write_answers(struct eval_prompts *s, struct metrics *m, int64_t step, bool all)
{
    bool failed = false;
    for (int64_t i = 0; i < s->n; i++) {
        struct eval_prompt *p = &s->of[i];
        const struct sample_metrics sample = {
            .step = step, .tokens = p->tokens, .prompt = p->shown, .expected = p->expected, .text = p->text};
        failed |= p->failed;
        if (m && all && !failed) metrics_sample(m, &sample);
        mem_free(p->text);
        p->text = NULL;
        p->failed = false;
    }
    if (failed) log_warn("no samples: the logits are not finite: check the adapter and the model");
}

bool eval_prompts_write(struct eval_prompts *s, struct metrics *m, int64_t step, bool (*stop)(void))
{
    struct err err;
    if (!s->n) return true;
    struct engine *e = engine_open_training(s->run, false, &err);
    if (!e) {
        log_warn("no samples: %s", err.msg);
        return true;
    }
    const bool all = answer_all(s, e, stop);
    engine_close(e);
    write_answers(s, m, step, all);
    return all;
}

void eval_prompts_close(struct eval_prompts *s)
{
    for (int64_t i = 0; i < s->n; i++) {
        prompt_free(&s->of[i].of);
        mem_free(s->of[i].shown);
        mem_free(s->of[i].expected);
    }
    mem_free(s->of);
    *s = (struct eval_prompts){.n = 0};
}

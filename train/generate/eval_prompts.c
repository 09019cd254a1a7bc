/* eval_prompts.c - eval.prompts. */
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
    struct prompt *one = &s->of[s->n];
    find_texts(row, &s->prompts[s->n], &s->expected[s->n]);
    s->n++;
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
    s->prompts = mem_array(SAMPLES_MAX, (int64_t)sizeof(*s->prompts));
    s->expected = mem_array(SAMPLES_MAX, (int64_t)sizeof(*s->expected));
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

static void write_answer(void *user, const struct sample *a)
{
    struct eval_prompts *s = user;
    const struct sample_metrics sample = {.step = s->step,
                                          .tokens = a->n - (a->end == SAMPLE_END_TOKEN),
                                          .prompt = s->prompts[s->at],
                                          .expected = s->expected[s->at],
                                          .text = a->text};
    s->failed = a->end == SAMPLE_FAILED;
    if (s->metrics && !s->failed) metrics_sample(s->metrics, &sample);
}

/* False: stop() was true. */
static bool answer_all(struct eval_prompts *s, struct engine *e, bool (*stop)(void))
{
    struct sample_params params = sample_params_default();
    struct err err;
    params.max_tokens = s->run->cfg->eval.prompt_tokens;
    for (s->at = 0; s->at < s->n && !s->failed; s->at++) {
        const struct prompt *p = &s->of[s->at];
        const struct sample_request q = {.ids = p->ids.ids,
                                         .n_ids = p->ids.count,
                                         .n = 1,
                                         .params = params,
                                         .end_ids = p->ends,
                                         .n_end_ids = p->n_ends,
                                         .user = s,
                                         .done = write_answer};
        if (comm_host_max(s->run->par.all, stop()) > 0) return false;
        if (engine_add(e, &q, &err) < 0) MT_REQUIRE(false, "%s", err.msg); /* add() has checked it */
        while (engine_step(e)) progress();
    }
    return true;
}

bool eval_prompts_write(struct eval_prompts *s, struct metrics *m, int64_t step, bool (*stop)(void))
{
    struct err err;
    if (!s->n) return true;
    const int64_t len = s->run->cfg->data.seq_len;
    const struct engine_options opt = {.n_seq = 1, .max_len = len, .n_tok = len, .chunk = 1, .cache_tok = len};
    struct engine *e = engine_open(s->run, &opt, &err);
    if (!e) {
        log_warn("no samples: %s", err.msg);
        return true;
    }
    s->metrics = m;
    s->step = step;
    s->failed = false;
    const bool all = answer_all(s, e, stop);
    engine_close(e);
    if (s->failed) log_warn("no samples: the logits are not finite: check the adapter and the model");
    return all;
}

void eval_prompts_close(struct eval_prompts *s)
{
    for (int64_t i = 0; i < s->n; i++) {
        prompt_free(&s->of[i]);
        mem_free(s->prompts[i]);
        mem_free(s->expected[i]);
    }
    mem_free(s->of);
    mem_free(s->prompts);
    mem_free(s->expected);
    *s = (struct eval_prompts){.n = 0};
}

/* eval_prompts.c - eval.prompts. */
#include "train/generate/eval_prompts.h"

#include <string.h>

static bool has_role(struct json message, const char *role)
{
    const char *own;
    if (json_get_str(message, "role", &own, NULL)) return false;
    const struct chat_alias *alias = chat_rules_alias(own);
    return !strcmp(alias ? alias->role : own, role);
}

/* A content, or its text parts; else JSON, as of calls. NULL: nothing. */
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

/* The last message of the user, or the prompt; and the answer that the row has after it, or NULL. */
static void find_texts(struct json row, char **prompt, char **expected)
{
    const struct json messages = json_find(row, "messages");
    int64_t end = json_count(messages), user;
    *prompt = text_of(json_find(row, "prompt"));
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
    const char *text;
    const int64_t room = r->cfg->data.seq_len - r->cfg->eval.prompt_tokens;
    if (s->n == SAMPLES_MAX) return err_set(err, "%s: more than %d prompts", name, SAMPLES_MAX);
    if (json_has(row, "messages") && json_has(row, "prompt"))
        return err_set(err, "%s: prompt and messages exclude each other: remove one", name);
    struct sampler *one = &s->of[s->n];
    find_texts(row, &s->prompts[s->n], &s->expected[s->n]);
    s->n++;
    *one = (struct sampler){.run = r, .top_p = 1};
    if (json_has(row, "messages")) {
        if (sampler_messages(one, row, name, err)) return -1;
    } else if (json_get_str(row, "prompt", &text, err) || sampler_prompt(one, text, name, err)) {
        return -1;
    }
    if (one->n_prompt <= room) return 0;
    return err_set(err, "%s: %lld tokens of prompt and eval.prompt_tokens = %lld are more than data.seq_len = %lld",
                   name, (long long)one->n_prompt, (long long)r->cfg->eval.prompt_tokens,
                   (long long)r->cfg->data.seq_len);
}

static int open_all(struct eval_prompts *s, struct run *r, const char *path, struct err *err)
{
    char *line, name[MT_PATH + 32];
    int64_t size;
    int rc;
    if (sampler_check(r, err)) return -1;
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
    *s = (struct eval_prompts){.n = 0};
    return path[0] && open_all(s, r, path, err) ? err_prefix(err, "eval.prompts") : 0;
}

bool eval_prompts_write(struct eval_prompts *s, struct metrics *m, int64_t step, bool (*stop)(void))
{
    struct err err;
    for (int64_t i = 0; i < s->n; i++) {
        struct sampler *one = &s->of[i];
        if (comm_host_max(one->run->par.all, stop()) > 0) return false;
        sampler_rewind(one);
        if (sampler_run(one, one->run->cfg->eval.prompt_tokens, &err)) {
            log_warn("no samples: %s", err.msg);
            return true;
        }
        const struct sample_metrics sample = {.step = step,
                                              .tokens = one->ids.count - one->n_prompt,
                                              .prompt = s->prompts[i],
                                              .expected = s->expected[i],
                                              .text = one->text.text ? one->text.text : ""};
        if (m) metrics_sample(m, &sample);
    }
    return true;
}

void eval_prompts_close(struct eval_prompts *s)
{
    for (int64_t i = 0; i < s->n; i++) {
        sampler_free(&s->of[i]);
        mem_free(s->prompts[i]);
        mem_free(s->expected[i]);
    }
    mem_free(s->of);
    mem_free(s->prompts);
    mem_free(s->expected);
    *s = (struct eval_prompts){.n = 0};
}

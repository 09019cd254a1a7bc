/* api_request.c - see api_request.h. */
#include "train/serve/api_request.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_SAMPLES = 128, MAX_PROMPTS = 1024, MAX_TOP = 20, MAX_STOPS = 16, COMPLETION_TOKENS = 16 };

enum key_use {
    USED = 3,
    CHAT = 1,
    COMPLETION = 2,
    NEUTRAL = 4 /* it cannot change the answer */
};
static const struct key {
    const char *name;
    enum key_use use;
    enum json_type type; /* ABSENT: what reads it checks */
} keys[] = {
    {"model", USED, JSON_STRING},
    {"messages", CHAT, JSON_ARRAY},
    {"prompt", COMPLETION, JSON_ABSENT},
    {"max_completion_tokens", CHAT, JSON_ABSENT},
    {"max_tokens", USED, JSON_ABSENT},
    {"min_tokens", USED, JSON_ABSENT},
    {"temperature", USED, JSON_ABSENT},
    {"top_p", USED, JSON_ABSENT},
    {"top_k", USED, JSON_ABSENT},
    {"min_p", USED, JSON_ABSENT},
    {"repetition_penalty", USED, JSON_ABSENT},
    {"frequency_penalty", USED, JSON_ABSENT},
    {"presence_penalty", USED, JSON_ABSENT},
    {"logit_bias", USED, JSON_OBJECT},
    {"n", USED, JSON_ABSENT},
    {"seed", USED, JSON_ABSENT},
    {"stop", USED, JSON_ABSENT},
    {"stop_token_ids", USED, JSON_ARRAY},
    {"include_stop_str_in_output", USED, JSON_BOOL},
    {"ignore_eos", USED, JSON_BOOL},
    {"stream", USED, JSON_BOOL},
    {"stream_options", USED, JSON_OBJECT},
    {"logprobs", USED, JSON_ABSENT},
    {"top_logprobs", CHAT, JSON_ABSENT},
    {"echo", COMPLETION, JSON_BOOL},
    {"tools", CHAT, JSON_ARRAY},
    {"tool_choice", CHAT, JSON_ABSENT},
    {"documents", CHAT, JSON_ARRAY},
    {"chat_template_kwargs", CHAT, JSON_OBJECT},
    {"reasoning_effort", CHAT, JSON_STRING},
    {"user", NEUTRAL, JSON_STRING},
    {"metadata", NEUTRAL, JSON_OBJECT},
    {"store", NEUTRAL, JSON_BOOL},
    {"service_tier", NEUTRAL, JSON_STRING},
    {"prompt_cache_key", NEUTRAL, JSON_STRING},
    {"safety_identifier", NEUTRAL, JSON_STRING},
};
/* Values of other keys that ask for what is done anyway. */
static const struct usual {
    const char *name, *value;
} usual[] = {
    {"response_format", "{\"type\": \"text\"}"},
    {"parallel_tool_calls", "true"},
    {"modalities", "[\"text\"]"},
    {"add_generation_prompt", "true"},
    {"continue_final_message", "false"},
    {"skip_special_tokens", "false"},
    {"best_of", "1"},
    {"length_penalty", "1.0"},
    {"use_beam_search", "false"},
};

struct reading {
    struct job *job;
    struct api_form *form;
    struct api_context *c;
    struct json body;
    struct api_error *e;
};

static int refuse(struct reading *r, int status, const char *param)
{
    r->e->status = status;
    snprintf(r->e->param, sizeof(r->e->param), "%s", param);
    return -1;
}

/* ---- which keys ---- */

static bool is_usual(const char *key, struct json value)
{
    struct text_buf text = {0};
    struct err err;
    bool same = false;
    if (text_put_json(&text, value, &err)) text.size = 0;
    for (int64_t i = 0; i < MT_LEN(usual) && text.text; i++)
        same |= !strcmp(usual[i].name, key) && !strcmp(usual[i].value, text.text);
    text_free(&text);
    return same;
}

static int refuse_unknown(struct reading *r, const char *key)
{
    const unsigned mine = r->form->chat ? CHAT : COMPLETION;
    const char *names[MT_LEN(keys)];
    int64_t n = 0;
    for (int64_t k = 0; k < MT_LEN(keys); k++)
        if ((unsigned)keys[k].use & (mine | NEUTRAL)) names[n++] = keys[k].name;
    const char *near = str_nearest(key, names, n);
    err_set(&r->e->why, "%.80s: this server does not support this parameter, or this value%s%s%s", key,
            near ? ": did you mean " : "", near ? near : "", near ? "?" : ": leave it out");
    return refuse(r, 400, key);
}

static int check_keys(struct reading *r)
{
    static const char *const types[] = {[JSON_BOOL] = "true or false",
                                        [JSON_STRING] = "a string",
                                        [JSON_ARRAY] = "a list",
                                        [JSON_OBJECT] = "an object"};
    const unsigned mine = r->form->chat ? CHAT : COMPLETION;
    const char *name;
    struct json value;
    if (json_type(r->body) != JSON_OBJECT) return err_set(&r->e->why, "the body is not a JSON object");
    for (int64_t i = 0; json_member(r->body, i, &name, &value); i++) {
        const struct key *key = keys;
        while (key < keys + MT_LEN(keys) && strcmp(key->name, name) != 0) key++;
        if (!json_given(value) || is_usual(name, value)) continue;
        if (key == keys + MT_LEN(keys) || !((unsigned)key->use & (mine | NEUTRAL))) return refuse_unknown(r, name);
        if (key->type == JSON_ABSENT || key->type == json_type(value)) continue;
        err_set(&r->e->why, "%s: expected %s", name, types[key->type]);
        return refuse(r, 400, name);
    }
    return 0;
}

/* ---- sampling ---- */

static int read_numbers(struct reading *r)
{
    struct sample_params *p = &r->job->q.params;
    const char *key;
    const struct {
        const char *key;
        int64_t *to, least, most;
    } integers[] = {{"n", &r->job->q.n, 1, MAX_SAMPLES},
                    {"min_tokens", &p->min_tokens, 0, INT32_MAX},
                    {"top_k", &p->top_k, -1, INT32_MAX}};
    const struct {
        const char *key;
        bool *to;
    } flags[] = {{"ignore_eos", &p->ignore_end},
                 {"include_stop_str_in_output", &p->keep_stop},
                 {"stream", &r->form->stream},
                 {"echo", &r->form->echo}};
    if (sample_params_read(p, r->body, &key, &r->e->why)) return refuse(r, 400, key);
    for (int i = 0; i < MT_LEN(integers); i++)
        if (json_opt_i64(r->body, integers[i].key, integers[i].least, integers[i].most, integers[i].to, &r->e->why))
            return refuse(r, 400, integers[i].key);
    for (int i = 0; i < MT_LEN(flags); i++)
        if (json_opt_bool(r->body, flags[i].key, flags[i].to, &r->e->why)) return refuse(r, 400, flags[i].key);
    p->top_k = MT_MAX(p->top_k, 0);
    return 0;
}

static int read_seed(struct reading *r)
{
    int64_t seed;
    jobs_lock(r->c->jobs);
    r->form->id = rng_u64(r->c->seed, r->c->n_request++);
    jobs_unlock(r->c->jobs);
    seed = (int64_t)(rng_u64(r->form->id, 0) >> 1);
    if (json_opt_i64(r->body, "seed", INT64_MIN, INT64_MAX, &seed, &r->e->why)) return refuse(r, 400, "seed");
    r->job->q.params.seed = (uint64_t)seed;
    return 0;
}

static int read_logprobs(struct reading *r)
{
    struct api_form *f = r->form;
    struct err *err = &r->e->why;
    if (f->chat) {
        if (json_opt_bool(r->body, "logprobs", &f->logprobs, err)) return refuse(r, 400, "logprobs");
        if (json_opt_i64(r->body, "top_logprobs", 0, MAX_TOP, &f->n_top, err)) return refuse(r, 400, "top_logprobs");
        if (f->n_top && !f->logprobs) {
            err_set(err, "top_logprobs needs logprobs = true");
            return refuse(r, 400, "top_logprobs");
        }
    } else {
        f->logprobs = json_given(json_find(r->body, "logprobs"));
        if (json_opt_i64(r->body, "logprobs", 0, MAX_TOP, &f->n_top, err)) return refuse(r, 400, "logprobs");
        r->job->q.params.prompt_logprobs = f->echo && f->logprobs;
    }
    r->job->q.params.top_logprobs = f->n_top;
    r->job->q.params.raw_logprobs = true;
    return 0;
}

static int add_stop(struct reading *r, struct json value)
{
    const char *text;
    int64_t size;
    if (json_str(value, &text, &size, &r->e->why)) return -1;
    if (!size || (int64_t)strlen(text) != size)
        return json_error(value, &r->e->why, "a stop string is empty or has a NUL");
    r->job->stops[r->job->q.n_stops++] = mem_strdup(text);
    return 0;
}

static int read_stops(struct reading *r)
{
    const struct json stop = json_find(r->body, "stop"), ids = json_find(r->body, "stop_token_ids");
    const bool list = json_type(stop) == JSON_ARRAY;
    struct job *job = r->job;
    int64_t id;
    if (json_count(stop) > MAX_STOPS || json_count(ids) > MAX_STOPS) {
        err_set(&r->e->why, "at most %d stop strings and %d stop_token_ids", MAX_STOPS, MAX_STOPS);
        return refuse(r, 400, json_count(stop) > MAX_STOPS ? "stop" : "stop_token_ids");
    }
    job->stops = mem_array(MAX_STOPS, sizeof(*job->stops));
    job->more_ends = mem_array(MAX_STOPS, sizeof(*job->more_ends));
    for (int64_t i = 0; list && i < json_count(stop); i++)
        if (add_stop(r, json_at(stop, i))) return refuse(r, 400, "stop");
    if (!list && json_given(stop) && add_stop(r, stop)) return refuse(r, 400, "stop");
    for (int64_t i = 0; i < json_count(ids); i++) {
        if (json_i64(json_at(ids, i), 0, r->c->run->arch.vocab - 1, &id, &r->e->why))
            return refuse(r, 400, "stop_token_ids");
        job->more_ends[job->n_more_end++] = (int32_t)id;
    }
    return 0;
}

static int read_stream(struct reading *r)
{
    const struct json options = json_find(r->body, "stream_options");
    const char *key;
    struct json value;
    bool pads; /* include_obfuscation: never done */
    if (!json_given(options)) return 0;
    if (!r->form->stream) {
        err_set(&r->e->why, "stream_options needs stream = true");
        return refuse(r, 400, "stream_options");
    }
    for (int64_t i = 0; json_member(options, i, &key, &value); i++) {
        if (strcmp(key, "include_usage") == 0 || strcmp(key, "include_obfuscation") == 0) continue;
        err_set(&r->e->why, "stream_options.%.80s: this server does not support it", key);
        return refuse(r, 400, "stream_options");
    }
    return json_opt_bool(options, "include_usage", &r->form->usage, &r->e->why) ||
                   json_opt_bool(options, "include_obfuscation", &pads, &r->e->why)
               ? refuse(r, 400, "stream_options")
               : 0;
}

static int read_bias(struct reading *r)
{
    const struct json bias = json_find(r->body, "logit_bias");
    struct job *job = r->job;
    const char *key;
    struct json value;
    job->bias = mem_array(json_count(bias) + 1, sizeof(*job->bias));
    for (int64_t i = 0; json_member(bias, i, &key, &value); i++) {
        double v;
        char *end;
        const long id = strtol(key, &end, 10);
        if (json_f64(value, &v, &r->e->why)) return refuse(r, 400, "logit_bias");
        if (end == key || *end || id < 0 || id >= r->c->run->arch.vocab || !(v >= -100 && v <= 100)) {
            err_set(&r->e->why, "logit_bias: \"%.40s\": %g: a token id below %lld, and a number in [-100, 100]", key, v,
                    (long long)r->c->run->arch.vocab);
            return refuse(r, 400, "logit_bias");
        }
        job->bias[job->q.n_bias++] = (struct sample_bias){(int32_t)id, (float)v};
    }
    job->q.bias = job->bias;
    return 0;
}

/* ---- the prompt ---- */

/* Makes a row of the keys that the chat template reads; reasoning_effort is a variable of templates. */
static int put_row(struct text_buf *row, struct json body, struct err *err)
{
    static const char *const names[] = {"messages", "tools", "documents"};
    const struct json kwargs = json_find(body, "chat_template_kwargs"), effort = json_find(body, "reasoning_effort");
    const char *key;
    struct json value;
    text_put(row, "{");
    for (int i = 0; i < MT_LEN(names); i++) {
        if (!json_given(json_find(body, names[i]))) continue;
        text_put_key(row, names[i]);
        if (text_put_json(row, json_find(body, names[i]), err)) return -1;
    }
    text_put_key(row, "chat_template_kwargs");
    text_put(row, "{");
    if (json_given(effort) && !json_has(kwargs, "reasoning_effort")) {
        text_put_key(row, "reasoning_effort");
        if (text_put_json(row, effort, err)) return -1;
    }
    for (int64_t i = 0; json_member(kwargs, i, &key, &value); i++) {
        text_put_key(row, key);
        if (text_put_json(row, value, err)) return -1;
    }
    text_put(row, "}}");
    return 0;
}

static int check_last(struct json messages, struct err *err)
{
    const char *role;
    if (!json_count(messages)) return err_set(err, "messages has no message");
    if (json_get_str(json_at(messages, json_count(messages) - 1), "role", &role, err)) return -1;
    if (!strcmp(role, "assistant"))
        return err_set(err, "the last message is an assistant's: end with a user's or a tool's");
    return 0;
}

static int render(struct reading *r)
{
    struct text_buf row = {0};
    struct err *err = &r->e->why;
    const struct json choice = json_find(r->body, "tool_choice");
    const char *word = "auto";
    r->job->prompts = mem_array(1, sizeof(*r->job->prompts));
    r->job->n_prompt = 1;
    if (!r->c->run->chat)
        return err_set(err, "the model has no chat template: use /v1/completions, or start the server with "
                            "--set data.chat_template=FILE");
    if (json_given(choice) && (json_opt_str(r->body, "tool_choice", &word, err) ||
                               (strcmp(word, "auto") != 0 && strcmp(word, "none") != 0))) {
        err_set(err, "tool_choice: this server supports auto and none");
        return refuse(r, 400, "tool_choice");
    }
    if (check_last(json_find(r->body, "messages"), err)) return refuse(r, 400, "messages");
    int rc = put_row(&row, r->body, err);
    struct json_doc *doc = rc ? NULL : json_parse_row(row.text, row.size, JSON_ROW_VALUES, "request", err);
    pthread_mutex_lock(&r->c->render);
    if (doc) rc = prompt_messages(&r->job->prompts[0], r->c->run, json_root(doc), "request", err);
    pthread_mutex_unlock(&r->c->render);
    text_free(&row);
    r->form->row = doc;
    if (rc || !doc) {
        char dir[MT_PATH + 1];
        snprintf(dir, sizeof(dir), "%s/", r->c->run->model_dir);
        api_hide_directory(err, dir);
        api_hide_directory(err, r->c->run->cfg->data.chat_template);
        return refuse(r, 400, "messages");
    }
    struct message_input *in = &r->form->in;
    in->rules = r->c->rules;
    in->think_open = prompt_opens_reasoning(&r->job->prompts[0], r->c->run->tok);
    in->tools = json_find(json_root(doc), "tools");
    in->wants_calls = json_count(in->tools) > 0 && !strcmp(word, "auto");
    return 0;
}

static int add_prompt(struct reading *r, struct json value)
{
    struct prompt *p = &r->job->prompts[r->job->n_prompt++];
    struct err *err = &r->e->why;
    const char *text;
    int64_t size;
    int rc = -1;
    if (json_type(value) == JSON_STRING && json_str(value, &text, &size, err)) return -1;
    if (json_type(value) == JSON_STRING && (int64_t)strlen(text) != size)
        return json_error(value, err, "a prompt has a NUL");
    pthread_mutex_lock(&r->c->render);
    rc = json_type(value) == JSON_STRING ? prompt_text(p, r->c->run, text, "prompt", err)
                                         : prompt_ids(p, r->c->run, value, err);
    pthread_mutex_unlock(&r->c->render);
    return rc;
}

/* A string, a list of ids, or a list of either. */
static int read_prompts(struct reading *r)
{
    const struct json prompt = json_find(r->body, "prompt");
    const enum json_type first = json_type(json_at(prompt, 0));
    const bool list = json_type(prompt) == JSON_ARRAY && (first == JSON_STRING || first == JSON_ARRAY);
    const int64_t n = list ? json_count(prompt) : 1;
    if (!json_given(prompt)) err_set(&r->e->why, "prompt is missing");
    if (!json_given(prompt) || n > MAX_PROMPTS) {
        if (n > MAX_PROMPTS) err_set(&r->e->why, "%lld prompts: at most %d", (long long)n, MAX_PROMPTS);
        return refuse(r, 400, "prompt");
    }
    r->job->prompts = mem_array(n, sizeof(*r->job->prompts));
    for (int64_t i = 0; i < n; i++)
        if (add_prompt(r, list ? json_at(prompt, i) : prompt)) return refuse(r, 400, "prompt");
    return 0;
}

/* ---- all ---- */

static int read_model(struct reading *r)
{
    const char *name = NULL;
    if (json_opt_str(r->body, "model", &name, &r->e->why)) return refuse(r, 400, "model");
    jobs_lock(r->c->jobs);
    r->job->model = models_find(r->c->models, name);
    jobs_unlock(r->c->jobs);
    if (!r->job->model) {
        err_set(&r->e->why, "there is no model %.200s: GET /v1/models lists them", name);
        return refuse(r, 404, "model");
    }
    r->form->model = mem_strdup(r->job->model->name);
    return 0;
}

/* Must be called after the prompts are read: without a limit an answer may fill the rest of the context. */
static int read_max_tokens(struct reading *r)
{
    static const char *const names[] = {"max_completion_tokens", "max_tokens"};
    int64_t longest = 0, given = -1, values[] = {-1, -1};
    for (int i = 0; i < 2; i++)
        if (json_opt_i64(r->body, names[i], r->form->echo ? 0 : 1, INT32_MAX, &values[i], &r->e->why))
            return refuse(r, 400, names[i]);
    given = values[0] < 0 ? values[1] : values[0];
    for (int64_t i = 0; i < r->job->n_prompt; i++) longest = MT_MAX(longest, r->job->prompts[i].ids.count);
    if (given < 0) given = r->form->chat ? MT_MAX(r->c->context - longest, 1) : COMPLETION_TOKENS;
    r->job->q.params.max_tokens = given;
    if (!given) r->job->q.params.prompt_logprobs = true; /* an answer without tokens needs a reason */
    if (longest + given <= r->c->context) return 0;
    err_set(&r->e->why, "%lld tokens of prompt and max_tokens = %lld are over this server's %lld (--context)",
            (long long)longest, (long long)given, (long long)r->c->context);
    return refuse(r, 400, r->form->chat ? "messages" : "prompt");
}

static int read_all(struct reading *r)
{
    if (check_keys(r) || read_model(r) || read_numbers(r) || read_seed(r) || read_logprobs(r) || read_stops(r) ||
        read_bias(r) || read_stream(r) || (r->form->chat ? render(r) : read_prompts(r)) || read_max_tokens(r))
        return -1;
    if (r->form->echo && r->form->stream) {
        err_set(&r->e->why, "echo with stream: this server does not support it");
        return refuse(r, 400, "echo");
    }
    return sample_params_check(&r->job->q.params, &r->e->why);
}

int api_request_read(struct job *job, struct api_form *form, struct api_context *c, bool chat, const char *body,
                     int64_t size, struct api_error *e)
{
    *e = (struct api_error){.status = 400};
    *form = (struct api_form){.chat = chat, .created = (int64_t)time(NULL)};
    job->q.n = 1;
    job->q.params = c->params;
    struct json_doc *doc = json_parse_row(body, size, JSON_ROW_VALUES, "request", &e->why);
    if (!doc) return -1;
    struct reading r = {job, form, c, json_root(doc), e};
    const int rc = read_all(&r);
    json_free(doc);
    return rc;
}

void api_form_free(struct api_form *form)
{
    mem_free(form->model);
    json_free(form->row);
    *form = (struct api_form){.id = 0};
}

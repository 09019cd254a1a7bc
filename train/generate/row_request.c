/* row_request.c - see row_request.h. */
#include "train/generate/row_request.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/json/text.h"

static int read_prompt(struct row_request *r, const struct run *run, struct json row, const char *name, struct err *err)
{
    static const char *const keys[] = {"prompt", "prompt_ids", "messages"};
    const char *found = NULL;
    for (int i = 0; i < MT_LEN(keys); i++) {
        if (!json_given(json_find(row, keys[i]))) continue;
        if (found) return err_set(err, "%s: %s and %s exclude each other: remove one", name, found, keys[i]);
        found = keys[i];
    }
    if (!found) return err_set(err, "%s: the row needs prompt, prompt_ids or messages", name);
    if (found == keys[1]) return prompt_ids(&r->prompt, run, json_find(row, found), err);
    if (found == keys[2]) return prompt_messages(&r->prompt, run, row, name, err);
    return prompt_row(&r->prompt, run, row, name, err);
}

static int add_stop(struct row_request *r, struct json value, struct err *err)
{
    const char *text;
    int64_t size;
    if (json_str(value, &text, &size, err)) return -1;
    if (!size || (int64_t)strlen(text) != size) return json_error(value, err, "a stop string is empty or has a NUL");
    r->stops[r->q.n_stops++] = mem_strdup(text);
    return 0;
}

static int read_stops(struct row_request *r, const struct run *run, struct json row, struct err *err)
{
    const struct json stop = json_find(row, "stop"), ids = json_find(row, "stop_token_ids");
    const bool list = json_type(stop) == JSON_ARRAY;
    int64_t id;
    r->stops = mem_array(MT_MAX(json_count(stop), 1), (int64_t)sizeof(*r->stops));
    for (int64_t i = 0; list && i < json_count(stop); i++)
        if (add_stop(r, json_at(stop, i), err)) return -1;
    if (!list && json_given(stop) && add_stop(r, stop, err)) return -1;
    if (json_given(ids) && json_type(ids) != JSON_ARRAY) return json_error(ids, err, "not a list of token ids");
    r->ends = mem_array(r->prompt.n_ends + json_count(ids), (int64_t)sizeof(*r->ends));
    for (int64_t i = 0; i < r->prompt.n_ends; i++) r->ends[r->q.n_end_ids++] = r->prompt.ends[i];
    for (int64_t i = 0; i < json_count(ids); i++) {
        if (json_i64(json_at(ids, i), 0, run->arch.vocab - 1, &id, err)) return -1;
        r->ends[r->q.n_end_ids++] = (int32_t)id;
    }
    return 0;
}

static int read_params(struct row_request *r, struct json row, struct err *err)
{
    struct sample_params *p = &r->q.params;
    const struct {
        const char *key;
        int64_t *to, most;
    } integers[] = {{"n", &r->q.n, 1 << 20},
                    {"max_tokens", &p->max_tokens, INT32_MAX},
                    {"min_tokens", &p->min_tokens, INT32_MAX},
                    {"top_k", &p->top_k, INT32_MAX},
                    {"top_logprobs", &p->top_logprobs, SAMPLE_TOP}};
    const char *bad;
    if (sample_params_read(p, row, &bad, err)) return -1;
    for (int i = 0; i < MT_LEN(integers); i++)
        if (json_opt_i64(row, integers[i].key, i ? 0 : 1, integers[i].most, integers[i].to, err)) return -1;
    return json_opt_bool(row, "prompt_logprobs", &p->prompt_logprobs, err) ||
                   json_opt_bool(row, "ignore_eos", &p->ignore_end, err)
               ? -1
               : 0;
}

/* {"id": value}, as OpenAI's API has it. */
static int read_bias(struct row_request *r, const struct run *run, struct json row, struct err *err)
{
    const struct json all = json_find(row, "logit_bias");
    const char *key;
    struct json value;
    char digits[32];
    double v;
    if (!json_given(all)) return 0;
    if (json_type(all) != JSON_OBJECT) return json_error(all, err, "not an object of token ids and values");
    r->bias = mem_array(MT_MAX(json_count(all), 1), (int64_t)sizeof(*r->bias));
    for (int64_t i = 0; json_member(all, i, &key, &value); i++) {
        const long long id = strtoll(key, NULL, 10);
        snprintf(digits, sizeof(digits), "%lld", id);
        if (strcmp(key, digits) || id < 0 || id >= run->arch.vocab)
            return json_error(value, err, "not a token id of the vocabulary of %lld", (long long)run->arch.vocab);
        if (json_f64(value, &v, err)) return -1;
        if (!(fabs(v) <= 100)) return json_error(value, err, "%g is not in [-100, 100]", v);
        r->bias[r->q.n_bias++] = (struct sample_bias){(int32_t)id, (float)v};
    }
    if (r->q.n_end_ids + r->q.n_bias <= SAMPLE_EDITS) return 0;
    return json_error(all, err, "%lld values and %lld end tokens are over the limit of %d together",
                      (long long)r->q.n_bias, (long long)r->q.n_end_ids, SAMPLE_EDITS);
}

static int read_id(struct row_request *r, struct json row, int64_t number, struct err *err)
{
    const struct json id = json_find(row, "id");
    struct text_buf text = {0};
    char digits[32];
    const char *wide = json_wide(id);
    const bool number_or_text = json_type(id) == JSON_STRING || json_type(id) == JSON_INT || json_type(id) == JSON_REAL;
    if ((json_given(id) && !number_or_text) || (wide && strpbrk(wide, "Ny"))) /* NaN, Infinity */
        return json_error(id, err, "an id is a text or a finite number");
    snprintf(digits, sizeof(digits), "%lld", (long long)number);
    if (!json_given(id))
        text_put(&text, digits);
    else if (text_put_json(&text, id, err))
        return -1;
    r->id = mem_strdup(text.text);
    text_free(&text);
    return 0;
}

bool row_request_has_key(const char *key, const char **near)
{
    static const char *const known[] = {"prompt",
                                        "prompt_ids",
                                        "messages",
                                        "tools",
                                        "id",
                                        "n",
                                        "seed",
                                        "max_tokens",
                                        "min_tokens",
                                        "temperature",
                                        "top_k",
                                        "top_p",
                                        "min_p",
                                        "repetition_penalty",
                                        "frequency_penalty",
                                        "presence_penalty",
                                        "stop",
                                        "stop_token_ids",
                                        "top_logprobs",
                                        "prompt_logprobs",
                                        "ignore_eos",
                                        "logit_bias",
                                        "chat_template_kwargs",
                                        "documents"};
    *near = str_nearest(key, known, MT_LEN(known));
    return str_in(key, known, MT_LEN(known));
}

static const char *find_role(struct json row)
{
    static const char *const known[] = {"system", "user", "assistant", "tool", "developer", "latest_reminder"};
    const struct json messages = json_find(row, "messages");
    const char *role;
    for (int64_t i = 0; i < json_count(messages); i++)
        if (!json_get_str(json_at(messages, i), "role", &role, NULL) && !str_in(role, known, MT_LEN(known)) &&
            !chat_rules_alias(role))
            return role;
    return NULL;
}

int64_t row_request_seed(const struct row_defaults *d, int64_t number)
{
    return (int64_t)(rng_u64(rng_key((uint64_t)d->seed, "generate"), (uint64_t)number) >> 1);
}

static int read_row(struct row_request *r, const struct run *run, struct json row, int64_t number,
                    const struct row_defaults *d, const char *name, struct err *err)
{
    int64_t seed = row_request_seed(d, number);
    if (json_type(row) != JSON_OBJECT) return err_set(err, "%s: not an object", name);
    if (read_prompt(r, run, row, name, err) || read_id(r, row, number, err) || read_params(r, row, err) ||
        read_stops(r, run, row, err) || read_bias(r, run, row, err) ||
        json_opt_i64(row, "seed", 0, INT64_MAX, &seed, err))
        return -1;
    r->q.params.seed = (uint64_t)seed;
    r->q.ids = r->prompt.ids.ids;
    r->q.n_ids = r->prompt.ids.count;
    r->q.end_ids = r->ends;
    r->q.bias = r->bias;
    r->q.stops = (const char *const *)r->stops;
    r->role = find_role(row);
    if (sample_params_check(&r->q.params, err)) return err_prefix(err, "%s", name);
    if (r->q.n_ids + r->q.params.max_tokens <= run->arch.max_len) return 0;
    return err_set(err, "%s: %lld tokens of prompt and max_tokens = %lld are over the model's %lld: shorten one", name,
                   (long long)r->q.n_ids, (long long)r->q.params.max_tokens, (long long)run->arch.max_len);
}

int row_request_read(struct row_request *r, const struct run *run, struct json row, int64_t number,
                     const struct row_defaults *d, const char *name, struct err *err)
{
    *r = (struct row_request){.q = {.n = d->n, .params = d->params}};
    const int rc = read_row(r, run, row, number, d, name, err);
    if (rc) row_request_free(r);
    return rc;
}

void row_request_free(struct row_request *r)
{
    for (int64_t i = 0; i < r->q.n_stops && r->stops; i++) mem_free(r->stops[i]);
    mem_free(r->stops);
    mem_free(r->ends);
    mem_free(r->bias);
    mem_free(r->id);
    prompt_free(&r->prompt);
    *r = (struct row_request){.id = NULL};
}

/* rollout_rows.c - see rollout_rows.h. */
#include "data/rollout/rollout_rows.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "data/rollout/routing_text.h"
#include "data/source/row_source.h"
#include "data/source/source_list.h"

/* Rounding of a sampler may put the logarithm of a probability this far above 0. */
#define LARGEST_LOGPROB 0.01

struct row_arrays {
    int32_t *prompt, *completion;
    float *logprobs;
    uint8_t *mask;
    uint16_t *routing;
};

static void arrays_free(struct row_arrays *a)
{
    mem_free(a->prompt);
    mem_free(a->completion);
    mem_free(a->logprobs);
    mem_free(a->mask);
    mem_free(a->routing);
}

static int32_t *read_ids(struct json row, const char *key, int64_t vocab, int64_t *n, struct err *err)
{
    struct json list;
    int64_t id;
    if (json_get_array(row, key, &list, err)) return NULL;
    *n = json_count(list);
    if (!*n) {
        (void)json_error(list, err, "has no token");
        return NULL;
    }
    int32_t *ids = mem_array(*n, sizeof(*ids));
    for (int64_t i = 0; i < *n; i++) {
        if (json_i64(json_at(list, i), 0, vocab - 1, &id, err)) {
            mem_free(ids);
            return NULL;
        }
        ids[i] = (int32_t)id;
    }
    return ids;
}

/* Reads a list with an entry per completion token. 1: it is missing or null. */
static int get_list(struct json row, const char *key, int64_t n, struct json *list, struct err *err)
{
    if (!json_given(json_find(row, key))) return 1;
    if (json_get_array(row, key, list, err)) return -1;
    if (json_count(*list) == n) return 0;
    return json_error(*list, err, "has %lld entries, and `completion_ids` %lld", (long long)json_count(*list),
                      (long long)n);
}

/* Reads a finite number, or NaN for null. */
static int read_number(struct json value, double *out, struct err *err)
{
    *out = NAN;
    if (json_type(value) == JSON_NULL) return 0;
    if (json_wide(value)) return json_error(value, err, "must be a finite number or null");
    if (json_f64(value, out, err)) return -1;
    return isfinite(*out) ? 0 : json_error(value, err, "must be a finite number or null");
}

static int read_logprobs(struct row_arrays *a, struct json row, int64_t n, struct err *err)
{
    struct json list;
    double value;
    const int rc = get_list(row, "logprobs", n, &list, err);
    if (rc) return rc < 0 ? -1 : 0;
    a->logprobs = mem_array(n, sizeof(*a->logprobs));
    for (int64_t i = 0; i < n; i++) {
        if (read_number(json_at(list, i), &value, err)) return -1;
        if (value > LARGEST_LOGPROB)
            return json_error(json_at(list, i), err, "%g is above 0: write the logarithms of probabilities", value);
        a->logprobs[i] = isnan(value) ? NAN : (float)fmin(fmax(value, (double)-FLT_MAX), (double)FLT_MAX);
    }
    return 0;
}

static int read_mask(struct row_arrays *a, struct json row, int64_t n, struct err *err)
{
    struct json list;
    int64_t value = 0;
    bool flag;
    const int rc = get_list(row, "mask", n, &list, err);
    if (rc) return rc < 0 ? -1 : 0;
    a->mask = mem_array(n, sizeof(*a->mask));
    for (int64_t i = 0; i < n; i++) {
        const struct json entry = json_at(list, i);
        if (json_type(entry) == JSON_BOOL) {
            if (json_bool(entry, &flag, err)) return -1;
            value = flag;
        } else if (json_i64(entry, 0, 1, &value, err)) {
            return -1;
        }
        a->mask[i] = (uint8_t)value;
    }
    return 0;
}

static int read_end(struct rollout *out, struct json row, const struct rollout_options *opt, struct err *err)
{
    const char *reason = NULL;
    const int32_t last = out->completion_ids[out->n_completion - 1];
    if (json_opt_str(row, "finish_reason", &reason, err)) return -1;
    out->truncated = !reason || !strcmp(reason, "length");
    for (int64_t i = 0; !reason && i < opt->n_end; i++) out->truncated = out->truncated && opt->end_ids[i] != last;
    return 0;
}

static int read_reward(struct rollout *out, struct json row, struct err *err)
{
    const struct json reward = json_find(row, "reward");
    if (json_type(reward) == JSON_ABSENT)
        return json_error(row, err, "has no `reward`: write a number, or null for a row without one");
    return read_number(reward, &out->reward, err);
}

static int read_routing(struct rollout *out, struct row_arrays *a, struct json row, const struct rollout_options *opt,
                        struct err *err)
{
    const struct json routing = json_find(row, "routing");
    const int64_t n = out->n_prompt + out->n_completion - 1;
    if (!opt->n_layer || !json_given(routing)) return 0;
    if (routing_text_read(&a->routing, routing, n, opt->n_layer, opt->n_top, opt->n_exp, err)) return -1;
    out->routing = a->routing;
    return 0;
}

static int read_row(struct rollout *out, struct row_arrays *a, struct json row, const struct rollout_options *opt,
                    struct err *err)
{
    if (!(a->prompt = read_ids(row, "prompt_ids", opt->vocab, &out->n_prompt, err)) ||
        !(a->completion = read_ids(row, "completion_ids", opt->vocab, &out->n_completion, err)))
        return -1;
    out->prompt_ids = a->prompt;
    out->completion_ids = a->completion;
    if (out->n_prompt + out->n_completion > opt->seq_len)
        return json_error(row, err, "has %lld tokens, more than data.seq_len = %lld: raise it, or sample shorter rows",
                          (long long)(out->n_prompt + out->n_completion), (long long)opt->seq_len);
    if (read_reward(out, row, err) || json_get_i64(row, "group", INT64_MIN, INT64_MAX, &out->group, err) ||
        read_logprobs(a, row, out->n_completion, err) || read_mask(a, row, out->n_completion, err) ||
        read_end(out, row, opt, err) || read_routing(out, a, row, opt, err))
        return -1;
    out->logprobs = a->logprobs;
    out->mask = a->mask;
    return 0;
}

/* Reads "rewards": {NAME: a number or null} for the last row. */
static int read_rewards(struct rollouts *r, struct json row, struct err *err)
{
    const struct json rewards = json_find(row, "rewards");
    const char *name;
    struct json value;
    double v;
    struct err why;
    if (!json_given(rewards)) return 0;
    if (json_type(rewards) != JSON_OBJECT) return json_error(rewards, err, "must be an object of numbers");
    for (int64_t i = 0; json_member(rewards, i, &name, &value); i++) {
        const enum json_type t = json_type(value);
        if (t != JSON_NULL && t != JSON_INT && t != JSON_REAL)
            return json_error(value, err, "must be a finite number or null");
        if (read_number(value, &v, err)) return -1;
        if (rollouts_add_reward(r, name, v, &why)) return json_error(row, err, "%s", why.msg);
    }
    return 0;
}

int rollout_row_add(struct rollouts *r, struct json row, const struct rollout_options *opt, struct err *err)
{
    struct row_arrays a = {.prompt = NULL};
    struct rollout one = {.n_prompt = 0};
    int rc = read_row(&one, &a, row, opt, err);
    if (!rc) rollouts_add(r, &one);
    if (!rc) rc = read_rewards(r, row, err);
    arrays_free(&a);
    return rc;
}

/* ---- files ---- */

static int add_text(struct rollouts *r, const struct row_text *row, const struct rollout_options *opt, struct err *err)
{
    struct json_doc *doc = json_parse_row(row->text, row->size, JSON_ROW_VALUES, row->where, err);
    const int rc = doc ? rollout_row_add(r, json_root(doc), opt, err) : -1;
    progress();
    json_free(doc);
    return rc;
}

static int read_file(struct rollouts *r, const char *path, int64_t last, const struct rollout_options *opt,
                     struct err *err)
{
    struct row_text row = {0};
    struct row_source *source = row_source_open(path, SAMPLE_DOCUMENT, err);
    int rc = source ? 0 : -1, more;
    while (!rc && r->n < last && (more = row_source_next(source, &row, err)) != 0)
        rc = more == 1 ? add_text(r, &row, opt, err) : -1;
    if (source) row_source_close(source);
    return rc;
}

static int read_entry(struct rollouts *r, const char *path, double weight, const struct rollout_options *opt,
                      struct err *err)
{
    struct source_files files;
    const int64_t last = opt->max_rows ? r->n + opt->max_rows : INT64_MAX;
    if (weight < 1 || weight > 1)
        return err_set(err, "%s*%g: rollouts have no weights: their groups are trained in the order of the file", path,
                       weight);
    int rc = source_files_find(&files, path, err);
    for (int64_t i = 0; !rc && i < files.n; i++) rc = read_file(r, files.paths[i], last, opt, err);
    source_files_free(&files);
    return rc;
}

int rollout_rows_load(struct rollouts *r, const char *files, const struct rollout_options *opt, struct err *err)
{
    char path[MT_PATH];
    const char *rest = files;
    double weight;
    int more;
    while ((more = source_list_next(&rest, path, &weight, err)) == 1)
        if (read_entry(r, path, weight, opt, err)) return -1;
    if (more) return -1;
    return r->n ? 0 : err_set(err, "%s: no rows: write rows {prompt_ids, completion_ids, reward, group}", files);
}

/* token_rows.c - see token_rows.h. Programs write such rows, so every deviation is an error. */
#include "data/token_rows.h"

#include <float.h>
#include <math.h>

/* Log-probabilities are rounded to float or less, so the sum of probabilities may exceed 1 by this much. */
#define SUM_TOLERANCE 1e-3

static void reserve(struct token_row *t, int64_t n)
{
    if (n <= t->cap) return;
    t->ids = mem_grow(t->ids, t->cap, n, sizeof(*t->ids));
    t->mask = mem_grow(t->mask, t->cap, n, sizeof(*t->mask));
    t->cap = n;
}

/* Reserves rows for distributions, which only labelled tokens have. */
static void reserve_top(struct token_row *t, const struct token_row_options *opt)
{
    const int64_t top = t->n_label * opt->n_top;
    if (top > t->cap_top) {
        t->topk_id = mem_grow(t->topk_id, t->cap_top, top, sizeof(*t->topk_id));
        t->topk_logprob = mem_grow(t->topk_logprob, t->cap_top, top, sizeof(*t->topk_logprob));
        t->cap_top = top;
    }
    if (!t->seen) t->seen = mem_array(opt->vocab, sizeof(*t->seen));
}

static int get_list(struct json row, const char *key, int64_t n, struct json *out, struct err *err)
{
    if (json_get_array(row, key, out, err)) return -1;
    if (n < 0 || json_count(*out) == n) return 0;
    return json_error(*out, err, "has %lld entries, and `input_ids` %lld", (long long)json_count(*out), (long long)n);
}

/* Reads the distribution of one labelled token into row `label`. */
static int read_top(struct token_row *t, struct json ids, struct json values, const struct token_row_options *opt,
                    int64_t label, struct err *err)
{
    const int64_t n = json_count(ids);
    int32_t *id = t->topk_id + label * opt->n_top;
    float *logprob = t->topk_logprob + label * opt->n_top;
    double sum = 0;
    if (json_type(ids) != JSON_ARRAY || json_type(values) != JSON_ARRAY || n < 1)
        return json_error(ids, err, "the token has loss, and no list of ids and of `topk_logprobs`");
    if (json_count(values) != n)
        return json_error(values, err, "has %lld entries, and `topk_ids` %lld", (long long)json_count(values),
                          (long long)n);
    if (n > opt->n_top)
        return json_error(ids, err, "has %lld ids, and distill.topk = %lld: raise it", (long long)n,
                          (long long)opt->n_top);
    t->n_seen++;
    for (int64_t k = 0; k < opt->n_top; k++) {
        int64_t one = -1;
        double value = 0;
        if (k < n &&
            (json_i64(json_at(ids, k), 0, opt->vocab - 1, &one, err) || json_f64(json_at(values, k), &value, err)))
            return -1;
        if (k < n && t->seen[one] == t->n_seen) return json_error(ids, err, "has the id %lld twice", (long long)one);
        if (k < n) t->seen[one] = t->n_seen;
        if (!isfinite(value)) return json_error(json_at(values, k), err, "is not a finite number");
        sum += k < n ? exp(value) : 0;
        id[k] = (int32_t)one;
        logprob[k] = (float)fmax(value, (double)-FLT_MAX); /* a probability of 0 either way */
    }
    if (sum <= 1 + SUM_TOLERANCE) return 0;
    return json_error(values, err, "are logs of probabilities whose sum is %g, above 1", sum);
}

static int read_tops(struct token_row *t, struct json row, const struct token_row_options *opt, struct err *err)
{
    struct json ids, values;
    double temperature = opt->temperature;
    if (get_list(row, "topk_ids", t->n, &ids, err) || get_list(row, "topk_logprobs", t->n, &values, err) ||
        json_opt_f64(row, "temperature", &temperature, err))
        return -1;
    if (temperature < opt->temperature || temperature > opt->temperature)
        return json_error(row, err,
                          "has the temperature %g, and the run distill.temperature = %g: set it to that of the rows, "
                          "or write rows with `moetrain teach --set distill.temperature=%g`",
                          temperature, opt->temperature, opt->temperature);
    reserve_top(t, opt);
    for (int64_t i = 0, label = 0; i < t->n; i++)
        if (t->mask[i] && read_top(t, json_at(ids, i), json_at(values, i), opt, label++, err)) return -1;
    return 0;
}

int token_row_read(struct token_row *t, struct json row, const struct token_row_options *opt, struct err *err)
{
    struct json ids, mask;
    int64_t value;
    if (get_list(row, "input_ids", -1, &ids, err)) return -1;
    const int64_t n = json_count(ids);
    if (get_list(row, "loss_mask", n, &mask, err)) return -1;
    if (!n) return json_error(ids, err, "has no token");
    reserve(t, n);
    t->n = n;
    t->n_label = 0;
    for (int64_t i = 0; i < n; i++) {
        if (json_i64(json_at(ids, i), 0, INT32_MAX, &value, err)) return -1;
        t->ids[i] = (int32_t)value;
        if (json_i64(json_at(mask, i), 0, 1, &value, err)) return -1;
        t->mask[i] = i > 0 && value; /* no token precedes the first one to predict it */
        t->n_label += t->mask[i];
    }
    return opt->n_top ? read_tops(t, row, opt, err) : 0;
}

void token_row_free(struct token_row *t)
{
    mem_free(t->ids);
    mem_free(t->mask);
    mem_free(t->topk_id);
    mem_free(t->topk_logprob);
    mem_free(t->seen);
    *t = (struct token_row){.n = 0};
}

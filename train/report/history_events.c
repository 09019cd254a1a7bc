/* history_events.c - see history_events.h. */
#include "train/report/history_events.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define MAX_CELLS (1 << 20) /* layers x experts */
enum { MAX_OPS = 1024, MAX_SAMPLES = 100000 };

static int positive(struct json j, double *out, struct err *err)
{
    if (json_f64(j, out, err)) return -1;
    return *out >= 0 && isfinite(*out) ? 0 : json_error(j, err, "must be at least 0, but is %g", *out);
}

/* ---- experts */

void history_experts_free(struct history_experts *x)
{
    struct series *all[] = {&x->step, &x->entropy, &x->idle, &x->hottest};
    for (int i = 0; i < MT_LEN(all); i++) mem_free(all[i]->v);
    mem_free(x->rows);
    mem_free(x->gates);
    mem_free(x->norms);
    mem_free(x->ranks);
    *x = (struct history_experts){0};
}

/* Adds the values of an array of arrays to out [n_layer, n_exp]. */
static int add_cells(double *out, struct json layers, int64_t n_layer, int64_t n_exp, struct err *err)
{
    for (int64_t l = 0; l < n_layer; l++) {
        struct json row = json_at(layers, l);
        if (json_count(layers) != n_layer || json_count(row) != n_exp)
            return json_error(layers, err, "rows of unequal length");
        for (int64_t e = 0; e < n_exp; e++) {
            double v;
            if (positive(json_at(row, e), &v, err)) return -1;
            out[l * n_exp + e] += v;
        }
    }
    return 0;
}

static void summarise(struct history_experts *x, const double *rows, double step)
{
    double entropy = 0, hottest = 0, idle = 0, layers = 0;
    for (int64_t l = 0; l < x->n_layer; l++) {
        const double *row = rows + l * x->n_exp;
        double sum = 0, most = 0, h = 0;
        for (int64_t e = 0; e < x->n_exp; e++) sum += row[e], most = fmax(most, row[e]);
        if (!(sum > 0)) continue;
        for (int64_t e = 0; e < x->n_exp; e++) {
            if (row[e] > 0) h -= row[e] / sum * log(row[e] / sum);
            idle += !(row[e] > 0);
        }
        entropy += x->n_exp > 1 ? h / log((double)x->n_exp) : 1;
        hottest += most / sum * (double)x->n_exp;
        layers++;
    }
    if (!(layers > 0)) return;
    series_push(&x->step, step);
    series_push(&x->entropy, entropy / layers);
    series_push(&x->hottest, hottest / layers);
    series_push(&x->idle, idle / layers / (double)x->n_exp);
}

/* Reads an optional array of the event; zeros if it is absent. *found: whether the event has it. */
static int optional_cells(double *out, bool *found, struct json event, const char *key, int64_t n_layer, int64_t n_exp,
                          struct err *err)
{
    struct json layers;
    *found = json_has(event, key);
    if (!*found) return 0;
    return json_get_array(event, key, &layers, err) || add_cells(out, layers, n_layer, n_exp, err) ? -1 : 0;
}

int history_experts_add(struct history_experts *x, struct json event, double step, struct err *err)
{
    struct json counts;
    if (json_get_array(event, "counts", &counts, err)) return -1;
    const int64_t n_layer = json_count(counts), n_exp = json_count(json_at(counts, 0));
    int64_t cells;
    if (!i64_mul(n_layer, n_exp, &cells) || cells < 1 || cells > MAX_CELLS ||
        (x->rows && (n_layer != x->n_layer || n_exp != x->n_exp)))
        return json_error(counts, err, "%lld layer%s of %lld experts", (long long)n_layer, str_plural(n_layer),
                          (long long)n_exp);
    static const char *const keys[] = {"gates", "norms", "ranks"};
    double **const to[] = {&x->gates, &x->norms, &x->ranks}, *add = mem_array(4 * cells, (int64_t)sizeof(*add));
    bool has[MT_LEN(keys)];
    int rc = add_cells(add, counts, n_layer, n_exp, err);
    for (int k = 0; !rc && k < MT_LEN(keys); k++)
        rc = optional_cells(add + (k + 1) * cells, &has[k], event, keys[k], n_layer, n_exp, err);
    if (!rc && !x->rows) {
        x->rows = mem_array(cells, (int64_t)sizeof(double));
        x->n_layer = n_layer;
        x->n_exp = n_exp;
    }
    for (int64_t i = 0; !rc && i < cells; i++) x->rows[i] += add[i];
    for (int k = 0; !rc && k < MT_LEN(keys); k++) {
        if (has[k] && !*to[k]) *to[k] = mem_array(cells, (int64_t)sizeof(double));
        for (int64_t i = 0; has[k] && i < cells; i++) /* norms and ranks are those of the last event */
            (*to[k])[i] = (k ? 0 : (*to[k])[i]) + add[(k + 1) * cells + i];
    }
    if (!rc) summarise(x, add, step);
    mem_free(add);
    return rc ? -1 : 0;
}

/* ---- profile */

void history_profile_free(struct history_profile *p)
{
    mem_free(p->ops);
    mem_free(p->at_ms.v);
    mem_free(p->memory.v);
    *p = (struct history_profile){0};
}

static int read_ops(struct history_profile *p, struct json ops, struct err *err)
{
    p->n_op = json_count(ops);
    if (p->n_op > MAX_OPS) return json_error(ops, err, "%lld ops", (long long)p->n_op);
    p->ops = mem_array(p->n_op, sizeof(*p->ops));
    for (int64_t i = 0; i < p->n_op; i++) {
        const char *name;
        const struct json op = json_at(ops, i);
        if (json_get_str(op, "op", &name, err) || positive(json_find(op, "ms"), &p->ops[i].ms, err)) return -1;
        snprintf(p->ops[i].name, sizeof(p->ops[i].name), "%s", name);
    }
    return 0;
}

static int read_memory(struct history_profile *p, struct json at, struct json used, struct err *err)
{
    const int64_t n = json_count(at);
    if (n != json_count(used) || n > MAX_SAMPLES) return json_error(used, err, "%lld samples", (long long)n);
    for (int64_t i = 0; i < n; i++) {
        double ms, bytes;
        if (positive(json_at(at, i), &ms, err) || positive(json_at(used, i), &bytes, err)) return -1;
        series_push(&p->at_ms, ms);
        series_push(&p->memory, bytes / (1 << 30));
    }
    return 0;
}

int history_profile_read(struct history_profile *p, struct json event, double step, struct err *err)
{
    struct history_profile now = {.last = (int64_t)fmin(fmax(step, 0), 1e15)};
    struct json ops, at, used;
    if (json_get_i64(event, "steps", 1, INT64_MAX, &now.steps, err) ||
        positive(json_find(event, "span_ms"), &now.span_ms, err) || json_get_array(event, "ops", &ops, err) ||
        json_get_array(event, "at_ms", &at, err) || json_get_array(event, "used", &used, err) ||
        positive(json_find(event, "weights"), &now.weights, err) ||
        positive(json_find(event, "state"), &now.state, err) || read_ops(&now, ops, err) ||
        read_memory(&now, at, used, err)) {
        history_profile_free(&now);
        return -1;
    }
    history_profile_free(p);
    *p = now;
    return 0;
}

/* ---- online RL ---- */

static double number(struct json j, const char *key)
{
    double v = NAN;
    return json_opt_f64(j, key, &v, NULL) ? NAN : v;
}

/* The reward of this name, new ones with NaN for the events so far; NULL: there is no room for it. */
static struct history_reward *find_reward(struct history_rollouts *h, const char *name, int64_t size)
{
    for (int i = 0; i < h->n_reward; i++)
        if ((int64_t)strlen(h->rewards[i].name) == size && !memcmp(h->rewards[i].name, name, (size_t)size))
            return &h->rewards[i];
    if (h->n_reward == MT_LEN(h->rewards) || size >= REWARD_NAME) return NULL;
    struct history_reward *r = &h->rewards[h->n_reward++];
    memcpy(r->name, name, (size_t)size);
    while (r->mean.n < h->step.n - 1) series_push(&r->mean, NAN);
    return r;
}

static void add_rewards(struct history_rollouts *h, struct json event)
{
    static const char begin[] = "rewards/", end[] = "/mean";
    const int64_t around = (int64_t)strlen(begin) + (int64_t)strlen(end);
    const char *key;
    struct json value;
    for (int64_t i = 0; json_member(event, i, &key, &value); i++) {
        const int64_t n = (int64_t)strlen(key);
        if (n <= around || strncmp(key, begin, strlen(begin)) || strcmp(key + n - strlen(end), end)) continue;
        struct history_reward *r = find_reward(h, key + strlen(begin), n - around);
        if (r && r->mean.n < h->step.n) series_push(&r->mean, number(event, key));
    }
    for (int i = 0; i < h->n_reward; i++)
        if (h->rewards[i].mean.n < h->step.n) series_push(&h->rewards[i].mean, NAN);
}

void history_rollouts_add(struct history_rollouts *h, struct json event, double step)
{
    series_push(&h->step, step);
    series_push(&h->reward, number(event, "reward"));
    series_push(&h->flat, number(event, "frac_reward_zero_std"));
    series_push(&h->length, number(event, "completions/mean_length"));
    series_push(&h->cut, number(event, "completions/clipped_ratio"));
    series_push(&h->tok_s, number(event, "sampling/tok_s"));
    series_push(&h->difference, number(event, "sampling/own_logp_difference/mean"));
    series_push(&h->turns, number(event, "environment/turns/mean"));
    series_push(&h->null, number(event, "reward_null"));
    add_rewards(h, event);
}

bool history_rollouts_add_eval(struct history_rollouts *h, struct json event, double step)
{
    if (!json_has(event, "eval_reward")) return false;
    series_push(&h->eval_step, step);
    series_push(&h->eval_reward, number(event, "eval_reward"));
    series_push(&h->eval_length, number(event, "eval_completions/mean_length"));
    series_push(&h->eval_turns, number(event, "eval_environment/turns/mean"));
    return true;
}

int64_t history_rollouts_best(const struct history_rollouts *h)
{
    int64_t best = -1;
    for (int64_t i = h->first_eval; i < h->eval_reward.n; i++)
        if (isfinite(h->eval_reward.v[i]) && (best < 0 || h->eval_reward.v[i] > h->eval_reward.v[best])) best = i;
    return best;
}

void history_rollouts_free(struct history_rollouts *h)
{
    struct series *all[] = {&h->step,  &h->reward,     &h->flat,      &h->length,      &h->cut,
                            &h->tok_s, &h->difference, &h->eval_step, &h->eval_reward, &h->eval_length,
                            &h->turns, &h->eval_turns, &h->null};
    for (int i = 0; i < MT_LEN(all); i++) mem_free(all[i]->v);
    for (int i = 0; i < h->n_reward; i++) mem_free(h->rewards[i].mean.v);
    *h = (struct history_rollouts){.step = {0}};
}

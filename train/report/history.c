/* history.c - metrics.jsonl -> series of numbers. */
#include "train/report/history.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/json.h"

void history_free(struct history *h)
{
    struct series *all[] = {&h->step,     &h->loss,      &h->smooth,      &h->grad,       &h->lr,
                            &h->tok_s,    &h->eval_step, &h->eval_loss,   &h->perplexity, &h->accuracy,
                            &h->eval_tok, &h->ce,        &h->kl,          &h->eval_ce,    &h->eval_kl,
                            &h->margin,   &h->right,     &h->eval_margin, &h->eval_right};
    for (int i = 0; i < MT_LEN(all); i++) mem_free(all[i]->v);
    history_experts_free(&h->experts);
    history_profile_free(&h->profile);
    history_rollouts_free(&h->rollouts);
    for (int64_t i = 0; i < h->n_samples; i++) {
        mem_free(h->samples[i].prompt);
        mem_free(h->samples[i].expected);
        mem_free(h->samples[i].text);
    }
    mem_free(h->samples);
    *h = (struct history){0};
}

/* ---- reading */

/* NaN: absent, null or not a number. */
static double number(struct json j, const char *key)
{
    double v = NAN;
    return json_opt_f64(j, key, &v, NULL) ? NAN : v;
}

/* Whether the event is a step of a preference objective; its `kl` is KTO's baseline. */
static bool has_rewards(struct json event) { return json_has(event, "rewards/margins"); }

static double or_zero(double v) { return isfinite(v) ? v : 0; }

static void copy_text(char *to, size_t size, struct json event, const char *key)
{
    const char *text = "";
    if (json_opt_str(event, key, &text, NULL)) text = "";
    snprintf(to, size, "%s", text);
}

/* A later start replaces an earlier one, so the last settings of the run count. */
static void add_start(struct history *h, struct json event)
{
    struct history_start *s = &h->start;
    char best[32];
    copy_text(s->run, sizeof(s->run), event, "run");
    copy_text(s->name, sizeof(s->name), event, "name");
    copy_text(s->date, sizeof(s->date), event, "date");
    copy_text(s->model, sizeof(s->model), event, "model");
    copy_text(s->data, sizeof(s->data), event, "data");
    copy_text(s->device, sizeof(s->device), event, "device");
    copy_text(s->version, sizeof(s->version), event, "version");
    copy_text(best, sizeof(best), json_find(event, "config"), "eval.best");
    s->by_accuracy = !strcmp(best, "accuracy");
    s->total_steps = h->n_worse = 0;
    s->resumed = or_zero(number(event, "step")) > 0;
    if (json_opt_i64(event, "total_steps", 0, INT64_MAX, &s->total_steps, NULL)) s->total_steps = 0;
}

static int add_sample(struct history *h, struct json event, double step, struct err *err)
{
    const char *prompt, *text, *expected = NULL;
    if (json_get_str(event, "prompt", &prompt, err) || json_get_str(event, "text", &text, err) ||
        json_opt_str(event, "expected", &expected, err))
        return -1;
    h->samples = mem_reserve(h->samples, &h->cap_samples, h->n_samples + 1, (int64_t)sizeof(*h->samples));
    h->samples[h->n_samples++] =
        (struct history_sample){step, mem_strdup(prompt), mem_strdup(text), expected ? mem_strdup(expected) : NULL};
    return 0;
}

static void add_eval(struct history *h, struct json event, double step)
{
    char held_out[sizeof(h->held_out)];
    copy_text(held_out, sizeof(held_out), event, "held_out");
    if (strcmp(held_out, h->held_out)) {
        h->first_eval = h->eval_step.n;
        h->rollouts.first_eval = h->rollouts.eval_step.n;
    }
    memcpy(h->held_out, held_out, sizeof(held_out));
    h->eval_ms += or_zero(number(event, "ms"));
    if (history_rollouts_add_eval(&h->rollouts, event, step)) return;
    series_push(&h->eval_step, step);
    series_push(&h->eval_loss, number(event, "loss"));
    series_push(&h->eval_ce, number(event, "ce"));
    series_push(&h->eval_kl, number(event, "kl"));
    series_push(&h->eval_margin, number(event, "eval_rewards/margins"));
    series_push(&h->eval_right, number(event, "eval_rewards/accuracies"));
    series_push(&h->perplexity, number(event, "perplexity"));
    series_push(&h->accuracy, number(event, "accuracy"));
    series_push(&h->eval_tok, number(event, "tokens"));
}

static int add_event(struct history *h, struct json event, struct err *err)
{
    const char *kind;
    double step;
    if (json_get_str(event, "event", &kind, err) || json_get_f64(event, "step", &step, err)) return -1;
    if (!strcmp(kind, "experts")) return history_experts_add(&h->experts, event, step, err);
    if (!strcmp(kind, "profile")) return history_profile_read(&h->profile, event, step, err);
    if (!strcmp(kind, "sample")) return add_sample(h, event, step, err);
    if (!strcmp(kind, "start")) add_start(h, event);
    if (!strcmp(kind, "step")) {
        series_push(&h->step, step);
        series_push(&h->loss, number(event, "loss"));
        series_push(&h->ce, number(event, "ce"));
        series_push(&h->kl, has_rewards(event) ? NAN : number(event, "kl"));
        series_push(&h->margin, number(event, "rewards/margins"));
        series_push(&h->right, number(event, "rewards/accuracies"));
        series_push(&h->smooth, number(event, "smooth_loss"));
        series_push(&h->grad, number(event, "grad_norm"));
        series_push(&h->lr, number(event, "lr"));
        series_push(&h->tok_s, number(event, "tok_s"));
        h->tokens += or_zero(number(event, "tokens"));
        h->train_ms += or_zero(number(event, "ms"));
        h->mem_bytes = fmax(h->mem_bytes, or_zero(number(event, "mem_bytes")));
        h->n_skipped += json_has(event, "skipped");
    }
    if (!strcmp(kind, "stop") && json_opt_i64(event, "evaluations", 0, INT64_MAX, &h->n_worse, NULL)) h->n_worse = 0;
    if (!strcmp(kind, "rollouts")) history_rollouts_add(&h->rollouts, event, step);
    if (!strcmp(kind, "eval")) add_eval(h, event, step);
    return 0; /* other events are ignored */
}

int history_read(struct history *h, const char *dir, struct err *err)
{
    char path[MT_PATH];
    *h = (struct history){0};
    if (file_in(path, dir, "metrics.jsonl", err)) return -1;
    struct line_reader *reader = line_reader_open(path, err);
    if (!reader) return -1;
    char *line, name[MT_PATH + 32];
    int64_t size;
    int rc;
    while ((rc = line_reader_next(reader, &line, &size, err)) > 0) {
        struct err bad;
        snprintf(name, sizeof(name), "%s:%lld", path, (long long)line_reader_line(reader));
        struct json_doc *doc = json_parse(line, size, name, &bad);
        if (!doc || add_event(h, json_root(doc), &bad)) log_warn("%s; the line is skipped", bad.msg);
        json_free(doc);
    }
    line_reader_close(reader);
    return rc;
}

/* As score_of of train/loop.c. */
static double score(const struct history *h, int64_t i)
{
    return h->start.by_accuracy && isfinite(h->eval_right.v[i]) ? 1 - h->eval_right.v[i] : h->eval_loss.v[i];
}

static bool is_better(const struct history *h, int64_t i, int64_t best)
{
    if (score(h, i) == score(h, best)) return h->eval_loss.v[i] < h->eval_loss.v[best];
    return score(h, i) < score(h, best);
}

int64_t history_best(const struct history *h)
{
    int64_t best = -1;
    for (int64_t i = h->first_eval; i < h->eval_loss.n; i++)
        if (isfinite(score(h, i)) && (best < 0 || is_better(h, i, best))) best = i;
    return best;
}

bool history_has_preferences(const struct history *h)
{
    for (int64_t i = 0; i < h->margin.n; i++)
        if (isfinite(h->margin.v[i])) return true;
    return isfinite(series_last(&h->eval_margin));
}

const char *history_stop(const struct history *h, char text[80])
{
    text[0] = 0;
    if (h->n_worse)
        snprintf(text, 80, "stopped early: no %s for %lld evaluation%s",
                 h->rollouts.eval_reward.n ? "higher held-out reward"
                 : h->start.by_accuracy    ? "higher held-out accuracy"
                                           : "lower held-out loss",
                 (long long)h->n_worse, str_plural(h->n_worse));
    return text;
}

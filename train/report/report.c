/* report.c - see report.h. */
#include "train/report/report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "train/report/history.h"
#include "train/report/html.h"
#include "train/report/report_experts.h"
#include "train/report/report_profile.h"
#include "train/report/svg.h"

static void card(FILE *out, const char *name, const char *value, const char *note)
{
    fprintf(out, "<div><span>%s</span><b>%s</b><span>%s</span></div>\n", name, value, note);
}

/* Writes the number of steps. If the run has not made all of them: "10 / 400, not finished", or what ended it. */
static void write_steps(FILE *out, const struct history *h)
{
    const double done = h->step.n ? h->step.v[h->step.n - 1] : 0, total = (double)h->start.total_steps;
    char value[96], note[160], stop[80], a[32], b[32];
    if (!*history_stop(h, stop)) snprintf(stop, sizeof(stop), "not finished");
    snprintf(value, sizeof(value), "%s", svg_number(a, done));
    if (total > done) snprintf(value, sizeof(value), "%s / %s", svg_number(a, done), svg_number(b, total));
    snprintf(note, sizeof(note), "%s%s%s skipped", total > done ? stop : "", total > done ? ", " : "",
             h->n_skipped ? svg_number(a, (double)h->n_skipped) : "none");
    card(out, "Steps", value, note);
}

static void write_cards(FILE *out, const struct history *h)
{
    char value[96], note[96], a[32], b[32];
    fputs("<div class=\"cards\">\n", out);
    if (isfinite(series_last(&h->smooth))) {
        snprintf(value, sizeof(value), "%.4f", f64_for_4f(series_last(&h->smooth)));
        card(out, "Final train loss", value, "smoothed");
    }
    if (h->eval_loss.n > 0) {
        double before = h->eval_loss.v[h->first_eval], after = h->eval_loss.v[h->eval_loss.n - 1];
        snprintf(value, sizeof(value), "%.3f &rarr; %.3f", before, after);
        snprintf(note, sizeof(note), "%+.1f %%", 100 * (after / before - 1));
        card(out, "Held-out loss", value, note);
    }
    const struct history_rollouts *r = &h->rollouts;
    if (r->eval_reward.n > 0) {
        const double before = r->eval_reward.v[r->first_eval], after = r->eval_reward.v[r->eval_reward.n - 1];
        snprintf(value, sizeof(value), "%.3f &rarr; %.3f", before, after);
        snprintf(note, sizeof(note), "mean, temperature 0");
        card(out, "Held-out reward", value, note);
    }
    snprintf(value, sizeof(value), "%s tok/s",
             svg_number(a, h->train_ms > 0 ? round(h->tokens / h->train_ms * 1e3) : 0));
    card(out, "Throughput", value, "mean of all steps");
    card(out, "Tokens", str_count(a, (int64_t)fmin(h->tokens, 9e18)), "trained on");
    write_steps(out, h);
    snprintf(note, sizeof(note), "and %s of evaluation", str_seconds(a, h->eval_ms / 1e3));
    card(out, "Time", str_seconds(b, h->train_ms / 1e3), note);
    card(out, "Memory", str_bytes(a, (int64_t)fmin(h->mem_bytes, 9e18)), "peak");
    fputs("</div>\n", out);
}

/* Draws wide plots twice, for two widths; the page's style shows one of them, depending on the screen width. */
static void write_loss(FILE *out, const struct history *h, const char *css, int width, int height)
{
    const double *step = h->step.v;
    const int64_t n = h->step.n;
    const char *unit = history_has_preferences(h) ? "loss of the objective" : "nats per token";
    struct svg_plot loss = {"step", unit, width, height, .n_lines = 3};
    loss.lines[0] = (struct svg_line){"a faint", step, h->loss.v, n, false};
    loss.lines[1] = (struct svg_line){"a", step, h->smooth.v, n, false};
    loss.lines[2] = (struct svg_line){"b", h->eval_step.v + h->first_eval, h->eval_loss.v + h->first_eval,
                                      h->eval_loss.n - h->first_eval, true};
    fprintf(out, "<div class=\"%s\">\n", css);
    svg_plot(out, &loss);
    fputs("</div>\n", out);
}

static void write_plots(FILE *out, const struct history *h)
{
    const double *step = h->step.v;
    int64_t n = h->step.n;
    fputs("<h2>Loss <small class=\"key kf\">train, each step</small><small class=\"key ka\">smoothed</small>", out);
    if (h->eval_loss.n) fputs("<small class=\"key kb\">held out</small>", out);
    fputs("</h2>\n", out);
    write_loss(out, h, "wide", 1120, 380);
    write_loss(out, h, "narrow", 360, 260);
    const struct {
        const char *title, *unit;
        const struct series *y;
    } small[] = {{"Learning rate", "per step", &h->lr},
                 {"Gradient norm", "before clipping", &h->grad},
                 {"Throughput", "tokens per second", &h->tok_s}};
    fputs("<div class=\"three\">\n", out);
    for (int i = 0; i < MT_LEN(small); i++) {
        fprintf(out, "<section><h2>%s</h2>\n", small[i].title);
        struct svg_plot plot = {"step", small[i].unit, 360, 250, .n_lines = 1, .from_zero = true};
        plot.lines[0] = (struct svg_line){"a thin", step, small[i].y->v, n, false};
        svg_plot(out, &plot);
        fputs("</section>\n", out);
    }
    fputs("</div>\n", out);
}

static bool has_teacher(const struct history *h)
{
    return isfinite(series_last(&h->kl)) || isfinite(series_last(&h->eval_kl));
}

/* A quantity other than the loss, in training and on the held-out data. */
struct beside {
    const char *title, *unit;
    const struct series *train, *held_out;
};

static void write_beside(FILE *out, const struct history *h, const struct beside part[2])
{
    fputs("<div class=\"three\">\n", out);
    for (int i = 0; i < 2; i++) {
        const int64_t first = h->first_eval, n = part[i].held_out->n - first;
        if (!isfinite(series_last(part[i].train)) && !isfinite(series_last(part[i].held_out))) continue;
        fprintf(out, "<section><h2>%s</h2>\n", part[i].title);
        struct svg_plot plot = {"step", part[i].unit, 360, 250, .n_lines = 2};
        plot.lines[0] = (struct svg_line){"a thin", h->step.v, part[i].train->v, h->step.n, false};
        plot.lines[1] = (struct svg_line){"b", h->eval_step.v + first, part[i].held_out->v + first, n, true};
        svg_plot(out, &plot);
        fputs("</section>\n", out);
    }
    fputs("</div>\n", out);
}

/* Plots the parts of a distillation's loss, or the rewards of a preference objective. */
static void write_parts(FILE *out, const struct history *h)
{
    const struct beside teacher[2] = {{"Cross-entropy", "nats per token", &h->ce, &h->eval_ce},
                                      {"KL to the teacher", "nats per token", &h->kl, &h->eval_kl}};
    const struct beside answers[2] = {{"Reward margin", "chosen - rejected", &h->margin, &h->eval_margin},
                                      {"Preference accuracy", "share of pairs", &h->right, &h->eval_right}};
    if (has_teacher(h)) write_beside(out, h, teacher);
    if (history_has_preferences(h)) write_beside(out, h, answers);
}

/* held_out: or NULL. */
struct curve {
    const char *title, *unit;
    const struct series *y, *held_out;
    bool from_zero;
};

static void write_curve(FILE *out, const struct history_rollouts *h, const struct curve *c)
{
    struct svg_plot plot = {"step", c->unit, 360, 250, .n_lines = 1, .from_zero = c->from_zero};
    if (!isfinite(series_last(c->y))) return;
    plot.lines[0] = (struct svg_line){"a thin", h->step.v, c->y->v, h->step.n, false};
    if (c->held_out && c->held_out->n)
        plot.lines[plot.n_lines++] = (struct svg_line){"b", h->eval_step.v, c->held_out->v, c->held_out->n, true};
    fputs("<section><h2>", out);
    svg_text(out, c->title);
    fputs("</h2>\n", out);
    svg_plot(out, &plot);
    fputs("</section>\n", out);
}

static bool has_nulls(const struct history_rollouts *h)
{
    for (int64_t i = 0; i < h->null.n; i++)
        if (h->null.v[i] > 0) return true;
    return false;
}

static void write_rollouts(FILE *out, const struct history_rollouts *h)
{
    const struct curve curves[] = {{"Reward", "mean of the rows", &h->reward, &h->eval_reward, false},
                                   {"Length", "tokens of a completion", &h->length, &h->eval_length, true},
                                   {"Turns", "of a completion", &h->turns, &h->eval_turns, true},
                                   {"Groups of equal rewards", "share", &h->flat, NULL, true},
                                   {"Cut", "share without an end token", &h->cut, NULL, true},
                                   {"Sampling", "tokens per second", &h->tok_s, NULL, true},
                                   {"Sampler to trainer", "nats, mean", &h->difference, NULL, true}};
    if (!h->step.n) return;
    fputs("<h2>Rollouts <small class=\"key ka\">train</small>", out);
    if (h->eval_step.n) fputs("<small class=\"key kb\">held out</small>", out);
    fputs("</h2>\n", out);
    fputs("<div class=\"three\">\n", out);
    for (int i = 0; i < MT_LEN(curves); i++) write_curve(out, h, &curves[i]);
    for (int i = 0; i < h->n_reward && h->n_reward > 1; i++) {
        char title[REWARD_NAME + 8];
        snprintf(title, sizeof(title), "Reward %s", h->rewards[i].name);
        write_curve(out, h, &(struct curve){title, "mean of the rows", &h->rewards[i].mean, NULL, false});
    }
    if (has_nulls(h)) write_curve(out, h, &(struct curve){"Rows without a reward", "rows", &h->null, NULL, true});
    fputs("</div>\n", out);
    if (!h->eval_step.n) return;
    fputs("<div class=\"table\"><table><tr><th>step<th>held-out reward<th>tokens<th></tr>\n", out);
    const int64_t best = history_rollouts_best(h);
    for (int64_t i = 0; i < h->eval_step.n; i++)
        fprintf(out, "<tr%s><td>%.0f<td>%.4f<td>%.1f<td>%s</tr>\n", i == best ? " class=\"best\"" : "",
                h->eval_step.v[i], h->eval_reward.v[i], h->eval_length.v[i], i == best ? "best" : "");
    fputs("</table></div>\n", out);
}

static void write_evals(FILE *out, const struct history *h)
{
    char text[32];
    int64_t best = history_best(h);
    const bool teacher = has_teacher(h), answers = history_has_preferences(h);
    fprintf(out,
            "<h2>Evaluations</h2>\n<div "
            "class=\"table\"><table><tr><th>step<th>loss%s<th>perplexity<th>accuracy<th>tokens<th></tr>\n",
            teacher   ? "<th>cross-entropy<th>KL"
            : answers ? "<th>margin<th>right"
                      : "");
    for (int64_t i = 0; i < h->eval_loss.n; i++) {
        fprintf(out, "<tr%s><td>%.0f<td>%.4f", i == best ? " class=\"best\"" : "", h->eval_step.v[i],
                h->eval_loss.v[i]);
        if (teacher) fprintf(out, "<td>%.4f<td>%.4g", h->eval_ce.v[i], h->eval_kl.v[i]);
        if (answers) fprintf(out, "<td>%.4g<td>%.3g", h->eval_margin.v[i], h->eval_right.v[i]);
        fprintf(out, "<td>%.4g<td>%.2f %%<td>%s<td>%s</tr>\n", h->perplexity.v[i], 100 * h->accuracy.v[i],
                svg_number(text, isfinite(h->eval_tok.v[i]) ? h->eval_tok.v[i] : 0),
                i == best           ? "best"
                : i < h->first_eval ? "other held-out data"
                                    : "");
    }
    fputs("</table></div>\n", out);
}

static void write_samples(FILE *out, const struct history *h)
{
    const double last = h->samples[h->n_samples - 1].step;
    int64_t earlier = 0;
    for (int64_t i = 0; i < h->n_samples; i++) earlier += h->samples[i].step != last;
    fprintf(out, "<h2>Samples at step %.0f <small>%lld of earlier evaluations are in metrics.jsonl</small></h2>\n",
            last, (long long)earlier);
    for (int64_t i = 0; i < h->n_samples; i++) {
        if (h->samples[i].step != last) continue;
        fputs("<div class=\"sample\"><p class=\"sub\">", out);
        svg_text(out, h->samples[i].prompt);
        fputs("</p><p>", out);
        svg_text(out, h->samples[i].text);
        if (h->samples[i].expected) fputs("</p><p class=\"sub\">expected: ", out);
        if (h->samples[i].expected) svg_text(out, h->samples[i].expected);
        fputs("</p></div>\n", out);
    }
}

static void write_facts(FILE *out, const struct history_start *s)
{
    const struct {
        const char *name, *value;
    } facts[] = {{"Name", s->name},        {"Run", s->run},   {s->resumed ? "Continued" : "Started", s->date},
                 {"Base model", s->model}, {"Data", s->data}, {"Device", s->device},
                 {"moetrain", s->version}};
    fputs("<dl class=\"facts\">\n", out);
    for (int i = 0; i < MT_LEN(facts); i++) {
        if (!facts[i].value[0]) continue;
        fprintf(out, "<dt>%s<dd>", facts[i].name);
        svg_text(out, facts[i].value);
        fputs("\n", out);
    }
    fputs("</dl>\n", out);
}

static void write_page(FILE *out, const struct history *h, const char *title, const char *config_text)
{
    html_begin(out, title);
    write_facts(out, &h->start);
    write_cards(out, h);
    if (h->step.n || h->eval_loss.n) write_plots(out, h);
    write_rollouts(out, &h->rollouts);
    write_parts(out, h);
    report_profile(out, &h->profile);
    report_experts(out, &h->experts);
    if (h->eval_loss.n) write_evals(out, h);
    if (h->n_samples) write_samples(out, h);
    fputs("<h2>Configuration</h2>\n<pre>", out);
    svg_text(out, config_text);
    fputs("</pre>\n", out);
    html_end(out);
}

int report_write(const char *dir, const char *title, const char *config_text, struct err *err)
{
    char path[MT_PATH], *html = NULL;
    size_t size;
    struct history history;
    int rc = -1;
    if (history_read(&history, dir, err)) goto out;
    FILE *out = open_memstream(&html, &size);
    MT_REQUIRE(out, "open_memstream failed");
    write_page(out, &history, title, config_text);
    MT_REQUIRE(!fclose(out), "out of memory for the report");
    if (str_format(path, sizeof(path), err, "output.dir", "%s/report.html", dir)) goto out;
    rc = file_write_atomic(path, html, (int64_t)size, err);
out:
    free(html);
    history_free(&history);
    return rc;
}

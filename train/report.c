/* report.c - metrics.jsonl -> report.html: key figures, plots, heat map, evaluations, configuration, in one file
 * without scripts. */
#include "train/metrics.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/file.h"
#include "data/json.h"
#include "train/svg.h"

#define MAX_EXPERT_CELLS (1 << 20) /* layers x experts of a heat map */

struct series {
    double *v;
    int64_t n, cap;
};

/* Everything a report shows; the series of steps are parallel, as are those of evaluations. */
struct history {
    struct series step, loss, smooth, grad, lr, tok_s;
    struct series eval_step, eval_loss, perplexity, accuracy, eval_tok;
    double tokens, train_ms, eval_ms, mem_bytes;
    int64_t n_skipped, n_layer, n_exp;
    double *experts; /* [n_layer, n_exp] tokens, all events summed; NULL: no such event */
};

static void push(struct series *s, double v)
{
    if (s->n == s->cap) {
        int64_t cap = MT_MAX(2 * s->cap, 256);
        s->v = mem_grow(s->v, s->cap, cap, (int64_t)sizeof(double));
        s->cap = cap;
    }
    s->v[s->n++] = v;
}

static void history_free(struct history *h)
{
    struct series *all[] = {&h->step,      &h->loss,      &h->smooth,     &h->grad,     &h->lr,      &h->tok_s,
                            &h->eval_step, &h->eval_loss, &h->perplexity, &h->accuracy, &h->eval_tok};
    for (int i = 0; i < MT_LEN(all); i++) mem_free(all[i]->v);
    mem_free(h->experts);
}

/* ---- reading */

/* NaN when it is absent, null or no number. */
static double number(struct json j, const char *key)
{
    double v = NAN;
    return json_opt_f64(j, key, &v, NULL) ? NAN : v;
}

static double or_zero(double v) { return isfinite(v) ? v : 0; }

static int read_counts(double *out, int64_t n_layer, int64_t n_exp, struct json counts, struct err *err)
{
    for (int64_t l = 0; l < n_layer; l++) {
        struct json row = json_at(counts, l);
        if (json_count(row) != n_exp) return json_error(counts, err, "rows of unequal length");
        for (int64_t e = 0; e < n_exp; e++) {
            int64_t count;
            if (json_i64(json_at(row, e), 0, INT64_MAX, &count, err)) return -1;
            out[l * n_exp + e] = (double)count;
        }
    }
    return 0;
}

static int add_experts(struct history *h, struct json event, struct err *err)
{
    struct json counts;
    if (json_get_array(event, "counts", &counts, err)) return -1;
    int64_t n_layer = json_count(counts), n_exp = json_count(json_at(counts, 0)), cells;
    if (!i64_mul(n_layer, n_exp, &cells) || cells < 1 || cells > MAX_EXPERT_CELLS ||
        (h->experts && (n_layer != h->n_layer || n_exp != h->n_exp)))
        return json_error(counts, err, "%lld layers of %lld experts", (long long)n_layer, (long long)n_exp);
    double *add = mem_array(cells, (int64_t)sizeof(double));
    int rc = read_counts(add, n_layer, n_exp, counts, err);
    if (rc == 0 && !h->experts) {
        h->experts = mem_array(cells, (int64_t)sizeof(double));
        h->n_layer = n_layer;
        h->n_exp = n_exp;
    }
    for (int64_t i = 0; rc == 0 && i < cells; i++) h->experts[i] += add[i];
    mem_free(add);
    return rc;
}

static int add_event(struct history *h, struct json event, struct err *err)
{
    const char *kind;
    double step;
    if (json_get_str(event, "event", &kind, err) || json_get_f64(event, "step", &step, err)) return -1;
    if (!strcmp(kind, "experts")) return add_experts(h, event, err);
    if (!strcmp(kind, "step")) {
        push(&h->step, step);
        push(&h->loss, number(event, "loss"));
        push(&h->smooth, number(event, "smooth_loss"));
        push(&h->grad, number(event, "grad_norm"));
        push(&h->lr, number(event, "lr"));
        push(&h->tok_s, number(event, "tok_s"));
        h->tokens += or_zero(number(event, "tokens"));
        h->train_ms += or_zero(number(event, "ms"));
        h->mem_bytes = fmax(h->mem_bytes, or_zero(number(event, "mem_bytes")));
        h->n_skipped += json_has(event, "skipped");
    }
    if (!strcmp(kind, "eval")) {
        push(&h->eval_step, step);
        push(&h->eval_loss, number(event, "loss"));
        push(&h->perplexity, number(event, "perplexity"));
        push(&h->accuracy, number(event, "accuracy"));
        push(&h->eval_tok, number(event, "tokens"));
        h->eval_ms += or_zero(number(event, "ms"));
    }
    return 0; /* other events are for other readers */
}

static int history_read(struct history *h, const char *path, struct err *err)
{
    struct line_reader *reader = line_reader_open(path, err);
    if (!reader) return -1;
    char *line, name[MT_PATH + 32];
    int64_t size;
    int rc;
    while ((rc = line_reader_next(reader, &line, &size, err)) > 0) {
        struct err bad;
        snprintf(name, sizeof(name), "%s:%lld", path, (long long)line_reader_line(reader));
        struct json_doc *doc = json_parse(line, size, name, &bad);
        if (!doc || add_event(h, json_root(doc), &bad)) log_warn("%s; the report goes on without it", bad.msg);
        json_free(doc);
    }
    line_reader_close(reader);
    return rc;
}

/* ---- writing */

static const char style[] =
    ":root{--bg:#fff;--fg:#1d2330;--dim:#667085;--line:#e6e8ee;--card:#f7f8fa;--a:#2563eb;--b:#e4572e;--faint:.3}\n"
    "@media(prefers-color-scheme:dark){:root{--bg:#12151c;--fg:#e6e9f0;--dim:#98a2b3;--line:#2a303c;--card:#1a1f29;"
    "--a:#6ea8fe;--b:#ff8a65;--faint:.45}}\n"
    "*{box-sizing:border-box}\n"
    "body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,-apple-system,\"Segoe UI\",Roboto,"
    "\"Helvetica Neue\",\"DejaVu Sans\",sans-serif}\n"
    "main{max-width:1180px;margin:0 auto;padding:36px 24px 60px}\n"
    "h1{font-size:26px;margin:0 0 2px;letter-spacing:-.01em;overflow-wrap:anywhere}\n"
    "h2{font-size:16px;margin:36px 0 8px}h2 small,.sub{font-size:13px;font-weight:400;color:var(--dim)}\n"
    ".cards{display:flex;flex-wrap:wrap;gap:10px;margin:22px 0 8px}\n"
    ".cards div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:11px 14px;"
    "flex:1 1 auto}\n"
    ".cards span{display:block;font-size:12.5px;color:var(--dim)}\n"
    ".cards b{display:block;font-size:19px;font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}\n"
    ".three{display:grid;grid-template-columns:repeat(auto-fit,minmax(310px,1fr));gap:0 24px}\n"
    "svg{display:block;width:100%;height:auto;overflow:visible}svg svg{overflow:hidden}\n"
    ".wide{overflow-x:auto}.wide>svg{min-width:720px}\n"
    "svg text{font-size:12px;fill:var(--dim);font-variant-numeric:tabular-nums}\n"
    ".mid{text-anchor:middle}.end{text-anchor:end}.grid{stroke:var(--line)}.axis{stroke:var(--dim);opacity:.6}\n"
    ".line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}\n"
    ".thin{stroke-width:1.2}.faint{opacity:var(--faint);stroke-width:1}\n"
    ".a{stroke:var(--a)}.b{stroke:var(--b)}circle{fill:var(--bg);stroke-width:2}\n"
    ".cell{fill:var(--a);stroke:var(--line);stroke-width:.5}\n"
    ".key{margin-left:14px}.key:before{content:\"\";display:inline-block;width:18px;border-top:3px solid;"
    "margin-right:6px;vertical-align:4px}.key.ka:before{color:var(--a)}.key.kb:before{color:var(--b)}"
    ".key.kf:before{color:var(--a);opacity:var(--faint)}\n"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}\n"
    "th,td{text-align:right;white-space:nowrap;padding:5px 22px 5px 0;border-bottom:1px solid var(--line)}"
    "th{font-size:12.5px;font-weight:500;color:var(--dim)}\n"
    "tr.best td{font-weight:600}\n"
    "pre{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 18px;margin:0;"
    "font:12.5px/1.55 ui-monospace,Menlo,Consolas,\"DejaVu Sans Mono\",monospace;columns:2 420px;column-gap:36px;"
    "white-space:pre-wrap;overflow-wrap:anywhere}\n";

static double last_finite(const struct series *s)
{
    for (int64_t i = s->n - 1; i >= 0; i--)
        if (isfinite(s->v[i])) return s->v[i];
    return NAN;
}

/* Index of the lowest evaluation, or -1. */
static int64_t best_eval(const struct history *h)
{
    int64_t best = -1;
    for (int64_t i = 0; i < h->eval_loss.n; i++)
        if (isfinite(h->eval_loss.v[i]) && (best < 0 || h->eval_loss.v[i] < h->eval_loss.v[best])) best = i;
    return best;
}

static void card(FILE *out, const char *name, const char *value, const char *note)
{
    fprintf(out, "<div><span>%s</span><b>%s</b><span>%s</span></div>\n", name, value, note);
}

static void write_cards(FILE *out, const struct history *h)
{
    char value[96], note[96], a[32], b[32];
    fputs("<div class=\"cards\">\n", out);
    if (isfinite(last_finite(&h->smooth))) {
        snprintf(value, sizeof(value), "%.4f", last_finite(&h->smooth));
        card(out, "Final train loss", value, "smoothed");
    }
    if (h->eval_loss.n > 0) {
        double before = h->eval_loss.v[0], after = h->eval_loss.v[h->eval_loss.n - 1];
        snprintf(value, sizeof(value), "%.3f &rarr; %.3f", before, after);
        snprintf(note, sizeof(note), "%+.1f %%", 100 * (after / before - 1));
        card(out, "Held-out loss", value, note);
    }
    snprintf(value, sizeof(value), "%s tok/s",
             svg_number(a, h->train_ms > 0 ? round(h->tokens / h->train_ms * 1e3) : 0));
    card(out, "Throughput", value, "mean of all steps");
    snprintf(note, sizeof(note), "%lld skipped", (long long)h->n_skipped);
    card(out, "Tokens", str_count(a, (int64_t)h->tokens), "trained on");
    card(out, "Steps", svg_number(a, (double)h->step.n), h->n_skipped ? note : "none skipped");
    snprintf(note, sizeof(note), "and %s of evaluation", str_seconds(a, h->eval_ms / 1e3));
    card(out, "Time", str_seconds(b, h->train_ms / 1e3), note);
    card(out, "Memory", str_bytes(a, (int64_t)h->mem_bytes), "peak");
    fputs("</div>\n", out);
}

static void write_plots(FILE *out, const struct history *h)
{
    const double *step = h->step.v;
    int64_t n = h->step.n;
    fputs("<h2>Loss <small class=\"key kf\">train, each step</small><small class=\"key ka\">smoothed</small>", out);
    if (h->eval_loss.n) fputs("<small class=\"key kb\">held out</small>", out);
    fputs("</h2>\n<div class=\"wide\">\n", out);
    struct svg_plot loss = {.x_label = "step", .y_label = "nats per token", .width = 1120, .height = 380, .n_lines = 3};
    loss.lines[0] = (struct svg_line){"a faint", step, h->loss.v, n, false};
    loss.lines[1] = (struct svg_line){"a", step, h->smooth.v, n, false};
    loss.lines[2] = (struct svg_line){"b", h->eval_step.v, h->eval_loss.v, h->eval_loss.n, true};
    svg_plot(out, &loss);

    const struct {
        const char *title, *unit;
        const struct series *y;
    } small[] = {{"Learning rate", "per step", &h->lr},
                 {"Gradient norm", "before clipping", &h->grad},
                 {"Throughput", "tokens per second", &h->tok_s}};
    fputs("</div>\n<div class=\"three\">\n", out);
    for (int i = 0; i < MT_LEN(small); i++) {
        fprintf(out, "<section><h2>%s</h2>\n", small[i].title);
        struct svg_plot plot = {"step", small[i].unit, 360, 250, .n_lines = 1, .from_zero = true};
        plot.lines[0] = (struct svg_line){"a thin", step, small[i].y->v, n, false};
        svg_plot(out, &plot);
        fputs("</section>\n", out);
    }
    fputs("</div>\n", out);
}

static void write_experts(FILE *out, const struct history *h)
{
    int64_t idle = 0, cells = h->n_layer * h->n_exp;
    for (int64_t i = 0; i < cells; i++) idle += h->experts[i] == 0;
    fprintf(out, "<h2>Tokens per expert and layer <small>%lld of %lld experts without tokens</small></h2>\n",
            (long long)idle, (long long)cells);
    fputs("<div class=\"wide\">\n", out);
    svg_heat(out, &(struct svg_heat){"layer", "expert", "tokens", h->experts, h->n_layer, h->n_exp});
    fputs("</div>\n", out);
}

static void write_evals(FILE *out, const struct history *h)
{
    char text[32];
    int64_t best = best_eval(h);
    fputs("<h2>Evaluations</h2>\n<table><tr><th>step<th>loss<th>perplexity<th>accuracy<th>tokens<th></tr>\n", out);
    for (int64_t i = 0; i < h->eval_loss.n; i++)
        fprintf(out, "<tr%s><td>%.0f<td>%.4f<td>%.4g<td>%.2f %%<td>%s<td>%s</tr>\n", i == best ? " class=\"best\"" : "",
                h->eval_step.v[i], h->eval_loss.v[i], h->perplexity.v[i], 100 * h->accuracy.v[i],
                svg_number(text, or_zero(h->eval_tok.v[i])), i == best ? "best" : "");
    fputs("</table>\n", out);
}

static void write_page(FILE *out, const struct history *h, const char *title, const char *config_text)
{
    fputs("<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\n"
          "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
          "<meta name=\"color-scheme\" content=\"light dark\">\n<title>",
          out);
    svg_text(out, title);
    fprintf(out, "</title>\n<style>\n%s</style>\n<main>\n<h1>", style);
    svg_text(out, title);
    fprintf(out, "</h1>\n<div class=\"sub\">moetrain %s</div>\n", MT_VERSION);
    write_cards(out, h);
    if (h->step.n || h->eval_loss.n) write_plots(out, h);
    if (h->experts) write_experts(out, h);
    if (h->eval_loss.n) write_evals(out, h);
    fputs("<h2>Configuration</h2>\n<pre>", out);
    svg_text(out, config_text);
    fputs("</pre>\n</main>\n</html>\n", out);
}

int report_write(const char *dir, const char *title, const char *config_text, struct err *err)
{
    char path[MT_PATH], *html = NULL;
    size_t size;
    struct history history = {0};
    int rc = -1;
    if (str_format(path, sizeof(path), err, "output.dir", "%s/metrics.jsonl", dir) || history_read(&history, path, err))
        goto out;
    FILE *out = open_memstream(&html, &size);
    MT_REQUIRE(out, "open_memstream failed");
    write_page(out, &history, title, config_text);
    MT_REQUIRE(!fclose(out), "the report does not fit into memory");
    if (str_format(path, sizeof(path), err, "output.dir", "%s/report.html", dir)) goto out;
    rc = file_write_atomic(path, html, (int64_t)size, err);
out:
    free(html);
    history_free(&history);
    return rc;
}

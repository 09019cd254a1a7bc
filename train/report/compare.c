/* compare.c - see compare.h. */
#include "train/report/compare.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "train/config/config.h"
#include "train/report/history.h"
#include "train/report/html.h"
#include "train/report/svg.h"

struct compared {
    char *label; /* "NAME (DIR)", or DIR without log.name */
    struct history history;
    char *settings; /* config_dump; NULL: config.ini is missing or cannot be read */
};

/* A column is shown if a run has a value in it. REWARD is the mean of the last BATCHES batches, because single batches
 * vary much. */
enum {
    STEPS,
    TOKENS,
    TRAIN,
    FIRST,
    BEST,
    LAST,
    REWARD,
    R_FIRST,
    R_BEST,
    R_LAST,
    SPEED,
    TIME,
    MEMORY,
    RIGHT,
    N_COLUMNS
};
enum { BATCHES = 10 };
static const char *const column_names[N_COLUMNS] = {[STEPS] = "steps",
                                                    [TOKENS] = "tokens",
                                                    [TRAIN] = "smoothed loss",
                                                    [FIRST] = "held-out first",
                                                    [BEST] = "best (at)",
                                                    [LAST] = "held-out last",
                                                    [REWARD] = "reward, last 10 batches",
                                                    [R_FIRST] = "held-out reward first",
                                                    [R_BEST] = "best reward (at)",
                                                    [R_LAST] = "held-out reward last",
                                                    [SPEED] = "tok/s",
                                                    [TIME] = "time",
                                                    [MEMORY] = "memory",
                                                    [RIGHT] = "pairs right"};

static void value_text(char text[64], double value)
{
    if (isfinite(value))
        snprintf(text, 64, "%.4f", f64_for_4f(value));
    else
        snprintf(text, 64, "-");
}

/* Writes the value of evaluation i, with its step; i < 0: there is no evaluation. */
static void best_text(char text[64], const struct series *value, const struct series *step, int64_t i)
{
    char at[32];
    value_text(text, i < 0 ? NAN : value->v[i]);
    if (i >= 0) snprintf(text + strlen(text), 64 - strlen(text), " (%s)", svg_number(at, step->v[i]));
}

static void losses_of(const struct history *h, char cells[N_COLUMNS][64])
{
    const int64_t n_eval = h->eval_loss.n;
    value_text(cells[TRAIN], series_last(&h->smooth));
    value_text(cells[FIRST], n_eval ? h->eval_loss.v[h->first_eval] : NAN);
    best_text(cells[BEST], &h->eval_loss, &h->eval_step, history_best(h));
    value_text(cells[LAST], n_eval ? h->eval_loss.v[n_eval - 1] : NAN);
}

static void rewards_of(const struct history_rollouts *h, char cells[N_COLUMNS][64])
{
    double sum = 0, n = 0;
    for (int64_t i = MT_MAX(h->reward.n - BATCHES, 0); i < h->reward.n; i++) {
        sum += isfinite(h->reward.v[i]) ? h->reward.v[i] : 0;
        n += isfinite(h->reward.v[i]);
    }
    value_text(cells[REWARD], n > 0 ? sum / n : NAN);
    value_text(cells[R_FIRST], h->eval_reward.n ? h->eval_reward.v[h->first_eval] : NAN);
    best_text(cells[R_BEST], &h->eval_reward, &h->eval_step, history_rollouts_best(h));
    value_text(cells[R_LAST], series_last(&h->eval_reward));
}

static void results(const struct history *h, char cells[N_COLUMNS][64])
{
    char a[32], b[32];
    const double done = h->step.n ? h->step.v[h->step.n - 1] : 0;
    if ((double)h->start.total_steps > done)
        snprintf(cells[STEPS], 64, "%s / %s%s", svg_number(a, done), svg_number(b, (double)h->start.total_steps),
                 h->n_worse ? ", stopped early" : "");
    else
        snprintf(cells[STEPS], 64, "%s", svg_number(a, done));
    snprintf(cells[TOKENS], 64, "%s", str_count(a, (int64_t)fmin(h->tokens, 9e18)));
    losses_of(h, cells);
    rewards_of(&h->rollouts, cells);
    snprintf(cells[SPEED], 64, "%s", svg_number(a, h->train_ms > 0 ? round(h->tokens / h->train_ms * 1e3) : 0));
    snprintf(cells[TIME], 64, "%s", str_seconds(a, h->train_ms / 1e3));
    snprintf(cells[MEMORY], 64, "%s", str_bytes(a, (int64_t)fmin(h->mem_bytes, 9e18)));
    snprintf(cells[RIGHT], 64, "-");
    if (isfinite(series_last(&h->eval_right))) snprintf(cells[RIGHT], 64, "%.1f %%", 100 * series_last(&h->eval_right));
}

/* ---- settings ---- */

/* Reads the next key from *text, the rest of a dump: its name, "section.key", and its value. False: there are no
 * more. */
static bool next_setting(const char **text, char section[64], char key[128], char value[MT_PATH])
{
    while (*text && **text) {
        const char *line = *text;
        const int n = (int)strcspn(line, "\n");
        const char *equals = memchr(line, '=', (size_t)n);
        *text = line + n + (line[n] != 0);
        if (*line == '[') snprintf(section, 64, "%.*s", (int)strcspn(line + 1, "]"), line + 1);
        if (!equals || *line == ';' || *line == '#') continue;
        equals += 1 + strspn(equals + 1, " ");
        snprintf(key, 128, "%s.%.*s", section, (int)strcspn(line, " ="), line);
        snprintf(value, MT_PATH, "%.*s", (int)(line + n - equals), equals);
        str_mask(value);
        return true;
    }
    return false;
}

static bool find_setting(const char *settings, const char *key, char value[MT_PATH])
{
    char section[64] = "", other[128];
    while (next_setting(&settings, section, other, value))
        if (!strcmp(key, other)) return true;
    value[0] = 0;
    return false;
}

/* A setting that differs between the runs with settings. output.dir and log.name, which always differ, are skipped. */
struct difference {
    char key[128];
    char values[COMPARE_RUNS][MT_PATH]; /* not shortened: long values may differ at their ends */
    int run;                            /* the run whose keys are read now; later runs may add keys that it lacks */
    char section[64];
    const char *text;
};
static bool next_difference(const struct compared *runs, int n, struct difference *d)
{
    char value[MT_PATH];
    for (; d->run < n; d->text = NULL, d->section[0] = 0, d->run++) {
        if (!d->text) d->text = runs[d->run].settings;
        while (next_setting(&d->text, d->section, d->key, value)) {
            bool differs = false, seen = !strcmp(d->key, "output.dir") || !strcmp(d->key, "log.name");
            for (int i = 0; i < d->run; i++) seen |= find_setting(runs[i].settings, d->key, d->values[i]);
            for (int i = 0; !seen && i < n; i++) {
                find_setting(runs[i].settings, d->key, d->values[i]);
                if (!runs[i].settings) snprintf(d->values[i], MT_PATH, "?");
                differs |= runs[i].settings && strcmp(value, d->values[i]) != 0;
            }
            if (differs) return true;
        }
    }
    return false;
}

static int read_run(struct compared *run, const char *dir, struct err *err)
{
    char path[MT_PATH];
    struct err why;
    if (file_check_kind(dir, true, &why)) return err_set(err, "%s: name the output.dir of a run", why.msg);
    if (file_in(path, dir, "metrics.jsonl", err)) return -1;
    if (!file_exists(path)) return err_set(err, "%s: no metrics.jsonl in it: name the output.dir of a run", dir);
    if (history_read(&run->history, dir, err)) return -1;
    const char *name = str_mask(run->history.start.name);
    const int64_t n = (int64_t)(strlen(name) + strlen(dir)) + 4;
    run->label = mem_alloc(n);
    snprintf(run->label, (size_t)n, *name ? "%s (%s)" : "%s%s", name, dir);
    if (file_in(path, dir, "config.ini", err)) return -1;
    struct config *cfg = mem_alloc(sizeof(*cfg));
    config_defaults(cfg);
    if (config_load(cfg, path, &why))
        log_warn("%s; the settings of this run are not compared", why.msg);
    else
        run->settings = config_dump(cfg);
    mem_free(cfg);
    return 0;
}

/* ---- for the terminal ---- */

struct table {
    char cells[COMPARE_RUNS][N_COLUMNS][64];
    bool shown[N_COLUMNS];
};

static void fill(struct table *t, const struct compared *runs, int n)
{
    *t = (struct table){.shown = {false}};
    for (int i = 0; i < n; i++) {
        results(&runs[i].history, t->cells[i]);
        for (int c = 0; c < N_COLUMNS; c++) t->shown[c] |= strcmp(t->cells[i][c], "-") != 0;
    }
}

static void print_results(const struct compared *runs, int n, FILE *out)
{
    struct table t;
    char stop[80];
    int name = 3, width[N_COLUMNS];
    fill(&t, runs, n);
    for (int i = 0; i < n; i++) name = MT_MAX(name, (int)strlen(runs[i].label));
    for (int c = 0; c < N_COLUMNS; c++) {
        width[c] = (int)strlen(column_names[c]);
        for (int i = 0; i < n; i++) width[c] = MT_MAX(width[c], (int)strlen(t.cells[i][c]));
    }
    fprintf(out, "%-*s", name, "run");
    for (int c = 0; c < N_COLUMNS; c++)
        if (t.shown[c]) fprintf(out, "  %*s", width[c], column_names[c]);
    for (int i = 0; i < n; i++) {
        fprintf(out, "\n%-*s", name, runs[i].label);
        for (int c = 0; c < N_COLUMNS; c++)
            if (t.shown[c]) fprintf(out, "  %*s", width[c], t.cells[i][c]);
    }
    fprintf(out, "\n");
    for (int i = 0; i < n; i++)
        if (*history_stop(&runs[i].history, stop)) fprintf(out, "%s: %s\n", runs[i].label, stop);
}

static void print_settings(const struct compared *runs, int n, FILE *out)
{
    struct difference d = {.run = 0};
    bool any = false;
    for (; next_difference(runs, n, &d); any = true) {
        if (!any) fprintf(out, "\nsettings that differ, in the order of the runs\n");
        fprintf(out, "%-28s%s", d.key, strlen(d.key) < 28 ? "" : " ");
        for (int i = 0; i < n; i++) fprintf(out, "%s%s", i ? " | " : "", d.values[i][0] ? d.values[i] : "(empty)");
        fprintf(out, "\n");
    }
    if (!any) fprintf(out, "\nsettings: no difference but output.dir\n");
}

/* The first run whose held-out data differ from those of run 0; 0: none is known to differ. */
static int other_held_out(const struct compared *runs, int n)
{
    for (int i = 1; i < n; i++)
        if (*runs[0].history.held_out && *runs[i].history.held_out &&
            strcmp(runs[0].history.held_out, runs[i].history.held_out))
            return i;
    return 0;
}

#define OTHER_HELD_OUT "held-out data differ: held-out losses and rewards do not compare"

/* A section of a run's settings, from its name on, with *n characters. *n is 0 if the section contains the line
 * `unused`: then the section has no effect. */
static const char *section_of(const struct compared *run, const char *section, const char *unused, int *n)
{
    const char *text = strstr(run->settings, section), *end = text ? strstr(text + 1, "\n[") : NULL;
    const char *none = text ? strstr(text, unused) : NULL;
    *n = end && !(none && none < end) ? (int)(end - text) : 0;
    return text;
}

/* The sections that say what the loss is. */
static const char *const losses[][2] = {{"\n[distill]\n", "\nteacher = none\n"}, {"\n[objective]\n", "\nkind = sft\n"}};

static bool same_loss(const struct compared *x, const struct compared *y)
{
    int length, other;
    for (int k = 0; k < MT_LEN(losses); k++) {
        const char *a = section_of(x, losses[k][0], losses[k][1], &length),
                   *b = section_of(y, losses[k][0], losses[k][1], &other);
        if (length != other || (length && memcmp(a, b, (size_t)length) != 0)) return false;
    }
    return true;
}

/* The first run whose loss differs from that of run 0; 0: none is known to differ. */
static int other_loss(const struct compared *runs, int n)
{
    for (int i = 1; i < n; i++)
        if (runs[0].settings && runs[i].settings && !same_loss(&runs[0], &runs[i])) return i;
    return 0;
}

/* What to print beside losses that do not compare. */
static const char *other_loss_text(const struct compared *runs, int n)
{
    int length = 0;
    for (int i = 0; i < n && !length; i++)
        if (runs[i].settings) section_of(&runs[i], losses[0][0], losses[0][1], &length);
    return length
               ? "[distill] or [objective] differs: these losses do not compare; after a distillation `moetrain eval "
                 "RUN/config.ini --set distill.teacher=none` prints the cross-entropy"
               : "[objective] differs: these losses do not compare";
}

/* ---- the page ---- */

static const char *const line_css[COMPARE_RUNS] = {"a", "b", "c2", "c3", "c4", "c5", "c6", "c7"};
static const char *const key_css[COMPARE_RUNS] = {"ka", "kb", "k2", "k3", "k4", "k5", "k6", "k7"};

static const char *unit_of_losses(const struct compared *runs, int n)
{
    for (int i = 0; i < n; i++)
        if (history_has_preferences(&runs[i].history) || runs[i].history.rollouts.step.n)
            return "loss of the objective";
    return "nats per token";
}

enum { HELD_OUT, TRAINING, HELD_OUT_REWARD, TRAINING_REWARD, N_PLOTS };
static const char *const plot_names[N_PLOTS] = {"Held-out loss", "Training loss, smoothed", "Held-out reward",
                                                "Reward of the training batches"};

static struct svg_line line_of(const struct history *h, int plot, const char *css)
{
    const struct history_rollouts *r = &h->rollouts;
    const struct series *const x[] = {&h->eval_step, &h->step, &r->eval_step, &r->step}, *const y[] = {&h->eval_loss,
                                                                                                       &h->smooth,
                                                                                                       &r->eval_reward,
                                                                                                       &r->reward};
    const int64_t first = plot == HELD_OUT ? h->first_eval : plot == HELD_OUT_REWARD ? r->first_eval : 0;
    const bool dots = plot == HELD_OUT || plot == HELD_OUT_REWARD;
    return (struct svg_line){css, x[plot]->v + first, y[plot]->v + first, y[plot]->n - first, dots};
}

/* Plots of rewards are left out if no run has any. */
static void write_plot(FILE *out, const struct compared *runs, int n, int plot)
{
    static const struct {
        const char *css;
        int width, height;
    } sizes[] = {{"wide", 1120, 380}, {"narrow", 360, 260}};
    const bool rewards = plot >= HELD_OUT_REWARD;
    int64_t points = 0;
    for (int i = 0; i < n; i++) points += line_of(&runs[i].history, plot, NULL).n;
    if (rewards && !points) return;
    fprintf(out, "<h2>%s</h2>\n", plot_names[plot]);
    for (int k = 0; k < MT_LEN(sizes); k++) {
        struct svg_plot p = {"step", rewards ? "mean" : unit_of_losses(runs, n), sizes[k].width, sizes[k].height,
                             .n_lines = n};
        for (int i = 0; i < n; i++) p.lines[i] = line_of(&runs[i].history, plot, line_css[i]);
        fprintf(out, "<div class=\"%s\">\n", sizes[k].css);
        svg_plot(out, &p);
        fputs("</div>\n", out);
    }
}

static void write_results(FILE *out, const struct compared *runs, int n)
{
    struct table t;
    char stop[80];
    fill(&t, runs, n);
    fputs("<div class=\"table\"><table><tr><th>run", out);
    for (int c = 0; c < N_COLUMNS; c++)
        if (t.shown[c]) fprintf(out, "<th>%s", column_names[c]);
    for (int i = 0; i < n; i++) {
        fprintf(out, "</tr>\n<tr><td><span class=\"key %s\">", key_css[i]);
        svg_text(out, runs[i].label);
        fputs("</span>", out);
        for (int c = 0; c < N_COLUMNS; c++)
            if (t.shown[c]) fprintf(out, "<td>%s", t.cells[i][c]);
    }
    fputs("</tr>\n</table></div>\n", out);
    if (other_held_out(runs, n)) fputs("<p class=\"sub\">" OTHER_HELD_OUT "</p>\n", out);
    if (other_loss(runs, n)) fprintf(out, "<p class=\"sub\">%s</p>\n", other_loss_text(runs, n));
    for (int i = 0; i < n; i++) {
        if (!*history_stop(&runs[i].history, stop)) continue;
        fputs("<p class=\"sub\">", out);
        svg_text(out, runs[i].label);
        fprintf(out, ": %s</p>\n", stop);
    }
}

static void write_settings(FILE *out, const struct compared *runs, int n)
{
    struct difference d = {.run = 0};
    fputs("<h2>Settings that differ</h2>\n<div class=\"table\"><table><tr><th>key", out);
    for (int i = 0; i < n; i++) {
        fputs("<th>", out);
        svg_text(out, runs[i].label);
    }
    while (next_difference(runs, n, &d)) {
        fprintf(out, "</tr>\n<tr><td>%s", d.key);
        for (int i = 0; i < n; i++) {
            fputs("<td>", out);
            svg_text(out, d.values[i]);
        }
    }
    fputs("</tr>\n</table></div>\n", out);
}

static int write_page(const char *path, const struct compared *runs, int n, struct err *err)
{
    char *html = NULL, title[64];
    size_t size;
    FILE *out = open_memstream(&html, &size);
    MT_REQUIRE(out, "open_memstream failed");
    snprintf(title, sizeof(title), "moetrain: %d runs", n);
    html_begin(out, title);
    write_results(out, runs, n);
    for (int plot = 0; plot < N_PLOTS; plot++) write_plot(out, runs, n, plot);
    write_settings(out, runs, n);
    html_end(out);
    MT_REQUIRE(!fclose(out), "out of memory for the page");
    const int rc = file_write_atomic(path, html, (int64_t)size, err);
    free(html);
    return rc;
}

int compare_runs(const char *const *dirs, int n, const char *html, FILE *out, struct err *err)
{
    struct compared runs[COMPARE_RUNS] = {{.settings = NULL}};
    int rc = 0;
    if (n < 2 || n > COMPARE_RUNS)
        return err_set(err, "compare takes 2 to %d run directories, not %d", COMPARE_RUNS, n);
    for (int i = 0; !rc && i < n; i++) rc = read_run(&runs[i], dirs[i], err);
    if (!rc) {
        print_results(runs, n, out);
        const int other = other_held_out(runs, n), loss = other_loss(runs, n);
        if (other) fprintf(out, "\n%s and %s: " OTHER_HELD_OUT "\n", runs[0].label, runs[other].label);
        if (loss) fprintf(out, "\n%s and %s: %s\n", runs[0].label, runs[loss].label, other_loss_text(runs, n));
        print_settings(runs, n, out);
    }
    if (!rc && html) {
        rc = write_page(html, runs, n, err);
        if (!rc) fprintf(out, "\npage: %s\n", html);
    }
    for (int i = 0; i < n; i++) {
        history_free(&runs[i].history);
        mem_free(runs[i].settings);
        mem_free(runs[i].label);
    }
    return rc;
}

/* metrics.c - the step line and metrics.jsonl. A line of metrics.jsonl is one write, so that a killed run leaves at
 * most one incomplete line, at the end. */
#include "train/report/metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "data/tokenizer/normalize.h"
#include "train/config/config.h"
#include "train/report/svg.h"
#include "train/report/tensorboard.h"

/* ---- the file */

/* Opens the file, empty for a new run. A new run makes a new file if the old one has other names (a copy by hard
 * links). */
static FILE *open_lines(const char *path, bool append, struct err *err)
{
    if (!append && file_has_links(path)) unlink(path);
    const int fd = file_open_own(path, O_WRONLY | O_APPEND, err);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "a");
    if (!f) return NULL;
    setvbuf(f, NULL, _IONBF, 0);
    if (append || !ftruncate(fd, 0)) return f;
    err_set(err, "%s: cannot be written: %s", path, strerror(errno));
    fclose(f);
    return NULL;
}

int metrics_open(struct metrics *m, const char *dir, const struct metrics_end *end, struct err *err)
{
    char path[MT_PATH];
    *m = (struct metrics){.tty = isatty(STDOUT_FILENO)};
    if (str_format(m->dir, sizeof(m->dir), err, "output.dir", "%s", dir) ||
        str_format(path, sizeof(path), err, "output.dir", "%s/metrics.jsonl", dir) || file_make_dirs(dir, err))
        return -1;
    if (end && metrics_cut(dir, end, err)) return -1;
    m->jsonl = open_lines(path, end != NULL, err);
    return m->jsonl ? 0 : -1;
}

int metrics_tensorboard(struct metrics *m, int64_t first_step, struct err *err)
{
    char dir[MT_PATH];
    if (str_format(dir, sizeof(dir), err, "output.dir", "%s/tensorboard", m->dir)) return -1;
    m->events = tensorboard_open(dir, first_step, err);
    return m->events ? 0 : -1;
}

int metrics_command(struct metrics *m, const struct log_command_run *run, struct err *err)
{
    char path[MT_PATH];
    return file_in(path, m->dir, "metrics.jsonl", err) ? -1 : log_command_open(&m->command, path, run, err);
}

void metrics_event_open(struct json_out *o, const char *event, int64_t step)
{
    json_out_open(o, NULL, '{');
    json_out_str(o, "event", event);
    json_out_i64(o, "step", step);
}

void metrics_event_close(struct metrics *m, struct json_out *o)
{
    json_out_close(o, '}');
    o->text[o->size] = '\n'; /* in place of the final NUL */
    fwrite(o->text, 1, (size_t)o->size + 1, m->jsonl);
    json_out_free(o);
    struct err why;
    if (!log_command_send(&m->command, &why)) return;
    metrics_end_line(m);
    log_warn("%s", why.msg);
}

/* True when a write failed. */
static bool close_lines(FILE *f)
{
    const bool failed = f && ferror(f);
    return (f && fclose(f)) || failed;
}

int metrics_close(struct metrics *m, struct err *err)
{
    if (!m->jsonl) return 0;
    struct err why;
    metrics_end_line(m);
    if (log_command_close(&m->command, &why)) log_warn("%s", why.msg);
    const char *failed = close_lines(m->events) ? "tensorboard" : NULL;
    if (close_lines(m->jsonl)) failed = "metrics.jsonl";
    m->jsonl = m->events = NULL;
    if (failed) return err_set(err, "%s/%s: not everything could be written: is the disk full?", m->dir, failed);
    return 0;
}

/* ---- the screen */

void metrics_end_line(struct metrics *m)
{
    if (m->drawn) putchar('\n');
    m->drawn = false;
    fflush(stdout);
}

enum { STEP, LOSS, PART, SMOOTH = PART + OBJECTIVE_LINE, GRAD, LR, SPEED, ROOF, DONE, LEFT, MEM, N_FIELDS };

/* Joins the fields; omits fields that do not fit into `columns`, the least important first. */
static void draw_fields(char fields[N_FIELDS][64], int columns)
{
    static const int dispensable[] = {MEM, LR, ROOF, SMOOTH, PART, GRAD, DONE, LEFT, SPEED};
    int width = -2, dropped = 0;
    for (int i = 0; i < N_FIELDS; i++) width += (int)strlen(fields[i]) + 2;
    for (; width > columns && dropped < MT_LEN(dispensable); dropped++) {
        width -= (int)strlen(fields[dispensable[dropped]]) + 2;
        fields[dispensable[dropped]][0] = 0;
    }
    for (int i = 0; i < N_FIELDS; i++)
        if (fields[i][0]) printf(i ? "  %s" : "%s", fields[i]);
}

static int step_width(const struct step_metrics *s) { return snprintf(NULL, 0, "%lld", (long long)s->total_steps); }

/* Assumes steps as fast as the last ones, and evaluations as often as so far. */
static double seconds_left(const struct metrics *m, const struct step_metrics *s)
{
    const int64_t n = MT_MIN(m->run_steps, METRICS_RECENT);
    double ms = 0;
    for (int64_t i = 0; i < n; i++) ms += m->recent_ms[i];
    return (ms / (double)n + m->eval_ms / (double)m->run_steps) / 1e3 * (double)(s->total_steps - s->step);
}

static void draw_step(const struct metrics *m, const struct step_metrics *s)
{
    char fields[N_FIELDS][64], text[32];
    const double left = seconds_left(m, s);
    double speed = m->line_ms > 0 ? m->line_tok / m->line_ms * 1e3 : 0;
    snprintf(fields[STEP], 64, "step %*lld/%lld", step_width(s), (long long)s->step, (long long)s->total_steps);
    snprintf(fields[LOSS], 64, "loss %.4f", f64_for_4f(s->loss));
    for (int i = 0; i < OBJECTIVE_LINE; i++) fields[PART + i][0] = 0;
    for (int i = 0, n = 0; i < s->parts.n && n < OBJECTIVE_LINE; i++)
        n += *objective_text(fields[PART + n], &s->parts.of[i]) != 0;
    snprintf(fields[SMOOTH], 64, "smooth %.4f", f64_for_4f(s->smooth_loss));
    snprintf(fields[GRAD], 64, "grad %#.4g", s->grad_norm);
    snprintf(fields[LR], 64, "lr %.2e", s->lr);
    snprintf(fields[SPEED], 64, "%s tok/s", svg_number(text, round(speed)));
    fields[ROOF][0] = 0;
    if (s->roof > 0) snprintf(fields[ROOF], 64, "%.0f%% of roof", 100 * s->roof);
    snprintf(fields[DONE], 64, "%.1f%%", 100 * (double)s->step / (double)MT_MAX(s->total_steps, 1));
    snprintf(fields[LEFT], 64, "left %s", str_seconds(text, left));
    snprintf(fields[MEM], 64, "mem %s", str_bytes(text, s->mem_bytes));
    struct winsize size;
    int columns = INT32_MAX;
    if (m->tty && !ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) && size.ws_col > 0) columns = size.ws_col - 1;
    draw_fields(fields, columns);
}

static void print_step(struct metrics *m, const struct step_metrics *s)
{
    if (m->tty) fputs("\r\x1b[K", stdout); /* go to the start of the line and clear it */
    if (s->skipped)
        printf("step %*lld/%lld  skipped: %s is not finite  (loss %.4g  grad %.4g)", step_width(s), (long long)s->step,
               (long long)s->total_steps, s->bad && s->bad[0] ? s->bad : "the loss", s->loss, s->grad_norm);
    else
        draw_step(m, s);
    m->drawn = true;
    if (!m->tty || s->skipped || s->step == s->total_steps) metrics_end_line(m);
    fflush(stdout);
    m->line_tok = m->line_ms = 0;
}

/* ---- events */

static void put_part_scalars(const struct metrics *m, const char *group, int64_t step,
                             const struct objective_means *parts)
{
    char names[OBJECTIVE_PARTS][64];
    struct scalar scalars[OBJECTIVE_PARTS];
    for (int i = 0; i < parts->n; i++) {
        snprintf(names[i], sizeof(names[i]), "%s/%s", group, parts->of[i].name);
        scalars[i] = (struct scalar){names[i], parts->of[i].mean};
    }
    if (parts->n) tensorboard_put(m->events, step, scalars, parts->n);
}

static void put_step_scalars(const struct metrics *m, const struct step_metrics *s)
{
    const struct scalar scalars[] = {{"train/loss", s->loss},
                                     {"train/smooth_loss", s->smooth_loss},
                                     {"train/grad_norm", s->grad_norm},
                                     {"train/lr", s->lr},
                                     {"train/tokens_per_second", s->ms > 0 ? (double)s->tokens / s->ms * 1e3 : 0},
                                     {"train/memory_gib", (double)s->mem_bytes / (double)(1 << 30)}};
    tensorboard_put(m->events, s->step, scalars, MT_LEN(scalars));
    put_part_scalars(m, "train", s->step, &s->parts);
}

static void put_eval_scalars(const struct metrics *m, const struct eval_metrics *e)
{
    const struct scalar scalars[] = {
        {"eval/loss", e->loss}, {"eval/perplexity", e->perplexity}, {"eval/accuracy", e->accuracy}};
    tensorboard_put(m->events, e->step, scalars, MT_LEN(scalars));
    put_part_scalars(m, "eval", e->step, &e->parts);
}

void metrics_put_parts(struct json_out *o, const struct objective_means *parts, bool eval)
{
    char name[64];
    for (int i = 0; i < parts->n; i++) {
        snprintf(name, sizeof(name), "%s%s", eval && parts->eval_names ? "eval_" : "", parts->of[i].name);
        json_out_f64(o, name, parts->of[i].mean);
    }
}

void metrics_step(struct metrics *m, const struct step_metrics *s, bool show)
{
    m->recent_ms[m->run_steps++ % METRICS_RECENT] = s->ms;
    m->line_tok += (double)s->tokens;
    m->line_ms += s->ms;
    if (show || s->skipped) print_step(m, s);

    struct json_out o = {0};
    metrics_event_open(&o, "step", s->step);
    json_out_f64(&o, "loss", s->loss);
    metrics_put_parts(&o, &s->parts, false);
    json_out_f64(&o, "smooth_loss", s->smooth_loss);
    json_out_f64(&o, "grad_norm", s->grad_norm);
    json_out_f64(&o, "lr", s->lr);
    json_out_i64(&o, "tokens", s->tokens);
    json_out_i64(&o, "labels", s->labels);
    json_out_f64(&o, "tok_s", s->ms > 0 ? (double)s->tokens / s->ms * 1e3 : 0);
    json_out_f64(&o, "ms", s->ms);
    if (m->events) put_step_scalars(m, s);
    if (s->roof > 0) json_out_f64(&o, "roof", s->roof);
    json_out_i64(&o, "mem_bytes", s->mem_bytes);
    if (s->skipped) json_out_str(&o, "skipped", s->bad && s->bad[0] ? s->bad : "loss");
    metrics_event_close(m, &o);
}

/* A text such as ", best", by comparison with earlier evaluations on the same held-out data; "" if the evaluation is
 * not the best. */
static const char *best_text(const struct eval_metrics *e, char text[64])
{
    text[0] = 0;
    if (e->step > 0 && e->from == e->step)
        snprintf(text, 64, ", first evaluation, nothing to compare");
    else if (e->best && e->from > 0)
        snprintf(text, 64, ", best since step %lld", (long long)e->from);
    else if (e->best)
        snprintf(text, 64, ", best");
    return text;
}

void metrics_eval(struct metrics *m, const struct eval_metrics *e)
{
    char tokens[32], text[64], parts[128];
    if (m->run_steps > 0) m->eval_ms += e->ms;
    metrics_end_line(m);
    printf("eval at step %lld: loss %.4f%s  perplexity %.4g  accuracy %.1f%%  (%s token%s%s)\n", (long long)e->step,
           f64_for_4f(e->loss), objective_texts(parts, &e->parts, "  "), e->perplexity, 100 * e->accuracy,
           svg_number(tokens, (double)e->tokens), str_plural(e->tokens), best_text(e, text));
    fflush(stdout);

    struct json_out o = {0};
    if (m->events) put_eval_scalars(m, e);
    metrics_event_open(&o, "eval", e->step);
    json_out_f64(&o, "loss", e->loss);
    metrics_put_parts(&o, &e->parts, true);
    json_out_f64(&o, "perplexity", e->perplexity);
    json_out_f64(&o, "accuracy", e->accuracy);
    json_out_i64(&o, "tokens", e->tokens);
    json_out_bool(&o, "best", e->best);
    snprintf(text, sizeof(text), "%016" PRIx64, e->held_out);
    json_out_str(&o, "held_out", text);
    json_out_f64(&o, "ms", e->ms);
    metrics_event_close(m, &o);
}

void metrics_stop(struct metrics *m, int64_t step, int64_t n_worse)
{
    struct json_out o = {0};
    metrics_event_open(&o, "stop", step);
    json_out_str(&o, "reason", "eval.patience");
    json_out_i64(&o, "evaluations", n_worse);
    metrics_event_close(m, &o);
}

static void put_config(struct json_out *o, const struct config *c)
{
    struct config_value *v = mem_alloc(sizeof(*v));
    json_out_open(o, "config", '{');
    for (int64_t i = 0; config_value(c, i, v); i++) json_out_str(o, v->name, v->text);
    json_out_close(o, '}');
    mem_free(v);
}

void metrics_start(struct metrics *m, const struct start_metrics *s)
{
    char date[32];
    const time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", &utc);
    struct json_out o = {0};
    metrics_event_open(&o, "start", s->step);
    json_out_i64(&o, "schema", METRICS_SCHEMA);
    json_out_i64(&o, "total_steps", s->total_steps);
    json_out_str(&o, "run", s->run);
    if (s->name && *s->name) json_out_str(&o, "name", s->name);
    json_out_str(&o, "date", date);
    json_out_str(&o, "model", s->model);
    json_out_str(&o, "data", s->data);
    json_out_str(&o, "eval_data", s->eval_data);
    json_out_str(&o, "device", s->device);
    json_out_i64(&o, "ranks", s->ranks);
    json_out_str(&o, "version", MT_VERSION);
    if (s->config) put_config(&o, s->config);
    metrics_event_close(m, &o);
}

/* Prints the start of the text as one line for the terminal, with blanks instead of control characters. */
static void print_short(const char *label, const char *text)
{
    enum { WIDTH = 96 };
    int64_t n = 0, shown = 0;
    const int64_t size = (int64_t)strlen(text);
    printf("  %s", label);
    for (int64_t k; n < size && shown < WIDTH && (k = utf8_character(text + n, size - n)) > 0; n += k, shown++) {
        if (text[n] == '\t' || !str_printable(text + n))
            putchar(' ');
        else
            fwrite(text + n, 1, (size_t)k, stdout);
    }
    puts(n < size ? "..." : "");
}

void metrics_sample(struct metrics *m, const struct sample_metrics *s)
{
    metrics_end_line(m);
    print_short("prompt: ", s->prompt);
    print_short("answer: ", s->text);
    if (s->expected) print_short("expected: ", s->expected);
    fflush(stdout);

    struct json_out o = {0};
    metrics_event_open(&o, "sample", s->step);
    json_out_str(&o, "prompt", s->prompt);
    json_out_str(&o, "text", s->text);
    if (s->expected) json_out_str(&o, "expected", s->expected);
    json_out_i64(&o, "tokens", s->tokens);
    metrics_event_close(m, &o);
}

/* Writes row l of [n_layer, n_exp] values as an array, with four digits, which are enough for a plot. */
static void put_layers(struct json_out *o, const char *key, const double *v, int64_t n_layer, int64_t n_exp)
{
    char text[32];
    json_out_open(o, key, '[');
    for (int64_t l = 0; l < n_layer; l++) {
        json_out_open(o, NULL, '[');
        for (int64_t e = 0; e < n_exp; e++) {
            snprintf(text, sizeof(text), "%.4g", v[l * n_exp + e]);
            json_out_f64(o, NULL, strtod(text, NULL));
        }
        json_out_close(o, ']');
    }
    json_out_close(o, ']');
}

void metrics_experts(struct metrics *m, const struct expert_metrics *x)
{
    struct json_out o = {0};
    metrics_event_open(&o, "experts", x->step);
    json_out_open(&o, "counts", '[');
    for (int64_t l = 0; l < x->n_layer; l++) {
        json_out_open(&o, NULL, '[');
        for (int64_t e = 0; e < x->n_exp; e++) json_out_i64(&o, NULL, x->rows[l * x->n_exp + e]);
        json_out_close(&o, ']');
    }
    json_out_close(&o, ']');
    put_layers(&o, "gates", x->gates, x->n_layer, x->n_exp);
    if (x->norms) put_layers(&o, "norms", x->norms, x->n_layer, x->n_exp);
    if (x->ranks) put_layers(&o, "ranks", x->ranks, x->n_layer, x->n_exp);
    metrics_event_close(m, &o);
}

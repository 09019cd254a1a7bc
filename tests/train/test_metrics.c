/* test_metrics.c - the step line, metrics.jsonl and its truncation on resume, and report.html. */
#include "tests/test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "train/report/metrics.h"
#include "train/report/profile.h"
#include "train/report/report.h"

static const char *in(const char *dir, const char *name)
{
    static char path[4][MT_PATH];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, MT_PATH, "%s/%s", dir, name);
    return p;
}

static char *read_text(const char *path)
{
    struct err err;
    int64_t size;
    char *text = file_read(path, 1 << 28, &size, &err);
    if (!text) fail_msg("%s", err.msg);
    return text;
}

static const struct expert_metrics one_expert = {
    1, 1, 1, (const int64_t[]){1}, (const double[]){1}, (const double[]){2}, NULL};

/* Two steps of 10 and 30 ms: a product in two parts, and a norm. */
static void write_profile(struct metrics *m, int64_t last)
{
    const struct cost no_cost = {.flops = 0};
    struct prof_event events[] = {{"linear_fwd", 1, 100, 8, no_cost, {4LL << 30, 1LL << 30, 0}},
                                  {"rmsnorm_fwd", 0, 108, 2, no_cost, {4LL << 30, 1LL << 30, 3LL << 30}},
                                  {"linear_fwd", 2, 130, 20, no_cost, {4LL << 30, 1LL << 30, 1LL << 30}}};
    struct prof p = {.rows = {{.name = "rmsnorm_fwd", .calls = 1, .ms = 2},
                              {.name = "linear_fwd", .part = 1, .calls = 1, .ms = 8},
                              {.name = "linear_fwd", .part = 2, .calls = 1, .ms = 20}},
                     .n_rows = 3,
                     .events = events,
                     .n_events = MT_LEN(events),
                     .span_ms = 40};
    profile_event(&p, m, last - 1, last);
}

static int count(const char *text, const char *what)
{
    int n = 0;
    for (; (text = strstr(text, what)); text += strlen(what)) n++;
    return n;
}

/* Between screen_open and screen_read, standard output and error go to a file. screen_close, the teardown of each test,
 * restores them for cmocka. */
static int saved[2] = {-1, -1};
static char screen_path[MT_PATH];

static void screen_open(const char *dir)
{
    snprintf(screen_path, sizeof(screen_path), "%s/screen", dir);
    fflush(stdout);
    for (int fd = 0; fd < 2; fd++) saved[fd] = dup(fd + 1);
    FILE *f = fopen(screen_path, "w");
    if (!f || dup2(fileno(f), STDOUT_FILENO) < 0 || dup2(fileno(f), STDERR_FILENO) < 0) abort();
    fclose(f);
}

static int screen_close(void **state)
{
    (void)state;
    fflush(stdout);
    for (int fd = 0; fd < 2; fd++) {
        if (saved[fd] < 0) continue;
        dup2(saved[fd], fd + 1);
        close(saved[fd]);
        saved[fd] = -1;
    }
    return 0;
}

static char *screen_read(void)
{
    screen_close(NULL);
    return read_text(screen_path);
}

static struct metrics opened(const char *dir, int64_t resume_step)
{
    struct metrics m;
    struct err err;
    const struct metrics_end end = {.step = resume_step, .evaluated = true};
    if (metrics_open(&m, dir, resume_step ? &end : NULL, &err)) fail_msg("%s", err.msg);
    return m;
}

static void closed(struct metrics *m)
{
    struct err err;
    if (metrics_close(m, &err)) fail_msg("%s", err.msg);
    assert_int_equal(metrics_close(m, &err), 0); /* twice is safe */
}

static struct step_metrics step_of(int64_t step, int64_t total)
{
    return (struct step_metrics){.step = step,
                                 .total_steps = total,
                                 .loss = 2.34561,
                                 .smooth_loss = 2.40123,
                                 .grad_norm = 1.234,
                                 .lr = 1.98e-4,
                                 .tokens = 2048,
                                 .labels = 1000,
                                 .ms = 600.25,
                                 .mem_bytes = (int64_t)812 << 20};
}

static struct eval_metrics eval_of(int64_t step)
{
    return (struct eval_metrics){.step = step,
                                 .tokens = 12345,
                                 .loss = 2.12340,
                                 .perplexity = 8.36,
                                 .accuracy = 0.512,
                                 .best = true,
                                 .ms = 1000};
}

static void step_lines(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    screen_open(dir);
    struct metrics m = opened(dir, 0);
    struct step_metrics s = step_of(1, 200), bad = step_of(3, 200);
    s.loss = -4.9e-5; /* as of online RL: what rounds to 0 has no sign */
    s.smooth_loss = -5.1e-5;
    metrics_eval(&m, &(struct eval_metrics){.tokens = 99, .loss = 3, .perplexity = 20.085, .accuracy = 0.1});
    metrics_step(&m, &s, true);
    s.step = 2;
    metrics_step(&m, &s, false);
    bad.skipped = true;
    bad.bad = "layers.3.gate_up_proj.lora_B";
    bad.loss = NAN;
    bad.grad_norm = INFINITY;
    metrics_step(&m, &bad, false);
    struct eval_metrics e = eval_of(50);
    metrics_eval(&m, &e);
    closed(&m);
    char *screen = screen_read();
    assert_string_equal(
        screen, "eval at step 0: loss 3.0000  perplexity 20.09  accuracy 10.0%  (99 tokens)\n"
                "step   1/200  loss 0.0000  smooth -0.0001  grad 1.234  lr 1.98e-04  3,412 tok/s  0.5%  left 1:59"
                "  mem 812 MiB\n"
                "step   3/200  skipped: layers.3.gate_up_proj.lora_B is not finite  (loss nan  grad inf)\n"
                "eval at step 50: loss 2.1234  perplexity 8.36  accuracy 51.2%  (12,345 tokens, best)\n");
    mem_free(screen);
}

static void numbers_keep_all_digits(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    screen_open(dir);
    struct metrics m = opened(dir, 0);
    struct step_metrics s = step_of(7, 9);
    s.loss = 1.0 / 3;
    s.grad_norm = NAN;
    metrics_step(&m, &s, false);
    metrics_experts(&m, &(struct expert_metrics){7, 2, 3, (const int64_t[]){1, 2, 3, 4, 5, 6},
                                                 (const double[]){0, 1.0 / 3, 1, 2, 3, 4}, NULL, NULL});
    closed(&m);
    mem_free(screen_read());
    char *text = read_text(in(dir, "metrics.jsonl")), *second = strchr(text, '\n') + 1;
    struct err err;
    struct json_doc *doc = json_parse(text, second - text, "line", &err);
    assert_non_null(doc);
    double loss, speed;
    const char *event;
    assert_int_equal(json_get_f64(json_root(doc), "loss", &loss, &err), 0);
    assert_int_equal(json_get_f64(json_root(doc), "tok_s", &speed, &err), 0);
    assert_int_equal(json_get_str(json_root(doc), "event", &event, &err), 0);
    assert_true(loss == 1.0 / 3);
    assert_close(speed, 2048 / 0.60025, 1e-12);
    assert_string_equal(event, "step");
    assert_int_equal(json_type(json_find(json_root(doc), "grad_norm")), JSON_NULL);
    assert_string_equal(second, "{\"event\":\"experts\",\"step\":7,\"counts\":[[1,2,3],[4,5,6]],"
                                "\"gates\":[[0,0.3333,1],[2,3,4]]}\n");
    json_free(doc);
    mem_free(text);
}

/* The table of train/report/README.md has every key and every event of metrics.jsonl. */
static void the_schema_is_documented(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    struct err err;
    char path[MT_PATH], quoted[80];
    snprintf(path, sizeof(path), "%s", fixture("../../train/report/README.md"));
    if (!file_exists(path)) {
        print_message("skip: %s is not there\n", path);
        skip();
    }
    char *readme = read_text(path);
    const char *table = strstr(readme, "## metrics.jsonl");
    assert_non_null(table);
    screen_open(dir);
    struct metrics m = opened(dir, 0);
    struct step_metrics s = step_of(1, 1);
    struct eval_metrics e = eval_of(1);
    s.skipped = true;
    s.roof = 0.5;
    metrics_start(&m, &(struct start_metrics){.run = "r", .model = "m", .data = "d", .eval_data = "", .device = "cpu"});
    metrics_step(&m, &s, true);
    metrics_eval(&m, &e);
    metrics_sample(&m, &(struct sample_metrics){.prompt = "p", .text = "t"});
    metrics_experts(&m, &one_expert);
    write_profile(&m, 1);
    closed(&m);
    mem_free(screen_read());
    char *text = read_text(in(dir, "metrics.jsonl"));
    int n_events = 0;
    for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1, n_events++) {
        struct json_doc *doc = json_parse(line, end - line, "line", &err);
        struct json value;
        const char *key, *event;
        assert_non_null(doc);
        assert_int_equal(json_get_str(json_root(doc), "event", &event, &err), 0);
        snprintf(quoted, sizeof(quoted), "\n| `%s` |", event);
        const char *row = strstr(table, quoted), *row_end = row ? strchr(row + 1, '\n') : NULL;
        if (!row_end) fail_msg("event %s is not in %s", event, path);
        for (int64_t i = 0; json_member(json_root(doc), i, &key, &value); i++) {
            if (!strcmp(key, "event") || !strcmp(key, "step")) continue;
            snprintf(quoted, sizeof(quoted), "`%s`", key);
            const char *found = strstr(row, quoted);
            if (!found || found > row_end) fail_msg("%s of event %s is not in %s", key, event, path);
        }
        json_free(doc);
    }
    assert_int_equal(n_events, 6);
    mem_free(text);
    mem_free(readme);
}

static void resume_truncates_later_lines(void **state)
{
    (void)state;
    const char *dir = scratch_dir(), *path = in(dir, "metrics.jsonl");
    screen_open(dir);
    struct metrics m = opened(dir, 0);
    struct eval_metrics e = eval_of(0);
    char *upto5 = NULL;
    metrics_eval(&m, &e);
    for (int64_t step = 1; step <= 10; step++) {
        struct step_metrics s = step_of(step, 10);
        metrics_step(&m, &s, false);
        e.step = step;
        if (step % 5 == 0) metrics_eval(&m, &e);
        if (step == 5) upto5 = read_text(path);
    }
    closed(&m);
    FILE *f = fopen(path, "a"); /* the writer was killed within a line */
    fputs("{\"event\":\"step\",\"step\":3,\"lo", f);
    fclose(f);

    m = opened(dir, 5);
    char *text = read_text(path);
    assert_string_equal(text, upto5);
    mem_free(text);
    struct step_metrics s = step_of(6, 10);
    metrics_step(&m, &s, false);
    closed(&m);
    text = read_text(path);
    assert_memory_equal(text, upto5, strlen(upto5));
    assert_int_equal(count(text, "\n"), count(upto5, "\n") + 1);
    assert_non_null(strstr(text, "\"step\":6"));
    mem_free(text);

    m = opened(dir, 100); /* no line is of a later step: all stay */
    closed(&m);
    text = read_text(path);
    assert_int_equal(count(text, "\n"), count(upto5, "\n") + 1);
    mem_free(text);
    m = opened(dir, 0);
    closed(&m);
    text = read_text(path);
    assert_string_equal(text, "");
    mem_free(text);
    mem_free(upto5);
    m = opened(in(dir, "new/deep"), 5); /* nothing to truncate */
    closed(&m);
    mem_free(screen_read());
}

/* A killed run may leave the file truncated anywhere. Complete lines up to the resumed step stay, byte for byte. */
static void truncated_metrics_are_resumed(void **state)
{
    (void)state;
    const char *dir = scratch_dir(), *path = in(dir, "metrics.jsonl");
    const char *text = "{\"event\":\"eval\",\"step\":0,\"loss\":3}\n{\"event\":\"step\",\"step\":1,\"loss\":2}\n"
                       "{\"event\":\"step\",\"step\":2,\"loss\":1}\n{\"event\":\"step\",\"step\":3,\"loss\":1}\n";
    const char *third = strstr(text, "{\"event\":\"step\",\"step\":3");
    for (size_t n = 0; n <= strlen(text); n++) {
        struct err err;
        assert_int_equal(file_write_atomic(path, text, (int64_t)n, &err), 0);
        struct metrics m = opened(dir, 2);
        closed(&m);
        size_t whole = 0;
        for (size_t i = 0; i < n && text + i < third; i++)
            if (text[i] == '\n') whole = i + 1;
        char *kept = read_text(path);
        assert_int_equal(strlen(kept), whole);
        assert_memory_equal(kept, text, whole);
        mem_free(kept);
    }
}

/* Resuming removes the events that the run will write again. Each row has an event and, for each way to continue,
 * whether it stays. */
static void events_made_again_are_removed(void **state)
{
    (void)state;
    enum { EVALUATED, NOT, COMPLETE, START, WAYS };
    static const struct metrics_end ways[WAYS] = {{.step = 2, .evaluated = true, .held_out = 0xa},
                                                  {.step = 2, .held_out = 0xa},
                                                  {.step = 2, .evaluated = true, .held_out = 0xa, .complete = true},
                                                  {.step = 0}};
    static const struct {
        const char *line;
        bool stays[WAYS];
    } rows[] = {
        {"{\"event\":\"start\",\"step\":0}\n", {true, true, true, false}},
        {"{\"event\":\"eval\",\"step\":0,\"held_out\":\"000000000000000b\"}\n", {true, true, true, false}},
        {"{\"event\":\"sample\",\"step\":0}\n", {true, true, true, false}},
        {"{\"event\":\"step\",\"step\":2}\n", {true, true, true, false}},
        {"{\"event\":\"eval\",\"step\":2,\"held_out\":\"000000000000000a\"}\n", {true, false, true, false}},
        {"{\"event\":\"sample\",\"step\":2}\n", {true, false, true, false}},
        {"{\"event\":\"stop\",\"step\":2}\n", {false, false, true, false}},
        {"{\"event\":\"experts\",\"step\":2}\n", {true, true, true, false}},
        {"{\"event\":\"start\",\"step\":2}\n", {false, false, false, false}},
        {"{\"event\":\"eval\",\"step\":2,\"held_out\":\"000000000000000c\"}\n", {false, false, false, false}},
        {"{\"event\":\"sample\",\"step\":2}\n", {false, false, false, false}},
        {"{\"event\":\"step\",\"step\":3}\n", {false, false, false, false}},
    };
    const char *dir = scratch_dir(), *path = in(dir, "metrics.jsonl");
    for (int w = 0; w < WAYS; w++) {
        char text[2048] = "", stays[2048] = "";
        struct err err;
        for (int i = 0; i < MT_LEN(rows); i++) {
            strcat(text, rows[i].line);
            if (rows[i].stays[w]) strcat(stays, rows[i].line);
        }
        if (file_write_atomic(path, text, (int64_t)strlen(text), &err) || metrics_cut(dir, &ways[w], &err))
            fail_msg("%s", err.msg);
        char *kept = read_text(path);
        assert_string_equal(kept, stays);
        mem_free(kept);
    }
}

/* ---- TensorBoard */

/* CRC-32C by its definition, bit by bit. */
static uint32_t crc32c(const uint8_t *bytes, int64_t n)
{
    uint32_t crc = ~0u, mirrored = 0;
    for (int64_t i = 0; i < n * 8; i++) {
        const uint32_t bit = (uint32_t)(bytes[i / 8] >> (i % 8)) & 1;
        crc = crc << 1 ^ ((crc >> 31 ^ bit) ? 0x1edc6f41u : 0);
    }
    for (int i = 0; i < 32; i++) mirrored |= (crc >> i & 1) << (31 - i);
    return ~mirrored;
}

static uint32_t masked(uint32_t crc) { return (crc >> 15 | crc << 17) + 0xa282ead8u; }

/* Checks the records of the only file in dir/tensorboard; returns their number and sets *last to the last one. */
static int read_events(const char *dir, uint8_t last[512], int64_t *n_last)
{
    struct err err;
    char **names;
    int64_t n_names, size, at = 0;
    int n = 0;
    assert_int_equal(crc32c((const uint8_t *)"123456789", 9), 0xe3069283u);
    assert_int_equal(file_list(in(dir, "tensorboard"), &names, &n_names, &err), 0);
    assert_int_equal(n_names, 1);
    assert_memory_equal(names[0], "events.out.tfevents.", 20);
    char path[MT_PATH];
    snprintf(path, sizeof(path), "%s/tensorboard/%s", dir, names[0]);
    uint8_t *bytes = (uint8_t *)file_read(path, 1 << 20, &size, &err);
    for (; at < size; n++) {
        uint64_t length;
        uint32_t crc[2];
        memcpy(&length, bytes + at, 8);
        memcpy(&crc[0], bytes + at + 8, 4);
        assert_int_equal(crc[0], masked(crc32c(bytes + at, 8)));
        assert_true(length <= 512 && at + 16 + (int64_t)length <= size);
        memcpy(last, bytes + at + 12, length);
        memcpy(&crc[1], bytes + at + 12 + length, 4);
        assert_int_equal(crc[1], masked(crc32c(last, (int64_t)length)));
        *n_last = (int64_t)length;
        at += 16 + (int64_t)length;
    }
    assert_int_equal(at, size);
    mem_free(bytes);
    file_list_free(names, n_names);
    return n;
}

static void tensorboard_records(void **state)
{
    /* Event.step = 300; summary: tag "eval/loss", simple_value 0.5 */
    static const uint8_t step_300[] = {0x10, 0xac, 0x02}, loss[] = "\x0a\x09"
                                                                   "eval/loss\x15\0\0\0\x3f";
    const char *dir = scratch_dir();
    struct err err;
    uint8_t last[512];
    int64_t n;
    (void)state;
    screen_open(dir);
    struct metrics m = opened(dir, 0);
    assert_int_equal(metrics_tensorboard(&m, 300, &err), 0);
    assert_int_equal(read_events(dir, last, &n), 2); /* file version; start of a session at step 300 */
    assert_memory_equal(last + 9, step_300, 3);
    assert_memory_equal(last + 12, "\x3a\x02\x08\x01", 4);
    struct step_metrics s = step_of(300, 400);
    struct eval_metrics e = eval_of(300);
    e.loss = 0.5;
    metrics_step(&m, &s, false);
    metrics_eval(&m, &e);
    closed(&m);
    mem_free(screen_read());
    assert_int_equal(read_events(dir, last, &n), 4);
    assert_memory_equal(last + 9, step_300, 3);
    assert_memory_equal(last + 16, loss, sizeof(loss) - 1);
}

static void a_full_disk_is_an_error(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    struct err err;
    if (access("/dev/full", W_OK)) {
        print_message("skip: no /dev/full\n");
        skip();
    }
    struct metrics m = opened(dir, 0);
    assert_non_null(m.jsonl = freopen("/dev/full", "a", m.jsonl));
    setvbuf(m.jsonl, NULL, _IONBF, 0);
    metrics_experts(&m, &one_expert);
    assert_int_equal(metrics_close(&m, &err), -1);
    assert_non_null(strstr(err.msg, "metrics.jsonl"));
    dir = scratch_dir(); /* the error names the file that failed */
    m = opened(dir, 0);
    m.events = fopen("/dev/full", "w");
    assert_non_null(m.events);
    metrics_eval(&m, &(struct eval_metrics){.step = 1, .tokens = 1});
    assert_int_equal(metrics_close(&m, &err), -1);
    assert_non_null(strstr(err.msg, "/tensorboard: not everything could be written"));
    assert_int_equal(metrics_open(&m, "/proc/no/such", NULL, &err), -1);
}

/* ---- report.html */

static char *report_of(const char *dir, const char *title, const char *config)
{
    struct err err;
    if (report_write(dir, title, config, &err)) fail_msg("%s", err.msg);
    char *html = read_text(in(dir, "report.html"));
    assert_null(strstr(html, "<script"));
    assert_null(strstr(html, "http")); /* no external resources */
    assert_null(strstr(html, "url("));
    assert_int_equal(count(html, "<svg"), count(html, "</svg>"));
    return html;
}

/* The path data of line n (from 0) of a plot, NUL-terminated; the caller frees it with mem_free. */
static char *line_path(const char *html, int n)
{
    const char *at = html;
    for (int i = 0; i <= n; i++) {
        at = strstr(at, "<path class=\"line");
        assert_non_null(at);
        at = strstr(at, "d=\"") + 3;
    }
    char *path = mem_strdup(at);
    *strchr(path, '"') = 0;
    return path;
}

static void report_has_every_plot(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    screen_open(dir);
    struct metrics m = opened(dir, 0);
    for (int64_t step = 0; step <= 40; step++) {
        struct step_metrics s = step_of(step, 40);
        struct eval_metrics e = eval_of(step);
        s.loss = s.smooth_loss = 4 - 0.05 * (double)step;
        s.skipped = step == 13;
        if (s.skipped) s.loss = NAN;
        e.loss = 4.1 - 0.05 * (double)step;
        if (step % 10 == 0) metrics_eval(&m, &e);
        if (step > 0) metrics_step(&m, &s, false);
        const double norms[] = {0.5, 0, (double)step, 0.25, 0.125, 0}, ranks[] = {2, 0, 4, 0, 0, 0};
        const struct expert_metrics x = {
            step,  2,    3, (const int64_t[]){5, 0, 7, 1, 1, 1}, (const double[]){2.5, 0, 1.75, 1, 0.5, 0.25},
            norms, ranks};
        if (step == 20 || step == 40) metrics_experts(&m, &x);
        if (step == 12) write_profile(&m, step);
    }
    closed(&m);
    mem_free(screen_read());
    char *html = report_of(dir, "<b>\"R&D\"</b>", "[output]\ndir = <out>&'x'\n");
    assert_int_equal(count(html, "&lt;b&gt;&quot;R&amp;D&quot;&lt;/b&gt;"), 2); /* title and heading */
    assert_non_null(strstr(html, "dir = &lt;out&gt;&amp;&#39;x&#39;"));
    assert_null(strstr(html, "<b>\"R"));
    assert_int_equal(count(html, "<svg viewBox=\"0 0 1120 380\""), 1);
    assert_int_equal(count(html, "<svg viewBox=\"0 0 360 250\""), 7);
    assert_int_equal(count(html, "<svg viewBox=\"0 0 360 260\""), 1); /* the loss plot for narrow screens */
    assert_int_equal(count(html, "<circle class=\"b\""), 10);
    assert_non_null(strstr(html, "<title>step 20: 3.1000</title>"));
    assert_int_equal(count(html, "<title>layer "), 48);                           /* four maps for two widths */
    assert_non_null(strstr(html, "<title>layer 0, expert 2: 14 tokens</title>")); /* the sum of all events */
    assert_non_null(strstr(html, "<title>layer 0, expert 2: 3.5 gate mass</title>"));
    assert_non_null(strstr(html, "<title>layer 0, expert 2: 40 norm</title>")); /* of the last event */
    assert_non_null(strstr(html, "<tr><td>0<td>2<td>58.3 %<td>0.250<td>40<td>4</tr>"));
    assert_non_null(strstr(html, "<title>layer 0, expert 2: 4 ranks</title>"));
    assert_non_null(strstr(html, "mean of 2 until step 12"));
    assert_non_null(strstr(html,
                           "<td class=\"op\">linear_fwd<td class=\"bar\"><i style=\"width:70.0%\"></i><td>14 ms<td>"
                           "70.0 %</tr>\n<tr><td class=\"op\">rmsnorm_fwd"));
    assert_non_null(strstr(html, "between the ops<td class=\"bar\"><i style=\"width:25.0%"));
    assert_int_equal(count(html, "<svg viewBox=\"0 0 1120 300\""), 1); /* memory */
    assert_non_null(strstr(html, "1 of 6 experts without tokens"));
    assert_non_null(strstr(html, ">1.75</text>")); /* layer 0: 14 / (24 / 3) */
    assert_non_null(strstr(html, "4.100 &rarr; 2.100"));
    assert_non_null(strstr(html, "-48.8 %"));
    assert_non_null(strstr(html, "1 skipped"));
    assert_non_null(strstr(html, "<tr class=\"best\"><td>40<td>2.1000<td>8.36<td>51.20 %<td>12,345<td>best</tr>"));
    char *raw = line_path(html, 0), *smooth = line_path(html, 1);
    assert_int_equal(count(raw, "M"), 2); /* a gap where the loss was not finite */
    assert_int_equal(count(raw, "L"), 37);
    assert_int_equal(count(smooth, "M"), 1);
    assert_int_equal(count(smooth, "L"), 39);
    assert_null(strstr(html, "nan"));
    mem_free(raw);
    mem_free(smooth);
    mem_free(html);
}

static void report_names_the_run(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    const struct start_metrics start = {.total_steps = 400,
                                        .run = "out/<one>",
                                        .model = "org/base",
                                        .data = "a.jsonl,b.jsonl",
                                        .eval_data = "",
                                        .device = "NVIDIA H200, sm_90a kernels",
                                        .ranks = 1};
    screen_open(dir);
    struct metrics m = opened(dir, 0);
    metrics_start(&m, &start);
    for (int64_t step = 1; step <= 10; step++) {
        struct step_metrics s = step_of(step, 400);
        metrics_step(&m, &s, false);
    }
    char full[97], longer[98]; /* a line has 96 characters */
    memset(full, 'f', 96), memset(longer, 'l', 97);
    full[96] = longer[97] = 0;
    metrics_sample(&m, &(struct sample_metrics){.step = 5, .prompt = full, .text = longer, .tokens = 1});
    metrics_sample(
        &m,
        &(struct sample_metrics){
            .step = 10, .prompt = "1 < 2?", .text = "yes & no\x1b[2J \xe2\x80\xae!", .tokens = 4, .expected = "<no>"});
    closed(&m);
    char *screen = screen_read(), *html = report_of(dir, "t", "");
    assert_non_null(strstr(screen, "fff\n  answer: lll"));
    assert_non_null(strstr(screen, "lll...\n"));
    assert_null(strstr(screen, longer));
    assert_non_null(strstr(screen, "prompt: 1 < 2?\n  answer: yes & no [2J  !\n  expected: <no>\n"));
    assert_null(strstr(html, "\xe2\x80\xae"));
    assert_non_null(strstr(html, "expected: &lt;no&gt;"));
    assert_non_null(strstr(html, "<b>10 / 400</b><span>not finished, none skipped</span>"));
    assert_non_null(strstr(html, "<dt>Run<dd>out/&lt;one&gt;\n"));
    assert_non_null(strstr(html, "<dt>Started<dd>2"));
    assert_non_null(strstr(html, "<dt>Base model<dd>org/base\n"));
    assert_non_null(strstr(html, "<dt>Data<dd>a.jsonl,b.jsonl\n"));
    assert_non_null(strstr(html, "<dt>Device<dd>NVIDIA H200, sm_90a kernels\n"));
    assert_non_null(strstr(html, "Samples at step 10 <small>1 of earlier"));
    assert_non_null(strstr(html, "<p>yes &amp; no"));
    assert_null(strstr(html, "Early?"));
    mem_free(screen);
    mem_free(html);
}

static void report_without_optional_data(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    screen_open(dir);
    struct metrics m = opened(dir, 0);
    closed(&m);
    char *html = report_of(dir, "empty", "");
    assert_null(strstr(html, "<svg"));
    mem_free(html);
    m = opened(dir, 0);
    struct step_metrics s = step_of(1, 1);
    metrics_step(&m, &s, false);
    closed(&m);
    html = report_of(dir, "one step", "");
    assert_non_null(strstr(html, "<circle class=\"a\""));
    assert_null(strstr(html, "Evaluations"));
    assert_null(strstr(html, "held out"));
    assert_null(strstr(html, "experts"));
    mem_free(html);
    m = opened(dir, 0);
    s.loss = s.smooth_loss = s.grad_norm = NAN;
    s.skipped = true;
    metrics_step(&m, &s, false);
    closed(&m);
    html = report_of(dir, "nothing finite", "");
    assert_int_equal(count(html, "<svg viewBox"), 2); /* learning rate and throughput */
    assert_int_equal(count(html, "<p>no finite value</p>"), 3);
    mem_free(html);
    mem_free(screen_read());
    struct err err;
    assert_int_equal(report_write(in(dir, "none"), "", "", &err), -1);
    assert_non_null(strstr(err.msg, "none/metrics.jsonl"));
}

static void report_downsamples_long_runs(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    screen_open(dir);
    struct metrics m = opened(dir, 0);
    for (int64_t step = 1; step <= 100000; step++) {
        struct step_metrics s = step_of(step, 100000);
        s.loss = 2 + rng_uniform(1, (uint64_t)step);
        metrics_step(&m, &s, false);
    }
    closed(&m);
    mem_free(screen_read());
    char *html = report_of(dir, "long", ""), *raw = line_path(html, 0);
    assert_true(count(raw, "L") + count(raw, "M") <= 1000);
    assert_true(count(raw, "L") > 900);
    assert_true(strlen(html) < 200000);
    mem_free(raw);
    mem_free(html);
}

static void report_skips_invalid_lines(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    const char *text =
        "{\"event\":\"step\",\"step\":1,\"loss\":\"x\",\"lr\":[],\"tok_s\":1e308}\nnot json\n[]\n{}\n"
        "{\"event\":\"step\"}\n{\"event\":7,\"step\":1}\n{\"event\":\"other\",\"step\":1}\n"
        "{\"event\":\"experts\",\"step\":1,\"counts\":[]}\n"
        "{\"event\":\"experts\",\"step\":1,\"counts\":[[1,2],[3]]}\n"
        "{\"event\":\"experts\",\"step\":1,\"counts\":[[1,-2]]}\n"
        "{\"event\":\"experts\",\"step\":1,\"counts\":[[1,2]]}\n"
        "{\"event\":\"experts\",\"step\":1,\"counts\":[[1,2]],\"norms\":[[1]]}\n"
        "{\"event\":\"experts\",\"step\":1,\"counts\":[[1,2,3]]}\n"
        "{\"event\":\"profile\",\"step\":1,\"steps\":1,\"span_ms\":-1,\"ops\":[]}\n"
        "{\"event\":\"profile\",\"step\":1,\"steps\":1,\"span_ms\":1,\"ops\":[{\"op\":\"<b>\",\"ms\":2}],"
        "\"weights\":1,\"state\":1,\"at_ms\":[1,2],\"used\":[1]}\n"
        "{\"event\":\"step\",\"step\":-1e300,\"loss\":-1e308,\"tokens\":1e300}\n"
        "{\"event\":\"eval\",\"step\":1e300,\"loss\":1e308}\n{\"event\":\"st";
    struct err err;
    screen_open(dir);
    for (size_t n = 0; n <= strlen(text); n += 7) {
        assert_int_equal(file_write_atomic(in(dir, "metrics.jsonl"), text, (int64_t)n, &err), 0);
        mem_free(report_of(dir, "t", "c"));
    }
    assert_int_equal(file_write_atomic(in(dir, "metrics.jsonl"), text, (int64_t)strlen(text), &err), 0);
    char *html = report_of(dir, "t", "c"), *warnings = screen_read();
    assert_non_null(strstr(html, "<title>layer 0, expert 0: 1 token</title>"));
    assert_non_null(strstr(html, "<title>layer 0, expert 1: 2 tokens</title>"));
    assert_non_null(strstr(warnings, "metrics.jsonl:10: key `counts[0][1]`"));
    assert_non_null(strstr(warnings, "metrics.jsonl:13: key `counts`: 1 layer of 3 experts"));
    assert_non_null(strstr(warnings, "metrics.jsonl:14: key `span_ms`"));
    assert_non_null(strstr(warnings, "metrics.jsonl:15: key `used`: 2 samples"));
    mem_free(html);
    mem_free(warnings);
}

static void a_fifo_does_not_hang(void **state)
{
    (void)state;
    struct metrics m;
    struct err err = {.msg = ""};
    char path[MT_PATH];
    const char *dir = scratch_dir();
    snprintf(path, sizeof(path), "%s/metrics.jsonl", dir);
    assert_int_equal(mkfifo(path, 0600), 0);
    alarm(20);
    assert_int_equal(metrics_open(&m, dir, NULL, &err), -1);
    alarm(0);
    assert_non_null(strstr(err.msg, "/metrics.jsonl: a pipe, not a regular file"));
}

/* The time left follows the last 20 steps: slow first steps and an earlier speed do not count. Evaluations count as
 * often as they were made. */
static void the_time_left_is_of_the_last_steps(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    screen_open(dir);
    struct metrics m = opened(dir, 0);
    for (int64_t step = 1; step <= 100; step++) {
        struct step_metrics s = step_of(step, 200);
        s.ms = step <= 80 ? 60000 : 1000;
        metrics_step(&m, &s, step == 100);
    }
    metrics_eval(&m, &(struct eval_metrics){.step = 100, .ms = 101000});
    struct step_metrics s = step_of(101, 200);
    s.ms = 1000;
    metrics_step(&m, &s, true);
    closed(&m);
    char *screen = screen_read();
    assert_non_null(strstr(screen, "  left 1:40"));
    assert_non_null(strstr(screen, "  left 3:18"));
    mem_free(screen);
}

/* A link to another file, symbolic or hard, is not written through. */
static void links_keep_their_targets(void **state)
{
    (void)state;
    static const char line[] = "{\"event\":\"start\",\"step\":0}\n";
    const struct metrics_end end = {.step = 1};
    for (int hard = 0; hard < 2; hard++)
        for (int go_on = 0; go_on < 2; go_on++) {
            char victim[MT_PATH], path[MT_PATH];
            struct metrics m;
            struct err err;
            const char *dir = scratch_dir();
            snprintf(victim, sizeof(victim), "%s/victim", dir);
            snprintf(path, sizeof(path), "%s/metrics.jsonl", dir);
            assert_int_equal(file_write_atomic(victim, line, (int64_t)strlen(line), &err), 0);
            assert_int_equal(hard ? link(victim, path) : symlink(victim, path), 0);
            const int rc = metrics_open(&m, dir, go_on ? &end : NULL, &err);
            assert_int_equal(rc, hard ? 0 : -1);
            if (rc) assert_non_null(strstr(err.msg, "/metrics.jsonl: a symbolic link"));
            if (!rc) metrics_stop(&m, 1, 1);
            if (!rc) assert_int_equal(metrics_close(&m, &err), 0);
            char *text = read_text(victim);
            assert_string_equal(text, line);
            mem_free(text);
        }
}

int test_metrics(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(step_lines, screen_close),
        cmocka_unit_test_teardown(numbers_keep_all_digits, screen_close),
        cmocka_unit_test_teardown(the_schema_is_documented, screen_close),
        cmocka_unit_test_teardown(resume_truncates_later_lines, screen_close),
        cmocka_unit_test_teardown(truncated_metrics_are_resumed, screen_close),
        cmocka_unit_test(events_made_again_are_removed),
        cmocka_unit_test_teardown(tensorboard_records, screen_close),
        cmocka_unit_test_teardown(report_names_the_run, screen_close),
        cmocka_unit_test_teardown(a_full_disk_is_an_error, screen_close),
        cmocka_unit_test(links_keep_their_targets),
        cmocka_unit_test_teardown(the_time_left_is_of_the_last_steps, screen_close),
        cmocka_unit_test(a_fifo_does_not_hang),
        cmocka_unit_test_teardown(report_has_every_plot, screen_close),
        cmocka_unit_test_teardown(report_without_optional_data, screen_close),
        cmocka_unit_test_teardown(report_downsamples_long_runs, screen_close),
        cmocka_unit_test_teardown(report_skips_invalid_lines, screen_close),
    };
    return cmocka_run_group_tests_name("metrics", tests, NULL, NULL);
}

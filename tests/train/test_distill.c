/* test_distill.c - training runs with a teacher: what the loss is, that it does not depend on how a step is divided
 * into micro-batches and ranks, and that a run continues only with the same teacher. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "data/token_rows.h"
#include "data/topk.h"
#include "tests/process.h"

/* A configuration with the lines `distill` in [distill], then `more`. The learning rate is constant, so that a longer
 * run makes the same steps. */
static const char *config_of(const char *distill, const char *more)
{
    char text[4 * MT_PATH];
    snprintf(text, sizeof(text), "[distill]\n%s\n[optim]\nschedule = constant\nwarmup_ratio = 0\nlr = 5e-3\n%s",
             distill, more);
    return process_config(text);
}

/* A value for lora.init_from or distill.teacher: an adapter of the parity case. */
static const char *case_adapter(const char *name)
{
    static char path[2][MT_PATH];
    static int next;
    char *p = path[next++ % 2];
    snprintf(p, MT_PATH, "%s/%s", fixture("parity/case_a"), name);
    return p;
}

static void trained(const char *config, const char *a, const char *b)
{
    if (RUN(config, "--set", a, "--set", b)) fail_msg("training failed:\n%s", said.err);
}

/* Trains with r = 8 on other data; eval: held-out files, or a share of the data. */
static void trained_on(const char *config, const char *train, const char *eval, const char *steps)
{
    char a[MT_PATH + 64], b[MT_PATH + 64];
    const bool share = eval[0] == '0';
    snprintf(a, sizeof(a), "data.train=%s", train);
    snprintf(b, sizeof(b), share ? "data.eval_split=%s" : "data.eval=%s", eval);
    if (RUN(config, "--set", a, "--set", "data.eval=", "--set", b, "--set", "lora.r=8", "--set", steps))
        fail_msg("training failed:\n%s", said.err);
}

/* A number of the n-th event of a kind in metrics.jsonl, n from 0. */
static double metric(const char *config, const char *event, int n, const char *key)
{
    static char text[1 << 16];
    char mark[64];
    struct err err;
    double value = NAN;
    snprintf(mark, sizeof(mark), "\"event\":\"%s\"", event);
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        if (!strstr(line, mark) || n--) continue;
        struct json_doc *doc = json_parse(line, (int64_t)strlen(line), "metrics", &err);
        assert_non_null(doc);
        if (json_get_f64(json_root(doc), key, &value, &err)) fail_msg("%s", err.msg);
        json_free(doc);
        return value;
    }
    fail_msg("no %s of %s", key, event);
    return value;
}

#define EQUAL_TEACHER "a new adapter is the base model, so nothing is learnt: set distill.alpha above 0"

/* A new adapter has B = 0, so the student equals its teacher, the base model: KL divergence and gradient are 0. */
static void a_new_adapter_is_the_base(void **state)
{
    (void)state;
    const char *config = config_of("teacher = base", "");
    trained(config, "train.steps=2", "lora.dropout=0");
    for (int i = 0; i < 2; i++) {
        assert_close(metric(config, "step", i, "kl"), 0, 0);
        assert_close(metric(config, "step", i, "loss"), 0, 0);
        assert_close(metric(config, "step", i, "grad_norm"), 0, 0);
        assert_close(metric(config, "eval", i, "kl"), 0, 0);
        assert_true(metric(config, "step", i, "ce") > 1);
    }
    assert_says(said.out, "kl 0");
    assert_says(said.out, "eval at step 2: loss 0.0000  ce ");
    assert_says(said.err, EQUAL_TEACHER);
    const char *dropped = config_of("teacher = base", "");
    trained(dropped, "train.steps=1", "lora.dropout=0.5"); /* only the adapter's input changes, and B is 0 */
    assert_close(metric(dropped, "step", 0, "grad_norm"), 0, 0);
    assert_says(said.err, EQUAL_TEACHER);
    trained(config_of("teacher = base\nalpha = 0.5", ""), "train.steps=1", "lora.dropout=0");
    assert_null(strstr(said.err, "nothing is learnt"));
    const char *quantised = config_of("teacher = base", "[quant]\nweights = int8\n");
    trained(quantised, "train.steps=1", "lora.dropout=0");
    assert_null(strstr(said.err, "nothing is learnt"));
    assert_true(metric(quantised, "step", 0, "grad_norm") > 0);
}

/* An adapter that is its own teacher has no divergence. Dropout applies to the student only. */
static void an_adapter_is_its_teacher(void **state)
{
    (void)state;
    char teacher[MT_PATH + 64], init[MT_PATH + 64];
    snprintf(teacher, sizeof(teacher), "teacher = adapter:%s", case_adapter("adapter_init"));
    snprintf(init, sizeof(init), "lora.init_from=%s", case_adapter("adapter_init"));
    const char *config = config_of(teacher, "[lora]\nalpha = 16\n");
    trained(config, "lora.r=8", init);
    assert_close(metric(config, "step", 0, "kl"), 0, 0);
    assert_close(metric(config, "step", 0, "grad_norm"), 0, 0);
    const char *dropped = config_of(teacher, "[lora]\nalpha = 16\ndropout = 0.5\n");
    trained(dropped, "lora.r=8", init);
    assert_true(metric(dropped, "step", 0, "kl") > 1e-6);
    assert_close(metric(dropped, "eval", 0, "kl"), 0, 0);
}

static const char mixed[] = "teacher = base\nalpha = 0.25\ntemperature = 2\nkl = reverse";

/* A student that starts from an adapter with r = 8 of the parity case, so that it differs from its teacher. */
static const char *student(const char *distill, const char *more)
{
    char text[2 * MT_PATH];
    snprintf(text, sizeof(text), "[lora]\nalpha = 16\ninit_from = %s\n%s", case_adapter("adapter_init"), more);
    return config_of(distill, text);
}

static void the_loss_is_the_sum_of_its_parts(void **state)
{
    (void)state;
    const char *config = student(mixed, ""), *plain = student("teacher = none", "");
    trained(config, "lora.r=8", "train.steps=4");
    trained(plain, "lora.r=8", "train.steps=4");
    for (int i = 0; i < 4; i++) {
        const double ce = metric(config, "step", i, "ce"), kl = metric(config, "step", i, "kl");
        assert_close(metric(config, "step", i, "loss"), 0.25 * ce + 0.75 * 4 * kl, 1e-12);
        assert_true(kl > 0);
    }
    for (int i = 0; i < 2; i++) {
        const double ce = metric(config, "eval", i, "ce"), kl = metric(config, "eval", i, "kl");
        assert_close(metric(config, "eval", i, "loss"), 0.25 * ce + 0.75 * 4 * kl, 1e-12);
        assert_close(metric(config, "eval", i, "perplexity"), exp(ce), 1e-9);
    }
    assert_close(metric(config, "eval", 0, "ce"), metric(plain, "eval", 0, "loss"), 1e-6);
    assert_true(metric(config, "eval", 1, "kl") < metric(config, "eval", 0, "kl")); /* it learns */
    static const char *const shown[] = {"<h2>KL to the teacher</h2>", "<th>cross-entropy<th>KL",
                                        "<h2>Cross-entropy</h2>"};
    static char page[1 << 20];
    for (int i = 0; i < 2; i++) {
        process_read(process_output(i ? plain : config, "report.html"), page, sizeof(page));
        for (int k = 0; k < MT_LEN(shown); k++) assert_true((strstr(page, shown[k]) == NULL) == (i == 1));
    }
}

/* One step is the same for any division into micro-batches, any recomputation and any number of ranks. */
static void a_step_may_be_divided(void **state)
{
    (void)state;
    static const char *const cuts[] = {"[data]\npacking = no\nshuffle = no\n[train]\nmicro_batch = 4\n",
                                       "[data]\npacking = no\nshuffle = no\n[train]\nmicro_batch = 2\ngrad_accum = 2\n",
                                       "[data]\npacking = no\nshuffle = no\n[train]\ngrad_accum = 4\n"};
    const char *run[3];
    for (int i = 0; i < 3; i++) {
        run[i] = student(mixed, cuts[i]);
        trained(run[i], "lora.r=8", "train.steps=1");
        assert_close(metric(run[i], "step", 0, "loss") / metric(run[0], "step", 0, "loss"), 1, 1e-6);
        assert_close(metric(run[i], "step", 0, "kl") / metric(run[0], "step", 0, "kl"), 1, 1e-6);
        assert_close(metric(run[i], "step", 0, "grad_norm") / metric(run[0], "step", 0, "grad_norm"), 1, 1e-5);
    }
    char more[512];
    for (int i = 0; i < 2; i++) {
        snprintf(more, sizeof(more), "%s[parallel]\ncpu_ranks = 4\nep = %d\n", cuts[2], i ? 2 : 1);
        const char *ranks = student(mixed, more);
        trained(ranks, "lora.r=8", "train.steps=1");
        if (!i) assert_same_output(run[2], ranks, ADAPTER);
        assert_true(adapter_error(run[2], ranks) < 1e-4);
        assert_close(metric(ranks, "eval", 0, "kl") / metric(run[2], "eval", 0, "kl"), 1, 1e-6);
    }
    snprintf(more, sizeof(more), "%srecompute = full\n", cuts[0]);
    const char *again = student(mixed, more);
    trained(again, "lora.r=8", "train.steps=1");
    assert_same_output(run[0], again, ADAPTER);
}

/* A run of four steps equals a run of two steps that continues for two more. */
static void a_run_continues_with_its_teacher(void **state)
{
    (void)state;
    char distill[MT_PATH + 128], set[MT_PATH + 64], teacher[256], copy[2 * MT_PATH + 64];
    snprintf(teacher, sizeof(teacher), "%s", scratch_dir());
    snprintf(copy, sizeof(copy), "cp -r %s %s/t", case_adapter("adapter_final"), teacher);
    assert_int_equal(system(copy), 0);
    snprintf(distill, sizeof(distill), "teacher = adapter:%s/t\nalpha = 0.5", teacher);
    const char *whole = student(distill, "dropout = 0.1\n"), *halves = student(distill, "dropout = 0.1\n");
    trained(whole, "lora.r=8", "train.steps=4");
    trained(halves, "lora.r=8", "train.steps=2");
    trained(halves, "lora.r=8", "train.steps=4");
    assert_says(said.err, "continuing after step 2 of 4");
    assert_same_output(whole, halves, ADAPTER);
    assert_same_output(whole, halves, "checkpoints/step-000004/optimizer.safetensors");
    /* a directory that holds it, or a link to it, is the same teacher; a directory with another adapter is not */
    snprintf(copy, sizeof(copy), "cd %s && mkdir run other && ln -s ../t run/adapter && cp -r %s other/adapter",
             teacher, case_adapter("adapter_init"));
    assert_int_equal(system(copy), 0);
    for (int same = 0; same < 2; same++) {
        snprintf(set, sizeof(set), "distill.teacher=adapter:%s/%s", teacher, same ? "run" : "other");
        const int rc = RUN(halves, "--set", "lora.r=8", "--set", "train.steps=5", "--set", set);
        if (rc != !same) fail_msg("%s", said.err);
        assert_says(said.err, same ? "continuing after step 4 of 5" : "distill.teacher: adapter:");
    }
    const char *ranks = student(distill, "[data]\npacking = no\n[train]\ngrad_accum = 2\n");
    trained(ranks, "lora.r=8", "train.steps=1");
    if (process_run_sets(ranks, "lora.r=8 train.steps=2 parallel.cpu_ranks=2 parallel.ep=2")) fail_msg("%s", said.err);
    assert_says(said.err, "continuing after step 1 of 2");

    assert_int_equal(RUN(halves, "--set", "lora.r=8", "--set", "train.steps=6", "--set", "distill.alpha=0.4"), 1);
    assert_says(said.err, "distill.alpha: 0.5 -> 0.4");
    snprintf(copy, sizeof(copy), "rm -r %s/t && cp -r %s %s/t", teacher, case_adapter("adapter_init"), teacher);
    assert_int_equal(system(copy), 0);
    snprintf(set, sizeof(set), "train.steps=6");
    assert_int_equal(RUN(halves, "--set", "lora.r=8", "--set", set), 1);
    assert_says(said.err, "the weights in model.path or distill.teacher are not the same");
    /* generate needs no teacher */
    snprintf(copy, sizeof(copy), "rm -r %s/t", teacher);
    assert_int_equal(system(copy), 0);
    if (RUN("generate", halves, "--prompt", "the", "--tokens", "2", "--set", "lora.r=8")) fail_msg("%s", said.err);
    assert_int_equal(RUN(halves, "--set", "lora.r=8", "--set", set), 1);
    assert_says(said.err, "distill.teacher =");
    /* with a moved teacher, the weights in the new directory decide */
    snprintf(
        copy, sizeof(copy),
        "cd %s && cp -r %s moved && cp -r moved scaled && sed -i 's/\"lora_alpha\": /&1/' scaled/adapter_config.json",
        teacher, case_adapter("adapter_final"));
    assert_int_equal(system(copy), 0);
    static const char *const moves[] = {"other", "scaled", "moved"};
    for (int i = 0; i < MT_LEN(moves); i++) {
        const bool same = i == 2;
        snprintf(set, sizeof(set), "distill.teacher=adapter:%s/%s", teacher, moves[i]);
        const int rc = RUN(halves, "--set", "lora.r=8", "--set", "train.steps=6", "--set", set);
        if (rc != !same) fail_msg("%s", said.err);
        assert_says(said.err, same ? "continuing after step 5 of 6"
                                   : "the weights in model.path or distill.teacher are not the same");
    }
    assert_int_equal(RUN(halves, "--set", "lora.r=8", "--set", "distill.teacher=base"), 1);
    assert_says(said.err, " -> base: set it back");
}

static void eval_prints_the_parts(void **state)
{
    (void)state;
    const char *config = student(mixed, "");
    trained(config, "lora.r=8", "train.steps=2");
    if (RUN("eval", config, "--set", "lora.r=8")) fail_msg("%s", said.err);
    struct err err;
    double kl = NAN, loss = NAN;
    struct json_doc *doc = json_parse(said.out, (int64_t)strlen(said.out), "eval", &err);
    assert_non_null(doc);
    assert_int_equal(json_get_f64(json_root(doc), "kl", &kl, &err), 0);
    assert_int_equal(json_get_f64(json_root(doc), "loss", &loss, &err), 0);
    assert_close(kl, metric(config, "eval", 1, "kl"), 1e-9);
    assert_says(said.err, ", ce ");
    assert_says(said.err, ", kl ");
    assert_close(loss, metric(config, "eval", 1, "loss"), 1e-9);
    json_free(doc);
    if (RUN("eval", config, "--set", "lora.r=8", "--set", "distill.teacher=none")) fail_msg("%s", said.err);
    assert_says(said.err, "no effect: distill.alpha, distill.temperature, distill.kl");
    assert_null(strstr(said.out, "\"kl\""));
}

/* Without a teacher or quantised weights, the other keys of their sections have no effect; one line names them. */
static void unused_keys_are_named(void **state)
{
    (void)state;
    static const char unused[] = "no effect: distill.alpha, distill.temperature, distill.kl without distill.teacher; "
                                 "quant.mode, quant.amax without quant.weights\n";
    const char *config =
        config_of("alpha = 0.25\ntemperature = 2\nkl = reverse", "[quant]\nmode = base\namax = static\n");
    const char *plain = config_of("", "");
    trained(config, "lora.r=8", "train.steps=1");
    assert_says(said.err, unused);
    trained(plain, "lora.r=8", "train.steps=1");
    assert_null(strstr(said.err, "no effect"));
    assert_same_output(config, plain, ADAPTER);
    /* a run continues when these keys change, but not with a new teacher or new quantised weights */
    if (RUN(config, "--set", "lora.r=8", "--set", "train.steps=2", "--set", "distill.alpha=0.5", "--set",
            "quant.targets=all"))
        fail_msg("%s", said.err);
    assert_says(said.err, "continuing after step 1 of 2");
    assert_int_equal(RUN(config, "--set", "lora.r=8", "--set", "train.steps=3", "--set", "distill.teacher=base"), 1);
    assert_says(said.err, "distill.teacher: none -> base");
    assert_int_equal(RUN(config, "--set", "lora.r=8", "--set", "train.steps=3", "--set", "quant.weights=int8", "--set",
                         "quant.mode=merged"),
                     1);
    assert_says(said.err, "quant.weights: none -> int8, quant.mode: base -> merged");
}

static void settings_are_checked(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"teacher = bas", "distill.teacher = \"bas\": expected none, base, rows or adapter:DIR"},
        {"teacher = adapter:", "distill.teacher = \"adapter:\": expected none, base, rows or adapter:DIR"},
        {"teacher = adaptor:x", "distill.teacher = \"adaptor:x\": expected none, base, rows or adapter:DIR"},
        {"teacher = base\nalpha = 1.5", "distill.alpha = \"1.5\": expected a number in [0, 1]"},
        {"teacher = base\ntemperature = 0", "distill.temperature = \"0\": expected a number in [1e-3, 1e3]"},
        {"teacher = rows\nkl = reverse", "distill.kl = reverse needs the teacher's whole distribution"},
        {"teacher = adapter:nowhere", "distill.teacher = adapter:nowhere: no such directory"},
    };
    for (int i = 0; i < MT_LEN(bad); i++) {
        assert_int_equal(RUN(config_of(bad[i][0], "")), 1);
        assert_says(said.err, bad[i][1]);
    }
}

/* ---- rows of a teacher */

/* Three short documents of text. */
static const char *three_documents(void)
{
    static char path[MT_PATH];
    snprintf(path, sizeof(path), "%s/three.jsonl", scratch_dir());
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (int d = 0; d < 3; d++) fprintf(f, "{\"text\": \"the king %d of the house %d\"}\n", 7 * d, d);
    assert_int_equal(fclose(f), 0);
    return path;
}

/* Teacher rows of the base model that cover the whole vocabulary give the same training as the base model as teacher.
 */
static void whole_rows_are_the_base(void **state)
{
    (void)state;
    char text[MT_PATH + 64], eval[MT_PATH + 64], out[MT_PATH], held[MT_PATH];
    const char *dir = scratch_dir(), *files = three_documents();
    snprintf(text, sizeof(text), "data.train=%s", files);
    snprintf(eval, sizeof(eval), "data.eval=%s", files);
    snprintf(out, sizeof(out), "%s/t.jsonl", dir);
    snprintf(held, sizeof(held), "%s/e.jsonl", dir);
    const char *config = config_of("temperature = 2\nteacher = base", "");
    if (RUN("teach", config, "--base", "--topk", "4096", "--out", out, "--set", text)) fail_msg("%s", said.err);
    assert_says(said.err, "the 4096 likeliest tokens");
    assert_says(said.err, "distill.teacher = rows, distill.temperature = 2, distill.topk = 4096, data.train = ");
    assert_int_equal(RUN("teach", config, "--base", "--out", out, "--set", text), 1);
    assert_says(said.err, "t.jsonl exists: delete it, or choose another name");
    assert_int_equal(RUN("teach", config, "--base", "--out", "nowhere/t.jsonl", "--set", text), 1);
    assert_says(said.err, "cannot write nowhere/t.jsonl: nowhere: no such directory");
    assert_null(strstr(said.err, "loaded"));
    if (RUN("teach", config, "--base", "--topk", "4096", "--out", held, "--eval", "--set", eval))
        fail_msg("%s", said.err);
    const char *rows = student("teacher = rows\nalpha = 0.25\ntemperature = 2\ntopk = 4096", "");
    const char *base = student("teacher = base\nalpha = 0.25\ntemperature = 2", "");
    trained_on(rows, out, held, "train.steps=3");
    trained_on(base, files, files, "train.steps=3");
    for (int i = 0; i < 3; i++) {
        assert_close(metric(rows, "step", i, "kl") / metric(base, "step", i, "kl"), 1, 1e-5);
        assert_close(metric(rows, "step", i, "ce") / metric(base, "step", i, "ce"), 1, 1e-6);
    }
    assert_close(metric(rows, "eval", 1, "kl") / metric(base, "eval", 1, "kl"), 1, 1e-5);
    assert_true(adapter_error(rows, base) < 1e-4);
}

/* `teach` computes rows with the weights as loaded, without the quantisation of [quant]. */
static void a_teacher_is_not_quantised(void **state)
{
    (void)state;
    char text[MT_PATH + 64], out[2][MT_PATH];
    const char *config = config_of("topk = 5", "[quant]\nweights = int4\n");
    snprintf(text, sizeof(text), "data.train=%s", three_documents());
    for (int i = 0; i < 2; i++) {
        snprintf(out[i], MT_PATH, "%s/t.jsonl", scratch_dir());
        if (RUN("teach", config, "--adapter", case_adapter("adapter_init"), "--out", out[i], "--set", text, "--set",
                i ? "quant.weights=none" : "quant.narrow=no"))
            fail_msg("%s", said.err);
        assert_int_equal(!strstr(said.err, "quant.weights = int4 does not apply to teach"), i);
    }
    assert_same_file(out[0], out[1]);
}

/* A signal ends `teach` at once, and `teach` leaves no file. */
static void a_signal_leaves_no_rows(void **state)
{
    (void)state;
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    const char *config = config_of("topk = 5", ""), *dir = scratch_dir();
    char data[MT_PATH], text[MT_PATH + 64], out[MT_PATH], tmp[MT_PATH + 8];
    snprintf(data, sizeof(data), "%s/many.jsonl", dir);
    FILE *f = fopen(data, "w");
    assert_non_null(f);
    for (int d = 0; d < 20000; d++) fprintf(f, "{\"text\": \"the king %d of the house %d\"}\n", 7 * d, d);
    assert_int_equal(fclose(f), 0);
    snprintf(text, sizeof(text), "data.train=%s", data);
    for (int i = 0; i < MT_LEN(signals); i++) {
        snprintf(out, sizeof(out), "%s/rows%d.jsonl", dir, i);
        snprintf(tmp, sizeof(tmp), "%s.tmp", out);
        const char *const words[] = {"teach", config, "--base", "--out", out, "--set", text, NULL};
        const pid_t pid = process_start(dir, words);
        for (int k = 0; k < 6000 && file_size(tmp) == 0; k++) nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
        assert_true(file_size(tmp) > 0);
        assert_int_equal(kill(pid, signals[i]), 0);
        assert_int_equal(process_finish(dir, pid), 1000 + signals[i]);
        assert_false(file_exists(tmp) || file_exists(out));
    }
}

/* Training on teacher rows with the 5 most probable tokens of each position: a run that stops after 2 of 4 steps and
 * resumes writes the bytes of a run without a stop. */
static void rows_continue(void **state)
{
    (void)state;
    const char *config = config_of("topk = 5", "");
    trained(config, "train.steps=1", "lora.r=8");
    if (RUN("teach", config, "--topk", "5", "--set", "lora.r=8")) fail_msg("%s", said.err); /* the run's adapter */
    const char *data = process_output(config, "teacher.jsonl");
    assert_null(strstr(said.err, "distill.temperature"));
    assert_int_equal(RUN("teach", config, "--topk", "5", "--set", "lora.r=8"), 1);
    assert_says(said.err, "teacher.jsonl exists: delete it, or name another file with --out");
    data = process_output(config, "teacher.jsonl");
    const char *distill = "teacher = rows\ntopk = 8\nalpha = 0.5"; /* the rows have 5 */
    const char *whole = student(distill, "dropout = 0.1\n"), *halves = student(distill, "dropout = 0.1\n");
    trained_on(whole, data, "0.2", "train.steps=4");
    trained_on(halves, data, "0.2", "train.steps=2");
    trained_on(halves, data, "0.2", "train.steps=4");
    assert_same_output(whole, halves, ADAPTER);
    assert_same_output(whole, halves, "checkpoints/step-000004/optimizer.safetensors");
    assert_true(metric(whole, "eval", 1, "kl") > 0);
}

/* Probabilities that are 0 in double, as `teach` writes them, and one whose logarithm is beyond float. */
static void far_rows_train(void **state)
{
    (void)state;
    static const char far[] = "{\"input_ids\": [1, 2], \"loss_mask\": [0, 1], \"topk_ids\": [null, [3, 4]], "
                              "\"topk_logprobs\": [null, [0, -1e300]]}\n";
    char text[MT_PATH + 64], out[MT_PATH];
    snprintf(text, sizeof(text), "data.train=%s", three_documents());
    snprintf(out, sizeof(out), "%s/far.jsonl", scratch_dir());
    const char *distill = "temperature = 0.001\nteacher = rows\ntopk = 512\nalpha = 0.5";
    const char *config = config_of(distill, "");
    if (RUN("teach", config, "--base", "--topk", "512", "--out", out, "--set", text)) fail_msg("%s", said.err);
    FILE *f = fopen(out, "a");
    assert_non_null(f);
    fputs(far, f);
    assert_int_equal(fclose(f), 0);
    const char *rows = student(distill, "");
    trained_on(rows, out, out, "train.steps=2");
    for (int i = 0; i < 2; i++) {
        assert_true(isfinite(metric(rows, "step", i, "kl")) && metric(rows, "step", i, "kl") > 0);
        assert_true(isfinite(metric(rows, "step", i, "grad_norm")));
    }
}

static void rows_are_checked(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"{\"text\": \"a\"}", "rows.jsonl:2: distill.teacher = rows needs rows with `input_ids`"},
        {"{\"input_ids\": [1, 2], \"loss_mask\": [0, 1]}", "topk_ids"},
        {"{\"input_ids\": [1, 2], \"loss_mask\": [0], \"topk_ids\": [null, [1]], \"topk_logprobs\": [null, [-1]]}",
         "has 1 entries, and `input_ids` 2"},
        {"{\"input_ids\": [1, 2], \"loss_mask\": [0, 1], \"topk_ids\": [[1]], \"topk_logprobs\": [null, [-1]]}",
         "has 1 entries, and `input_ids` 2"},
        {"{\"input_ids\": [1, 2], \"loss_mask\": [0, 1], \"topk_ids\": [null, [1]], \"topk_logprobs\": [null, [-1, "
         "-2]]}",
         "has 2 entries, and `topk_ids` 1"},
        {"{\"input_ids\": [1, 2], \"loss_mask\": [0, 1], \"topk_ids\": [null, null], \"topk_logprobs\": [null, null]}",
         "the token has loss, and no list"},
        {"{\"input_ids\": [1, 2], \"loss_mask\": [0, 1], \"topk_ids\": [null, [4096]], \"topk_logprobs\": [null, "
         "[-1]]}",
         "4096"},
        {"{\"input_ids\": [1, 2], \"loss_mask\": [0, 1], \"topk_ids\": [null, [3, 3]], \"topk_logprobs\": [null, [-1, "
         "-2]]}",
         "has the id 3 twice"},
        {"{\"input_ids\": [1, 2], \"loss_mask\": [0, 1], \"topk_ids\": [null, [3, 4]], \"topk_logprobs\": [null, "
         "[-0.1, -0.1]]}",
         "whose sum is 1.80967, above 1"},
        {"{\"input_ids\": [1, 2], \"loss_mask\": [0, 1], \"topk_ids\": [null, [3]], \"topk_logprobs\": [null, [null]]}",
         "topk_logprobs"},
        {"{\"input_ids\": [1, 2], \"loss_mask\": [0, 1], \"topk_ids\": [null, [3]], \"topk_logprobs\": [null, "
         "[-1e999]]}",
         "rows.jsonl:2"},
        {"{\"input_ids\": [1, 2], \"loss_mask\": [0, 1], \"topk_ids\": [null, [3, 4, 5]], \"topk_logprobs\": [null, "
         "[-2, -2, -2]]}",
         "has 3 ids, and distill.topk = 2: raise it"},
        {"{\"input_ids\": [1, 2], \"loss_mask\": [0, 1], \"temperature\": 2, \"topk_ids\": [null, [3]], "
         "\"topk_logprobs\": [null, [-2]]}",
         "has the temperature 2, and the run distill.temperature = 1: set it to that of the rows, or write rows with "
         "`moetrain teach --set distill.temperature=1`"},
        {"{\"input_ids\": [1, 4096], \"loss_mask\": [0, 1], \"topk_ids\": [null, [3]], \"topk_logprobs\": [null, "
         "[-2]]}",
         "token id 4096 is outside the model's vocabulary"},
    };
    static const char good[] = "{\"input_ids\": [1, 2], \"loss_mask\": [0, 1], \"topk_ids\": [null, [3]], "
                               "\"topk_logprobs\": [null, [-1]]}";
    char path[MT_PATH], data[MT_PATH + 64];
    snprintf(path, sizeof(path), "%s/rows.jsonl", scratch_dir());
    snprintf(data, sizeof(data), "data.train=%s", path);
    for (int i = 0; i < MT_LEN(bad); i++) {
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        for (int line = 0; line < 300; line++) fprintf(f, "%s\n", line == 1 ? bad[i][0] : good); /* below 1 % */
        assert_int_equal(fclose(f), 0);
        assert_int_equal(RUN(config_of("teacher = rows\ntopk = 2", ""), "--set", data, "--set", "data.eval="), 1);
        assert_says(said.err, "rows.jsonl:2");
        assert_says(said.err, bad[i][1]);
    }
}

/* A long row with one labelled token: distill.topk entries for it alone. */
static void unlabelled_tokens_take_no_memory(void **state)
{
    (void)state;
    enum { TOKENS = 2000, TOPK = 1000 };
    const struct token_row_options opt = {.n_top = TOPK, .vocab = TOPK, .temperature = 1};
    struct token_row row = {.n = 0};
    struct json_out o = {0};
    struct err err;
    json_out_open(&o, NULL, '{');
    for (int key = 0; key < 4; key++) {
        json_out_open(&o, (const char *[]){"input_ids", "loss_mask", "topk_ids", "topk_logprobs"}[key], '[');
        for (int i = 0; i < TOKENS; i++) {
            if (key < 2) {
                json_out_i64(&o, NULL, key && i == 7);
            } else if (i != 7) {
                json_out_str(&o, NULL, NULL);
            } else {
                json_out_open(&o, NULL, '[');
                json_out_i64(&o, NULL, 0);
                json_out_close(&o, ']');
            }
        }
        json_out_close(&o, ']');
    }
    json_out_close(&o, '}');
    struct json_doc *doc = json_parse(o.text, o.size, "row", &err);
    assert_non_null(doc);
    if (token_row_read(&row, json_root(doc), &opt, &err)) fail_msg("%s", err.msg);
    assert_int_equal(row.n_label, 1);
    assert_int_equal(row.cap_top, TOPK);
    token_row_free(&row);
    json_free(doc);
    json_out_free(&o);
}

/* The hash of the teacher rows, by which a resumed run notices other rows, changes with each id, each probability and
 * the position that has them. */
static void the_hash_has_every_value(void **state)
{
    (void)state;
    static const int32_t id[][4] = {{1, 2, 3, -1}, {1, -1, 2, 3}, {1, 2, 4, -1}, {1, 2, 3, -1}};
    static const float logprob[][4] = {{-1, -2, -3, 0}, {-1, 0, -2, -3}, {-1, -2, -3, 0}, {-1, -2, -4, 0}};
    uint64_t hash[MT_LEN(id)];
    for (int i = 0; i < MT_LEN(id); i++) {
        struct topk t = {.n_top = 2};
        topk_add(&t, id[i], logprob[i], 2);
        hash[i] = topk_hash(&t);
        topk_free(&t);
        for (int k = 0; k < i; k++) assert_true(hash[k] != hash[i]);
    }
}

int test_distill(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_new_adapter_is_the_base),
        cmocka_unit_test(an_adapter_is_its_teacher),
        cmocka_unit_test(the_loss_is_the_sum_of_its_parts),
        cmocka_unit_test(a_step_may_be_divided),
        cmocka_unit_test(a_run_continues_with_its_teacher),
        cmocka_unit_test(eval_prints_the_parts),
        cmocka_unit_test(unused_keys_are_named),
        cmocka_unit_test(settings_are_checked),
        cmocka_unit_test(whole_rows_are_the_base),
        cmocka_unit_test(a_teacher_is_not_quantised),
        cmocka_unit_test(a_signal_leaves_no_rows),
        cmocka_unit_test(rows_continue),
        cmocka_unit_test(far_rows_train),
        cmocka_unit_test(rows_are_checked),
        cmocka_unit_test(unlabelled_tokens_take_no_memory),
        cmocka_unit_test(the_hash_has_every_value),
    };
    return cmocka_run_group_tests_name("distill", tests, NULL, NULL);
}

/* test_train.c - whole runs: the same gradients for any recomputation and division into batches; the same bytes after
 * any number of kills. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "data/safetensors.h"
#include "tests/process.h"

#define ADAPTER   "adapter/adapter_model.safetensors"
#define MAX_WORDS 24

/* A configuration and command-line arguments: `sets` are assignments separated by blanks. */
struct job {
    const char *config, *words[MAX_WORDS + 1];
    char sets[1024];
};

static struct job *job_new(const char *sets)
{
    static struct job jobs[8];
    static int next;
    struct job *j = &jobs[next++ % 8];
    int n = 0;
    memset(j, 0, sizeof(*j));
    j->config = j->words[n++] = process_config("");
    assert_true((size_t)snprintf(j->sets, sizeof(j->sets), "%s", sets) < sizeof(j->sets));
    for (char *set = strtok(j->sets, " "); set; set = strtok(NULL, " ")) {
        assert_true(n + 2 <= MAX_WORDS);
        j->words[n++] = "--set";
        j->words[n++] = set;
    }
    return j;
}

/* Runs to the end; returns the configuration's path, for process_output. */
static const char *trained(const char *sets)
{
    const struct job *j = job_new(sets);
    if (process_run(j->words)) fail_msg("training failed:\n%s", said.err);
    return j->config;
}

/* A number of the last "step" event of a run. */
static double last_step(const char *config, const char *key)
{
    static char text[1 << 18];
    struct err err;
    double value = NAN;
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        if (!strstr(line, "\"event\":\"step\"")) continue;
        struct json_doc *doc = json_parse(line, (int64_t)strlen(line), "metrics", &err);
        assert_non_null(doc);
        assert_int_equal(json_get_f64(json_root(doc), key, &value, &err), 0);
        json_free(doc);
    }
    assert_true(isfinite(value));
    return value;
}

static void assert_same_step(const char *a, const char *b)
{
    assert_close(last_step(a, "loss") / last_step(b, "loss"), 1, 1e-6);
    assert_close(last_step(a, "grad_norm") / last_step(b, "grad_norm"), 1, 1e-5);
    assert_true(last_step(a, "tokens") == last_step(b, "tokens"));
}

static void test_recompute(void **state)
{
    (void)state;
    /* recomputation must drop the same elements and give the auxiliary loss the same statistics */
    static const char *const more[] = {"", "train.aux_loss_coef=0.5 lora.dropout=0.1"};
    static const char *const mode[] = {"none", "selective", "full"};
    for (int i = 0; i < 2; i++) {
        const char *run[3];
        for (int m = 0; m < 3; m++) {
            char sets[256];
            snprintf(sets, sizeof(sets), "train.recompute=%s train.micro_batch=2 eval.at_start=no eval.at_end=no %s",
                     mode[m], more[i]);
            run[m] = trained(sets);
        }
        assert_same_output(run[0], run[1], ADAPTER);
        assert_same_output(run[0], run[2], ADAPTER);
    }
}

static const char *documents(int n)
{
    static char path[256];
    snprintf(path, sizeof(path), "%s/documents.jsonl", scratch_dir());
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (int d = 0; d < n; d++) {
        fprintf(f, "{\"text\": \"");
        for (int w = 0; w < 6 + 3 * d; w++) fprintf(f, "the king %d of ", 7 * d + w);
        fprintf(f, "\"}\n");
    }
    assert_int_equal(fclose(f), 0);
    return path;
}

/* One optimizer step on four documents: packed in one sequence, as one micro-batch of four, two of two, four of one. */
static void test_batch_divisions(void **state)
{
    (void)state;
    static const char *const cuts[] = {"data.packing=yes train.micro_batch=4 train.grad_accum=1",
                                       "data.packing=no train.micro_batch=4 train.grad_accum=1",
                                       "data.packing=no train.micro_batch=2 train.grad_accum=2",
                                       "data.packing=no train.micro_batch=1 train.grad_accum=4"};
    const char *run[4], *path = documents(4);
    for (int i = 0; i < 4; i++) {
        char sets[1024];
        snprintf(sets, sizeof(sets), "data.train=%s data.seq_len=256 train.steps=1 data.shuffle=no %s", path, cuts[i]);
        run[i] = trained(sets);
    }
    for (int i = 1; i < 4; i++) assert_same_step(run[i], run[0]);
}

/* Equal micro-batches of one document and no updates. A step of two micro-batches has the same gradient as a step of
 * one, since each counts half of the auxiliary loss. With dropout the gradients differ, also between steps, since every
 * micro-batch drops other elements. */
static void test_equal_micro_batches(void **state)
{
    (void)state;
    static const char *const division[] = {"steps=1 train.grad_accum=1", "steps=1 train.grad_accum=2",
                                           "steps=2 train.grad_accum=1"};
    for (int dropout = 0; dropout < 2; dropout++) {
        double norm[3];
        for (int i = 0; i < 3; i++) {
            char sets[512];
            snprintf(sets, sizeof(sets), "data.train=%s optim.lr=0 eval.at_start=no eval.at_end=no train.%s %s",
                     documents(1), division[i], dropout ? "lora.dropout=0.5" : "train.aux_loss_coef=5");
            norm[i] = last_step(trained(sets), "grad_norm");
        }
        for (int i = 1; i < 3; i++)
            if ((fabs(norm[i] / norm[0] - 1) > 1e-5) != dropout) fail_msg("%g, %g", norm[0], norm[i]);
    }
}

/* Each setting of the optimizer changes the adapter; log.every chooses the lines on the screen. */
static void test_settings(void **state)
{
    (void)state;
    static const char *const sets[] = {"lr=1e-3",   "warmup_steps=2", "weight_decay=1", "beta1=0.5",
                                       "beta2=0.5", "eps=1e-3",       "clip_norm=1e-3"};
#define THREE "train.steps=3 eval.at_start=no eval.at_end=no log.every=2 "
    const char *usual = trained(THREE);
    assert_says(said.out, "step 2/3 ");
    assert_null(strstr(said.out, "step 1/3 "));
    assert_null(strstr(said.out, "step 3/3 "));
    for (int i = 0; i < MT_LEN(sets); i++) {
        char text[128];
        snprintf(text, sizeof(text), THREE "optim.%s", sets[i]);
        const double error = adapter_error(usual, trained(text));
        if (!(error > 1e-5)) fail_msg("optim.%s: the adapters are %g apart", sets[i], error);
    }
}

/* The data report: duplicates, truncated documents, skipped rows, held-out and training documents. */
static void test_data_report(void **state)
{
    (void)state;
    static const char *const words[] = {
        "train: 300 documents, ",
        " tokens (longest document 16), 88.6% of tokens with loss; duplicates: 199",
        "train: 302 rows, 1 bad; documents longer than seq_len: 2 (truncated); nothing to train on: 1 (dropped)",
        "held out: 2 documents, ",
        "held out: 2 rows, 0 bad; documents longer than seq_len: 0 (truncated); nothing to train on: 0 (dropped)",
        "\n1 step, 1 micro-batch each, ",
        "1 held-out document is also in the training data: the held-out loss will be optimistic",
    };
    char path[256], eval[256], sets[1024];
    snprintf(path, sizeof(path), "%s/train.jsonl", scratch_dir());
    snprintf(eval, sizeof(eval), "%s/eval.jsonl", scratch_dir());
    FILE *f = fopen(path, "w"), *g = fopen(eval, "w");
    assert_true(f && g);
    for (int d = 0; d < 299; d++) fprintf(f, "{\"text\": \"the king %d of the house\"}\n", d % 100);
    fprintf(f, "{\"text\": \"%080d\"}\nno row\n{\"prompt\": \"%080d\", \"completion\": \"a\"}\n", 1, 2);
    fprintf(g, "{\"text\": \"the king 7 of the house\"}\n{\"text\": \"the queen of the house\"}\n");
    assert_int_equal(fclose(f) | fclose(g), 0);
    snprintf(sets, sizeof(sets), "data.train=%s data.eval=%s data.seq_len=16 train.steps=1", path, eval);
    trained(sets);
    for (int64_t i = 0; i < MT_LEN(words); i++)
        if (!strstr(said.err, words[i])) fail_msg("\"%s\" is not in:\n%s", words[i], said.err);
    snprintf(sets, sizeof(sets), "data.train=%s data.eval= data.eval_split=0.01 data.seq_len=16 train.steps=1", path);
    trained(sets);
    assert_null(strstr(said.err, " rows, 0 of them bad"));
    g = fopen(eval, "w");
    assert_true(g && fprintf(g, "{\"text\": \"the queen of the house\"}\n") > 0 && !fclose(g));
    snprintf(sets, sizeof(sets), "data.train=%s data.eval=%s data.seq_len=16 train.steps=1", path, eval);
    trained(sets);
    assert_says(said.err, "held out: 1 document, ");
    assert_says(said.err, "held out: 1 row, 0 bad; ");
}

static const char long_run[] = "train.steps=12 train.micro_batch=2 eval.every=4 output.save_every=3 output.keep=2 "
                               "eval.at_start=no " /* its loss would be the lowest, and no step would write best/ */
                               "lora.dropout=0.05";
static const char *const whole[] = {ADAPTER,
                                    "adapter/adapter_config.json",
                                    "best/adapter_model.safetensors",
                                    "checkpoints/step-000012/optimizer.safetensors",
                                    "checkpoints/step-000012/state.json",
                                    "checkpoints/step-000012/manifest.json"};

static void assert_same_run(const char *a, const char *b)
{
    for (int i = 0; i < MT_LEN(whole); i++) assert_same_output(a, b, whole[i]);
}

/* Starts the job again and again until it finishes, and sends it the signal `number` after a delay that grows with each
 * start. Returns how many starts after the first one the signal ended. */
static int run_in_pieces(const struct job *j, int number, long step_ms)
{
    const char *dir = scratch_dir();
    int code = -1, ended = 0;
    for (long ms = 0; code; ms += step_ms) {
        const struct timespec pause = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
        const pid_t pid = process_start(dir, j->words);
        nanosleep(&pause, NULL);
        kill(pid, number);
        code = process_finish(dir, pid);
        if (code && code != 1000 + number && code != 130) fail_msg("exit code %d:\n%s", code, said.err);
        ended += ms && code;
    }
    return ended;
}

/* SIGKILL interrupts loading, steps, evaluations and saves. SIGTERM: each start saves the steps that it made. */
static void test_killed_runs(void **state)
{
    (void)state;
    const double start = clock_ms();
    const char *reference = trained(long_run);
    const long ms = (long)(clock_ms() - start); /* a slow machine needs no more starts than a fast one */
    const struct job *killed = job_new(long_run), *stopped = job_new(long_run);
    assert_true(run_in_pieces(killed, SIGKILL, MT_MAX(20, ms / 20)) > 2);
    assert_same_run(killed->config, reference);
    assert_true(run_in_pieces(stopped, SIGTERM, MT_MAX(60, ms / 8)) > 0);
    assert_same_run(stopped->config, reference);
}

/* With a flipped bit in the newest checkpoint, a warning names it, the run resumes from the one before and ends in the
 * same bytes. */
static void test_damaged_checkpoint(void **state)
{
    (void)state;
    const char *reference = trained(long_run);
    const struct job *j = job_new(long_run);
    assert_int_equal(process_run(j->words), 0);
    const char *damaged = process_output(j->config, "checkpoints/step-000012/optimizer.safetensors");
    FILE *f = fopen(damaged, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, -5, SEEK_END), 0);
    const int byte = fgetc(f);
    assert_int_equal(fseek(f, -5, SEEK_END), 0);
    fputc(byte ^ 1, f);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(process_run(j->words), 0);
    assert_says(said.err, "step-000012");
    assert_says(said.err, "optimizer.safetensors");
    assert_says(said.err, "continuing after step 9 of 12");
    assert_same_run(j->config, reference);
}

/* Writes the parity case with 3e38 in the output biases of both layers, whose sum in layer 1 is infinite, and a flipped
 * bit in the embedding; returns the directory. */
#define OUT_BIAS "model.layers.0.self_attn.o_proj.bias"
static const char *poisoned_model(void)
{
    static const char *const files[] = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"};
    static char dir[256];
    char from[MT_PATH], to[MT_PATH];
    struct err err;
    int64_t size;
    struct safetensors st;
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    for (int i = 0; i < MT_LEN(files); i++) {
        snprintf(from, sizeof(from), "%s/%s", fixture("parity/case_a"), files[i]);
        snprintf(to, sizeof(to), "%s/%s", dir, files[i]);
        char *text = file_read(from, 1 << 26, &size, &err);
        assert_non_null(text);
        if (i == 3) {
            assert_int_equal(safetensors_open(&st, from, &err), 0);
            const struct st_tensor *t;
            for (int l = 0; l < 2; l++) {
                t = safetensors_find(&st, l ? "model.layers.1.self_attn.o_proj.bias" : OUT_BIAS);
                memcpy(text + (t->data - st.maps[0].data), "\x61\x7f", 2); /* bf16 */
            }
            t = safetensors_find(&st, "model.embed_tokens.weight");
            text[t->data - st.maps[0].data] ^= 1;
            safetensors_close(&st);
        }
        assert_int_equal(file_write_atomic(to, text, size, &err), 0);
        mem_free(text);
    }
    return dir;
}

/* A resumed run refuses another model and accepts changes without effect on the numbers. train.resume = never archives
 * the old run. */
static void test_other_settings(void **state)
{
    (void)state;
    const char *config = trained("output.save_every=1");
    char model[MT_PATH];
    snprintf(model, sizeof(model), "model.path=%s", poisoned_model());
    assert_int_equal(RUN(config, "--set", model), 1);
    assert_says(said.err, "was made with another base model, model.path: ");
    assert_int_equal(RUN(config, "--set", "train.recompute=full", "--set", "log.every=2"), 0);
    assert_int_equal(RUN(config, "--set", "train.seed=1", "--set", "train.resume=never"), 0);
    assert_int_equal(access(process_output(config, "archive-1/checkpoints/step-000002/state.json"), F_OK), 0);
}

/* A run gives the same bytes with any number of decoded layers, also when the number changes between starts. */
static void test_decoded_layers(void **state)
{
    (void)state;
    static const char *const same[] = {"optim.schedule=constant", "optim.schedule=constant train.decoded_layers=1",
                                       "optim.schedule=constant train.decoded_layers=2"};
    const char *run[3];
    char sets[256];
    for (int i = 0; i < 3; i++) {
        snprintf(sets, sizeof(sets), "%s train.steps=4", same[i]);
        run[i] = trained(sets);
        if (i) assert_says(said.err, i > 1 ? "2 of 2 layers decoded to f32" : "mxfp4, 1 of 2 layers decoded to f32");
        if (i) assert_same_output(run[0], run[i], ADAPTER);
    }
    const char *parts = trained(same[2]);
    assert_int_equal(RUN(parts, "--set", same[0], "--set", "train.steps=3"), 0);
    assert_says(said.err, "continuing after step 2 of 3");
    assert_int_equal(RUN(parts, "--set", same[0], "--set", "train.steps=4", "--set", "train.decoded_layers=1"), 0);
    assert_says(said.err, "continuing after step 3 of 4");
    assert_same_output(run[0], parts, ADAPTER);
}

/* Steps with a non-finite loss are skipped and counted. The message names the first such value, and the run stops. */
static void test_nonfinite(void **state)
{
    (void)state;
    char sets[512];
    snprintf(sets, sizeof(sets), "model.path=%s train.steps=50 train.max_nonfinite=3", poisoned_model());
    const struct job *j = job_new(sets);
    assert_int_equal(process_run(j->words), 1);
    assert_says(said.err, "train.max_nonfinite");
    assert_says(said.err, "output of layer 1");
    assert_says(said.err, "warning: tensor " OUT_BIAS " has the value 2.99076e+38 at element 0: above 1e6 ");
    assert_says(said.err,
                "warning: step 1 is skipped: its loss is not finite, before any update; the run ends after 3 ");
    assert_says(said.err, "Check the base model's weights and the data; `moetrain eval --base` computes");
    assert_null(strstr(said.err, "optim.lr"));
    assert_null(strstr(said.err, "diverge"));
    assert_says(said.out, "step  3/50");
    assert_null(strstr(said.out, "step  4/50"));
    assert_says(said.out, "skipped");
    assert_int_not_equal(access(process_output(j->config, "adapter"), F_OK), 0);

    /* A run that skips all of its few steps is an error too. */
    snprintf(sets, sizeof(sets), "model.path=%s train.steps=2 train.max_nonfinite=3", poisoned_model());
    const struct job *brief = job_new(sets);
    assert_int_equal(process_run(brief->words), 1);
    assert_says(said.err, "nothing was trained: no step had a finite loss and gradient");
    assert_says(said.err, "output of layer 1");
    assert_int_not_equal(access(process_output(brief->config, "adapter"), F_OK), 0);
}

/* A run is killed between its last checkpoint and the report. The next start writes the report and deletes partial
 * files. */
static void test_killed_at_the_report(void **state)
{
    static const char *const tmp[] = {"report.html.tmp", "config.ini.tmp", "metrics.jsonl.tmp"};
    (void)state;
    const struct job *j = job_new("train.steps=1");
    assert_int_equal(process_run(j->words), 0);
    assert_int_equal(unlink(process_output(j->config, "report.html")), 0);
    for (int i = 0; i < MT_LEN(tmp); i++) {
        FILE *f = fopen(process_output(j->config, tmp[i]), "w");
        assert_non_null(f);
        assert_int_equal(fclose(f), 0);
    }
    assert_int_equal(process_run(j->words), 0);
    assert_says(said.err, "report.html");
    assert_int_equal(access(process_output(j->config, "report.html"), F_OK), 0);
    for (int i = 0; i < MT_LEN(tmp); i++) assert_int_not_equal(access(process_output(j->config, tmp[i]), F_OK), 0);
}

int test_train(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_recompute),
        cmocka_unit_test(test_batch_divisions),
        cmocka_unit_test(test_equal_micro_batches),
        cmocka_unit_test(test_settings),
        cmocka_unit_test(test_data_report),
        cmocka_unit_test(test_killed_runs),
        cmocka_unit_test(test_damaged_checkpoint),
        cmocka_unit_test(test_other_settings),
        cmocka_unit_test(test_killed_at_the_report),
        cmocka_unit_test(test_nonfinite),
        cmocka_unit_test(test_decoded_layers),
    };
    return cmocka_run_group_tests_name("train", tests, NULL, NULL);
}

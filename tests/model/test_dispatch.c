/* test_dispatch.c - expert-parallel runs (parallel.ep) on the CPU train like one process, write the same files, and
 * resume with any number of ranks; ranks without tokens, ranks whose receive buffer is too small. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "data/safetensors.h"
#include "tests/process.h"

/* Dropout and auxiliary loss differ between micro-batches. There are three held-out micro-batches, so a rank may have
 * none. */
static const char settings[] =
    "[parallel]\ncpu_ranks = %d\nep = %d\n[optim]\nschedule = constant\nwarmup_ratio = 0\n[eval]\nevery = 2\n"
    "max_batches = 3\n";
#define JOB                                                                                                            \
    "--set", "train.grad_accum=4", "--set", "lora.dropout=0.1", "--set", "train.aux_loss_coef=0.1", "--set",           \
        "log.report=no", "--set", "train.threads=1"

static const char *config_of(int ranks, int ep)
{
    char more[512];
    snprintf(more, sizeof(more), settings, ranks, ep);
    return process_config(more);
}

/* more: an additional setting, or NULL. */
static void train(const char *config, const char *steps, const char *more)
{
    if (RUN(config, JOB, "--set", steps, "--set", more)) fail_msg("training failed:\n%s", said.err);
}

/* The reference run on one process, made once. */
static const char *one_rank(void)
{
    static char path[MT_PATH];
    if (path[0]) return path;
    snprintf(path, sizeof(path), "%s", config_of(1, 1));
    train(path, "train.steps=4", "parallel.ep=1");
    return path;
}

/* Reads every loss in metrics.jsonl, of steps and evaluations. */
static int losses(const char *config, double out[32])
{
    static char text[1 << 16];
    int n = 0;
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    for (const char *s = text; (s = strstr(s, "\"loss\":")) && n < 32; n++) out[n] = strtod(s += 7, NULL);
    return n;
}

static void assert_same_run(const char *config, const char *reference)
{
    double a[32], b[32];
    const int n = losses(reference, a);
    assert_int_equal(n, 7); /* four steps, three evaluations */
    assert_int_equal(losses(config, b), n);
    for (int i = 0; i < n; i++) assert_true(fabs(b[i] - a[i]) < 1e-6 * a[i]);
    assert_true(adapter_error(config, reference) < 1e-4);
}

/* ---- the same training */

static void test_same_training(void **state)
{
    (void)state;
    static const struct {
        int ranks, ep;
        const char *more;
    } rows[] = {{2, 2, "train.recompute=none"},
                {4, 4, "train.recompute=selective"},
                {4, 2, "train.recompute=full"},
                {2, 2, "parallel.chunks=4"},
                {4, 2, "parallel.zero=yes"}};
    const char *reference = one_rank();
    for (int i = 0; i < MT_LEN(rows); i++) {
        const char *config = config_of(rows[i].ranks, rows[i].ep);
        train(config, "train.steps=4", rows[i].more);
        assert_same_run(config, reference);
    }
}

/* DeepSeek-V4: several residual streams, experts by the token's id, compressed attention. */
static void test_streams(void **state)
{
    (void)state;
    static const char *const rows[][3] = {
        {"1", "1", "train.recompute=none"}, {"2", "2", "train.recompute=none"}, {"4", "2", "train.recompute=full"}};
    double want[32], got[32];
    for (int i = 0; i < MT_LEN(rows); i++) {
        char sets[3 * MT_PATH], more[64];
        const char *dir = fixture("parity/deepseek_v4");
        snprintf(more, sizeof(more), "[parallel]\ncpu_ranks = %s\nep = %s\n", rows[i][0], rows[i][1]);
        const char *config = process_config(more);
        snprintf(sets, sizeof(sets),
                 "model.path=%s data.train=%s/train.jsonl data.eval=%s/eval.jsonl lora.targets=all-linear "
                 "train.steps=3 train.grad_accum=4 lora.dropout=0.1 train.threads=1 log.report=no %s",
                 dir, dir, dir, rows[i][2]);
        if (process_run_sets(config, sets)) fail_msg("training failed:\n%s", said.err);
        const int n = losses(config, i ? got : want);
        assert_true(n >= 3);
        for (int k = 0; i && k < n; k++) assert_true(fabs(got[k] - want[k]) < 1e-6 * want[k]);
    }
}

/* A checkpoint saved with one layout resumes with another. Without a step in between the files are equal, byte by byte.
 */
static void test_resume(void **state)
{
    (void)state;
    static const struct {
        int ranks, ep;
        const char *then_ranks, *then_ep;
    } rows[] = {{1, 1, "parallel.cpu_ranks=4", "parallel.ep=2"}, {4, 4, "parallel.cpu_ranks=1", "parallel.ep=1"}};
    const char *reference = one_rank();
    for (int i = 0; i < MT_LEN(rows); i++) {
        const char *config = config_of(rows[i].ranks, rows[i].ep);
        train(config, "train.steps=2", "parallel.zero=yes");
        int64_t n, m;
        struct err err;
        char *saved = file_read(process_output(config, ADAPTER), 1 << 26, &n, &err);
        if (!saved) fail_msg("%s", err.msg);
        if (RUN(config, JOB, "--set", "train.steps=2", "--set", rows[i].then_ranks, "--set", rows[i].then_ep))
            fail_msg("%s", said.err);
        assert_says(said.err, "continuing after step 2 of 2");
        assert_says(said.err, "this run is complete: to train longer, raise train.steps\n");
        char *again = file_read(process_output(config, ADAPTER), 1 << 26, &m, &err);
        assert_true(again && n == m && !memcmp(saved, again, (size_t)n));
        mem_free(saved);
        mem_free(again);
        if (RUN(config, JOB, "--set", "train.steps=4", "--set", rows[i].then_ranks, "--set", rows[i].then_ep))
            fail_msg("%s", said.err);
        assert_says(said.err, "continuing after step 2 of 4");
        assert_true(adapter_error(config, reference) < 1e-4);
    }
}

/* ---- overloaded ranks and empty ones */

/* Writes the parity case with routers that send every token to the first two experts. */
static const char *crowded_model(void)
{
    static const char *const names[] = {"config.json", "tokenizer.json", "tokenizer_config.json"};
    static uint16_t bias[8];
    const char *dir = scratch_dir();
    char from[MT_PATH], to[MT_PATH + 32];
    struct safetensors st;
    struct err err;
    for (int i = 0; i < MT_LEN(names); i++) {
        int64_t n;
        snprintf(from, sizeof(from), "%s/%s", fixture("parity/case_a"), names[i]);
        snprintf(to, sizeof(to), "%s/%s", dir, names[i]);
        char *text = file_read(from, 1 << 24, &n, &err);
        assert_true(text && !file_write_atomic(to, text, n, &err));
        mem_free(text);
    }
    for (int e = 0; e < 8; e++) bias[e] = f32_to_bf16(e < 2 ? 100 : 0);
    snprintf(to, sizeof(to), "%s/model.safetensors", dir);
    assert_int_equal(safetensors_open(&st, fixture("parity/case_a/model.safetensors"), &err), 0);
    struct st_entry *entries = mem_array(st.n_tensors, sizeof(*entries));
    for (int64_t i = 0; i < st.n_tensors; i++) {
        const struct st_tensor *t = &st.tensors[i];
        entries[i] = (struct st_entry){.name = t->name, .dtype = t->dtype, .ndim = t->ndim, .data = t->data};
        for (int d = 0; d < t->ndim; d++) entries[i].shape[d] = t->shape[d];
        if (strstr(t->name, "router.bias")) entries[i].data = bias;
    }
    assert_int_equal(safetensors_write(to, entries, st.n_tensors, &err), 0);
    mem_free(entries);
    safetensors_close(&st);
    return dir;
}

static void test_crowded(void **state)
{
    (void)state;
    char model[MT_PATH + 16];
    snprintf(model, sizeof(model), "model.path=%s", crowded_model());
    const char *reference = config_of(1, 1), *config = config_of(4, 4);
    train(reference, "train.steps=4", model);
    train(config, "train.steps=4", model);
    assert_same_run(config, reference);

    /* Four ranks send all rows to one of them, whose receive buffer is for balanced routing: the exchange takes more
     * chunks, down to one token each. */
    static const char *const more[] = {"train.recompute=none", "train.recompute=selective", "parallel.chunks=3"};
    for (int i = 0; i < MT_LEN(more); i++) {
        config = config_of(4, 4);
        if (RUN(config, JOB, "--set", "train.steps=4", "--set", model, "--set", "parallel.capacity_factor=1", "--set",
                more[i]))
            fail_msg("%s", said.err);
        assert_says(said.err, "routing is unbalanced: a layer is cut into");
        assert_same_run(config, reference);
    }
    if (RUN("eval", "--base", config_of(4, 4), JOB, "--set", model, "--set", "parallel.capacity_factor=1"))
        fail_msg("%s", said.err);
}

/* ---- the plan; invalid settings */

static void test_plan(void **state)
{
    (void)state;
    const char *config = config_of(1, 1);
    assert_int_equal(RUN("plan", config), 0);
    assert_says(said.out, "experts                                326 KiB");
    assert_says(said.out, "1.58 M FLOP per token forward, 3.20 M per token of training");
    assert_int_equal(RUN("plan", config, "--set", "parallel.ep=2"), 0);
    assert_says(said.out, "1.58 M FLOP per token forward, 3.20 M per token of training");
    assert_says(said.out, "experts                                163 KiB");
    assert_says(said.out, "all-to-all in 1 chunk, capacity factor 2");
    assert_says(said.out, "20992 parameters");
}

static void test_refusals(void **state)
{
    (void)state;
    assert_int_equal(RUN(config_of(4, 3), JOB), 1);
    assert_says(said.err, "parallel.ep = 3 does not divide the number of ranks, 4");
    assert_int_equal(RUN(config_of(1, 2), JOB), 1);
    assert_says(said.err, "parallel.ep = 2 does not divide the number of ranks, 1: start a multiple of 2 ranks");
    assert_int_equal(RUN(config_of(3, 3), JOB, "--set", "train.grad_accum=3"), 1);
    assert_says(said.err, "cannot divide the 8 experts of a layer evenly");
    const char *two = config_of(2, 1);
    assert_int_equal(RUN(two, JOB, "--set", "train.grad_accum=3"), 1);
    assert_says(said.err, "train.grad_accum = 3 is not a multiple of the 2 ranks");
    assert_int_equal(RUN("plan", two, "--set", "train.grad_accum=3"), 0);
    assert_says(said.err, "training would refuse this: train.grad_accum = 3 is not a multiple of the 2 ranks");
    assert_int_equal(RUN("plan", two, "--set", "train.grad_accum=4"), 0);
    assert_null(strstr(said.err, "training would refuse"));
}

int test_dispatch(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_training), cmocka_unit_test(test_streams), cmocka_unit_test(test_resume),
        cmocka_unit_test(test_crowded),       cmocka_unit_test(test_plan),    cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests_name("dispatch", tests, NULL, NULL);
}

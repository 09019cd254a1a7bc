/* test_matrix.c - whole runs of every family: recomputation, threads, ranks, resume, packing of weights at load,
 * quantisation-aware training, distillation as student and as teacher, commands that read a run. Families with mixers
 * or networks that others lack also train with KTO, and with several documents in a sequence. */
#include "tests/test.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/process.h"

static char model[MT_PATH]; /* a copy of the case, whose directory can take a cache of packed weights */

static void link_case(const char *name)
{
    const char *from = fixture(name);
    struct dirent *entry;
    DIR *dir = opendir(from);
    assert_non_null(dir);
    snprintf(model, sizeof(model), "%s", scratch_dir());
    while ((entry = readdir(dir))) {
        char file[2 * MT_PATH], link[2 * MT_PATH];
        snprintf(file, sizeof(file), "%s/%s", from, entry->d_name);
        snprintf(link, sizeof(link), "%s/%s", model, entry->d_name);
        if (entry->d_name[0] != '.') assert_int_equal(symlink(file, link), 0);
    }
    assert_int_equal(closedir(dir), 0);
}

/* Trains the case for `steps` in the directory of `config`; NULL: a new one. */
static const char *train(const char *config, int steps, const char *sets)
{
    char all[8 * MT_PATH];
    if (!config)
        config = process_config(
            "[eval]\nat_start = no\nmax_batches = 1\n[optim]\nschedule = constant\n[log]\nreport = no\n");
    snprintf(all, sizeof(all),
             "model.path=%s data.train=%s/train.jsonl data.eval=%s/eval.jsonl lora.targets=all-linear "
             "train.steps=%d train.grad_accum=2 data.packing=no %s",
             model, model, model, steps, sets);
    if (process_run_sets(config, all)) fail_msg("%s: %s", sets, said.err);
    return config;
}

static void check_same(const char *a, const char *b)
{
    const char *one = train(NULL, 2, a), *two = train(NULL, 2, b);
    assert_same_output(one, two, ADAPTER);
}

/* attention: also packs the projections of attention, whose sizes are multiples of NF4's blocks in this case. */
static void one_family(const char *name, bool attention)
{
    char init[3 * MT_PATH], none[4 * MT_PATH], full[4 * MT_PATH];
    link_case(name);
    const char *one = train(NULL, 2, "train.recompute=none train.threads=1");
    assert_same_output(train(NULL, 2, "train.recompute=full train.threads=16 train.offload=all"), one, ADAPTER);
    assert_same_output(train(NULL, 2, "train.recompute=selective parallel.cpu_ranks=2 parallel.zero=yes"), one,
                       ADAPTER);
    const char *divided = train(NULL, 2, "parallel.cpu_ranks=2 parallel.ep=2");
    /* parallel.ep sums in another order; AdamW's first steps amplify small gradients */
    assert_true(adapter_error(divided, one) < 5e-3);
    const char *resumed = train(NULL, 1, "train.threads=3");
    assert_same_output(train(resumed, 2, "parallel.cpu_ranks=2"), one, ADAPTER);

#define PACKED "model.quantize=nf4 lora.dropout=0.2 lora.rslora=yes train."
    const char *projections = attention ? "model.quantize_attention=yes" : "";
    snprintf(none, sizeof(none), PACKED "recompute=none train.threads=1 %s", projections);
    snprintf(full, sizeof(full), PACKED "recompute=full train.threads=3 %s", projections);
    check_same(none, full);
#define QUANTISED "quant.weights=int8 quant.activations=int8 quant.targets=all "
    check_same(QUANTISED "train.recompute=none", QUANTISED "train.recompute=full parallel.cpu_ranks=2");

    snprintf(init, sizeof(init), "distill.teacher=base distill.alpha=0.3 lora.init_from=%s",
             process_output(one, "adapter"));
    snprintf(none, sizeof(none), "%s train.recompute=none", init);
    snprintf(full, sizeof(full), "%s train.recompute=full train.threads=3", init);
    check_same(none, full);

    const char *run = process_output(train(NULL, 1, "data.packing=yes"), "config.ini");
    assert_int_equal(RUN("eval", run), 0);
    assert_int_equal(RUN("generate", run, "--prompt", "To be", "--tokens", "3"), 0);
    assert_int_equal(RUN("plan", run, "--set", "parallel.cpu_ranks=2", "--set", "parallel.ep=2"), 0);
    assert_int_equal(RUN("inspect", model), 0);
}

/* The loss and the gradient's norm of the first step, in metrics.jsonl. */
static void read_step(const char *config, double *loss, double *norm)
{
    static char text[1 << 16];
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    const char *step = strstr(text, "\"event\":\"step\""), *at = step ? strstr(step, "\"loss\":") : NULL,
               *then = step ? strstr(step, "\"grad_norm\":") : NULL;
    if (!at || !then) fail_msg("no step in %s", text);
    *loss = strtod(at + strlen("\"loss\":"), NULL);
    *norm = strtod(then + strlen("\"grad_norm\":"), NULL);
}

/* The first four rows of the case's data, in a file. */
static const char *four_rows(void)
{
    static char path[2 * MT_PATH];
    static char text[1 << 14];
    snprintf(path, sizeof(path), "%s/train.jsonl", model);
    process_read(path, text, sizeof(text));
    snprintf(path, sizeof(path), "%s/four.jsonl", model);
    char *end = text;
    for (int i = 0; i < 4; i++) end = strchr(end, '\n') + 1;
    *end = 0;
    FILE *f = fopen(path, "w");
    assert_true(f && fputs(text, f) >= 0 && !fclose(f));
    return path;
}

/* KTO, continued with another recomputation and number of ranks; four documents in one sequence, and one by one. */
static void other_data(const char *name)
{
    char rows[3 * MT_PATH], whole[4 * MT_PATH], part[4 * MT_PATH];
    double loss[2], norm[2];
    link_case(name);
    snprintf(rows, sizeof(rows),
             "objective.kind=kto train.micro_batch=2 data.train=%s/kto/train.jsonl data.eval=%s/kto/eval.jsonl",
             fixture("preference"), fixture("preference"));
    snprintf(whole, sizeof(whole), "%s train.recompute=none", rows);
    snprintf(part, sizeof(part), "%s train.recompute=full parallel.cpu_ranks=2", rows);
    const char *one = train(NULL, 2, whole), *two = train(NULL, 1, part);
    assert_same_output(train(two, 2, part), one, ADAPTER);

    snprintf(rows, sizeof(rows), "data.train=%s data.eval= data.shuffle=no data.seq_len=2048", four_rows());
    snprintf(whole, sizeof(whole), "%s data.packing=yes train.grad_accum=1", rows);
    snprintf(part, sizeof(part), "%s train.grad_accum=4", rows);
    one = train(NULL, 1, whole);
    two = train(NULL, 1, part);
    read_step(one, &loss[0], &norm[0]);
    read_step(two, &loss[1], &norm[1]);
    assert_close(loss[0] / loss[1], 1, 1e-6);
    assert_close(norm[0] / norm[1], 1, 1e-5);
}

static void glm4(void **state)
{
    (void)state;
    one_family("parity/glm4", true);
}

static void glm4_lite(void **state)
{
    (void)state;
    one_family("parity/glm4_lite", true);
}

static void deepseek_v3(void **state)
{
    (void)state;
    one_family("parity/deepseek_v3", false);
}

static void qwen3_5(void **state)
{
    (void)state;
    one_family("parity/qwen3_5", true);
}

static void qwen3_next(void **state)
{
    (void)state;
    one_family("parity/qwen3_next", true);
}

static void qwen3_vl(void **state)
{
    (void)state;
    one_family("parity/qwen3_vl", false);
}

static void mistral4(void **state)
{
    (void)state;
    one_family("parity/mistral4", false);
}

static void deepseek_v4(void **state)
{
    (void)state;
    one_family("parity/deepseek_v4", false);
}

static void minimax_m2(void **state)
{
    (void)state;
    one_family("parity/minimax_m2", true);
    other_data("parity/minimax_m2");
}

static void nemotron(void **state)
{
    (void)state;
    one_family("parity/nemotron", false);
    other_data("parity/nemotron");
}

static void nemotron_latent(void **state)
{
    (void)state;
    one_family("parity/nemotron_latent", false);
    other_data("parity/nemotron_latent");
}

static void gemma4(void **state)
{
    (void)state;
    one_family("parity/gemma4", false);
    other_data("parity/gemma4");
}

static void lfm2(void **state)
{
    (void)state;
    one_family("parity/lfm2", true);
    other_data("parity/lfm2");
}

int test_matrix(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(glm4),        cmocka_unit_test(glm4_lite),  cmocka_unit_test(deepseek_v3),
        cmocka_unit_test(qwen3_5),     cmocka_unit_test(qwen3_next), cmocka_unit_test(mistral4),
        cmocka_unit_test(deepseek_v4), cmocka_unit_test(minimax_m2), cmocka_unit_test(nemotron),
        cmocka_unit_test(gemma4),      cmocka_unit_test(lfm2),       cmocka_unit_test(nemotron_latent),
        cmocka_unit_test(qwen3_vl),
    };
    return cmocka_run_group_tests_name("matrix", tests, NULL, NULL);
}

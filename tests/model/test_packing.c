/* test_packing.c - packed documents have the same loss as unpacked ones, and a batch whose documents attend to each
 * other is detected. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/op_check.h"
#include "tests/process.h"
#include "train/session/packing_check.h"

static void open_run(struct run *r, struct config *cfg, const char *model, const char *device, const char *dtype)
{
    struct err err = {.msg = ""};
    char set[MT_PATH + 32];
    config_defaults(cfg);
    snprintf(cfg->model.path, sizeof(cfg->model.path), "%s", fixture(model));
    snprintf(cfg->data.train, sizeof(cfg->data.train), "%s", fixture("parity/case_a/train.jsonl"));
    snprintf(cfg->output.dir, sizeof(cfg->output.dir), "%s", scratch_dir());
    cfg->data.seq_len = 512;
    snprintf(set, sizeof(set), "train.device=%s", device);
    assert_int_equal(config_set(cfg, set, &err), 0);
    snprintf(set, sizeof(set), "train.dtype=%s", dtype);
    assert_int_equal(config_set(cfg, set, &err), 0);
    if (run_open_headers(r, cfg, &err) || run_open_data(r, true, &err) || run_open_model(r, NULL, PLAN_TRAIN, &err))
        fail_msg("%s", err.msg);
}

/* wrong: the batch has one sequence for all documents, so they attend to each other. */
static void prove(const char *model, const char *device, const char *dtype, bool wrong)
{
    struct config cfg;
    struct run r;
    struct err err = {.msg = ""};
    struct packing_check p;
    struct batch b;
    open_run(&r, &cfg, model, device, dtype);
    const struct loader_options lo = run_loader_options(&cfg, true);
    struct loader *l = loader_open(&r.train, &lo, (struct loader_pos){0, 0});
    loader_next(l, &b, NULL);
    assert_true(b.n_seq > 1);
    if (wrong) b.cu[1] = b.cu[b.n_seq], b.n_seq = 1; /* one sequence */
    packing_check_measure(&r, &b, &p);
    print_message("%s, %s %s%s: %lld documents, loss %.9g packed, %.9g alone\n", model, device, dtype,
                  wrong ? ", seams forgotten" : "", (long long)p.n_seq, p.packed, p.alone);
    assert_true(p.n_seq > 1 && p.n_tok <= b.n_tok && isfinite(p.alone));
    assert_int_equal(packing_check_judge(&r, &p, &err), wrong ? -1 : 0);
    if (wrong) assert_non_null(strstr(err.msg, "packed documents affect each other"));
    assert_int_equal(r.dev.work.used, 0);
    batch_free(&b);
    loader_close(l);
    run_close(&r);
}

static void on_cpu(void **state)
{
    static const char *const models[] = {"parity/case_a", "parity/qwen3", "parity/olmoe", "parity/mixtral"};
    (void)state;
    for (int i = 0; i < MT_LEN(models); i++) {
        prove(models[i], "cpu", "fp32", false);
        prove(models[i], "cpu", "fp32", true);
        prove(models[i], "cpu", "bf16", false);
    }
    prove("../../configs/tiny-gptoss", "cpu", "bf16", true);
}

static void on_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int portable = 0; portable < 2; portable++)
        for (int wrong = 0; wrong < 2; wrong++)
            prove("../../configs/tiny-gptoss", portable ? "cuda-portable" : "cuda", "auto", wrong);
}

static const struct ops *real;
static int64_t n_wrong; /* number of next calls in which packed documents attend to each other */

static void leaky_attn(struct device *dev, struct tensor o, struct tensor lse, struct tensor qkv, struct tensor sinks,
                       const struct seqs *seqs, const struct attn_shape *shape)
{
    int32_t all[2] = {0, (int32_t)qkv.shape[0]};
    struct seqs one = *seqs;
    if (seqs->n_seq > 1 && n_wrong-- > 0) {
        one.n_seq = 1;
        one.cu.data = all;
        one.cu.shape[0] = 2;
    }
    real->attn_fwd(dev, o, lse, qkv, sinks, &one, shape);
}

/* A near tie in the router changes the loss of one micro-batch only. Documents that attend to each other change the
 * loss of every micro-batch, so only a difference in all of them is an error. */
static void a_difference_in_all(void **state)
{
    (void)state;
    struct config cfg;
    struct run r;
    struct err err = {.msg = ""};
    open_run(&r, &cfg, "parity/case_a", "cpu", "fp32");
    real = r.dev.ops;
    struct ops leaky = *real;
    leaky.attn_fwd = leaky_attn;
    r.dev.ops = &leaky;
    n_wrong = r.arch.n_layer;
    assert_int_equal(packing_check_run(&r, (struct loader_pos){0, 0}, &err), 0);
    assert_true(n_wrong < 0);
    n_wrong = INT64_MAX;
    assert_int_equal(packing_check_run(&r, (struct loader_pos){0, 0}, &err), -1);
    assert_says(err.msg, "packed documents affect each other");
    run_close(&r);
}

static void a_single_document(void **state)
{
    (void)state;
    int32_t pos[] = {0, 1, 2};
    const struct batch b = {.n_tok = 3, .n_seq = 1, .pos = pos};
    struct packing_check p;
    packing_check_measure(NULL, &b, &p);
    assert_int_equal(p.n_seq, 1);
}

int test_packing(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(on_cpu), cmocka_unit_test(on_gpu),
                                       cmocka_unit_test(a_difference_in_all), cmocka_unit_test(a_single_document)};
    return cmocka_run_group_tests_name("packing", tests, NULL, NULL);
}

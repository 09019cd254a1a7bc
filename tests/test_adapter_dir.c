/* test_adapter_dir.c - which adapter eval, generate, export, inspect and lora.init_from load; the last lines of a
 * run. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/json.h"
#include "tests/process.h"

/* Trains two steps; returns the configuration. */
static const char *finished(const char *more)
{
    const char *config = process_config(more);
    if (RUN(config, "--set", "optim.lr=0.001", "--set", "output.save_every=1")) fail_msg("%s", said.err);
    return config;
}

/* The loss in the JSON of `eval`. Fails unless its "adapter" is this one; NULL: the base model. */
static double eval_loss(const char *adapter)
{
    struct err err;
    struct json_doc *doc = json_parse(said.out, (int64_t)strlen(said.out), "eval", &err);
    const char *name;
    double loss;
    assert_non_null(doc);
    assert_int_equal(json_get_f64(json_root(doc), "loss", &loss, &err), 0);
    if (adapter) {
        if (json_get_str(json_root(doc), "adapter", &name, &err)) fail_msg("%s", err.msg);
        assert_string_equal(name, adapter);
    } else {
        assert_int_equal(json_type(json_find(json_root(doc), "adapter")), JSON_NULL);
    }
    json_free(doc);
    return loss;
}

static void test_eval(void **state)
{
    (void)state;
    static const struct {
        const char *given, *found;
    } cases[] = {
        {"", "/adapter"},
        {"adapter", ""},
        {"best", ""},
        {"checkpoints/step-000001", "/adapter"},
        {"checkpoints/step-000001/adapter", ""},
    };
    const char *config = finished("");
    assert_int_equal(RUN("eval", config), 0);
    const double last = eval_loss(process_output(config, "adapter"));
    assert_int_equal(RUN("eval", config, "--base"), 0);
    assert_true(eval_loss(NULL) != last);
    for (int i = 0; i < MT_LEN(cases); i++) {
        char given[MT_PATH], found[MT_PATH + 16];
        snprintf(given, sizeof(given), "%s", process_output(config, cases[i].given));
        if (!*cases[i].given) given[strlen(given) - 1] = 0; /* no trailing slash */
        snprintf(found, sizeof(found), "%s%s", given, cases[i].found);
        if (RUN("eval", config, "--adapter", given)) fail_msg("%s", said.err);
        const double loss = eval_loss(found);
        if (i != 2) assert_true((loss == last) == (i < 2)); /* the best evaluation may be the last one */
    }
}

static void test_others(void **state)
{
    (void)state;
    const char *config = finished("");
    char run[MT_PATH], init[MT_PATH + 32], out[MT_PATH];
    snprintf(run, sizeof(run), "%s", process_output(config, "checkpoints/step-000002"));
    if (RUN("generate", config, "--adapter", run, "--prompt", "a", "--tokens", "1")) fail_msg("%s", said.err);
    if (RUN("inspect", run)) fail_msg("%s", said.err);
    assert_says(said.out, "lora_A");
    snprintf(out, sizeof(out), "%s/peft", scratch_dir());
    if (RUN("export", config, "--adapter", run, "--to", "peft", "--out", out)) fail_msg("%s", said.err);
    snprintf(init, sizeof(init), "lora.init_from=%s", run);
    snprintf(out, sizeof(out), "output.dir=%s/again", scratch_dir());
    if (RUN(config, "--set", init, "--set", out, "--set", "train.steps=1")) fail_msg("%s", said.err);
}

static void test_missing(void **state)
{
    (void)state;
    const char *config = process_config("");
    char dir[MT_PATH];
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    const char *const commands[] = {"eval", "generate", "export"};
    for (int i = 0; i < MT_LEN(commands); i++) {
        const char *more = i == 1 ? "--prompt=a" : i == 2 ? "--to=peft" : "--set=train.seed=0";
        assert_int_equal(RUN(commands[i], config, more), 1);
        assert_says(said.err, "out/adapter: train first, or give --adapter");
        assert_int_equal(RUN(commands[i], config, more, "--adapter", "/nowhere"), 1);
        assert_says(said.err, "--adapter /nowhere: no such directory");
        assert_int_equal(RUN(commands[i], config, more, "--adapter", config), 1);
        assert_says(said.err, "run.ini: not a directory");
        assert_int_equal(RUN(commands[i], config, more, "--adapter", dir), 1);
        assert_says(said.err, "no adapter: found neither adapter_config.json nor adapter/adapter_config.json");
    }
    assert_int_equal(RUN("eval", config, "--base", "--adapter", dir), 2);
}

/* The last lines of a run name its files. The commands in them work as printed, for any directory name. */
static void test_closing(void **state)
{
    (void)state;
    static char lines[sizeof(said.err)];
    const char *config = process_config("");
    char set[MT_PATH], line[3 * MT_PATH], out[MT_PATH - 16];
    snprintf(out, sizeof(out), "%s/it's an $out", scratch_dir());
    snprintf(set, sizeof(set), "output.dir=%s", out);
    if (RUN(config, "--set", set)) fail_msg("%s", said.err);
    static const char *const places[][2] = {
        {"adapter:", "adapter"}, {"checkpoints:", "checkpoints"}, {"report:", "report.html"}};
    for (int i = 0; i < MT_LEN(places); i++) {
        snprintf(line, sizeof(line), "\n%-12s %s/%s\n", places[i][0], out, places[i][1]);
        assert_says(said.err, line);
    }
    snprintf(line, sizeof(line), "\nbest:        %s/best (", out);
    assert_says(said.err, line);
    strcpy(lines, said.err);
    char *at = strstr(lines, "\nnext:\n");
    assert_non_null(at);
    int n = 0;
    for (at = strtok(at + strlen("\nnext:\n"), "\n"); at; at = strtok(NULL, "\n"), n++) {
        static const char *const names[] = {" eval ", " generate ", " export "};
        assert_true(n < 3 && strstr(at, names[n]));
        snprintf(line, sizeof(line), "%s%s > /dev/null 2>&1", at, n == 1 ? " --tokens 1" : "");
        if (system(line)) fail_msg("%s", at);
    }
    assert_int_equal(n, 3);
    assert_int_equal(RUN(config, "--set", set, "--set", "data.eval=", "--set", "train.resume=never"), 0);
    assert_says(said.err, "--set data.eval=FILE\n");
}

/* The suggested export is the one with the weights that training read, if the family has it. */
static void test_closing_of_qat(void **state)
{
    (void)state;
    static const char *const rows[][3] = {{"quant.weights=mxfp4", "quant.mode=merged", "--to merged-mxfp4\n"},
                                          {"quant.weights=mxfp4", "quant.mode=base", "--to vllm\n"},
                                          {"quant.weights=nvfp4", "quant.mode=merged", "--to vllm\n"}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        if (RUN(process_config(""), "--set", rows[i][0], "--set", rows[i][1], "--set", "train.steps=1"))
            fail_msg("%s", said.err);
        assert_says(said.err, rows[i][2]);
    }
}

int test_adapter_dir(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_eval),    cmocka_unit_test(test_others),         cmocka_unit_test(test_missing),
        cmocka_unit_test(test_closing), cmocka_unit_test(test_closing_of_qat),
    };
    return cmocka_run_group_tests_name("adapter_dir", tests, NULL, NULL);
}

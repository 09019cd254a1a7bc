/* test_adapter_dir.c - which adapter eval, generate, export, inspect and lora.init_from load; the last lines of a
 * run. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "data/safetensors.h"
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

/* The suggested export has the merged weights that training read, if the family has such an export; else vllm. */
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

/* lora.init_from is refused before the data are read; the error has all of `says`, NULL at the end. */
static void assert_init_refused(const char *adapter, const char *sets, const char *const *says)
{
    char all[MT_PATH + 512];
    snprintf(all, sizeof(all), "lora.init_from=%s %s", adapter, sets);
    assert_int_equal(process_run_sets(process_config(""), all), 1);
    for (; *says; says++) assert_says(said.err, *says);
    assert_null(strstr(said.err, "tokens with loss"));
    assert_null(strstr(said.err, "of weights in"));
}

/* Leaves out the tensors whose names contain `part`. */
static void remove_tensors(const char *path, const char *part)
{
    struct safetensors st;
    struct err err;
    int64_t n = 0;
    if (safetensors_open(&st, path, &err)) fail_msg("%s", err.msg);
    struct st_entry *entries = mem_array(st.n_tensors, sizeof(*entries));
    for (int64_t i = 0; i < st.n_tensors; i++) {
        const struct st_tensor *t = &st.tensors[i];
        if (strstr(t->name, part)) continue;
        entries[n] = (struct st_entry){.name = t->name, .dtype = t->dtype, .ndim = t->ndim, .data = t->data};
        memcpy(entries[n++].shape, t->shape, sizeof(t->shape));
    }
    assert_true(n < st.n_tensors);
    if (safetensors_write(path, entries, n, &err)) fail_msg("%s", err.msg);
    mem_free(entries);
    safetensors_close(&st);
}

static void test_init_settings(void **state)
{
    (void)state;
    const char *config = process_trained("lora.r=4 lora.alpha=8 lora.targets=q_proj,v_proj");
    char run[MT_PATH], adapter[MT_PATH], text[1 << 14], *at;
    struct err err;
    snprintf(run, sizeof(run), "%s", process_output(config, "adapter"));
    assert_init_refused(
        run, "lora.r=8 lora.alpha=16 lora.rslora=true lora.targets=q_proj,o_proj lora.layers=0",
        (const char *const[]){"lora.init_from", "lora.r = 4, but 8 is configured", "lora.alpha = 8, but 16 is",
                              "lora.rslora = false, but true is", "lora.targets = q_proj,v_proj, but q_proj,o_proj is",
                              "lora.layers = 0-1, but 0 is",
                              "set lora.r, lora.alpha, lora.rslora, lora.targets, lora.layers to", NULL});
    assert_init_refused(
        run, "lora.r=4 lora.alpha=8 lora.targets=q_proj",
        (const char *const[]){"lora.targets = q_proj,v_proj, but q_proj is configured: set lora.targets "
                              "to the adapter's value\n",
                              NULL});
    snprintf(adapter, sizeof(adapter), "%s", process_output(config, ADAPTER));
    remove_tensors(adapter, "layers.1.self_attn.v_proj");
    assert_init_refused(run, "lora.r=4 lora.alpha=8 lora.targets=q_proj,v_proj",
                        (const char *const[]){"its targets differ by layer",
                                              "v_proj is adapted in layers 0 and not in layers 1", NULL});
    snprintf(adapter, sizeof(adapter), "%s", process_output(config, "adapter/adapter_config.json"));
    process_read(adapter, text, sizeof(text));
    assert_non_null(at = strstr(text, "\"use_qalora\": false"));
    memcpy(at, "\"use_qalora\": true ", strlen("\"use_qalora\": false"));
    assert_non_null(at = strstr(text, "\"layer_replication\": null"));
    memcpy(at, "\"layer_replication\": 1111", strlen("\"layer_replication\": null"));
    assert_int_equal(file_write_atomic(adapter, text, (int64_t)strlen(text), &err), 0);
    assert_init_refused(
        run, "lora.r=4 lora.alpha=8 lora.targets=q_proj,v_proj",
        (const char *const[]){"sets `layer_replication`, `use_qalora`; only LoRA and DoRA are read", NULL});
}

/* A continued run takes the adapter of its checkpoint and does not read lora.init_from, whose adapter may have changed.
 */
static void test_init_of_a_run_that_continues(void **state)
{
    (void)state;
    char sets[MT_PATH + 64], adapter[MT_PATH];
    const char *first = process_trained("lora.r=4"), *config = process_config("");
    snprintf(sets, sizeof(sets), "lora.r=4 lora.init_from=%s train.steps=1", process_output(first, "adapter"));
    if (process_run_sets(config, sets)) fail_msg("%s", said.err);
    snprintf(adapter, sizeof(adapter), "%s", process_output(first, ADAPTER));
    remove_tensors(adapter, "layers.1");
    sets[strlen(sets) - 1] = '2';
    if (process_run_sets(config, sets)) fail_msg("%s", said.err);
    assert_says(said.err, "continuing after step 1");
}

int test_adapter_dir(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_eval),
        cmocka_unit_test(test_others),
        cmocka_unit_test(test_missing),
        cmocka_unit_test(test_closing),
        cmocka_unit_test(test_closing_of_qat),
        cmocka_unit_test(test_init_settings),
        cmocka_unit_test(test_init_of_a_run_that_continues),
    };
    return cmocka_run_group_tests_name("adapter_dir", tests, NULL, NULL);
}

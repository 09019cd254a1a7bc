/* test_cli.c - runs the executable: exit codes, messages, subcommands, files of a run. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "data/json/json.h"
#include "tests/process.h"
#include "train/version.h"

#define CASE "parity/case_a"

static bool exists(const char *path) { return access(path, F_OK) == 0; }

/* ---- usage */

static void test_help(void **state)
{
    (void)state;
    assert_int_equal(RUN("--help"), 0);
    assert_says(said.out, "moetrain CONFIG.ini");
    assert_says(said.out, "--set section.key=value");
    assert_string_equal(said.err, "");
    assert_int_equal(RUN("--version"), 0);
    assert_int_equal(strncmp(said.out, "moetrain " MT_VERSION, strlen("moetrain " MT_VERSION)), 0);
    static const char *const parts[] = {build_version, build_commit, "CUDA ",     "zlib ",  "jansson ",
                                        "PCRE2 ",      "utf8proc ",  "OpenBLAS ", "libcurl"};
    for (int i = 0; i < MT_LEN(parts); i++) assert_says(said.out, parts[i]);
}

#ifdef __x86_64__
/* Without OPENBLAS_CORETYPE moetrain chooses OpenBLAS's kernels. Prescott: kernels for SSE3, which OpenBLAS itself
 * takes for processors that it does not know. */
static void test_blas_kernels(void **state)
{
    (void)state;
    const char *dir = scratch_dir(), *const words[] = {"--version", NULL};
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        print_message("skip: no AVX2 and FMA here, for which OpenBLAS's kernels are chosen\n");
        skip();
    }
    assert_int_equal(process_finish(dir, process_start_shell(dir, "unset OPENBLAS_CORETYPE; exec \"$@\"", words)), 0);
    assert_says(said.out, "OpenBLAS ");
    assert_null(strstr(said.out, "Prescott"));
}
#endif

static void test_usage_errors(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(process_run((const char *const[]){NULL}), 2);
    assert_says(said.err, "moetrain CONFIG.ini");
    assert_int_equal(RUN("--frobnicate", config), 2);
    assert_says(said.err, "--frobnicate");
    assert_int_equal(RUN(config, "--set"), 2);
    assert_says(said.err, "--set");
    assert_int_equal(RUN(config, "another.ini"), 2);
    assert_says(said.err, "another.ini");
    assert_int_equal(RUN("train"), 2);
    assert_int_equal(RUN("inspect"), 2);
    assert_int_equal(RUN(config, "--adapter", "x"), 2);
    assert_false(exists(process_output(config, "")));
}

/* ---- errors of the user: exit code 1, one line with the error and its place */

static void assert_refused(const char *more, const char *part, const char *hint)
{
    const char *config = process_config(more);
    assert_int_equal(RUN(config), 1);
    assert_says(said.err, "moetrain: error: ");
    assert_says(said.err, part);
    assert_says(said.err, hint);
    assert_string_equal(said.out, "");
    assert_false(exists(process_output(config, "adapter")));
}

static void test_config_errors(void **state)
{
    (void)state;
    assert_refused("[optim]\nweigth_decay = 0\n", "run.ini:15: ", "\"weight_decay\"");
    assert_refused("[optmi]\nlr = 1e-4\n", "run.ini:14: ", "[optim]");
    assert_refused("[optim]\nlr = fast\n", "run.ini:15: ", "fast");
    assert_refused("[optim]\nschedule = cosin\n", "run.ini:15: ", "cosine");
    assert_refused("[lora]\ntargets = q_prj\n", "q_prj", "q_proj");
    assert_refused("[lora]\nlayers = 7\n", "layers", "7");
    assert_refused("[train]\nresume = /nowhere\n", "/nowhere", "");
    const char *config = process_config("");
    assert_int_equal(RUN(config, "--set", "optim.lrr=1"), 1);
    assert_says(said.err, "\"lr\"");
    assert_int_equal(RUN("/nowhere/run.ini"), 1);
    assert_says(said.err, "/nowhere/run.ini");
}

static void test_input_errors(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(RUN(config, "--set", "model.path=/nowhere"), 1);
    assert_says(said.err, "/nowhere");
    assert_int_equal(RUN(config, "--set", "data.train=/nowhere.jsonl"), 1);
    assert_says(said.err, "/nowhere.jsonl");
    assert_int_equal(RUN(config, "--set", "lora.init_from=/nowhere"), 1);
    assert_says(said.err, "/nowhere");
    assert_int_equal(RUN(config, "--set", "data.chat_kwargs={\"x\": 1}"), 1);
    assert_says(said.err, CASE " has no chat template: set data.chat_template");
    assert_int_equal(RUN("eval", config, "--adapter", "/nowhere"), 1);
    assert_says(said.err, "/nowhere");
    assert_int_equal(RUN("inspect", config), 1);
    assert_says(said.err,
                ": expected a checkpoint (a directory or a .safetensors file), an adapter directory or a run");
    assert_says(said.err, "run.ini");
    assert_false(exists(process_output(config, "adapter")));
}

/* PEFT has no dropout on routed experts. */
static void test_unused_dropout(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(process_run_sets(config, "train.steps=1 lora.dropout=0.1 lora.targets=experts"), 0);
    assert_says(said.err, "warning: lora.dropout = 0.1 has no effect: lora.targets has only routed experts");
    config = process_config("");
    assert_int_equal(process_run_sets(config, "train.steps=1 lora.dropout=0.1 lora.targets=experts,q_proj"), 0);
    assert_null(strstr(said.err, "has no effect"));
}

/* lora.alpha does not follow lora.r, so a small or large rank gives an unusual scale, and a warning. */
static void test_unusual_scale(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(RUN(config, "--set", "train.steps=1"), 0); /* r 2, alpha 32 */
    assert_says(said.err, "warning: lora.alpha = 32 with rank 2 scales the adapter of q_proj by 16; usual is 1 or 2");
    assert_int_equal(RUN(config, "--set", "train.steps=1", "--set", "train.resume=never", "--set", "lora.alpha=4"), 0);
    assert_null(strstr(said.err, "lora.alpha = "));
    assert_int_equal(RUN(config, "--set", "train.steps=1", "--set", "train.resume=never", "--set", "lora.rslora=yes"),
                     0);
    assert_null(strstr(said.err, "lora.alpha = "));
}

/* ---- commands that print and stop */

static void test_config_keys(void **state)
{
    (void)state;
    char keys[] = "path revision quantize quantize_attention train eval eval_split format seq_len packing shuffle "
                  "loss_on split_turns overlong chat_template r alpha dropout rslora targets layers init_from lr "
                  "schedule warmup_steps warmup_ratio min_lr_ratio weight_decay beta1 beta2 eps clip_norm device dtype "
                  "steps epochs "
                  "micro_batch grad_accum seed recompute aux_loss_coef aux_convention resume max_nonfinite every "
                  "at_start at_end max_batches dir save_every keep report";
    assert_int_equal(RUN("config"), 0);
    for (const char *key = strtok(keys, " "); key; key = strtok(NULL, " ")) {
        char line[64];
        snprintf(line, sizeof(line), "\n  %s ", key);
        assert_says(said.out, line);
    }
}

/* The dump reads back to the same dump; a later --set overrides an earlier one and the file. */
static void test_dump_config(void **state)
{
    (void)state;
    static char first[sizeof(said.out)];
    const char *config = process_config("");
    assert_int_equal(RUN(config, "--set", "train.steps=5", "--set", "train.steps=7", "--dump-config"), 0);
    assert_says(said.out, "\nsteps = 7\n");
    strcpy(first, said.out);
    FILE *f = fopen(config, "w");
    assert_non_null(f);
    assert_true(fputs(first, f) >= 0);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(RUN(config, "--dump-config"), 0);
    assert_string_equal(said.out, first);
    assert_false(exists(process_output(config, "")));
}

static void test_plan(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(RUN("plan", config), 0);
    assert_says(said.out, "\n  counts tensors; the program with");
    assert_says(said.out, "gate_up_proj");
    assert_says(said.out, "gradients");
    assert_says(said.out, "recompute = none");
    assert_says(said.out, "FLOP");
    assert_false(exists(process_output(config, ""))); /* a plan creates no output.dir */
    assert_int_equal(RUN("plan", config, "--set", "train.recompute=full"), 0);
    assert_says(said.out, "recompute = full");
}

/* A memory budget between two modes of recomputation: the plan saves activations in some layers, since they do not fit
 * in all. */
static void test_budget(void **state)
{
    (void)state;
    const char *config = process_config("");
    char layers[MT_PATH];
    snprintf(layers, sizeof(layers), "model.path=%s", fixture("../../configs/tiny-gptoss")); /* has 4 */
    char none[32], selective[32], full[32], set[64];
    double mib[3];
    int core, mixer, network, norms;
    assert_int_equal(RUN("plan", config, "--set", layers), 0);
    const char *at = strstr(said.out, ": none ");
    assert_non_null(at);
    assert_int_equal(
        sscanf(at, ": none %31[0-9.] MiB, selective %31[0-9.] MiB, full %31[0-9.] MiB", none, selective, full), 3);
    mib[0] = strtod(none, NULL), mib[1] = strtod(selective, NULL), mib[2] = strtod(full, NULL);
    for (int i = 0; i < 2; i++) {
        snprintf(set, sizeof(set), "train.memory_gb=%.9f", (mib[i] + mib[i + 1]) / 2 / 1024);
        assert_int_equal(RUN("plan", config, "--set", layers, "--set", set), 0);
        assert_says(said.out, " (chosen)");
        assert_int_equal(sscanf(strstr(said.out, "layers saved: "),
                                "layers saved: attention output %d, mixer %d, network %d, norms %d", &core, &mixer,
                                &network, &norms),
                         4);
        assert_true(core + mixer + network > 0 && core + mixer + network + norms < 16);
    }
    snprintf(set, sizeof(set), "train.memory_gb=%.9f", mib[2] * 0.98 / 1024);
    assert_int_equal(RUN(config, "--set", layers, "--set", set), 1);
    assert_says(said.err, "train.memory_gb");
    assert_says(said.err, "lower data.seq_len");
    assert_int_equal(RUN(config, "--set", "train.memory_gb=0.001"), 1); /* no sequence is short enough */
    assert_says(said.err, "the weights alone ");
    assert_says(said.err, "parallel.ep");
    assert_null(strstr(said.err, "lower data.seq_len"));
    assert_false(exists(process_output(config, "adapter")));
}

/* `eval` runs within the memory that the plan gives for an evaluation, which has no gradients and moments. */
static void test_eval_alone(void **state)
{
    (void)state;
    const char *config = process_config(""), *line = "holds no gradients and moments: ";
    char set[64];
    double alone;
    assert_int_equal(RUN("plan", config, "--set", "lora.r=64"), 0);
    assert_says(said.out, line);
    assert_int_equal(sscanf(strstr(said.out, line) + strlen(line), "%lf MiB", &alone), 1);
    snprintf(set, sizeof(set), "train.memory_gb=%.9f", 1.02 * alone / 1024);
    assert_int_equal(RUN("eval", config, "--set", "lora.r=64", "--base", "--set", set), 0);
    assert_int_equal(RUN(config, "--set", "lora.r=64", "--set", set), 1);
    assert_says(said.err, "training needs ");
}

static void test_inspect(void **state)
{
    (void)state;
    char path[MT_PATH];
    assert_int_equal(RUN("inspect", fixture(CASE)), 0);
    assert_says(said.out, "MXFP4");
    assert_says(said.out, "8 x 192 x 128");
    assert_says(said.out, "1745304"); /* parameters */
    snprintf(path, sizeof(path), "%s/adapter_init", fixture(CASE));
    assert_int_equal(RUN("inspect", path), 0);
    assert_says(said.out, "lora_A");
    assert_says(said.out, "mlp.experts.gate_up_proj");
}

/* ---- runs */

static void test_train_and_eval(void **state)
{
    (void)state;
    static const char *const files[] = {"adapter/adapter_config.json",
                                        "adapter/adapter_model.safetensors",
                                        "best",
                                        "checkpoints/step-000002",
                                        "metrics.jsonl",
                                        "report.html",
                                        "config.ini"};
    const char *config = process_config("[log]\nevery = 1\n[eval]\nat_start = false\n");
    double loss;
    struct err err;
    assert_int_equal(RUN("train", config), 0);
    for (int i = 0; i < MT_LEN(files); i++)
        if (!exists(process_output(config, files[i]))) fail_msg("%s was not written", files[i]);
    assert_says(said.out, "step 2/2");
    assert_null(strchr(said.out, '\r')); /* not a terminal: plain lines */
    assert_null(strchr(said.out, '\033'));

    assert_int_equal(RUN("eval", config, "--adapter", process_output(config, "adapter")), 0);
    struct json_doc *doc = json_parse(said.out, (int64_t)strlen(said.out), "eval", &err);
    assert_non_null(doc);
    assert_int_equal(json_get_f64(json_root(doc), "loss", &loss, &err), 0);
    assert_true(loss > 13 && loss < 15); /* random weights, vocabulary of 4096; uniform predictions would give 8.3 */
    json_free(doc);
}

/* Ctrl-C: exit code 130, the state is saved, and the next start continues from it. */
static void test_interrupt(void **state)
{
    (void)state;
    const char *dir = scratch_dir(), *config = process_config("[eval]\nat_start = false\nat_end = false\n");
    const char *const words[] = {config, "--set", "train.steps=1000000", "--set", "optim.schedule=constant", NULL};
    const struct timespec pause = {.tv_nsec = 20000000};
    const pid_t pid = process_start(dir, words);
    char text[4096] = "";
    for (int i = 0; i < 3000 && !strstr(text, "\"step\":2"); i++) {
        nanosleep(&pause, NULL);
        if (exists(process_output(config, "metrics.jsonl")))
            process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    }
    kill(pid, SIGINT);
    assert_int_equal(process_finish(dir, pid), 130);
    assert_true(exists(process_output(config, "checkpoints")));
    assert_true(exists(process_output(config, "adapter/adapter_model.safetensors"))); /* the last state */
    assert_says(said.err, "adapter:     ");
    const char *at = strstr(said.err, " after step ");
    assert_non_null(at);
    char steps[64];
    snprintf(steps, sizeof(steps), "train.steps=%lld", strtoll(at + strlen(" after step "), NULL, 10) + 1);
    if (RUN(config, "--set", "optim.schedule=constant", "--set", steps)) fail_msg("%s", said.err);
    assert_says(said.err, "continuing after step");
}

int test_cli(void)
{
    const struct CMUnitTest tests[] = {
#ifdef __x86_64__
        cmocka_unit_test(test_blas_kernels),
#endif
        cmocka_unit_test(test_help),           cmocka_unit_test(test_usage_errors),
        cmocka_unit_test(test_config_errors),  cmocka_unit_test(test_input_errors),
        cmocka_unit_test(test_unused_dropout), cmocka_unit_test(test_unusual_scale),
        cmocka_unit_test(test_config_keys),    cmocka_unit_test(test_dump_config),
        cmocka_unit_test(test_plan),           cmocka_unit_test(test_budget),
        cmocka_unit_test(test_eval_alone),     cmocka_unit_test(test_inspect),
        cmocka_unit_test(test_train_and_eval), cmocka_unit_test(test_interrupt),
    };
    return cmocka_run_group_tests_name("cli", tests, NULL, NULL);
}

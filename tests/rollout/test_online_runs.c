/* test_online_runs.c - whole runs of online RL: the same bytes after any number of kills and for any number of ranks;
 * the log; offline steps from the recorded rows; refused settings. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "data/json/text.h"
#include "tests/process.h"

enum { TEXT = 1 << 18 };

static char path[MT_PATH]; /* of the prompts */

static const char *config_of(const char *more)
{
    struct text_buf rows = {0};
    struct err err;
    char text[4096], row[128];
    snprintf(path, sizeof(path), "%s/prompts.jsonl", scratch_dir());
    for (int i = 0; i < 10; i++) {
        snprintf(row, sizeof(row), "{\"prompt\": \"The %d cats and\", \"answer\": \"%d\"}\n", i, 3 * i);
        text_put(&rows, row);
    }
    if (file_write_atomic(path, rows.text, rows.size, &err)) fail_msg("%s", err.msg);
    text_free(&rows);
    snprintf(
        text, sizeof(text),
        "keep = 0\n[objective]\nkind = grpo\nnum_generations = 4\nmax_completion_length = 12\n[optim]\nlr = 0.02\n"
        "schedule = constant\n[eval]\nevery = 2\nmax_batches = 2\n[reward]\nvarious = repetition n=1\nshort = length "
        "max=12 cache=8\n%s",
        more);
    return process_config(text); /* the configuration names documents; SETS replaces them by prompts */
}

#define SETS(config, ...)                                                                                              \
    config, "--set", prompts("data.train"), "--set", prompts("data.eval"), "--set", "train.steps=4", "--set",          \
        "train.micro_batch=2", "--set", "train.grad_accum=4", ##__VA_ARGS__

static const char *prompts(const char *key)
{
    static char sets[4][MT_PATH];
    static int next;
    char *s = sets[next++ % 4];
    snprintf(s, MT_PATH, "%s=%s", key, path);
    return s;
}

static void assert_same_run(const char *a, const char *b, int steps)
{
    char name[64];
    assert_same_output(a, b, ADAPTER);
    for (int i = 1; i <= steps; i++) {
        snprintf(name, sizeof(name), "rollouts/step-%06d.jsonl", i);
        assert_same_output(a, b, name);
    }
}

static void kills_and_ranks(void **state)
{
    (void)state;
    const double start = clock_ms();
    const char *one = config_of("");
    if (RUN(SETS(one, "--set", "output.save_every=3"))) fail_msg("%s", said.err);
    assert_says(said.out, "rollouts of step 4: reward ");
    assert_says(said.out, "eval at step 4: reward ");
    const long ms = (long)(clock_ms() - start);
    const char *killed = config_of("");
    const char *const words[] = {SETS(killed, "--set", "output.save_every=3"), NULL};
    process_in_pieces(words, MT_MAX(60, ms / 5));
    assert_same_run(one, killed, 4);
    static const char *const ranks[] = {"[parallel]\ncpu_ranks = 2\n", "[parallel]\ncpu_ranks = 4\n"};
    for (int i = 0; i < MT_LEN(ranks); i++) {
        const char *several = config_of(ranks[i]);
        if (RUN(SETS(several))) fail_msg("%s", said.err);
        assert_same_run(one, several, 4);
    }
}

/* The number of texts that the plan samples at once with a cache of so many GiB. */
static int at_once(const char *config, double gib)
{
    char limit[64];
    int n = 0;
    snprintf(limit, sizeof(limit), "generate.memory_gb=%.9g", gib);
    if (RUN("plan", SETS(config, "--set", "train.device=cpu", "--set", limit))) fail_msg("%s", said.err);
    const char *at = strstr(said.out, "sampling between steps: up to ");
    if (!at || sscanf(at, "sampling between steps: up to %d", &n) != 1) fail_msg("%s", said.out);
    return n;
}

/* Eight texts are asked for. Memory for fewer gives the largest of 7, 6, 5, 4, 3, 2, 1 that fits. */
static void texts_at_once(void **state)
{
    (void)state;
    const char *config = config_of("");
    double most = 2e-4; /* GiB for 8 texts */
    while (at_once(config, most) < 8) most *= 1.02;
    assert_int_equal(at_once(config, most * 0.9), 7);
    assert_int_equal(at_once(config, most * 0.78), 6);
    assert_int_equal(at_once(config, most * 0.66), 5);
    assert_int_equal(at_once(config, most * 0.53), 4);
    assert_int_equal(at_once(config, most * 0.4), 3);
}

/* The number of event `event` at `step`. */
static double number_of(const char *config, const char *event, int step, const char *key)
{
    static char text[TEXT];
    char want[64];
    double value = -1e9;
    struct err err;
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    snprintf(want, sizeof(want), "{\"event\":\"%s\",\"step\":%d,", event, step);
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        if (strncmp(line, want, strlen(want)) != 0) continue;
        struct json_doc *doc = json_parse(line, (int64_t)strlen(line), "metrics", &err);
        assert_non_null(doc);
        if (json_get_f64(json_root(doc), key, &value, &err)) fail_msg("%s", err.msg);
        json_free(doc);
    }
    if (value < -1e8) fail_msg("no event %s of step %d", event, step);
    return value;
}

/* Log-probabilities of sampler and trainer agree. A generation batch trains several steps, and each row is in several
 * of them. */
static void log_and_iterations(void **state)
{
    (void)state;
    const char *run = config_of("");
    if (RUN(SETS(run, "--set", "objective.steps_per_generation=2", "--set", "objective.num_iterations=2", "--set",
                 "objective.temperature=0.7", "--set", "output.save_every=1")))
        fail_msg("%s", said.err);
    assert_true(number_of(run, "rollouts", 1, "rows") == 16);
    assert_true(number_of(run, "rollouts", 1, "sampling/own_logp_difference/mean") < 1e-4);
    assert_true(number_of(run, "rollouts", 1, "completions/mean_length") <= 12);
    assert_int_not_equal(access(process_output(run, "rollouts/step-000002.jsonl"), F_OK), 0);
    /* a run that stops and continues within one batch of samples */
    const char *part = config_of("");
    if (RUN(SETS(part, "--set", "objective.steps_per_generation=2", "--set", "objective.num_iterations=2", "--set",
                 "objective.temperature=0.7", "--set", "output.save_every=1", "--set", "train.steps=3")))
        fail_msg("%s", said.err);
    if (RUN(SETS(part, "--set", "objective.steps_per_generation=2", "--set", "objective.num_iterations=2", "--set",
                 "objective.temperature=0.7", "--set", "output.save_every=1")))
        fail_msg("%s", said.err);
    assert_same_output(run, part, ADAPTER);
    for (int step = 1; step <= 4; step++)
        assert_true(number_of(run, "step", step, "num_tokens") == number_of(part, "step", step, "num_tokens"));
    const double tokens[] = {number_of(run, "step", 1, "tokens"), number_of(run, "step", 2, "tokens")};
    assert_true(number_of(run, "step", 4, "num_tokens") == tokens[0] + tokens[1]);
    /* every batch counts once, however often it is trained on */
    if (RUN(SETS(part, "--set", "objective.steps_per_generation=2", "--set", "objective.num_iterations=2", "--set",
                 "objective.temperature=0.7", "--set", "output.save_every=1", "--set", "train.steps=5")))
        fail_msg("%s", said.err);
    assert_true(number_of(part, "step", 5, "num_tokens") < 2.5 * (tokens[0] + tokens[1]));
}

/* A step of offline training on the recorded rows of a batch gives the adapter of the online step. */
static void offline(void **state)
{
    (void)state;
    char rows[MT_PATH];
    const char *online = config_of(""), *recorded = config_of("");
    if (RUN(SETS(online, "--set", "train.steps=1"))) fail_msg("%s", said.err);
    snprintf(rows, sizeof(rows), "data.train=%s", process_output(online, "rollouts/step-000001.jsonl"));
    if (RUN(SETS(recorded, "--set", "train.steps=1", "--set", "data.format=rollouts", "--set", rows, "--set",
                 "data.eval=", "--set", "eval.every=0")))
        fail_msg("%s", said.err);
    assert_null(strstr(said.err, "moetrain eval")); /* rollouts have no held-out loss */
    assert_true(adapter_error(online, recorded) < 1e-4);
}

/* The commands that the end of a run names, and others that read its data, accept rows of prompts. */
static void commands_after_a_run(void **state)
{
    (void)state;
    char reward[64], rows[MT_PATH];
    const char *run = config_of("");
    if (RUN(SETS(run))) fail_msg("%s", said.err);
    snprintf(reward, sizeof(reward), "\"reward\":%.17g,", number_of(run, "eval", 4, "eval_reward"));
    if (RUN("eval", SETS(run))) fail_msg("%s", said.err);
    assert_says(said.out, reward);
    if (RUN("eval", SETS(run, "--set", "train.device=cpu", "--set", "parallel.cpu_ranks=2"))) fail_msg("%s", said.err);
    assert_says(said.out, reward);
    if (RUN("export", SETS(run, "--to", "vllm"))) fail_msg("%s", said.err);
    assert_says(said.err, "written and verified");
    if (RUN("check", SETS(run))) fail_msg("%s", said.err);
    assert_says(said.out, "verdict: ok");
    if (RUN("tokens", SETS(run))) fail_msg("%s", said.err);
    assert_says(said.out, "c|ats| and|");
    assert_int_equal(RUN("eval", SETS(run, "--generate", "--verifier", "exact")), 1);
    assert_says(said.err, "data.eval has prompts of online RL: name their file by --input FILE");
    snprintf(rows, sizeof(rows), "data.train=%s", process_output(run, "rollouts/step-000001.jsonl"));
    for (int i = 0; i < 2; i++) {
        if (RUN(i ? "tokens" : "check",
                SETS(run, "--set", "data.format=rollouts", "--set", rows, "--set", "data.eval=", "--set",
                     "eval.every=0", "--set", i ? "data.seq_len=64" : "data.seq_len=16")))
            fail_msg("%s", said.err);
        assert_says(said.out, i ? " with loss\n" : "verdict: ok");
        assert_null(strstr(said.out, ", 0 with loss\n"));
    }
}

/* A difference of log-probabilities above rollout.max_logp_difference ends the run, also without importance weights for
 * the sampler. */
static void sampler_is_compared(void **state)
{
    (void)state;
    static const char *const sets[][2] = {{"objective.is_mode=none", "rollout.replay=true"},
                                          {"objective.is_mode=none", "rollout.replay=false"},
                                          {"objective.old=rows", "rollout.replay=true"},
                                          {"objective.is_mode=auto", "rollout.replay=true"}};
    for (int i = 0; i < MT_LEN(sets); i++) {
        const char *config = config_of("");
        assert_int_equal(RUN(SETS(config, "--set", sets[i][0], "--set", sets[i][1], "--set", "train.steps=1")), 0);
        assert_int_equal(RUN(SETS(config_of(""), "--set", sets[i][0], "--set", sets[i][1], "--set",
                                  "rollout.max_logp_difference=1e-12")),
                         1);
        assert_says(said.err, "step 1: log-probabilities of trainer and sampler differ by ");
    }
}

/* Quantised inputs: sampler and trainer differ by a code here and there, which is no error. */
static void quantised_inputs(void **state)
{
    (void)state;
    static const char *const seeds[] = {"train.seed=1", "train.seed=2", "train.seed=3", "train.seed=4"};
    for (int i = 0; i < MT_LEN(seeds); i++)
        if (RUN(SETS(config_of(""), "--set", "quant.activations=int8", "--set", seeds[i]))) fail_msg("%s", said.err);
}

/* Ctrl-C does not wait for a reward; the samples are not lost. */
static void stopped_while_waiting(void **state)
{
    (void)state;
    const char *config = config_of("");
    const char *const words[] = {
        SETS(config, "--set", "reward.slow=command sleep 100", "--set", "data.eval=", "--set", "eval.every=0"), NULL};
    const char *dir = scratch_dir(), *part = process_output(config, "rollouts/step-000001.part-0");
    static char text[TEXT];
    int n_line = 0;
    const pid_t pid = process_start(dir, words);
    for (int i = 0; i < 1000 && n_line < 8; i++) { /* until the journal has all 8 samples */
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
        n_line = 0;
        if (file_exists(part)) process_read(part, text, sizeof(text));
        for (const char *c = text; (c = strchr(c, '\n')); c++) n_line++;
    }
    assert_int_equal(n_line, 8);
    const double start = clock_ms();
    kill(pid, SIGINT);
    assert_int_equal(process_finish(dir, pid), 130);
    assert_true(clock_ms() - start < 20e3);
    if (RUN(SETS(config, "--set", "train.steps=1"))) fail_msg("%s", said.err);
}

/* Null rewards are counted. Where every completion is truncated, a message names that and no program. */
static void nulls_and_truncation(void **state)
{
    (void)state;
    char program[MT_PATH + 64];
    snprintf(program, sizeof(program), "reward.p=command python3 -S \"%s\" null 12",
             fixture("../generate/reward_program.py"));
    const char *some = config_of("");
    if (RUN(SETS(some, "--set", "reward.NAME=", "--set", program, "--set", "eval.every=1", "--set", "train.steps=2")))
        fail_msg("%s", said.err);
    assert_says(said.out, ", 1 without a reward), ");
    assert_true(number_of(some, "rollouts", 1, "reward_null") == 1);
    assert_true(number_of(some, "rollouts", 1, "rewards/p/null") == 1);
    assert_true(number_of(some, "rollouts", 2, "reward_null") == 0);
    assert_true(number_of(some, "eval", 1, "eval_reward_null") == 0);
    static char page[1 << 18];
    process_read(process_output(some, "report.html"), page, sizeof(page));
    assert_says(page, "<h2>Rows without a reward</h2>");
#define CUT "objective.max_completion_length=1", "--set", "train.steps=1", "--set", "objective.mask_truncated="
    const char *cut = config_of("");
    if (RUN(SETS(cut, "--set", CUT "true", "--set", "reward.form=format"))) fail_msg("%s", said.err);
    assert_true(number_of(cut, "rollouts", 1, "rewards/form/mean") == 0); /* no answer ended */
    assert_says(said.err, "step 1: every completion was truncated, so none has loss (objective.mask_truncated): raise "
                          "objective.max_completion_length");
    if (RUN(SETS(config_of(""), "--set", CUT "false", "--set", "reward.none=last_number reference=absent")))
        fail_msg("%s", said.err);
    assert_says(said.err, "step 1: every completion was truncated; that may be why the reward none is null for all of "
                          "them: raise objective.max_completion_length");
    assert_null(strstr(said.err, "its program"));
}

/* The message of eval.patience names rewards. */
static void patience(void **state)
{
    (void)state;
    static char page[TEXT];
    const char *config = config_of("");
    if (RUN(SETS(config, "--set", "reward.NAME=", "--set", "reward.same=regex pattern=^", "--set", "eval.every=1",
                 "--set", "eval.patience=1")))
        fail_msg("%s", said.err);
    assert_says(said.err, "the last 1 evaluations had no higher reward than 1.0000 of step 0");
    process_read(process_output(config, "report.html"), page, sizeof(page));
    assert_says(page, "no higher held-out reward for 1 evaluation");
}

static void refused(void **state)
{
    (void)state;
    static const struct {
        const char *sets, *words;
    } rows[] = {{"objective.num_generations=3", "whole groups"},
                {"reward.NAME=", "[reward]"},
                {"objective.max_completion_length=64", "data.seq_len"},
                {"environment.command=cat", "environment.command needs messages"},
                {"lora.dropout=0.1", "lora.dropout"}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        assert_int_not_equal(RUN(SETS(config_of(""), "--set", rows[i].sets)), 0);
        assert_says(said.err, rows[i].words);
    }
}

int test_online_runs(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(kills_and_ranks),
                                       cmocka_unit_test(texts_at_once),
                                       cmocka_unit_test(log_and_iterations),
                                       cmocka_unit_test(offline),
                                       cmocka_unit_test(commands_after_a_run),
                                       cmocka_unit_test(sampler_is_compared),
                                       cmocka_unit_test(quantised_inputs),
                                       cmocka_unit_test(stopped_while_waiting),
                                       cmocka_unit_test(nulls_and_truncation),
                                       cmocka_unit_test(patience),
                                       cmocka_unit_test(refused)};
    return cmocka_run_group_tests_name("online_runs", tests, NULL, NULL);
}

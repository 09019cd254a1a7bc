/* test_policy.c - training runs over recorded rollouts: any division of a step into micro-batches and ranks gives the
 * same result; runs continue within a generation; rows without a gradient; rows of `generate`; refusals. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "tests/process.h"

static const char *config_of(const char *objective, const char *more)
{
    char text[4 * MT_PATH];
    snprintf(text, sizeof(text),
             "[objective]\nnum_generations = 4\n%s\n[optim]\nschedule = constant\nwarmup_ratio = 0\n"
             "lr = 5e-4\n%s",
             objective, more);
    return process_config(text);
}

/* 32 rows in groups of four. */
static int run_on(const char *rows, const char *config, const char *sets)
{
    char text[3 * MT_PATH];
    snprintf(text, sizeof(text), "data.train=%s data.eval= data.format=rollouts %s", rows, sets);
    return process_run_sets(config, text);
}

static void trained(const char *config, const char *sets)
{
    if (run_on(fixture("rl/dr_grpo/train.jsonl"), config, sets)) fail_msg("training failed:\n%s", said.err);
}

/* A number of the n-th step in metrics.jsonl. */
static double metric(const char *config, int n, const char *key)
{
    static char text[1 << 17];
    struct err err;
    double value = NAN;
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        if (!strstr(line, "\"event\":\"step\"") || n--) continue;
        struct json_doc *doc = json_parse(line, (int64_t)strlen(line), "metrics", &err);
        assert_non_null(doc);
        if (json_get_f64(json_root(doc), key, &value, &err)) fail_msg("%s", err.msg);
        json_free(doc);
        return value;
    }
    fail_msg("no %s of step %d", key, n);
    return value;
}

/* Two steps on one generation are the same for any division into micro-batches and ranks, and any recomputation. */
static void a_step_may_be_divided(void **state)
{
    (void)state;
    static const char *const objectives[] = {
        "kind = grpo\nbeta = 0.1\nkl = k3_ratio\nnum_iterations = 2",
        "kind = dr_grpo\nis_mode = token_truncate",
        "kind = dapo\ntop_entropy_quantile = 0.35\nentropy_coef = 0.01\nnum_iterations = 2\nmask_truncated = true",
        "kind = gspo\nnum_iterations = 2\nepsilon = 0.1",
        "kind = rloo\nnum_iterations = 2\nscale_rewards = batch",
        "kind = cispo\nnum_iterations = 2\ntemperature = 0.8"};
    static const char *const cuts[] = {"train.steps=2 train.micro_batch=8 train.grad_accum=1",
                                       "train.steps=2 train.micro_batch=4 train.grad_accum=2",
                                       "train.steps=2 train.micro_batch=1 train.grad_accum=8"};
    static const char *const keys[] = {"loss",      "grad_norm", "entropy",    "reward",
                                       "ratio/max", "ratio/min", "ratio/mean", "clip_ratio/region_mean"};
    for (int i = 0; i < MT_LEN(objectives); i++) {
        const char *run[3];
        for (int k = 0; k < 3; k++) {
            run[k] = config_of(objectives[i], "");
            trained(run[k], cuts[k]);
            for (int step = 0; step < 2; step++)
                for (int j = 0; j < MT_LEN(keys); j++)
                    assert_close(metric(run[k], step, keys[j]), metric(run[0], step, keys[j]), 1e-4);
        }
        /* the pass that gave the old log-probabilities has the same bits */
        assert_close(metric(run[0], 0, "ratio/mean"), 1, 0);
        const char *ranks = config_of(objectives[i], "[parallel]\ncpu_ranks = 2\n"),
                   *full = config_of(objectives[i], "[train]\nrecompute = full\n");
        trained(ranks, cuts[1]);
        assert_same_output(run[1], ranks, ADAPTER);
        for (int j = 0; j < MT_LEN(keys); j++)
            assert_close(metric(run[1], 1, keys[j]), metric(ranks, 1, keys[j]), 1e-12);
        trained(full, cuts[1]);
        assert_same_output(run[1], full, ADAPTER);
    }
}

/* The same bytes with any number of ranks, also where a rank has several micro-batches of a step. */
static void any_number_of_ranks(void **state)
{
    (void)state;
    static const char *const objectives[] = {"kind = grpo\nbeta = 0.1\nnum_iterations = 2", "kind = gspo",
                                             "kind = dapo\ntop_entropy_quantile = 0.35\nentropy_coef = 0.01"};
    static const char *const keys[] = {"loss", "grad_norm", "entropy", "ratio/max", "ratio/mean", "kl"};
    const char *const sets = "train.steps=3 train.micro_batch=2 train.grad_accum=6 data.max_samples=24";
    for (int i = 0; i < MT_LEN(objectives); i++) {
        const char *one = config_of(objectives[i], "");
        trained(one, sets);
        for (int n = 2; n <= 6; n++) {
            char more[64];
            snprintf(more, sizeof(more), "[parallel]\ncpu_ranks = %d\nzero = %s\n", n, n == 3 ? "true" : "false");
            if (6 % n) continue;
            const char *several = config_of(objectives[i], more);
            trained(several, sets);
            assert_same_output(one, several, ADAPTER);
            for (int j = 0; j < 3 * MT_LEN(keys); j++)
                if (i == 0 || j % MT_LEN(keys) < 5)
                    assert_close(metric(one, j / MT_LEN(keys), keys[j % MT_LEN(keys)]),
                                 metric(several, j / MT_LEN(keys), keys[j % MT_LEN(keys)]), 0);
        }
    }
}

/* Six steps at once, and with a stop after each step: within an iteration, between iterations, between generations. */
static void a_run_continues(void **state)
{
    (void)state;
    static const char *const objectives[] = {"kind = grpo\nnum_iterations = 2\nsteps_per_generation = 2\nbeta = 0.1",
                                             "kind = rloo\nnum_iterations = 2\nsteps_per_generation = 2"};
    const char *const sets = "train.micro_batch=2 train.grad_accum=4";
    char text[128];
    for (int i = 0; i < MT_LEN(objectives); i++) {
        const char *whole = config_of(objectives[i], ""), *parts = config_of(objectives[i], "");
        snprintf(text, sizeof(text), "%s train.steps=6", sets);
        trained(whole, text);
        for (int stop = 1; stop <= 6; stop++) {
            snprintf(text, sizeof(text), "%s train.steps=%d", sets, stop);
            trained(parts, text);
            char name[64];
            snprintf(name, sizeof(name), "checkpoints/step-%06d/generation.safetensors", stop);
            assert_int_equal(file_exists(process_output(parts, name)), stop != 4);
        }
        assert_same_output(whole, parts, ADAPTER);
        assert_int_equal(run_on(fixture("rl/dr_grpo/train.jsonl"), parts,
                                "train.micro_batch=2 train.grad_accum=4 train.steps=8 objective.num_iterations=3"),
                         1);
        assert_says(said.err, "objective.num_iterations");
    }
}

static const char *rows_file(const char *text)
{
    static char path[MT_PATH];
    struct err err;
    snprintf(path, sizeof(path), "%s/rows.jsonl", scratch_dir());
    if (file_write_atomic(path, text, (int64_t)strlen(text), &err)) fail_msg("%s", err.msg);
    return path;
}

#define ROW(completion, more) "{\"prompt_ids\": [5, 6, 7], \"completion_ids\": " completion more "}\n"

/* Equal rewards, null rewards and masked rows give no gradient and no NaN. A KL term still gives a gradient. */
static void rows_without_gradient(void **state)
{
    (void)state;
    static const char *const kinds[] = {"dapo", "gspo", "rloo\nbeta = 0"};
    static const char *const rows[] = {
        ROW("[8, 9]", ", \"reward\": 0.3, \"group\": 1") ROW("[10]", ", \"reward\": 0.3, \"group\": 1"),
        ROW("[8, 9]", ", \"reward\": null, \"group\": 1") ROW("[10]", ", \"reward\": 1, \"group\": 1"),
        ROW("[8, 9]", ", \"reward\": 0, \"group\": 1, \"mask\": [0, 0]")
            ROW("[10]", ", \"reward\": 1, \"group\": 1, \"mask\": [0]")};
    char text[256];
    for (int i = 0; i < MT_LEN(kinds); i++)
        for (int k = 0; k < MT_LEN(rows); k++) {
            snprintf(text, sizeof(text), "kind = %s", kinds[i]);
            const char *config = config_of(text, "");
            if (run_on(rows_file(rows[k]), config, "objective.num_generations=2 train.grad_accum=2 train.steps=2"))
                fail_msg("%s, rows %d:\n%s", kinds[i], k, said.err);
            assert_close(metric(config, 0, "loss"), 0, 1e-12);
            assert_close(metric(config, 1, "grad_norm"), 0, 0);
        }
    const char *config = config_of("kind = grpo\nbeta = 0.1", "[lora]\nalpha = 16\n");
    snprintf(text, sizeof(text),
             "objective.num_generations=2 train.grad_accum=2 train.steps=2 lora.r=8 "
             "lora.init_from=%s/adapter_init",
             fixture("parity/case_a"));
    if (run_on(rows_file(rows[0]), config, text)) fail_msg("%s", said.err);
    assert_true(metric(config, 0, "grad_norm") > 0 && metric(config, 0, "kl") > 0);
}

/* Rows that `generate --format rollouts` writes can be trained on, with null rewards. */
static void rows_of_generate(void **state)
{
    (void)state;
    char rows[MT_PATH + 32], sets[2 * MT_PATH];
    const char *config = config_of("kind = grpo", ""),
               *prompts = rows_file("{\"prompt\": \"a b c\"}\n{\"prompt\": \"d\"}\n");
    snprintf(rows, sizeof(rows), "%s/rollouts.jsonl", scratch_dir());
    if (RUN("generate", config, "--base", "--input", prompts, "--output", rows, "--format", "rollouts", "--samples",
            "4", "--tokens", "6", "--set", "data.eval=", "--set", "data.format=rollouts"))
        fail_msg("%s", said.err);
    snprintf(sets, sizeof(sets), "train.micro_batch=4 train.grad_accum=2 train.steps=1 train.seed=0");
    if (run_on(rows, config, sets)) fail_msg("%s", said.err);
    assert_says(said.err, "8 rows, 8 with log-probabilities");
    assert_says(said.err, "no row of data.train has a reward");
    assert_close(metric(config, 0, "sampling/sampling_logp_difference/max"), 0, 1e-4);
    assert_close(metric(config, 0, "sampling/importance_sampling_ratio/mean"), 1, 1e-3);
    assert_close(metric(config, 0, "loss"), 0, 1e-12);
}

/* A step in which all rows have the importance weight 0 gives a warning. */
static void rows_of_another_sampler(void **state)
{
    (void)state;
    static const char rows[] = ROW("[8]", ", \"reward\": 1, \"group\": 1, \"logprobs\": [-40]")
        ROW("[10]", ", \"reward\": 0, \"group\": 1, \"logprobs\": [%s]");
    char text[512];
    for (int i = 0; i < 2; i++) {
        const char *config = config_of("kind = grpo", "");
        snprintf(text, sizeof(text), rows, i ? "null" : "-50");
        if (run_on(rows_file(text), config, "objective.num_generations=2 train.grad_accum=2 train.steps=1"))
            fail_msg("%s", said.err);
        assert_int_equal(strstr(said.err, "step 1: no completion has loss") == NULL, i);
        assert_int_equal(metric(config, 0, "grad_norm") > 0, i);
    }
}

/* Training with recorded experts of the sampler. If they are those that the trainer would choose, the first step is the
 * same except for rounding. Either every row of a file has recorded experts or none. */
static void rows_with_experts(void **state)
{
    (void)state;
    static const char *const sets = "train.micro_batch=4 train.grad_accum=2 train.steps=2 objective.num_iterations=2";
    static char text[1 << 17];
    char rows[2][MT_PATH + 32];
    const char *run[2];
    char prompts[MT_PATH];
    snprintf(prompts, sizeof(prompts), "%s", rows_file("{\"prompt\": \"a b c\"}\n{\"prompt\": \"d\"}\n"));
    for (int i = 0; i < 2; i++) {
        run[i] = config_of("kind = grpo\nbeta = 0.1", "");
        snprintf(rows[i], sizeof(rows[i]), "%s/rollouts.jsonl", scratch_dir());
        if (RUN("generate", run[i], "--base", "--input", prompts, "--output", rows[i], "--format", "rollouts",
                "--samples", "4", "--temperature", "1", "--tokens", "6", "--set", "data.eval=", "--set",
                "data.format=rollouts", i ? "--routing" : NULL))
            fail_msg("%s", said.err);
        process_read(rows[i], text, sizeof(text));
        for (char *at = strstr(text, "\"reward\": null"), n = 0; at; at = strstr(at, "\"reward\": null"), n++)
            memcpy(at, n % 3 ? "\"reward\": 1   " : "\"reward\": 0.5 ", 14);
        snprintf(rows[i], sizeof(rows[i]), "%s", rows_file(text));
        if (run_on(rows[i], run[i], sets)) fail_msg("%s", said.err);
        assert_true(!strstr(said.err, "experts are those of the sampler") == !i);
    }
    assert_close(metric(run[0], 0, "grad_norm"), metric(run[1], 0, "grad_norm"), 1e-3);
    assert_close(metric(run[0], 0, "entropy"), metric(run[1], 0, "entropy"), 1e-4);
    /* after an update run 0 may choose other experts, run 1 keeps those of the sampler */
    assert_true(metric(run[0], 1, "grad_norm") != metric(run[1], 1, "grad_norm"));
    assert_close(metric(run[1], 0, "ratio/mean"), 1, 0);
    char *at = strstr(text, "\"routing\"");
    assert_non_null(at);
    at[1] = 'x';
    assert_int_equal(run_on(rows_file(text), config_of("kind = grpo", ""), sets), 1);
    assert_says(said.err, "7 of 8 rows have `routing`, and row 1 does not");
}

static void refusals(void **state)
{
    (void)state;
    static const struct {
        const char *objective, *sets, *words;
    } all[] = {
        {"kind = grpo", "data.format=auto objective.max_completion_length=8", "set data.format = rollouts"},
        {"kind = sft", "objective.num_generations=8", "the objective decides the form"},
        {"kind = grpo", "data.eval_split=0.1", "has no held-out loss"},
        {"kind = grpo", "train.grad_accum=3", "is not whole groups of objective.num_generations = 4"},
        {"kind = grpo", "train.micro_batch=4 train.grad_accum=3", "32 rows are not whole generations of 12"},
        {"kind = grpo", "objective.num_generations=8 train.grad_accum=8", "row 1: group 0 has 4 adjacent rows"},
        {"kind = grpo", "objective.delta=1.1", "objective.delta = 1.1 must be above"},
        {"kind = grpo", "objective.is_floor=3", "must be below objective.is_cap"},
        {"kind = grpo", "objective.kl=k1", "which only rloo does"},
        {"kind = rloo", "objective.kl=k3", "RLOO subtracts k1"},
        {"kind = rloo", "objective.is_mode=token_mask", "one loss per row"},
        {"kind = rloo", "objective.scale_rewards=group", "set batch or none"},
        {"kind = rloo", "objective.delta=2", "has no effect with objective.kind = rloo"},
        {"kind = cispo", "objective.epsilon=0.2", "has no effect with objective.kind = cispo"},
        {"kind = grpo", "objective.gamma=1", "has no effect with objective.kind = grpo"},
        {"kind = grpo", "objective.old=rows objective.is_mode=token_mask", "leave is_mode out"},
        {"kind = grpo", "objective.old=rows train.grad_accum=4", "has no log-probability of token 0"},
        {"kind = grpo", "objective.reference=initial", "needs lora.init_from"},
        {"kind = dpo", "data.format=auto", "objective.num_generations = 4 has no effect with objective.kind = dpo"},
    };
    for (int i = 0; i < MT_LEN(all); i++) {
        char sets[256];
        const char *config = config_of(all[i].objective, "");
        snprintf(sets, sizeof(sets), "train.grad_accum=4 %s", all[i].sets);
        assert_int_equal(run_on(fixture("rl/dr_grpo/train.jsonl"), config, sets), 1);
        assert_says(said.err, all[i].words);
    }
}

int test_policy(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_may_be_divided), cmocka_unit_test(any_number_of_ranks),
        cmocka_unit_test(a_run_continues),       cmocka_unit_test(rows_without_gradient),
        cmocka_unit_test(rows_of_generate),      cmocka_unit_test(rows_of_another_sampler),
        cmocka_unit_test(rows_with_experts),     cmocka_unit_test(refusals)};
    return cmocka_run_group_tests_name("policy", tests, NULL, NULL);
}

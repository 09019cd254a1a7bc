/* test_preference.c - training runs of preference objectives: known losses of the first step, the same step for any
 * division into micro-batches and ranks, prompts that answers share, resume, refused settings. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "tests/process.h"
#include "train/config/config.h"

/* Rows of fixtures/preference in a run of the parity case. */
static const char *config_of(const char *objective, const char *more)
{
    char text[4 * MT_PATH];
    snprintf(text, sizeof(text), "[objective]\n%s\n[optim]\nschedule = constant\nwarmup_ratio = 0\nlr = 5e-3\n%s",
             objective, more);
    return process_config(text);
}

static int run_on(const char *rows, const char *config, const char *a, const char *b)
{
    char train[MT_PATH + 64], eval[MT_PATH + 64];
    snprintf(train, sizeof(train), "data.train=%s/%s/train.jsonl", fixture("preference"), rows);
    snprintf(eval, sizeof(eval), "data.eval=%s/%s/eval.jsonl", fixture("preference"), rows);
    char sets[3 * MT_PATH];
    snprintf(sets, sizeof(sets), "%s %s %s %s", train, eval, a, b);
    return process_run_sets(config, sets);
}

static void trained(const char *rows, const char *config, const char *a, const char *b)
{
    if (run_on(rows, config, a, b)) fail_msg("training failed:\n%s", said.err);
}

/* A number of the n-th event of a kind in metrics.jsonl, n from 0. */
static double metric(const char *config, const char *event, int n, const char *key)
{
    static char text[1 << 17];
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

/* A new adapter is the base model: the loss is ln 2, of IPO 1 / (4 beta^2), and no pair is right. */
static void a_new_adapter_is_the_reference(void **state)
{
    (void)state;
    static const struct {
        const char *objective, *rows;
        double loss;
    } all[] = {{"kind = dpo", "dpo", 0.69314718055994531},
               {"kind = dpo\nlabel_smoothing = 0.2", "dpo", 0.69314718055994531},
               {"kind = ipo\nbeta = 0.5", "dpo", 1},
               {"kind = kto\ndesirable_weight = 3", "kto", -1}};
    for (int i = 0; i < MT_LEN(all); i++) {
        const char *config = config_of(all[i].objective, "");
        trained(all[i].rows, config, "train.steps=2", "train.grad_accum=2");
        if (all[i].loss > 0) assert_close(metric(config, "step", 0, "loss"), all[i].loss, 1e-12);
        assert_close(metric(config, "step", 0, "rewards/chosen"), 0, 0);
        assert_says(said.err, "first step: the adapters are the reference: rewards are 0");
        if (all[i].loss > 0) assert_close(metric(config, "eval", 0, "eval_rewards/margins"), 0, 0);
        assert_true(metric(config, "step", 0, "grad_norm") > 0);
    }
    const char *dropped = config_of("kind = dpo", "[lora]\ndropout = 0.5\n");
    trained("dpo", dropped, "train.steps=2", "train.grad_accum=2");
    assert_null(strstr(said.err, "first step: "));
    assert_says(said.out, "margin ");
    assert_says(said.out, "right ");
}

/* The automatic rates of supervised fine-tuning, preferences and online RL. */
static void default_rates(void **state)
{
    (void)state;
    struct config *c = test_malloc(sizeof(*c));
    config_defaults(c);
    for (c->objective.kind = CFG_SFT; c->objective.kind <= CFG_CISPO; c->objective.kind++) {
        const double rate = c->objective.kind < CFG_DPO ? 2e-4 : c->objective.kind <= CFG_KTO ? 2e-5 : 1e-5;
        assert_close(config_lr(c), rate, 0);
    }
    test_free(c);
}

/* Held-out rows of one label have no margin: the line has the rest. */
static void rows_of_one_label(void **state)
{
    (void)state;
    static const char row[] = "{\"prompt\": \"I with tears\", \"completion\": \" do wash the\", \"label\": false}\n";
    char path[MT_PATH], sets[MT_PATH + 32];
    struct err err;
    const char *config = config_of("kind = kto", "");
    snprintf(path, sizeof(path), "%s/one.jsonl", scratch_dir());
    if (file_write_atomic(path, row, sizeof(row) - 1, &err)) fail_msg("%s", err.msg);
    snprintf(sets, sizeof(sets), "data.eval=%s", path);
    trained("kto", config, "train.steps=1 train.grad_accum=2", sets);
    assert_says(said.out, "eval at step 0: loss 0.5000  kl 0  perplexity");
    assert_says(said.out, "eval at step 1: loss ");
    assert_null(strstr(said.out, "nan"));
}

/* One step is the same for any division into micro-batches, any recomputation and any number of ranks. */
static void a_step_may_be_divided(void **state)
{
    (void)state;
    static const struct {
        const char *objective, *rows;
    } all[] = {{"kind = dpo\nsft_weight = 0.5", "dpo"}, {"kind = orpo", "dpo"}, {"kind = kto", "kto"}};
    static const char *const cuts[] = {"train.micro_batch=4", "train.micro_batch=2", "train.micro_batch=1"};
    static const char *const accums[] = {"train.grad_accum=1", "train.grad_accum=2", "train.grad_accum=4"};
    for (int i = 0; i < MT_LEN(all); i++) {
        const char *run[3], *const more = "[train]\nseed = 3\n";
        for (int k = 0; k < 3; k++) {
            run[k] = config_of(all[i].objective, more);
            trained(all[i].rows, run[k], cuts[k], accums[k]);
            for (int step = 0; step < 2; step++) {
                assert_close(metric(run[k], "step", step, "loss") / metric(run[0], "step", step, "loss"), 1, 1e-5);
                assert_close(metric(run[k], "step", step, "grad_norm") / metric(run[0], "step", step, "grad_norm"), 1,
                             1e-4);
            }
        }
        const char *ranks = config_of(all[i].objective, "[train]\nseed = 3\n[parallel]\ncpu_ranks = 2\n"),
                   *halves = config_of(all[i].objective, "[train]\nseed = 3\nrecompute = full\n");
        trained(all[i].rows, ranks, cuts[1], accums[1]);
        assert_same_output(run[1], ranks, ADAPTER);
        assert_close(metric(run[1], "eval", 1, "loss"), metric(ranks, "eval", 1, "loss"), 1e-12);
        trained(all[i].rows, halves, cuts[1], accums[1]);
        assert_same_output(run[1], halves, ADAPTER);
    }
}

/* Compares answers that share the rows of their prompt with answers that each have a copy of it. An auxiliary loss,
 * which counts the tokens of both copies, prevents the sharing. */
static void answers_share_their_prompt(void **state)
{
    (void)state;
    static const char *const keys[] = {"loss", "grad_norm", "rewards/margins", "logps/chosen", "logps/rejected"};
    const char *once = config_of("kind = dpo\nsft_weight = 0.5", ""),
               *twice = config_of("kind = dpo\nsft_weight = 0.5", "");
    trained("dpo", once, "train.steps=3", "train.aux_loss_coef=0");
    assert_says(said.err, "both answers of a pair share the rows of their prompt");
    trained("dpo", twice, "train.steps=3", "train.aux_loss_coef=1e-12");
    assert_says(said.err,
                "each answer of a pair has rows for its prompt: the auxiliary loss counts the tokens of both");
    for (int step = 1; step < 3; step++)
        for (int k = 0; k < MT_LEN(keys); k++)
            assert_close(metric(once, "step", step, keys[k]) / metric(twice, "step", step, keys[k]), 1, 1e-4);
    assert_close(metric(once, "step", 2, "tokens"), metric(twice, "step", 2, "tokens"), 0);
    assert_close(metric(once, "eval", 1, "loss"), metric(twice, "eval", 1, "loss"), 1e-5);
}

/* Writes pairs with long prompts, and returns assignments that train a fixture with them. */
static const char *long_pairs(const char *model, const char *more)
{
    static char sets[4 * MT_PATH];
    char path[MT_PATH], text[1 << 14] = "";
    struct err err;
    size_t n = 0;
    for (int row = 0; row < 4; row++) {
        n += (size_t)snprintf(text + n, sizeof(text) - n, "{\"prompt\": \"%d", row);
        for (int i = 0; i < 90; i++) n += (size_t)snprintf(text + n, sizeof(text) - n, " %d", 7 * i % (11 + row));
        n += (size_t)snprintf(text + n, sizeof(text) - n,
                              "\", \"chosen\": \" sob and weep\", \"rejected\": \" them %d blind with rain\"}\n", row);
    }
    snprintf(path, sizeof(path), "%s/long.jsonl", scratch_dir());
    if (file_write_atomic(path, text, (int64_t)n, &err)) fail_msg("%s", err.msg);
    snprintf(sets, sizeof(sets), "data.train=%s data.eval= model.path=%s data.seq_len=512 train.steps=3 %s", path,
             fixture(model), more);
    return sets;
}

/* Mixers with a state continue it after the prompt of both answers. Their prompts are shared from 129 tokens on. */
static void recurrences_share_long_prompts(void **state)
{
    (void)state;
    static const char *const keys[] = {"loss", "grad_norm", "rewards/margins", "logps/chosen", "logps/rejected"};
    static const struct {
        const char *model, *says;
        bool aux; /* the router has an auxiliary loss, with which prompts are not shared */
    } all[] = {{"parity/lfm2", "share the rows of their prompt\n", false},
               {"parity/nemotron", "share the rows of their prompt if it has more than 128 tokens", false},
               {"parity/qwen3_next", "share the rows of their prompt if it has more than 128 tokens", true},
               {"parity/qwen3_5", "share the rows of their prompt if it has more than 128 tokens", true}};
    for (int i = 0; i < MT_LEN(all); i++) {
        const char *run[3];
        for (int k = 0; k < 2 + all[i].aux; k++) {
            run[k] = config_of("kind = dpo", "[lora]\ntargets = mixers\n");
            if (process_run_sets(
                    run[k], long_pairs(all[i].model, k < 2 ? "train.aux_loss_coef=0" : "train.aux_loss_coef=1e-12")))
                fail_msg("%s", said.err);
            if (k < 2) assert_says(said.err, all[i].says);
            assert_says(said.err, "train: 4 rows, 0 bad; rows longer than seq_len: 0 (dropped);");
        }
        assert_same_output(run[0], run[1], ADAPTER);
        for (int step = 1; step < 3 && all[i].aux; step++)
            for (int k = 0; k < MT_LEN(keys); k++)
                assert_close(metric(run[0], "step", step, keys[k]) / metric(run[2], "step", step, keys[k]), 1, 1e-4);
    }
}

/* Four steps, and two that continue for two more. */
static void a_run_continues(void **state)
{
    (void)state;
    static const struct {
        const char *objective, *rows;
    } all[] = {{"kind = dpo", "dpo"}, {"kind = kto", "kto"}};
    for (int i = 0; i < MT_LEN(all); i++) {
        const char *whole = config_of(all[i].objective, ""), *halves = config_of(all[i].objective, "");
        trained(all[i].rows, whole, "train.steps=4", "train.grad_accum=2");
        trained(all[i].rows, halves, "train.steps=2", "train.grad_accum=2");
        trained(all[i].rows, halves, "train.steps=4", "train.grad_accum=2");
        assert_says(said.err, "continuing after step 2 of 4");
        assert_null(strstr(said.err, "first step: "));
        assert_same_output(whole, halves, ADAPTER);
        assert_int_equal(run_on(all[i].rows, halves, "train.steps=6", "objective.beta=0.3"), 1);
        assert_says(said.err, "objective.beta");
    }
}

/* reference_cache = auto, which computes the reference once, gives the same bytes as computing it in every step, also
 * in a continued run. */
static void a_cached_reference_is_the_live_one(void **state)
{
    (void)state;
    static const struct {
        const char *objective, *rows, *more;
    } all[] = {{"kind = dpo", "dpo", ""}, {"kind = kto", "kto", "[parallel]\ncpu_ranks = 2\n"}};
    for (int i = 0; i < MT_LEN(all); i++) {
        char cached[128], init[2 * MT_PATH];
        snprintf(cached, sizeof(cached), "%s\nreference = initial\nreference_cache = auto", all[i].objective);
        snprintf(init, sizeof(init), "%s[lora]\nalpha = 16\ninit_from = %s/adapter_init\n", all[i].more,
                 fixture("parity/case_a"));
        char live_text[128];
        snprintf(live_text, sizeof(live_text), "%s\nreference = initial", all[i].objective);
        const char *live = config_of(live_text, init), *once = config_of(cached, init);
        trained(all[i].rows, live, "lora.r=8 train.steps=12",
                "train.grad_accum=2"); /* more than an epoch of dpo's rows */
        assert_null(strstr(said.err, "reference: log-probabilities"));
        trained(all[i].rows, once, "lora.r=8 train.steps=6", "train.grad_accum=2");
        assert_says(said.err, "training answers computed, kept in ");
        trained(all[i].rows, once, "lora.r=8 train.steps=12", "train.grad_accum=2");
        assert_says(said.err, "training answers from ");
        assert_says(said.err, "held-out answers from ");
        assert_same_output(live, once, ADAPTER);
        for (int k = 0; k < 2; k++) {
            const double x = metric(live, "eval", k, "loss"), y = metric(once, "eval", k ? 2 : 0, "loss");
            assert_close(x, y, 0);
        }
    }
}

/* Two ranks that divide the experts give the losses of one process: with three held-out micro-batches, of which one
 * rank has one less, and with KTO's mismatched rows, which may be twice as long as a micro-batch. */
static void ranks_divide_the_experts(void **state)
{
    (void)state;
    static const struct {
        const char *objective, *rows;
    } all[] = {{"kind = dpo", "dpo"},
               {"kind = dpo\nreference_cache = auto", "dpo"},
               {"kind = simpo", "dpo"},
               {"kind = kto", "kto"},
               {"kind = kto\nreference_cache = auto", "kto"}};
    static const char *const cut = "train.micro_batch=2 train.grad_accum=2";
    for (int i = 0; i < MT_LEN(all); i++) {
        const char *one = config_of(all[i].objective, "[train]\nseed = 3\n"),
                   *two = config_of(all[i].objective, "[train]\nseed = 3\n[parallel]\ncpu_ranks = 2\nep = 2\n");
        trained(all[i].rows, one, cut, "train.threads=1");
        trained(all[i].rows, two, cut, "train.threads=1");
        for (int k = 0; k < 2; k++) {
            assert_close(metric(two, "step", k, "loss") / metric(one, "step", k, "loss"), 1, 1e-5);
            assert_close(metric(two, "eval", k, "loss") / metric(one, "eval", k, "loss"), 1, 1e-5);
        }
    }
}

/* eval.best = accuracy chooses best/ by the share of held-out pairs that are right. */
static void best_by_accuracy(void **state)
{
    (void)state;
    const char *config = config_of("kind = dpo", "[eval]\nevery = 2\nbest = accuracy\n");
    trained("dpo", config, "train.steps=6", "train.grad_accum=2");
    static char page[1 << 20];
    char row[64];
    const char *line = strstr(said.err, "(held-out accuracy "), *at = line ? strstr(line, " at step ") : NULL;
    assert_non_null(at);
    snprintf(row, sizeof(row), "<tr class=\"best\"><td>%d<td>", atoi(at + 9));
    process_read(process_output(config, "report.html"), page, sizeof(page));
    assert_non_null(strstr(page, row));
    assert_int_equal(run_on("kto", config, "objective.kind=kto", "train.resume=never"), 1);
    assert_says(said.err, "eval.best = accuracy needs an objective over pairs");
}

/* `tokens` shows both answers and how many tokens they share; a run without adapters on experts gets a warning; the
 * report has the curves of preferences. */
static void what_is_told(void **state)
{
    (void)state;
    const char *config = config_of("kind = dpo", "");
    char train[MT_PATH + 64];
    snprintf(train, sizeof(train), "data.train=%s/train.jsonl", fixture("preference/dpo"));
    if (RUN("tokens", config, "--set", train, "--json")) fail_msg("%s", said.err);
    assert_says(said.out, "{\"side\": \"chosen\", \"shared\": ");
    assert_says(said.out, "{\"side\": \"rejected\", \"shared\": ");
    trained("dpo", config, "train.steps=2", "lora.targets=q_proj");
    assert_says(said.err, "lora.targets adapts none of the routed experts");
    static char page[1 << 20];
    process_read(process_output(config, "report.html"), page, sizeof(page));
    assert_non_null(strstr(page, "<h2>Reward margin</h2>"));
    assert_non_null(strstr(page, "<h2>Preference accuracy</h2>"));
    assert_null(strstr(page, "KL to the teacher"));
}

/* Commands that generate take no notice of the objective. */
static void other_commands(void **state)
{
    (void)state;
    const char *config = config_of("kind = dpo", "[eval]\nbest = accuracy\n");
    trained("dpo", config, "train.steps=1", "data.format=preference");
    if (RUN("generate", process_output(config, "config.ini"), "--prompt", "hello", "--tokens", "2"))
        fail_msg("%s", said.err);
    if (RUN("eval", process_output(config, "config.ini"))) fail_msg("%s", said.err);
    assert_says(said.out, "\"eval_rewards/accuracies\":");
    const double chosen = metric(config, "eval", 0, "eval_logps/chosen_per_token");
    assert_close(log(metric(config, "eval", 0, "perplexity")), -chosen, 1e-9);
}

/* Commands without an objective read preference rows too: both answers are held-out documents, and the better answer is
 * the reference for `eval --generate`. */
static void commands_without_an_objective(void **state)
{
    (void)state;
    static const char *const kinds[] = {"dpo", "kto"}, *const rows[] = {"\"rows\":6,", "\"rows\":4,"};
    for (int i = 0; i < MT_LEN(kinds); i++) {
        char kind[32];
        snprintf(kind, sizeof(kind), "kind = %s", kinds[i]);
        const char *config = config_of(kind, "");
        trained(kinds[i], config, "train.steps=1", "");
        const char *ini = process_output(config, "config.ini");
        if (RUN("export", ini, "--to", "vllm")) fail_msg("%s", said.err);
        if (RUN("check", ini, "--layers", "1")) fail_msg("%s", said.err);
        if (RUN("eval", ini, "--generate", "--verifier", "exact", "--tokens", "2")) fail_msg("%s", said.err);
        assert_says(said.out, rows[i]);
        assert_int_equal(RUN("teach", ini), 1);
        assert_says(said.err,
                    i ? "keep the rows whose `label` is true" : "data.columns=prompt=prompt,completion=chosen");
        if (!i && RUN("teach", ini, "--base", "--set", "data.columns=prompt=prompt,completion=chosen"))
            fail_msg("%s", said.err);
    }
}

/* Steps of the demo's files. */
static void the_demo_learns(void **state)
{
    (void)state;
    char ini[MT_PATH], out[MT_PATH + 32];
    snprintf(ini, sizeof(ini), "%s", fixture("../../configs/demo_dpo.ini"));
    snprintf(out, sizeof(out), "output.dir=%s/out", scratch_dir());
    if (RUN(ini, "--set", out, "--set", "train.steps=4", "--set", "train.micro_batch=1", "--set", "eval.every=0",
            "--set", "eval.max_batches=4", "--set", "data.max_samples=24"))
        fail_msg("%s", said.err);
    assert_says(said.err, "first step: the adapters are the reference");
}

static void settings_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *set, *why;
    } rows[] = {
        {"objective.kind=dop", "objective.kind = \"dop\": expected one of sft|dpo|ipo|simpo|orpo|kto"},
        {"objective.beta=0", "objective.beta = 0 removes the preference from the loss of DPO"},
        {"objective.gamma=1", "objective.gamma = 1 has no effect with objective.kind = dpo"},
        {"objective.desirable_weight=2", "objective.desirable_weight = 2 has no effect"},
        {"objective.orpo_nll=completion", "objective.orpo_nll = completion has no effect"},
        {"objective.label_smoothing=0.5", "objective.label_smoothing = \"0.5\": expected a number in [0, 0.5)"},
        {"objective.reference=initial", "objective.reference = initial needs lora.init_from"},
        {"data.format=text", "data.format = text with objective.kind = dpo: leave it out"},
        {"data.format=labelled", "data.format = labelled with objective.kind = dpo"},
        {"data.eval_format=text", "data.eval_format = text with objective.kind = dpo"},
        {"data.loss_on=all", "data.loss_on has no effect on DPO"},
        {"distill.teacher=base", "distill.teacher and DPO (objective.kind) exclude each other"},
    };
    const char *config = config_of("kind = dpo", ""), *orpo = config_of("kind = orpo\nbeta = 0", "");
    for (int i = 0; i < MT_LEN(rows); i++) {
        assert_int_equal(run_on("dpo", config, "train.steps=1", rows[i].set), 1);
        assert_says(said.err, rows[i].why);
    }
    trained("dpo", orpo, "train.steps=1", "train.grad_accum=2"); /* leaves the cross-entropy */
    assert_close(metric(orpo, "step", 0, "loss"), metric(orpo, "step", 0, "nll_loss"), 1e-12);
    const char *sft = process_config("");
    assert_int_equal(RUN(sft, "--set", "objective.beta=0.2"), 1);
    assert_says(said.err, "objective.beta = 0.2 has no effect with objective.kind = sft");
    assert_int_equal(RUN(sft, "--set", "data.format=preference"), 1);
    assert_says(said.err, "data.format = preference with objective.kind = sft");
}

int test_preference(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_new_adapter_is_the_reference),
        cmocka_unit_test(default_rates),
        cmocka_unit_test(rows_of_one_label),
        cmocka_unit_test(a_step_may_be_divided),
        cmocka_unit_test(answers_share_their_prompt),
        cmocka_unit_test(recurrences_share_long_prompts),
        cmocka_unit_test(a_run_continues),
        cmocka_unit_test(a_cached_reference_is_the_live_one),
        cmocka_unit_test(ranks_divide_the_experts),
        cmocka_unit_test(best_by_accuracy),
        cmocka_unit_test(what_is_told),
        cmocka_unit_test(other_commands),
        cmocka_unit_test(commands_without_an_objective),
        cmocka_unit_test(the_demo_learns),
        cmocka_unit_test(settings_are_refused),
    };
    return cmocka_run_group_tests_name("preference", tests, NULL, NULL);
}

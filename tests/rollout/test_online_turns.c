/* test_online_turns.c - online RL with an environment: the same bytes after any number of kills and for any number of
 * ranks, tokens without loss, limits, programs that fail. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "data/json/text.h"
#include "tests/process.h"

#define LONG "data.seq_len=300"

enum { TEXT = 1 << 18, END_ID = 4089, START_ID = 4092, CALL_ID = 4095, HIDDEN = 128 };

static const char template[] =
    "{%- for m in messages %}{{- '<|start|>' + m.role + '<|message|>' + m.content + ('<|return|>' if m.role == "
    "'assistant' else '<|end|>') }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant<|message|>' }}"
    "{%- endif %}";

/* The model of the fixture, which ends turns more often: the end token's row of the output head, the first tensor,
 * times 16. */
static void write_model(const char *dir)
{
    static const char *const files[] = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"};
    struct file_map map;
    struct err err;
    char from[MT_PATH], to[MT_PATH];
    if (file_make_dirs(dir, &err)) fail_msg("%s", err.msg);
    for (int i = 0; i < MT_LEN(files); i++) {
        snprintf(from, sizeof(from), "%s/%s", fixture("parity/case_a"), files[i]);
        snprintf(to, sizeof(to), "%s/%s", dir, files[i]);
        if (file_map_open(&map, from, &err)) fail_msg("%s", err.msg);
        char *bytes = mem_strndup((const char *)map.data, map.size);
        if (i == 3) {
            uint64_t header;
            uint16_t w;
            memcpy(&header, bytes, sizeof(header));
            for (int k = 0; k < HIDDEN; k++) {
                char *at = bytes + sizeof(header) + header + 2 * (END_ID * HIDDEN + k);
                memcpy(&w, at, sizeof(w));
                w = (uint16_t)(w + (4 << 7));
                memcpy(at, &w, sizeof(w));
            }
        }
        if (file_write_atomic(to, bytes, map.size, &err)) fail_msg("%s", err.msg);
        mem_free(bytes);
        file_map_close(&map);
    }
}

static char model[MT_PATH], rows[MT_PATH], chat[MT_PATH];

static const char *config_of(const char *mode, const char *more)
{
    char text[8192], row[128];
    struct text_buf prompts = {0};
    struct err err;
    if (!model[0]) {
        const char *dir = scratch_dir();
        snprintf(model, sizeof(model), "%s/model", dir);
        snprintf(rows, sizeof(rows), "%s/prompts.jsonl", dir);
        snprintf(chat, sizeof(chat), "%s/chat.jinja", dir);
        write_model(model);
        for (int i = 0; i < 10; i++) {
            snprintf(row, sizeof(row),
                     "{\"messages\": [{\"role\": \"user\", \"content\": \"The %d cats\"}], \"n\": %d}\n", i, i);
            text_put(&prompts, row);
        }
        if (file_write_atomic(rows, prompts.text, prompts.size, &err) ||
            file_write_atomic(chat, template, sizeof(template) - 1, &err))
            fail_msg("%s", err.msg);
        text_free(&prompts);
    }
    snprintf(text, sizeof(text),
             "keep = 0\n[objective]\nkind = grpo\nnum_generations = 4\nmax_completion_length = 40\n[optim]\nlr = 0.02\n"
             "schedule = constant\n[eval]\nevery = 2\nmax_batches = 2\n[reward]\ngame = environment\nvarious = "
             "repetition n=1\n[environment]\ncommand = python3 -S \"%s\" %s\nturns = 5\n%s",
             fixture("../rollout/turns_program.py"), mode, more);
    return process_config(text);
}

static const char *set(const char *key, const char *value)
{
    static char sets[16][MT_PATH];
    static int next;
    char *s = sets[next++ % 16];
    snprintf(s, MT_PATH, "%s=%s", key, value);
    return s;
}

#define SETS(config, ...)                                                                                              \
    config, "--set", set("model.path", model), "--set", set("data.train", rows), "--set", set("data.eval", rows),      \
        "--set", set("data.chat_template", chat), "--set", "data.seq_len=80", "--set", "train.steps=3", "--set",       \
        "train.micro_batch=2", "--set", "train.grad_accum=4", ##__VA_ARGS__

static void assert_same_run(const char *a, const char *b)
{
    char name[64];
    assert_same_output(a, b, ADAPTER);
    for (int i = 1; i <= 3; i++) {
        snprintf(name, sizeof(name), "rollouts/step-%06d.jsonl", i);
        assert_same_output(a, b, name);
    }
}

/* Checks the rows of the first step: ids of all turns, a mask, and the chosen experts of each token except the last.
 * Returns the largest number of turns. */
static int64_t check_rows(const char *config)
{
    static char text[TEXT];
    struct err err;
    int64_t most = 0;
    process_read(process_output(config, "rollouts/step-000001.jsonl"), text, sizeof(text));
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        struct json_doc *doc = json_parse(line, (int64_t)strlen(line), "rows", &err);
        assert_non_null(doc);
        const struct json row = json_root(doc), mask = json_find(row, "mask"), logprobs = json_find(row, "logprobs");
        const int64_t n = json_count(json_find(row, "completion_ids"));
        int64_t turns = 0, before = 0, own = 0, shape = 0;
        assert_int_equal(json_count(mask), n);
        for (int64_t t = 0; t < n; t++, before = own) {
            if (json_i64(json_at(mask, t), 0, 1, &own, &err)) fail_msg("%s", err.msg);
            assert_int_equal(json_type(json_at(logprobs, t)) == JSON_NULL, !own);
            turns += own && !before;
        }
        const struct json routing = json_find(row, "routing");
        double given = -1, taken = -2;
        if (json_get_f64(row, "environment_reward", &given, &err) ||
            json_get_f64(json_find(row, "rewards"), "game", &taken, &err))
            fail_msg("%s", err.msg);
        assert_true(fabs(given - taken) < 1e-9);
        if (json_i64(json_at(json_find(routing, "shape"), 0), 0, 1000, &shape, &err)) fail_msg("%s", err.msg);
        assert_int_equal(shape, json_count(json_find(row, "prompt_ids")) + n - 1);
        most = MT_MAX(most, turns);
        json_free(doc);
    }
    return most;
}

static void kills_and_ranks(void **state)
{
    (void)state;
    const double start = clock_ms();
    const char *one = config_of("usual", "");
    if (RUN(SETS(one, "--set", "output.save_every=2"))) fail_msg("%s", said.err);
    assert_true(check_rows(one) > 1);
    const long ms = (long)(clock_ms() - start);
    const char *killed = config_of("usual", "");
    const char *const words[] = {SETS(killed, "--set", "output.save_every=2"), NULL};
    process_in_pieces(words, MT_MAX(60, ms / 5));
    assert_same_run(one, killed);
    static const char *const ranks[] = {"[parallel]\ncpu_ranks = 2\n", "[parallel]\ncpu_ranks = 4\n"};
    for (int i = 0; i < MT_LEN(ranks); i++) {
        const char *several = config_of("usual", ranks[i]);
        if (RUN(SETS(several))) fail_msg("%s", said.err);
        assert_same_run(one, several);
    }
}

/* The ranks of a group make the same requests, so they share one program. */
static void expert_parallel(void **state)
{
    (void)state;
    const char *two = config_of("reset", "[parallel]\ncpu_ranks = 2\nep = 2\n"), *one = config_of("reset", "");
    if (RUN(SETS(two, "--set", "train.steps=1")) || RUN(SETS(one, "--set", "train.steps=1"))) fail_msg("%s", said.err);
    assert_same_output(one, two, "rollouts/step-000001.jsonl");
}

/* Of the first event that begins so. */
static double number_of(const char *config, const char *event, const char *key)
{
    static char text[TEXT];
    char start[64];
    double value = -1;
    struct err err;
    snprintf(start, sizeof(start), "{\"event\":\"%s", event);
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        if (strncmp(line, start, strlen(start)) != 0) continue;
        struct json_doc *doc = json_parse(line, (int64_t)strlen(line), "metrics", &err);
        if (!doc || json_get_f64(json_root(doc), key, &value, &err)) fail_msg("%s", err.msg);
        json_free(doc);
        return value;
    }
    fail_msg("no event");
    return value;
}

/* Tokens of the first step's rows that passes over prompts compute at most: each prompt once, without its last token,
 * and those of messages. A prompt that begins as that of an ended turn computes fewer. */
static int64_t new_tokens(const char *config)
{
    static char text[TEXT];
    struct err err;
    int64_t n = 0, row = 0;
    process_read(process_output(config, "rollouts/step-000001.jsonl"), text, sizeof(text));
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"), row++) {
        struct json_doc *doc = json_parse(line, (int64_t)strlen(line), "rows", &err);
        assert_non_null(doc);
        const struct json mask = json_find(json_root(doc), "mask");
        if (row % 4 == 0) n += json_count(json_find(json_root(doc), "prompt_ids")) - 1;
        for (int64_t t = 0, own; t < json_count(mask); t++, n += !own)
            if (json_i64(json_at(mask, t), 0, 1, &own, &err)) fail_msg("%s", err.msg);
        json_free(doc);
    }
    return n;
}

/* Each turn computes its messages alone. In a cache for few sequences some turns begin again, with the same bytes. */
static void turns_continue(void **state)
{
    (void)state;
    const char *all = config_of("usual", ""), *few = config_of("usual", "[generate]\nmemory_gb = 0.0003\n");
    if (RUN(SETS(all)) || RUN(SETS(few))) fail_msg("%s", said.err);
    const double computed = number_of(all, "rollouts", "sampling/prefilled_tok"), most = (double)new_tokens(all);
    if (!(computed > 0 && computed <= most)) fail_msg("%g tokens computed, at most %g are new", computed, most);
    assert_true(number_of(all, "rollouts", "sampling/cached_tok") > 0);
    assert_true(number_of(few, "rollouts", "sampling/prefilled_tok") > most);
    assert_same_run(all, few);
}

/* A step of offline training on the recorded rows gives the adapter of the online step: in both, messages of the
 * environment carry no loss. */
static void train_offline(const char *mode, const char *with, const char *seq_len)
{
    const char *online = config_of(mode, ""), *recorded = config_of(mode, "");
    if (RUN(SETS(online, "--set", "train.steps=1", "--set", with, "--set", seq_len))) fail_msg("%s", said.err);
    if (RUN(SETS(recorded, "--set", "train.steps=1", "--set", with, "--set", seq_len, "--set", "data.format=rollouts",
                 "--set", set("data.train", process_output(online, "rollouts/step-000001.jsonl")), "--set",
                 "data.eval=", "--set", "eval.every=0")))
        fail_msg("%s", said.err);
    assert_says(said.err, "environment.command has no effect");
    assert_true(fabs(number_of(online, "rollouts", "rewards/game/mean") -
                     number_of(recorded, "step", "rewards/game/mean")) < 1e-9);
    assert_true(fabs(number_of(online, "step", "loss") - number_of(recorded, "step", "loss")) < 1e-6);
    assert_true(adapter_error(online, recorded) < 1e-4);
}

static void offline(void **state)
{
    (void)state;
    train_offline("usual", "data.seq_len=80", "data.seq_len=80");
}

/* Each earlier turn keeps its sampled end token, with its log-probability and loss; the messages follow it without a
 * further end. Returns the number of such turns. */
static int64_t check_ends(const char *config)
{
    static char text[TEXT];
    struct err err;
    int64_t n_end = 0;
    process_read(process_output(config, "rollouts/step-000001.jsonl"), text, sizeof(text));
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        struct json_doc *doc = json_parse(line, (int64_t)strlen(line), "rows", &err);
        assert_non_null(doc);
        const struct json row = json_root(doc), ids = json_find(row, "completion_ids"), mask = json_find(row, "mask");
        for (int64_t t = 0; t + 1 < json_count(ids); t++) {
            int64_t id = 0, next = 0, own = 0, after = 0;
            double logprob = 1;
            if (json_i64(json_at(ids, t), 0, 4095, &id, &err) || json_i64(json_at(ids, t + 1), 0, 4095, &next, &err) ||
                json_i64(json_at(mask, t), 0, 1, &own, &err) || json_i64(json_at(mask, t + 1), 0, 1, &after, &err))
                fail_msg("%s", err.msg);
            if (!own || after) continue;
            if (json_f64(json_at(json_find(row, "logprobs"), t), &logprob, &err)) fail_msg("%s", err.msg);
            assert_true(id == END_ID || id == CALL_ID);
            assert_int_equal(next, START_ID);
            assert_true(logprob <= 0);
            n_end++;
        }
        json_free(doc);
    }
    return n_end;
}

/* gpt-oss's template writes another end of earlier answers than the model samples, and leaves their reasoning out. */
static void harmony(void **state)
{
    (void)state;
    static char with[MT_PATH];
    snprintf(with, sizeof(with), "data.chat_template=%s", fixture("../../configs/tiny-gptoss/chat_template.jinja"));
    const double start = clock_ms();
    const char *one = config_of("three", ""), *killed = config_of("three", "");
    if (RUN(SETS(one, "--set", with, "--set", LONG, "--set", "output.save_every=2"))) fail_msg("%s", said.err);
    const long ms = (long)(clock_ms() - start);
    assert_int_equal(check_rows(one), 3);
    assert_true(check_ends(one) >= 8);
    assert_true(number_of(one, "rollouts", "environment/unfit") <= 0);
    const char *const words[] = {SETS(killed, "--set", with, "--set", LONG, "--set", "output.save_every=2"), NULL};
    process_in_pieces(words, MT_MAX(60, ms / 3));
    assert_same_run(one, killed);
    train_offline("three", with, LONG);
}

/* Programs whose episodes end by a limit, or by their failure. */
static void limits(void **state)
{
    (void)state;
    static const struct {
        const char *mode, *sets, *key;
        double least, most;
    } cases[] = {{"endless", "environment.turns=2", "environment/turns/max", 2, 2},
                 {"endless", "environment.tokens=9", "completions/max_length", 1, 9},
                 {"endless", "environment.turns=10000", "completions/max_length", 2, 40},
                 {"endless", "environment.turns=1", "environment/turns/mean", 1, 1},
                 {"long 9", "environment.turns=5", "environment/turns/max", 1, 1},
                 {"exit 12", "environment.turns=5", "environment/lost", 1, 8},
                 {"hang 12", "environment.timeout_s=0.5", "environment/lost", 1, 8},
                 {"deaf 12", "environment.timeout_s=0.5", "environment/lost", 1, 8}};
    for (int i = 0; i < MT_LEN(cases); i++) {
        const char *config = config_of(cases[i].mode, "");
        if (RUN(SETS(config, "--set", cases[i].sets, "--set", "train.steps=1", "--set", "data.eval=", "--set",
                     "eval.every=0")))
            fail_msg("%s: %s", cases[i].mode, said.err);
        const double value = number_of(config, "rollouts", cases[i].key);
        if (value < cases[i].least || value > cases[i].most)
            fail_msg("%s: %s = %g", cases[i].mode, cases[i].key, value);
    }
}

static void failures(void **state)
{
    (void)state;
    static const struct {
        const char *mode, *says;
    } cases[] = {{"garbage 10", "environment.command: line 10 of its output, thinking about it"},
                 {"utf8 3", "environment.command: line 3 of its output"},
                 {"id 9", "is of no completion that is open"},
                 {"role 10", "environment.command: the messages of a reply"},
                 {"exit 1", "the 3rd failure in a row: correct the program"}};
    for (int i = 0; i < MT_LEN(cases); i++) {
        assert_int_equal(RUN(SETS(config_of(cases[i].mode, ""), "--set", "data.eval=", "--set", "eval.every=0")), 1);
        assert_says(said.err, cases[i].says);
    }
    assert_int_equal(RUN(SETS(config_of("usual", ""), "--set", "environment.command=")), 1);
    assert_says(said.err, "reward.game = environment needs environment.command");
}

/* A template that changes the text before the turns ends the completion, not the run; the log says that a reward is
 * always null. */
static void refused_turns(void **state)
{
    (void)state;
    struct text_buf text = {0};
    struct err err;
    char strict[MT_PATH];
    const char *config = config_of("usual", ""), *usual = config_of("usual", "");
    snprintf(strict, sizeof(strict), "%s/strict.jinja", scratch_dir());
    text_put(&text, "{%- for m in messages %}{%- if loop.first %}{{- messages | length }}{%- endif %}{%- endfor %}");
    text_put(&text, template);
    if (file_write_atomic(strict, text.text, text.size, &err)) fail_msg("%s", err.msg);
    text_free(&text);
    if (RUN(SETS(config, "--set", set("data.chat_template", strict), "--set", "train.steps=1")))
        fail_msg("%s", said.err);
    assert_says(said.err, "completions end before a turn that cannot follow their tokens: with the new messages");
    assert_true(number_of(config, "rollouts", "environment/unfit") > 0);
    assert_true(number_of(config, "rollouts", "environment/turns/max") <= 1);
    if (RUN(SETS(usual, "--set", "reward.odd=last_number reference=anser", "--set", "train.steps=1")))
        fail_msg("%s", said.err);
    assert_says(said.err, "step 1: the reward odd is null for every completion and has no effect: check its column");
}

static double said_number(const char *key, const char *member)
{
    double value = -1;
    struct err err;
    struct json_doc *doc = json_parse(said.out, (int64_t)strlen(said.out), "standard output", &err);
    assert_non_null(doc);
    const struct json of = member ? json_find(json_root(doc), member) : json_root(doc);
    if (json_get_f64(of, key, &value, &err)) fail_msg("%s", err.msg);
    json_free(doc);
    return value;
}

/* `eval` and `eval --generate` give the held-out reward of the run, of whole episodes. */
static void held_out(void **state)
{
    (void)state;
    static char first[TEXT], text[TEXT];
    char file[MT_PATH], input[MT_PATH];
    int n_line = 0;
    const char *run = config_of("three", "[reward]\nwon = regex pattern=e\n"), *const last = "eval\",\"step\":3,";
    if (RUN(SETS(run))) fail_msg("%s", said.err);
    for (int i = 0; i < 3; i++) {
        if (i == 0   ? RUN("eval", SETS(run))
            : i == 1 ? RUN("eval", SETS(run, "--generate"))
                     : RUN("eval", SETS(run, "--generate", "--seed", "5", "--set", "parallel.cpu_ranks=2")))
            fail_msg("%s", said.err);
        if (!i) snprintf(first, sizeof(first), "%s", said.out);
        assert_string_equal(said.out, first);
    }
    assert_true(said_number("reward", NULL) == number_of(run, last, "eval_reward"));
    assert_true(said_number("environment/turns/mean", NULL) == number_of(run, last, "eval_environment/turns/mean"));
    assert_true(said_number("environment/turns/mean", NULL) > 1);
    assert_true(said_number("1", "rewards/won/pass_at") == said_number("rewards/won/mean", NULL));
    process_read(process_output(run, "report.html"), text, sizeof(text));
    assert_says(text, "<h2>Turns</h2>");
    assert_says(text, "<h2>Reward won</h2>");
    assert_says(text, "<h2>Reward game</h2>");
    assert_null(strstr(text, "<h2>Rows without a reward</h2>"));
    assert_null(strstr(said.out, "rewards/game/pass_at")); /* its values are other numbers */
    snprintf(file, sizeof(file), "%s/episodes.jsonl", scratch_dir());
    if (RUN("eval", SETS(run, "--generate", "--samples", "3", "--temperature", "1", "--rows", "5", "--output", file)))
        fail_msg("%s", said.err);
    assert_true(said_number("prompts", NULL) == 5 && said_number("samples", NULL) == 15);
    assert_true(said_number("3", "rewards/won/pass_at") >= said_number("1", "rewards/won/pass_at"));
    assert_close(said_number("1", "rewards/won/pass_at"), said_number("rewards/won/mean", NULL), 1e-12);
    snprintf(first, sizeof(first), "%s", said.out);
    process_read(file, text, sizeof(text));
    for (const char *c = text; (c = strchr(c, '\n')); c++) n_line++;
    assert_int_equal(n_line, 15);
    assert_says(text, "\"mask\": [1");
    assert_says(text, "\"environment_reward\": ");
    assert_int_equal(RUN("eval", SETS(run, "--generate", "--output", file)), 1); /* it exists */
    if (RUN("eval", SETS(run, "--generate", "--samples", "3", "--temperature", "1", "--rows", "5", "--seed", "1")))
        fail_msg("%s", said.err);
    assert_string_not_equal(said.out, first);
    if (RUN("eval", SETS(config_of("exit 12", ""), "--base", "--set", "eval.max_batches=0"))) fail_msg("%s", said.err);
    assert_says(said.err, " lost by the environment, ");
    assert_true(said_number("environment/lost", NULL) > 0);
    snprintf(input, sizeof(input), "%s/plain.jsonl", scratch_dir());
    static const char row[] = "{\"prompt\": \"The cat\", \"answer\": \"a\"}\n";
    struct err err;
    if (file_write_atomic(input, row, sizeof(row) - 1, &err)) fail_msg("%s", err.msg);
    if (RUN("eval",
            SETS(run, "--generate", "--verifier", "exact", "--tokens", "2", "--input", input, "--reference", "answer")))
        fail_msg("%s", said.err);
    assert_says(said.err, "environment.command has no effect with --verifier");
    assert_int_equal(RUN("eval", SETS(run, "--generate", "--tokens", "2")), 2);
    assert_says(said.err, "--tokens needs --verifier");
}

int test_online_turns(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kills_and_ranks), cmocka_unit_test(expert_parallel), cmocka_unit_test(turns_continue),
        cmocka_unit_test(offline),         cmocka_unit_test(harmony),         cmocka_unit_test(limits),
        cmocka_unit_test(failures),        cmocka_unit_test(refused_turns),   cmocka_unit_test(held_out)};
    return cmocka_run_group_tests_name("online_turns", tests, NULL, NULL);
}

/* test_rewards.c - [reward]: settings, built-in rewards, totals. */
#include <math.h>
#include <string.h>

#include "tests/test.h"
#include "train/reward/rewards.h"

static void parse(struct config *c, const char *text)
{
    struct err err;
    config_defaults(c);
    if (config_parse(c, text, (int64_t)strlen(text), "run.ini", &err)) fail_msg("%s", err.msg);
}

static struct rewards *open_rewards(struct config *c, const char *text)
{
    struct err err;
    parse(c, text);
    struct rewards *r = rewards_open(c, true, &err);
    if (!r) fail_msg("%s", err.msg);
    return r;
}

static void refuse(const char *lines, const char *message)
{
    struct config c;
    struct err err = {""};
    char text[2048];
    snprintf(text, sizeof(text), "[reward]\n%s", lines);
    config_defaults(&c);
    assert_int_equal(config_parse(&c, text, (int64_t)strlen(text), "run.ini", &err), -1);
    assert_string_equal(err.msg, message);
}

static void settings(void **state)
{
    (void)state;
    static const char text[] = "[reward]\ncorrect = last_number reference=gold tolerance=0.5\nshort=length max=10 "
                               "cache=4\ncorrect.weight = 2.5\ntimeout_s = 3\nform = regex pattern=\"a \\\"b\"\n";
    struct config c, back;
    struct reward_key key;
    struct err err;
    parse(&c, text);
    char *dump = config_dump(&c);
    assert_non_null(strstr(dump, "\ncorrect = last_number reference=gold tolerance=0.5\n"));
    parse(&back, dump);
    assert_memory_equal(&c, &back, sizeof(c));
    mem_free(dump);
    assert_true(reward_keys_get(c.reward.NAME, 0, &key));
    assert_string_equal(key.name, "correct");
    assert_string_equal(key.reference, "gold");
    assert_true(key.weight == 2.5 && key.tolerance == 0.5 && key.kind == REWARD_LAST_NUMBER);
    reward_key_free(&key);
    assert_true(reward_keys_get(c.reward.NAME, 1, &key) && key.max == 10 && key.cache == 4 && key.weight == 1);
    reward_key_free(&key);
    assert_true(reward_keys_get(c.reward.NAME, 2, &key));
    assert_string_equal(key.pattern, "a \"b");
    reward_key_free(&key);
    assert_false(reward_keys_get(c.reward.NAME, 3, &key));
    /* --set replaces a reward or its weight, or adds one; a checkpoint's settings have the whole list as one value */
    assert_int_equal(config_set(&c, "reward.correct=boxed", &err), 0);
    assert_int_equal(config_set(&c, "reward.correct.weight=-1", &err), 0);
    assert_int_equal(config_set(&c, "reward.more=exact", &err), 0);
    config_defaults(&back);
    assert_int_equal(config_set_key(&back, "reward.NAME", c.reward.NAME, "state.json", &err), 0);
    assert_string_equal(back.reward.NAME, c.reward.NAME);
    assert_true(reward_keys_get(back.reward.NAME, 0, &key) && key.kind == REWARD_BOXED && key.weight == -1);
    reward_key_free(&key);
    assert_int_equal(config_set(&back, "reward.NAME=a=exact  \ta.weight=2 ", &err), 0);
    assert_string_equal(back.reward.NAME, "a=exact\ta.weight=2");
    assert_int_equal(config_set(&back, "reward.NAME=", &err), 0);
    assert_string_equal(back.reward.NAME, "");
    assert_int_equal(config_set(&back, "reward.NAME=a", &err), -1);
    assert_int_equal(config_set(&c, "reward.x.weight=2", &err), -1);
    assert_string_equal(err.msg, "--set reward.x.weight=2: reward.x.weight: no reward \"x\" is set before it");
}

static void refused_settings(void **state)
{
    (void)state;
    refuse("a = nope", "run.ini:2: reward.a = \"nope\": unknown kind of reward \"nope\": expected " REWARD_KINDS);
    refuse("a =", "run.ini:2: reward.a = \"\": unknown kind of reward \"\": expected " REWARD_KINDS);
    refuse("a.weight = 2", "run.ini:2: reward.a.weight: no reward \"a\" is set before it");
    refuse("a = exact\na.weight = x", "run.ini:3: reward.a.weight = \"x\": expected a number in [-1e6, 1e6]");
    refuse("a = exact\na.weight = nan", "run.ini:3: reward.a.weight = \"nan\": expected a number in [-1e6, 1e6]");
    refuse("a = exact\nb = boxed\na = boxed", "run.ini:4: reward.a is set twice, first on line 2");
    refuse("a = exact\na.weight = 2\na.weight = 2", "run.ini:4: reward.a.weight is set twice, first on line 3");
    refuse("a = exact max=3", "run.ini:2: reward.a = \"exact max=3\": exact does not take \"max=3\": its arguments are "
                              "reference=, ignore_case=");
    refuse("a = length max=3", "run.ini:2: reward.a = \"length max=3\": length needs cache=");
    refuse("a = length max=3 cache=4", "run.ini:2: reward.a = \"length max=3 cache=4\": cache=4 is more than max=3");
    refuse("a = length max=3.5 cache=1", "run.ini:2: reward.a = \"length max=3.5 cache=1\": max=3.5: expected an "
                                         "integer in [1, 1e9]");
    refuse("a = exact schema=x", "run.ini:2: reward.a = \"exact schema=x\": exact does not take \"schema=x\": its "
                                 "arguments are reference=, ignore_case=");
    refuse("a = regex", "run.ini:2: reward.a = \"regex\": regex needs pattern=");
    refuse("a = regex pattern='x", "run.ini:2: reward.a = \"regex pattern='x\": a quote has no end");
    refuse("a b = exact", "run.ini:2: reward.a b: expected a name of letters, digits, _ and -, below 40 of them");
    refuse("a.b = exact", "run.ini:2: reward.a.b: expected a name of letters, digits, _ and -, below 40 of them");
    refuse("on_nan = zero", "run.ini:2: reward.on_nan = \"zero\": expected one of error|null");
}

static void words(void **state)
{
    (void)state;
    static const struct {
        const char *text, *words[5];
    } rows[] = {
        {"", {NULL}},
        {"  a\tb  c ", {"a", "b", "c"}},
        {"'a b' \"c d\"e f''", {"a b", "c de", "f"}},
        {"'' \"\"", {"", ""}},
        {"a\\ b \\\\d \\d \\\" '\\\"'", {"a b", "\\d", "\\d", "\"", "\\\""}},
        {"\"a\\\"b\" $HOME ~ *;|", {"a\"b", "$HOME", "~", "*;|"}},
        {"end\\", {"end\\"}},
    };
    struct words w;
    struct err err;
    for (int i = 0; i < MT_LEN(rows); i++) {
        assert_int_equal(words_split(&w, rows[i].text, &err), 0);
        for (int k = 0; k < MT_LEN(rows[i].words) && rows[i].words[k]; k++) {
            assert_true(k < w.n);
            assert_string_equal(w.words[k], rows[i].words[k]);
        }
        assert_true(w.n == MT_LEN(rows[i].words) || !rows[i].words[w.n]);
        assert_null(w.words[w.n]);
        words_free(&w);
    }
    assert_int_equal(words_split(&w, "a 'b", &err), -1);
    assert_int_equal(words_split(&w, "\"b\\\"", &err), -1);
}

static struct verify_text text_of(const char *s) { return (struct verify_text){s, (int64_t)strlen(s)}; }

static void submit(struct rewards *r, const char *text, int64_t n_ids, const char *columns)
{
    static const int32_t ids[] = {1, 2, 3, 1, 2, 3, 1, 2};
    struct err err;
    const struct reward_item item = {
        .prompt = "\"p\"",
        .columns = columns,
        .answer = {.content = text_of(text), .whole = text_of(text), .ids = ids, .n_ids = n_ids},
        .finish_reason = "stop"};
    if (rewards_submit(r, &item, &err)) fail_msg("%s", err.msg);
}

static void totals(void **state)
{
    (void)state;
    struct config c;
    struct rewards *r = open_rewards(
        &c, "[reward]\na = last_number\na.weight = 2\nb = exact reference=x\nl = length max=6 cache=4\nrep=repetition");
    struct reward_results out;
    struct err err;
    for (int step = 0; step < 2; step++) {
        assert_int_equal(rewards_begin(r, step, &err), 0);
        submit(r, "so 18", 2, "{\"answer\": 18, \"x\": \"so 18\"}");
        submit(r, "17", 8, "{\"answer\": \"18\", \"x\": null}");
        submit(r, "17", 5, NULL);
        assert_int_equal(rewards_collect(r, &out, NULL, &err), 0);
        assert_int_equal(out.n, 3);
        const double values[] = {1, 1, 0, 0, 0, NAN, -1, 3.0 / 6 - 1, NAN, NAN, -0.75, 0};
        for (int i = 0; i < MT_LEN(values); i++)
            assert_true(isnan(values[i]) ? isnan(out.values[i]) : fabs(out.values[i] - values[i]) < 1e-12);
        assert_true(out.totals[0] == 3 && out.totals[1] == -1.5 && out.totals[2] == -0.75);
        assert_true(out.nulls[0] == 1 && out.nulls[1] == 2 && !out.nulls[2] && !out.nulls[3]);
    }
    rewards_close(r);
    r = open_rewards(&c, "[reward]\na = last_number");
    assert_int_equal(rewards_begin(r, 0, &err), 0);
    for (int i = 0; i < 1000; i++) submit(r, "1", 1, i % 2 ? "{}" : "{\"answer\": 1}");
    assert_int_equal(rewards_collect(r, &out, NULL, &err), 0);
    for (int i = 0; i < 1000; i++) assert_true(i % 2 ? isnan(out.totals[i]) : out.totals[i] == 1);
    rewards_close(r);
    r = open_rewards(&c, "[reward]\na = last_number\nb = regex pattern=^$\nc = exact\nd = boxed\ne = json\n"
                         "f = think_format\ng = length max=1 cache=1\nh = repetition");
    assert_int_equal(rewards_begin(r, 0, &err), 0);
    const struct reward_item nothing = {.prompt = "\"\"", .columns = "{\"answer\": \"\"}", .finish_reason = "stop"};
    if (rewards_submit(r, &nothing, &err) || rewards_collect(r, &out, NULL, &err)) fail_msg("%s", err.msg);
    assert_true(isnan(out.values[0]) && out.values[1] == 1 && out.values[2] == 1 && isnan(out.values[3]));
    assert_true(isnan(out.values[4]) && out.values[5] == 0 && out.values[6] == 0 && out.values[7] == 0);
    rewards_close(r);
    r = open_rewards(&c, "[reward]\na = environment\nb = environment\nb.weight = 2");
    assert_int_equal(rewards_begin(r, 0, &err), 0);
    const double given = 1.5;
    struct reward_item played = nothing;
    played.environment = &given;
    if (rewards_submit(r, &nothing, &err) || rewards_submit(r, &played, &err) || rewards_collect(r, &out, NULL, &err))
        fail_msg("%s", err.msg);
    assert_true(isnan(out.totals[0]) && fabs(out.totals[1] - 4.5) < 1e-12);
    rewards_close(r);
    parse(&c, "[reward]\na = json schema=/nowhere/schema.json");
    assert_null(rewards_open(&c, true, &err));
    assert_non_null(strstr(err.msg, "reward.a: schema: /nowhere/schema.json"));
    parse(&c, "");
    assert_null(rewards_open(&c, true, &err));
    assert_non_null(strstr(err.msg, "no rewards"));
}

int test_rewards(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(settings),
        cmocka_unit_test(refused_settings),
        cmocka_unit_test(words),
        cmocka_unit_test(totals),
    };
    return cmocka_run_group_tests_name("rewards", tests, NULL, NULL);
}

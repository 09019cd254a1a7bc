/* test_judge.c - rewards of a language model: prompts, scores, refusals, retries, time. */
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/file/child.h"
#include "data/file/file.h"
#include "data/hub/hub_curl.h"
#include "tests/test.h"
#include "train/reward/rewards.h"

extern char **environ;

static struct child server;
static char port[16], template[MT_PATH], key[MT_PATH];
static struct config cfg;

static int start(void **state)
{
    (void)state;
    char script[MT_PATH], *argv[] = {"python3", "-S", script, NULL};
    struct err err;
    const char *dir = scratch_dir();
    snprintf(script, sizeof(script), "%s", fixture("../generate/judge_server.py"));
    snprintf(template, sizeof(template), "%s/prompt.txt", dir);
    snprintf(key, sizeof(key), "%s/key", dir);
    static const char prompt[] = "Q {prompt} A {answer} {x} [{completion}]", secret[] = "secret\n";
    if (file_write_atomic(template, prompt, sizeof(prompt) - 1, &err) ||
        file_write_atomic(key, secret, sizeof(secret) - 1, &err) ||
        child_start(&server, argv, environ, CHILD_IN | CHILD_OUT))
        return -1;
    poll(&(struct pollfd){.fd = server.out, .events = POLLIN}, 1, 30000);
    const ssize_t n = read(server.out, port, sizeof(port) - 1);
    port[MT_MAX(n, 0)] = 0;
    port[strcspn(port, "\n")] = 0;
    return port[0] ? 0 : -1;
}

static int stop(void **state)
{
    (void)state;
    int status;
    child_close(&server.in);
    child_close(&server.out);
    child_finish(&server, 5000, &status);
    return 0;
}

static struct rewards *begin(const char *more)
{
    char text[4 * MT_PATH];
    struct err err;
    snprintf(text, sizeof(text),
             "[reward]\nj = judge http://127.0.0.1:%s/v1/ model=m prompt='%s' key='%s'\nsame = exact reference=x\n%s",
             port, template, key, more);
    config_defaults(&cfg);
    if (config_parse(&cfg, text, (int64_t)strlen(text), "run.ini", &err)) fail_msg("%s", err.msg);
    struct rewards *r = rewards_open(&cfg, true, &err);
    if (!r) fail_msg("%s", err.msg);
    return r;
}

static int step_of(struct rewards *r, int64_t step, const char *const *answers, int64_t n, struct reward_results *out,
                   struct err *err)
{
    if (rewards_begin(r, step, err)) return -1;
    for (int64_t i = 0; i < n; i++) {
        const struct verify_text text = {answers[i % 40], (int64_t)strlen(answers[i % 40])};
        const struct reward_item item = {.prompt = "[{\"role\": \"user\", \"content\": \"what?\"}]",
                                         .columns = "{\"answer\": 7}",
                                         .answer = {.content = text, .whole = text},
                                         .finish_reason = "stop"};
        if (rewards_submit(r, &item, err)) return -1;
    }
    return rewards_collect(r, out, NULL, err);
}

static void scores(void **state)
{
    (void)state;
    static const char *const answers[] = {"a", "aaa", "b\"\\\n", "c", "f", ""};
    static const double want[] = {1, 3, 4, (double)NAN, -2.5, 0};
    struct reward_results out;
    struct err err;
    struct rewards *r = begin("");
    for (int step = 0; step < 2; step++) {
        if (step_of(r, step, answers, MT_LEN(answers), &out, &err)) fail_msg("%s", err.msg);
        for (int i = 0; i < MT_LEN(want); i++)
            assert_true(isnan(want[i]) ? isnan(out.totals[i]) : out.totals[i] == want[i]);
        assert_true(out.nulls[0] == 1 && out.missing[0] == 1);
    }
    rewards_close(r);
}

static void many(void **state)
{
    (void)state;
    const char *answers[40];
    char text[40][48];
    struct reward_results out;
    struct err err;
    for (int i = 0; i < 40; i++) {
        snprintf(text[i], sizeof(text[i]), "%.*s", i, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa");
        answers[i] = text[i];
    }
    struct rewards *r = begin("");
    if (step_of(r, 0, answers, 200, &out, &err)) fail_msg("%s", err.msg);
    for (int i = 0; i < 200; i++) assert_true(out.totals[i] == i % 40);
    rewards_close(r);
}

static void failures(void **state)
{
    (void)state;
    static const char *const refused[] = {"a", "d"}, *const late[] = {"a", "ee"}, *const all_late[] = {"e"};
    struct reward_results out;
    struct err err;
    struct rewards *r = begin("");
    assert_int_equal(step_of(r, 0, refused, 2, &out, &err), -1);
    assert_non_null(strstr(err.msg, "answers HTTP 401: {\"error\""));
    rewards_close(r);
    r = begin("timeout_s = 1");
    if (step_of(r, 0, late, 2, &out, &err)) fail_msg("%s", err.msg);
    assert_true(out.totals[0] == 1 && isnan(out.totals[1]) && out.missing[0] == 1);
    rewards_close(r);
    r = begin("timeout_s = 0.2");
    int step = 0;
    while (step < 9 && !step_of(r, step, all_late, 1, &out, &err)) step++;
    assert_int_equal(step, 2);
    assert_string_equal(err.msg, "reward.j gave no reward in 3 steps in a row: no answer in time");
    rewards_close(r);
    snprintf(port, sizeof(port), "1"); /* nobody listens */
    r = begin("timeout_s = 20");
    if (step_of(r, 0, late, 1, &out, &err)) fail_msg("%s", err.msg);
    assert_true(out.missing[0] == 1);
    rewards_close(r);
}

static void refused_settings(void **state)
{
    (void)state;
    static const struct {
        const char *value, *why;
    } rows[] = {{"judge", "judge needs an address, http://... or https://..."},
                {"judge host", "judge needs an address, http://... or https://..."},
                {"judge http://x prompt=", "prompt is empty"},
                {"judge http://x max=3", "judge does not take \"max=3\": its arguments are model=, prompt=, key="}};
    struct err err;
    char set[256];
    for (int i = 0; i < MT_LEN(rows); i++) {
        config_defaults(&cfg);
        snprintf(set, sizeof(set), "reward.j=%s", rows[i].value);
        assert_int_equal(config_set(&cfg, set, &err), -1);
        if (!strstr(err.msg, rows[i].why)) fail_msg("%s", err.msg);
    }
    config_defaults(&cfg);
    assert_int_equal(config_set(&cfg, "reward.j=judge http://x prompt=/no/such/file", &err), 0);
    assert_null(rewards_open(&cfg, true, &err));
    assert_non_null(strstr(err.msg, "reward.j: /no/such/file"));
}

int test_judge(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(scores), cmocka_unit_test(many), cmocka_unit_test(failures),
                                       cmocka_unit_test(refused_settings)};
    struct err err;
    if (hub_curl_open(&err) || system("python3 -c '' 2> /dev/null")) {
        print_message("skip: no libcurl or python3, which tests/generate/judge_server.py needs\n");
        return 0;
    }
    return cmocka_run_group_tests_name("judge", tests, start, stop);
}

/* test_environment.c - environments: turns of completions at once, limits, failures; messages as a suffix of tokens. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/test.h"
#include "train/models/turn.h"
#include "train/reward/environment.h"

static struct config cfg;

static struct environment *begin(const char *mode, const char *more)
{
    char text[3 * MT_PATH];
    struct err err;
    snprintf(text, sizeof(text), "[environment]\ncommand = python3 -S \"%s\" %s\n%s",
             fixture("../generate/environment_program.py"), mode, more);
    config_defaults(&cfg);
    if (config_parse(&cfg, text, (int64_t)strlen(text), "run.ini", &err)) fail_msg("%s", err.msg);
    struct environment *e = environment_open(&cfg, &err);
    if (!e) fail_msg("%s", err.msg);
    return e;
}

static void end(struct environment *e)
{
    environment_close(e);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_int_equal(errno, ECHILD);
}

/* Free the reply. */
static struct environment_reply reply_of(struct environment *e)
{
    struct environment_reply reply = {.id = 0};
    struct err err;
    while (!environment_next(e, &reply))
        if (environment_work(e, 10000, &err)) fail_msg("%s", err.msg);
    return reply;
}

static void reset(struct environment *e, int64_t id)
{
    struct err err;
    if (environment_reset(e, id, "{\"task\":\n \"go\"}", &err)) fail_msg("%s", err.msg);
}

static void step(struct environment *e, int64_t id)
{
    struct err err;
    if (environment_step(e, id, "{\"role\": \"assistant\", \"content\": \"a\"}", "a\nb", 3, &err))
        fail_msg("%s", err.msg);
}

static void expect(struct environment *e, int64_t id, enum environment_end how, double reward, const char *messages)
{
    struct environment_reply r = reply_of(e);
    assert_int_equal(r.id, id);
    assert_int_equal(r.end, how);
    assert_true(isnan(reward) ? isnan(r.reward) : r.reward == reward);
    assert_string_equal(r.messages, messages);
    environment_reply_free(&r);
}

#define START "[{\"role\": \"user\", \"content\": \"go\"}]"
#define ECHO  "[{\"role\": \"tool\", \"content\": \"a\\nb\"}]"

static void turns(void **state)
{
    (void)state;
    struct environment *e = begin("plain", "");
    reset(e, 7);
    struct environment_reply r = reply_of(e);
    assert_string_equal(r.messages, START);
    assert_string_equal(r.tools, "[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]");
    environment_reply_free(&r);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(environment_waits(e), 0);
        step(e, 7);
        expect(e, 7, i < 2 ? ENVIRONMENT_GOES_ON : ENVIRONMENT_DONE, i < 2 ? (double)NAN : 3, ECHO);
    }
    struct err err;
    assert_int_equal(environment_end(e, 7, &err), 0); /* it has ended */
    end(e);
}

static void many_at_once(void **state)
{
    (void)state;
    enum { N = 400 };
    struct environment *e = begin("two", "");
    int done = 0, n_turn[N] = {0};
    for (int i = 0; i < N; i++) reset(e, i);
    while (done < N) {
        struct environment_reply r = reply_of(e);
        assert_int_equal(r.end, n_turn[r.id] == 3 ? ENVIRONMENT_DONE : ENVIRONMENT_GOES_ON);
        done += r.end == ENVIRONMENT_DONE;
        if (r.end == ENVIRONMENT_GOES_ON) n_turn[r.id]++, step(e, r.id);
        environment_reply_free(&r);
    }
    end(e);
}

/* The caller ends completions, between turns and during one. */
static void limits(void **state)
{
    (void)state;
    struct err err;
    struct environment *e = begin("plain", "turns = 2");
    for (int64_t id = 0; id < 3; id++) {
        reset(e, id);
        expect(e, id, ENVIRONMENT_GOES_ON, (double)NAN, START);
        step(e, id);
        if (id == 1) { /* its reply is there, or to come */
            usleep(100000);
            assert_int_equal(environment_work(e, 0, &err), 0);
            assert_int_equal(environment_end(e, id, &err), 0);
            assert_int_equal(environment_waits(e), 0);
            continue;
        }
        expect(e, id, ENVIRONMENT_GOES_ON, (double)NAN, ECHO);
        if (id == 0) {
            step(e, id);
            expect(e, id, ENVIRONMENT_LIMIT, (double)NAN, ECHO);
        }
        assert_int_equal(environment_end(e, id, &err), 0);
    }
    end(e);
}

static void failures(void **state)
{
    (void)state;
    struct err err;
    struct environment_reply r;
    struct environment *e = begin("exit 3", "");
    for (int round = 0; round < 4; round++) { /* a reply ends the row of failures */
        reset(e, 10 * round);
        expect(e, 10 * round, ENVIRONMENT_GOES_ON, (double)NAN, START);
        reset(e, 10 * round + 1);
        expect(e, 10 * round + 1, ENVIRONMENT_GOES_ON, (double)NAN, START);
        step(e, 10 * round);
        expect(e, 10 * round, ENVIRONMENT_LOST, (double)NAN, "[]");
        expect(e, 10 * round + 1, ENVIRONMENT_LOST, (double)NAN, "[]");
    }
    assert_int_equal(environment_lost(e), 8);
    end(e);
    e = begin("hang 1", "timeout_s = 0.5");
    int rc = 0, n = 0;
    for (; !rc && n < 5; n++) {
        reset(e, n);
        while (!rc && !environment_next(e, &r)) rc = environment_work(e, 1000, &err);
        if (!rc) environment_reply_free(&r);
    }
    assert_int_equal(n, 3);
    assert_non_null(strstr(err.msg, "environment.command gave no reply for 0.5 s, the 3rd failure in a row"));
    end(e);
}

static void bad_replies(void **state)
{
    (void)state;
    static const struct {
        const char *line, *why;
    } rows[] = {
        {"garbage", "reply"},
        {"[]", "expected an object"},
        {"{\"messages\": []}", "it has no \"id\""},
        {"{\"id\": 5, \"messages\": []}", "id 5 is of no completion that is open"},
        {"{\"id\": ID, \"messages\": {}}", "\"messages\": expected a list"},
        {"{\"id\": ID, \"messages\": [1]}", "\"messages\": expected objects"},
        {"{\"id\": ID, \"messages\": []}", "it has no \"messages\" for the next turn, and \"done\" is not true"},
        {"{\"id\": ID, \"done\": 1}", "\"done\": expected true or false"},
        {"{\"id\": ID, \"done\": true, \"reward\": \"x\"}", "\"reward\": expected a number or null"},
        {"{\"id\": ID, \"done\": true, \"reward\": NaN}", "\"reward\" is not finite"},
    };
    char mode[512];
    struct err err;
    for (int i = 0; i < MT_LEN(rows); i++) {
        snprintf(mode, sizeof(mode), "say 2 '%s'", rows[i].line);
        struct environment *e = begin(mode, "");
        reset(e, 0);
        expect(e, 0, ENVIRONMENT_GOES_ON, (double)NAN, START);
        if (!environment_step(e, 0, "{\"role\": \"assistant\"}", "a", 1, &err)) /* the reply may be there already */
            assert_int_equal(environment_work(e, 10000, &err), -1);
        if (!strstr(err.msg, rows[i].why)) fail_msg("%s: %s", rows[i].line, err.msg);
        end(e);
    }
    config_defaults(&cfg);
    assert_null(environment_open(&cfg, &err));
    assert_string_equal(err.msg, "environment.command is not set");
}

/* ---- tokens ---- */

static void suffix(void **state)
{
    (void)state;
    static const struct {
        const char *held, *conversation, *suffix; /* suffix NULL: it does not fit */
    } rows[] = {
        {"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>",
         "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": "
         "\"Hello\"}, {\"role\": \"user\", \"content\": \"More \\u00e9\"}]}",
         "\n<|im_start|>user\nMore \xc3\xa9<|im_end|>\n<|im_start|>assistant\n"},
        {"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>Hm</think>Hello<|im_end|>",
         "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": "
         "\"Hello\", \"reasoning_content\": \"Hm\"}, {\"role\": \"user\", \"content\": \"More\"}]}",
         NULL},
    };
    struct run *run = test_malloc(sizeof(*run));
    struct err err = {""};
    memset(run, 0, sizeof(*run));
    config_defaults(&cfg);
    run->cfg = &cfg;
    const char *dir = fixture("../../configs/tiny-gptoss");
    run->tok = tokenizer_open(dir, &err);
    if (!run->tok || chat_template_load(&run->chat, dir, "chatml", &err)) fail_msg("%s", err.msg);
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct token_list held = {0}, got = {0}, want = {0};
        bool fits;
        struct json_doc *doc =
            json_parse(rows[i].conversation, (int64_t)strlen(rows[i].conversation), "conversation", &err);
        assert_non_null(doc);
        assert_int_equal(tokenizer_encode(run->tok, rows[i].held, (int64_t)strlen(rows[i].held), true, &held, &err), 0);
        if (turn_suffix(&got, &fits, run, json_root(doc), held.ids, held.count, &err)) fail_msg("%s", err.msg);
        assert_int_equal(fits, rows[i].suffix != NULL);
        if (fits) {
            assert_int_equal(
                tokenizer_encode(run->tok, rows[i].suffix, (int64_t)strlen(rows[i].suffix), true, &want, &err), 0);
            assert_int_equal(got.count, want.count);
            assert_memory_equal(got.ids, want.ids, (size_t)want.count * sizeof(*want.ids));
        } else {
            assert_int_equal(got.count, 0);
            assert_non_null(strstr(err.msg, "the chat template renders the earlier turns as"));
        }
        json_free(doc);
        token_list_free(&held);
        token_list_free(&got);
        token_list_free(&want);
    }
    chat_template_free(run->chat);
    tokenizer_free(run->tok);
    test_free(run);
}

static void answers_as_messages(void **state)
{
    (void)state;
    static const struct message_rules rules = {.calls = MESSAGE_JSON, .think = true};
    static const char answer[] =
        "<think>Why</think>Yes\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    struct message m = {.n_call = 0};
    struct text_buf text = {0};
    message_parse(&m, &(struct message_input){.rules = rules, .wants_calls = true, .whole = true}, answer,
                  (int64_t)strlen(answer));
    turn_put_message(&text, &m);
    assert_string_equal(text.text, "{\"role\": \"assistant\", \"content\": \"Yes\", \"reasoning_content\": \"Why\", "
                                   "\"tool_calls\": [{\"id\": \"call_0\", \"type\": \"function\", \"function\": "
                                   "{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}}]}");
    text_free(&text);
    message_free(&m);
}

int test_environment(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(turns),
        cmocka_unit_test(many_at_once),
        cmocka_unit_test(limits),
        cmocka_unit_test(failures),
        cmocka_unit_test(bad_replies),
        cmocka_unit_test(suffix),
        cmocka_unit_test(answers_as_messages),
    };
    if (system("python3 -c '' 2> /dev/null")) {
        print_message("skip: no python3, which tests/generate/environment_program.py needs\n");
        return 0;
    }
    return cmocka_run_group_tests_name("environment", tests, NULL, NULL);
}

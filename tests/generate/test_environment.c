/* test_environment.c - environments: turns of completions at once, limits, failures; messages as a suffix of tokens. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/file/file.h"
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

/* Waits for a reply; the caller frees it. */
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
        if (id == 1) { /* its reply may have arrived or not */
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

/* A program that fails in each completion, at its first turn (`steps`) or before. */
static void stops_at_third(struct environment *e, bool steps, const char *why)
{
    struct environment_reply r;
    struct err err;
    char want[128];
    int rc = 0, n = 0;
    for (; !rc && n < 5; n++) {
        reset(e, n);
        if (steps) expect(e, n, ENVIRONMENT_GOES_ON, (double)NAN, START);
        if (steps) step(e, n);
        while (!rc && !environment_next(e, &r)) rc = environment_work(e, 10000, &err);
        if (!rc) environment_reply_free(&r);
    }
    assert_int_equal(n, 3);
    snprintf(want, sizeof(want), "environment.command %s, the 3rd failure in a row", why);
    if (!strstr(err.msg, want)) fail_msg("%s", err.msg);
    end(e);
}

static void failures(void **state)
{
    (void)state;
    struct environment *e = begin("exit 4", "");
    for (int round = 0; round < 4; round++) { /* an answered turn resets the count of consecutive failures */
        reset(e, 10 * round);
        expect(e, 10 * round, ENVIRONMENT_GOES_ON, (double)NAN, START);
        reset(e, 10 * round + 1);
        expect(e, 10 * round + 1, ENVIRONMENT_GOES_ON, (double)NAN, START);
        step(e, 10 * round);
        expect(e, 10 * round, ENVIRONMENT_GOES_ON, (double)NAN, ECHO);
        step(e, 10 * round);
        expect(e, 10 * round, ENVIRONMENT_LOST, (double)NAN, "[]");
        expect(e, 10 * round + 1, ENVIRONMENT_LOST, (double)NAN, "[]");
    }
    assert_int_equal(environment_lost(e), 8);
    end(e);
    stops_at_third(begin("hang 1", "timeout_s = 0.5"), false, "gave no reply for 0.5 s");
    stops_at_third(begin("exit 2", ""), true, "ended (exit status 2)"); /* completions begin, the first turn fails */
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
        {"{\"id\": ID, \"done\": true, \"rewrd\": 1}",
         "unknown key \"rewrd\" (did you mean \"reward\"?); the keys are id, messages, tools, done, reward"},
        {"{\"id\": ID, \"done\": true, \"tools\": []}", "\"tools\" has no effect in the reply to a step"},
    };
    char mode[512];
    struct err err;
    for (int i = 0; i < MT_LEN(rows); i++) {
        snprintf(mode, sizeof(mode), "say 2 '%s'", rows[i].line);
        struct environment *e = begin(mode, "");
        reset(e, 0);
        expect(e, 0, ENVIRONMENT_GOES_ON, (double)NAN, START);
        /* a reply that has arrived already fails in environment_step */
        if (!environment_step(e, 0, "{\"role\": \"assistant\"}", "a", 1, &err))
            assert_int_equal(environment_work(e, 10000, &err), -1);
        if (!strstr(err.msg, rows[i].why)) fail_msg("%s: %s", rows[i].line, err.msg);
        end(e);
    }
    struct environment *first = begin("say 1 '{\"id\": ID, \"messages\": [], \"done\": false, \"reward\": 1}'", "");
    if (!environment_reset(first, 0, "{\"task\": \"go\"}", &err))
        assert_int_equal(environment_work(first, 10000, &err), -1);
    assert_non_null(strstr(err.msg, "\"reward\" has no effect in the reply to a reset: leave it out"));
    end(first);
    config_defaults(&cfg);
    assert_null(environment_open(&cfg, &err));
    assert_string_equal(err.msg, "environment.command is not set");
    snprintf(cfg.environment.command, sizeof(cfg.environment.command), "python3 ./no-such.py");
    assert_null(environment_open(&cfg, &err));
    assert_non_null(strstr(err.msg, "environment.command: ./no-such.py cannot be read: No such file or directory"));
}

/* ---- tokens ---- */

/* Chat templates. PLAIN: the same end for every message. MARKS: a mark before this end. ROLES: the next role's token
 * ends an answer. LAST: the last message has the system prompt. MUTE: answers have no content. */
#define FOR   "{%- for m in messages %}{{- "
#define END   " }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant<|message|>' }}{%- endif %}"
#define PLAIN FOR "'<|start|>' + m.role + '<|message|>' + m.content + '<|return|>\n'" END
#define MUTE  FOR "'<|start|>' + m.role + '<|message|>' + (m.content if m.role == 'user' else '') + '<|return|>\n'" END
#define MARKS FOR "'<|start|>' + m.role + '<|message|>' + m.content + '<|constrain|><|return|>'" END
#define ROLES                                                                                                          \
    FOR "{'user': '<|end|>', 'tool': '<|channel|>', 'assistant': '<|start|>'}[m.role] + '\n' + m.content }}{%- "       \
        "endfor "                                                                                                      \
        "%}{%- if add_generation_prompt %}{{- '<|start|>\n' }}{%- endif %}"
#define LAST                                                                                                           \
    "{%- for m in messages if m.role != 'system' %}{{- '<|start|>' + m.role + '<|message|>' + (messages[0].content "   \
    "if "                                                                                                              \
    "loop.last else '') + m.content + '<|return|>'" END
#define ASKED  "{\"role\": \"user\", \"content\": \"Hi\"}"
#define MORE   "{\"role\": \"user\", \"content\": \"More \\u00e9\"}"
#define RESULT "{\"role\": \"tool\", \"content\": \"42\"}"
#define ANSWER "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hello"
#define CALL   "<|channel|>commentary to=functions.f <|constrain|>json<|message|>not json"
#define TWO    CALL "<|call|><|start|>assistant<|channel|>commentary to=functions.g json<|message|>{}"

static const struct suffix_row {
    const char *template, *before, *answer, *end, *after;
    const char *suffix, *why; /* suffix NULL: there is none; why: the error */
    bool refused, lossy;
} suffix_rows[] = {
    {PLAIN, ASKED, "Hello", "<|return|>", MORE,
     "\n<|start|>user<|message|>More \xc3\xa9<|return|>\n<|start|>assistant<|message|>", NULL, false, false},
    {PLAIN, ASKED, "Hello", "<|endoftext|>", MORE,
     "\n<|start|>user<|message|>More \xc3\xa9<|return|>\n<|start|>assistant<|message|>", NULL, false, false},
    {MARKS, ASKED, "Hello", "<|endoftext|>", MORE,
     "<|start|>user<|message|>More \xc3\xa9<|constrain|><|return|><|start|>assistant<|message|>", NULL, false, false},
    {"", ASKED, ANSWER, "<|return|>", MORE, "<|start|>user<|message|>More \xc3\xa9<|end|><|start|>assistant", NULL,
     false, false},
    {"", ASKED ", {\"role\": \"assistant\", \"content\": \"a\"}, " MORE, ANSWER, "<|call|>", MORE ", " ASKED,
     "<|start|>user<|message|>More \xc3\xa9<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant", NULL, false,
     false},
    {"", ASKED, CALL, "<|call|>", RESULT,
     "<|start|>functions.f to=assistant<|channel|>commentary<|message|>\"42\"<|end|><|start|>assistant", NULL, false,
     false},
    {"", ASKED, CALL, "<|return|>", RESULT,
     "<|start|>functions.f to=assistant<|channel|>commentary<|message|>\"42\"<|end|><|start|>assistant", NULL, false,
     false},
    {"", ASKED, CALL, "<|call|>", MORE, "<|start|>user<|message|>More \xc3\xa9<|end|><|start|>assistant", NULL, false,
     false},
    {"", ASKED, ANSWER, "<|return|>", RESULT, NULL, "Message has tool role", true, false},
    {"", ASKED, ANSWER, "<|return|>", "{\"role\": \"system\", \"content\": \"Now\"}", NULL,
     "the chat template does not write `content`", true, false},
    {"", ASKED, TWO, "<|call|>", RESULT, NULL, "has 2 calls, and the chat template writes only one", false, false},
    {"", ASKED, ANSWER, "<|return|>", MORE ", {\"role\": \"assistant\", \"content\": \"I\"}", NULL,
     "the last one is an assistant's", true, false},
    {ROLES, ASKED, "Hello", "<|end|>", MORE, "\nMore \xc3\xa9<|start|>\n", NULL, false, false},
    {ROLES, ASKED, "Hello", "<|channel|>", RESULT, "\n42<|start|>\n", NULL, false, false},
    {ROLES, ASKED, "Hello", "<|end|>", RESULT, NULL,
     "the model's turn ended with \"<|end|>\", and the chat template writes \"<|channel|> 42", false, false},
    {LAST, "{\"role\": \"system\", \"content\": \"Be. \"}, " ASKED, "Hello", "<|return|>", MORE, NULL,
     "<|message|>Hi<|return|><|start|\" before the model's turns, where the prompt has \"art|>user<|message|>Be. Hi",
     false, false},
    {MUTE, ASKED, "Hello", "<|return|>", MORE, NULL, "the chat template does not write `content`", true, false},
    {.template = MUTE,
     .before = ASKED,
     .answer = "Hello",
     .end = "<|return|>",
     .after = MORE,
     .why = "does not write the model's turn",
     .lossy = true},
};

/* The conversation with a stand-in for the answer. */
static struct json_doc *conversation_of(const struct suffix_row *row, struct message *m, bool other)
{
    struct text_buf text = {0};
    struct err err;
    turn_stand_in(m, other);
    text_put(&text, "{\"messages\": [");
    text_put(&text, row->before);
    text_put(&text, ", ");
    turn_put_message(&text, m);
    text_put(&text, ", ");
    text_put(&text, row->after);
    text_put(&text, "]}");
    struct json_doc *doc = json_parse(text.text, text.size, "the conversation", &err);
    assert_non_null(doc);
    text_free(&text);
    return doc;
}

static int64_t n_messages(const char *list)
{
    struct err err;
    char text[1024];
    snprintf(text, sizeof(text), "[%s]", list);
    struct json_doc *doc = json_parse(text, (int64_t)strlen(text), "messages", &err);
    const int64_t n = json_count(json_root(doc));
    json_free(doc);
    return n;
}

static void check_suffix(const struct suffix_row *row, const struct run *run)
{
    struct token_list got = {0}, want = {0};
    struct message m = {.n_call = 0};
    struct err err = {""};
    const int32_t ends[] = {tokenizer_id(run->tok, "<|return|>"), tokenizer_id(run->tok, "<|call|>"),
                            tokenizer_id(run->tok, "<|endoftext|>")};
    const struct message_input in = {.rules = message_rules_of(run->chat), .wants_calls = true, .whole = true};
    message_parse(&m, &in, row->answer, (int64_t)strlen(row->answer));
    struct json_doc *a = conversation_of(row, &m, false), *b = conversation_of(row, &m, true);
    struct chat_reader reader = {.template = run->chat, .on_dropped = row->lossy ? DROPPED_WARN : DROPPED_REFUSE};
    const struct turn_input turn = {.run = run,
                                    .reader = &reader,
                                    .conversation = {json_root(a), json_root(b)},
                                    .n_before = strstr(row->before, "assistant") ? 1 : n_messages(row->before),
                                    .n_told = n_messages(row->before) + 1,
                                    .end = tokenizer_id(run->tok, row->end),
                                    .ends = ends,
                                    .n_ends = MT_LEN(ends)};
    bool fits;
    const int rc = turn_suffix(&got, &fits, &turn, &err);
    if ((rc != 0) != row->refused || (!rc && fits) != (row->suffix != NULL))
        fail_msg("%s%s: %s", row->answer, row->end, err.msg);
    if (row->why && !strstr(err.msg, row->why)) fail_msg("%s%s: %s", row->answer, row->end, err.msg);
    if (row->suffix)
        assert_int_equal(tokenizer_encode(run->tok, row->suffix, (int64_t)strlen(row->suffix), true, &want, &err), 0);
    assert_int_equal(got.count, want.count);
    if (want.count) assert_memory_equal(got.ids, want.ids, (size_t)want.count * sizeof(*want.ids));
    chat_reader_free(&reader);
    json_free(a);
    json_free(b);
    message_free(&m);
    token_list_free(&got);
    token_list_free(&want);
}

static void suffix(void **state)
{
    (void)state;
    struct run *run = test_malloc(sizeof(*run));
    struct err err = {""};
    char path[MT_PATH];
    const char *dir = fixture("../../configs/tiny-gptoss");
    memset(run, 0, sizeof(*run));
    config_defaults(&cfg);
    run->cfg = &cfg;
    run->tok = tokenizer_open(dir, &err);
    if (!run->tok) fail_msg("%s", err.msg);
    snprintf(path, sizeof(path), "%s/chat.jinja", scratch_dir());
    for (int i = 0; i < MT_LEN(suffix_rows); i++) {
        const char *text = suffix_rows[i].template;
        if (file_write_atomic(path, text, (int64_t)strlen(text), &err) ||
            chat_template_load(&run->chat, dir, text[0] ? path : "", &err))
            fail_msg("%s", err.msg);
        chat_template_probe(run->chat);
        check_suffix(&suffix_rows[i], run);
        chat_template_free(run->chat);
    }
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

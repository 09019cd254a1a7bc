/* test_chat_command.c - `chat`: scripts on standard input against `generate`, commands, saved rows; on a terminal
 * Ctrl-C, reasoning and control characters. */
#define _XOPEN_SOURCE 700 /* posix_openpt */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "tests/process.h"
#include "train/answers/chat_reply.h"
#include "train/answers/chat_talk.h"
#include "train/generate/printable.h"

#define PLAIN                                                                                                          \
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] "    \
    "{% endif %}"
/* Prompts of this template end with <think>. A model that never writes </think> writes nothing but reasoning. */
#define THINKS                                                                                                         \
    "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}{# "        \
    "</think> #}"

static char text[1 << 16], saved[MT_PATH], template[MT_PATH + 32];

static const char *write_file(const char *name, const char *bytes)
{
    static char path[4][MT_PATH];
    static int next;
    char *p = path[next++ % 4];
    struct err err;
    snprintf(p, MT_PATH, "%s/%s", scratch_dir(), name);
    assert_int_equal(file_write_atomic(p, bytes, (int64_t)strlen(bytes), &err), 0);
    return p;
}

static void use_template(const char *jinja)
{
    snprintf(template, sizeof(template), "data.chat_template=%s", write_file("template.jinja", jinja));
    snprintf(saved, sizeof(saved), "%s/saved.jsonl", scratch_dir());
}

/* Runs chat with these lines on standard input. */
static int chat_run(const char *lines, const char *const *words)
{
    char script[MT_PATH + 64];
    snprintf(script, sizeof(script), "\"$@\" < '%s'", write_file("lines", lines));
    const char *dir = scratch_dir();
    return process_finish(dir, process_start_shell(dir, script, words));
}
#define CHAT(lines, ...)                                                                                               \
    chat_run(lines, (const char *const[]){"chat", config, "--set", template, "--temperature", "0", "--tokens", "7",    \
                                          __VA_ARGS__, NULL})

/* What generate answers to these messages. */
static const char *generated(const char *config, const char *model, const char *messages)
{
    static char out[4][4096];
    static int next;
    char *o = out[next++ % 4];
    const bool base = !*model;
    const char *const words[] = {"generate",
                                 config,
                                 "--set",
                                 template,
                                 "--tokens",
                                 "7",
                                 "--messages",
                                 write_file("messages.json", messages),
                                 base ? "--base" : "--adapter",
                                 base ? NULL : model,
                                 NULL};
    if (process_run(words)) fail_msg("%s", said.err);
    snprintf(o, sizeof(out[0]), "%s", said.out);
    return o;
}

static const char *content_of(struct json messages, int64_t i)
{
    const char *s;
    struct err err;
    if (json_get_str(json_at(messages, i), "content", &s, &err)) fail_msg("%s", err.msg);
    return s;
}

/* Each answer of the saved row is what generate writes to the messages before it. */
static void check_row(const char *config, const char *model, const char *line, int64_t size, int64_t n)
{
    struct err err;
    struct json_doc *doc = json_parse(line, size, "row", &err);
    if (!doc) fail_msg("%s", err.msg);
    const struct json messages = json_find(json_root(doc), "messages");
    assert_int_equal(json_count(messages), n);
    for (int64_t i = 2; i < n; i += 2) {
        struct text_buf before = {0};
        text_put(&before, "[");
        for (int64_t k = 0; k < i; k++) {
            if (k) text_put(&before, ", ");
            assert_int_equal(text_put_json(&before, json_at(messages, k), &err), 0);
        }
        text_put(&before, "]");
        const char *want = generated(config, model, before.text), *got = content_of(messages, i);
        assert_memory_equal(want, got, strlen(got));
        assert_string_equal(want + strlen(got), "\n");
        text_free(&before);
    }
    json_free(doc);
}

static void answers(void **state)
{
    (void)state;
    const char *config = process_config("");
    char lines[2 * MT_PATH + 256];
    use_template(PLAIN);
    snprintf(lines, sizeof(lines),
             "The cat\n/save %s\n\n\"\"\"\none\ntwo\n\"\"\"\n/save %s\n/system \nno\n/system So\nThe cat\r\n//x\n/save "
             "%s",
             saved, saved, saved);
    if (CHAT(lines, "--base", "--system", "Be")) fail_msg("%s", said.err);
    assert_says(said.err, "sampling: temperature 0, top_p 1");
    assert_says(said.err, "truncated after 7 tokens (--tokens)");
    assert_says(said.err, "another conversation begins");
    process_read(saved, text, sizeof(text));
    char *second = strchr(text, '\n') + 1;
    assert_says(text, "{\"messages\": [{\"role\": \"system\", \"content\": \"Be\"}, {\"role\": \"user\", \"content\": "
                      "\"The cat\"}, ");
    assert_says(text, "{\"role\": \"user\", \"content\": \"one\\ntwo\"}");
    check_row(config, "", text, second - text, 5);
    assert_says(second, "{\"messages\": [{\"role\": \"system\", \"content\": \"So\"}, {\"role\": \"user\", "
                        "\"content\": \"The cat\"}, ");
    assert_says(second, "\"content\": \"/x\"}"); /* //x is a message */
    check_row(config, "", second, (int64_t)strlen(second), 5);
    assert_null(strchr(strchr(second, '\n') + 1, '\n')); /* a row per conversation */

    assert_int_equal(RUN("tokens", "--checkpoint", fixture("parity/case_a"), "--messages", saved, "--json",
                         "--template", strchr(template, '=') + 1),
                     0); /* training reads it */
    assert_says(said.out, "\"loss_spans\": [[");
}

/* The adapter and the base model side by side; the adapter's answer stays. */
static void both(void **state)
{
    (void)state;
    const char *config = process_config("");
    const char *adapter = fixture("parity/case_a/adapter_final");
    char lines[2 * MT_PATH + 256], word[MT_PATH + 16], want[3][4096], all[16384];
    use_template(PLAIN);
    static const char user[] = "[{\"role\": \"user\", \"content\": \"The cat\"}]";
    snprintf(want[0], sizeof(want[0]), "%s", generated(config, adapter, user));
    snprintf(want[1], sizeof(want[1]), "%s", generated(config, "", user));
    snprintf(word, sizeof(word), "mine=%s", adapter);
    snprintf(lines, sizeof(lines),
             "/both\nThe cat\n/save %s\n/reset\n/base\nThe cat\n/reset\n/adapter mine\nThe cat\n/quit\nno", saved);
    if (CHAT(lines, "--adapter", word, "--context", "64")) fail_msg("%s", said.err);
    snprintf(all, sizeof(all), "[mine]\n%s[case_a]\n%s%s%s", want[0], want[1], want[1], want[0]);
    assert_string_equal(said.out, all);
    process_read(saved, text, sizeof(text));
    check_row(config, adapter, text, (int64_t)strlen(text), 2);
    assert_int_equal(CHAT("/adapter other\n", "--adapter", word), 1);
    assert_says(said.err, "other: no such adapter; loaded: mine");
    assert_int_equal(CHAT("/both\n", "--base"), 1);
    assert_says(said.err, "no adapter is loaded: /adapter DIR loads one");
    snprintf(lines, sizeof(lines), "/adapter %s\nThe cat\n/adapter one=%s\n/reset\n/adapter adapter_final\nThe cat\n",
             adapter, fixture("parity/case_a/adapter_init"));
    if (CHAT(lines, "--base", "--set", "lora.r=8", "--set",
             "lora.targets=q_proj,k_proj,v_proj,o_proj,gate_up_proj,down_proj"))
        fail_msg("%s", said.err); /* there is one slot: each adapter makes room for the next */
    snprintf(all, sizeof(all), "%s%s", want[0], want[0]);
    assert_string_equal(said.out, all);
    assert_int_equal(CHAT("/adapter /nowhere\n", "--base"), 1);
    assert_says(said.err, "/nowhere");
    assert_int_equal(CHAT("x\n", NULL), 1); /* the run has no adapter */
    assert_says(said.err, "train first, or give --adapter or --base");
}

/* A model's path in place of a configuration; seed and number of the turn determine samples. */
static void sampled(void **state)
{
    (void)state;
    char dir[MT_PATH], out[3][4096];
    static const char *const seeds[] = {"1", "1", "2"};
    snprintf(dir, sizeof(dir), "%s", fixture("../../configs/tiny-gptoss"));
    for (int i = 0; i < 3; i++) {
        const char *const words[] = {"chat",   dir,     "--tokens",       "20", "--seed",
                                     seeds[i], "--set", "data.system=Be", NULL};
        if (chat_run("Hi\nHi\n", words)) fail_msg("%s", said.err);
        assert_says(said.err, "sampling: temperature 1,");
        snprintf(out[i], sizeof(out[0]), "%s", said.out);
    }
    assert_string_equal(out[0], out[1]);
    assert_string_not_equal(out[0], out[2]);
}

static void refused(void **state)
{
    (void)state;
    const char *config = process_config("");
    char lines[MT_PATH + 64];
    struct err err;
    struct chat_talk t = {.n = 0};
    use_template(PLAIN);
    assert_int_equal(CHAT("", "--base"), 0);
    assert_string_equal(said.out, "");
    assert_int_equal(CHAT("/help\n", "--base"), 0);
    assert_says(said.out, "/adapter [NAME|DIR]");
    assert_int_equal(RUN("chat", "--help"), 0);
    assert_says(said.out, "[--adapter [NAME=]DIR | --base] [OPTION ...]");
    assert_int_equal(CHAT("/resett\n", "--base"), 1);
    assert_says(said.err, "/resett: no such command: did you mean /reset?");
    assert_int_equal(CHAT("The cat \xff\n", "--base"), 1);
    assert_says(said.err, "not valid UTF-8");
    assert_int_equal(CHAT("The cat and the dog and the mouse\nmore\n", "--base", "--context", "8"), 1);
    assert_says(said.err, "there is room for 8 with an answer: /reset begins another");
    const char *const piped[] = {"chat", config, "--set", template, "--temperature", "0", "--base", NULL};
    if (chat_run("The cat\n", piped)) fail_msg("%s", said.err); /* it repeats itself */
    assert_says(said.err, "truncated after 512 tokens (--tokens)");
    const char *const long_words[] = {"chat", config, "--set", template, "--base", "--context", "30", NULL};
    assert_int_equal(chat_run("The cat\n", long_words), 0);
    assert_says(said.err, "truncated: the conversation fills the context; /reset");
    assert_int_equal(CHAT("/save x\n", "--base"), 1);
    assert_says(said.err, "the conversation has no messages");
    const char *plain = write_file("notes.txt", "no line feed");
    snprintf(lines, sizeof(lines), "The cat\n/save %s\n", plain);
    assert_int_equal(CHAT(lines, "--base"), 1);
    assert_says(said.err, "does not end with a line feed");
    process_read(plain, text, sizeof(text));
    assert_string_equal(text, "no line feed");
    assert_int_equal(RUN("chat", config, "--base"), 1);
    assert_says(said.err, "has no chat template: set data.chat_template");
    const char *const cold[] = {"chat", config, "--set", template, "--base", "--temperature", "0.001", NULL};
    assert_int_equal(chat_run("x\n", cold), 1);
    assert_says(said.err, "temperature = 0.001 is neither 0 nor at least 0.01");
    assert_int_equal(CHAT("x\n", "--base", "--set", "quant.weights=mxfp4"), 1);
    assert_says(said.err, "chat does not imitate quantisation");
    chat_talk_add(&t, "user", "a", "");
    assert_null(t.messages[0].reasoning);
    assert_int_equal(chat_talk_save(&t, "/nowhere/x", &err), -1);
    snprintf(saved, sizeof(saved), "%s/changed.jsonl", scratch_dir());
    assert_int_equal(chat_talk_save(&t, saved, &err), 0);
    assert_int_equal(file_write_atomic(saved, "{}\n", 3, &err), 0);
    assert_int_equal(chat_talk_save(&t, saved, &err), -1);
    assert_says(err.msg, "was changed since");
    chat_talk_free(&t);
}

/* Without a terminal reasoning is not shown, and an answer of reasoning alone is not kept. */
static void reasoning(void **state)
{
    (void)state;
    const char *config = process_config("");
    use_template(THINKS);
    assert_int_equal(CHAT("The cat\n", "--base"), 0);
    assert_string_equal(said.out, "\n");
    assert_says(said.err, "no answer: the message is not kept");
}

/* ---- on a terminal ---- */

struct terminal {
    int fd;
    pid_t pid;
    int64_t n; /* bytes of text */
};

static void terminal_open(struct terminal *t, const char *const *words)
{
    const char *argv[32] = {moetrain_binary()};
    int n = 1;
    t->fd = posix_openpt(O_RDWR | O_NOCTTY);
    assert_true(t->fd >= 0 && !grantpt(t->fd) && !unlockpt(t->fd));
    const char *name = ptsname(t->fd);
    while (words[n - 1]) argv[n] = words[n - 1], n++;
    t->n = 0;
    t->pid = process_fork();
    if (t->pid) return;
    (void)setsid();
    for (int fd = 0; fd < 3; fd++) {
        const int side = open(name, O_RDWR); /* the session's terminal */
        if (side < 0 || dup2(side, fd) < 0) _exit(99);
    }
    execv(argv[0], (char *const *)(uintptr_t)argv);
    _exit(98);
}

static void terminal_more(struct terminal *t, const char *want)
{
    struct pollfd fd = {.fd = t->fd, .events = POLLIN};
    ssize_t n = -1;
    if (poll(&fd, 1, 60000) > 0 && t->n + 4096 < (int64_t)sizeof(text)) n = read(t->fd, text + t->n, 4095);
    if (n <= 0) fail_msg("no %s in:\n%s", want, text);
    t->n += n;
    text[t->n] = 0;
}

/* Reads until the words are there, after those of the last call. */
static void terminal_wait(struct terminal *t, const char *words)
{
    t->n = 0;
    text[0] = 0;
    while (!strstr(text, words)) terminal_more(t, words);
}

static void type(const struct terminal *t, const char *keys)
{
    assert_int_equal(write(t->fd, keys, strlen(keys)), strlen(keys));
}

static int terminal_close(struct terminal *t)
{
    int status;
    while (read(t->fd, text, sizeof(text)) > 0) {
    }
    close(t->fd);
    assert_int_equal(waitpid(t->pid, &status, 0), t->pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

#define TERMINAL(t, tokens)                                                                                            \
    terminal_open(t, (const char *const[]){"chat", config, "--set", template, "--base", "--tokens", tokens,            \
                                           "--temperature", "0", "--set", "train.threads=1", NULL})

/* Ctrl-C stops the answer and not the program; an error of a line does not end it; Ctrl-D ends. */
static void stopped(void **state)
{
    (void)state;
    const char *config = process_config("");
    struct terminal t;
    use_template(PLAIN);
    terminal_open(&t, (const char *const[]){"chat", fixture("../../configs/tiny-gptoss"), "--temperature", "0", NULL});
    terminal_wait(&t, "tiny-gptoss> ");
    type(&t, "The cat\n");
    terminal_wait(&t, "The cat\r\n");
    while (t.n < 60) terminal_more(&t, "an answer"); /* the answer goes on until the context is full */
    type(&t, "\003");
    terminal_wait(&t, "stopped after ");
    while (!strstr(text, "tiny-gptoss> ")) terminal_more(&t, "tiny-gptoss> ");
    type(&t, "/nothing\n");
    terminal_wait(&t, "warning: /nothing: no such command");
    while (!strstr(text, "tiny-gptoss> ")) terminal_more(&t, "tiny-gptoss> ");
    type(&t, "\003");
    terminal_wait(&t, "Ctrl-C again, or Ctrl-D, ends");
    while (!strstr(text, "tiny-gptoss> ")) terminal_more(&t, "tiny-gptoss> ");
    type(&t, "\004");
    assert_int_equal(terminal_close(&t), 0);
    TERMINAL(&t, "5");
    terminal_wait(&t, "case_a> ");
    type(&t, "\003");
    terminal_wait(&t, "case_a> ");
    type(&t, "\003");
    assert_int_equal(terminal_close(&t), 130);
}

static void printable(void **state)
{
    (void)state;
    static const char in[] = "a\tb\n\033[31m\r\xc3\xa9\xe2\x80\xae.", want[] = "a\tb\n\xef\xbf\xbd[31m\xef\xbf\xbd"
                                                                               "\xc3\xa9\xef\xbf\xbd.";
    char out[64] = "";
    FILE *f = fmemopen(out, sizeof(out), "w");
    printable_put(f, in, sizeof(in) - 1);
    fclose(f);
    assert_string_equal(out, want);
}

static void dimmed(void **state)
{
    (void)state;
    const char *config = process_config("");
    struct terminal t;
    use_template(THINKS);
    TERMINAL(&t, "9");
    terminal_wait(&t, "case_a> ");
    type(&t, "The cat\n");
    terminal_wait(&t, "no answer");
    assert_says(text, "\033[2m");
    assert_says(text, "\033[0m");
    type(&t, "/quit\n");
    assert_int_equal(terminal_close(&t), 0);
}

/* ---- turns ---- */

/* Answers each message of a conversation; tokens of the prompts, and those of them that were computed. */
static void converse(struct run *r, bool keeps, char answer[3][256], int64_t n_prompt[3], int64_t computed[3])
{
    static const char *const said_by_user[] = {"The cat sat", "And then?", "Go on"};
    const struct engine_options opt = {
        .n_seq = 1, .max_len = 200, .n_tok = 200, .chunk = 128, .cache_tok = 200, .keeps = keeps};
    struct chat_replies replies = {
        .run = r, .rules = message_rules_of(r->chat), .params = sample_params_default(), .context = 200};
    struct chat_talk talk = {.n = 0};
    struct chat_reply reply;
    struct err err;
    replies.params.max_tokens = 8;
    if (!(replies.engine = engine_open(r, &opt, &err))) fail_msg("%s", err.msg);
    for (int i = 0; i < 3; i++) {
        const struct engine_stats before = engine_stats(replies.engine);
        chat_talk_add(&talk, "user", said_by_user[i], NULL);
        if (chat_reply_make(&reply, &replies, &talk, ENGINE_OWN, &err)) fail_msg("%s", err.msg);
        n_prompt[i] = engine_stats(replies.engine).prompt_tok - before.prompt_tok;
        computed[i] = engine_stats(replies.engine).prefilled_tok - before.prefilled_tok;
        snprintf(answer[i], 256, "%s", reply.content.text);
        chat_talk_add(&talk, "assistant", reply.content.text, NULL);
        chat_reply_free(&reply);
    }
    engine_close(replies.engine);
    chat_talk_free(&talk);
}

/* A turn computes at most the tokens after the earlier prompt: the answer is among them only where template or
 * tokenizer now give it other tokens. The texts are those without a cache between turns. */
static void turns_continue(void **state)
{
    (void)state;
    struct config cfg;
    struct run r;
    struct dataset_options opt;
    struct err err;
    char with[3][256], without[3][256];
    int64_t n_prompt[3], computed[3], all[3];
    config_defaults(&cfg);
    use_template(PLAIN);
    snprintf(cfg.model.path, sizeof(cfg.model.path), "%s", fixture("parity/case_a"));
    if (config_set(&cfg, template, &err) || config_set(&cfg, "train.device=cpu", &err)) fail_msg("%s", err.msg);
    cfg.data.seq_len = 200;
    if (run_open_headers(&r, &cfg, &err) || run_open_tokenizer(&r, &opt, NULL, &err)) fail_msg("%s", err.msg);
    r.generation = chat_reply_sizes(200);
    if (run_open_model(&r, NULL, PLAN_GENERATE, &err)) fail_msg("%s", err.msg);
    converse(&r, r.generation.keeps, with, n_prompt, computed);
    converse(&r, false, without, n_prompt, all);
    for (int i = 0; i < 3; i++) {
        assert_string_equal(with[i], without[i]);
        assert_int_equal(all[i], n_prompt[i] - 1);
        if (computed[i] > n_prompt[i] - (i ? n_prompt[i - 1] - 2 : 1) || (i && !computed[i]))
            fail_msg("turn %d: %lld tokens of %lld computed", i, (long long)computed[i], (long long)n_prompt[i]);
    }
    run_close(&r);
}

int test_chat_command(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers),   cmocka_unit_test(both),      cmocka_unit_test(sampled),
        cmocka_unit_test(refused),   cmocka_unit_test(reasoning), cmocka_unit_test(stopped),
        cmocka_unit_test(printable), cmocka_unit_test(dimmed),    cmocka_unit_test(turns_continue),
    };
    return cmocka_run_group_tests_name("chat_command", tests, NULL, NULL);
}

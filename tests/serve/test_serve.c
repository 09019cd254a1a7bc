/* test_serve.c - `moetrain serve` over sockets: texts as `generate` gives them, streams, adapters, errors, limits,
 * hostile clients, many clients, the end. */
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "data/json/text.h"
#include "tests/process.h"
#include "train/serve/http.h"

enum { REPLY = 1 << 20, CLIENTS = 8, ROUNDS = 4 };

static struct server {
    pid_t pid;
    int port;
    char dir[MT_PATH], config[MT_PATH];
} server;

/* ---- the server ---- */

static const char template[] =
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('no') }}{% endif %}{% for m in messages %}{{ m.role + "
    "': ' + m.content + '\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ 'assistant: ' }}{% endif %}";

static bool can_serve(void)
{
    char name[64];
    const char *version = http_version(name);
    if (!strstr(version, "not ")) return true;
    printf("skip: %s\n", version);
    return false;
}

/* Waits until the log has `text`; returns what follows `text`. */
static const char *wait_for_log(const char *text)
{
    static char log[1 << 18];
    char path[MT_PATH + 16];
    snprintf(path, sizeof(path), "%s/stderr", server.dir);
    for (int i = 0; i < 3000; i++) {
        process_read(path, log, sizeof(log));
        const char *at = strstr(log, text);
        if (at && strchr(at, '\n')) return at + strlen(text);
        if (waitpid(server.pid, NULL, WNOHANG) == server.pid) break;
        usleep(20000);
    }
    fail_msg("no \"%s\" in:\n%s", text, log);
    return NULL;
}

/* Starts the server; a NULL ends the options. */
static void start(const char *const *options)
{
    char path[MT_PATH], set[MT_PATH + 64];
    struct err err;
    const char *config = process_config("");
    snprintf(server.config, MT_PATH, "%s", config);
    snprintf(server.dir, MT_PATH, "%.*s", (int)(strrchr(config, '/') - config), config);
    assert_int_equal(file_in(path, server.dir, "template.jinja", &err), 0);
    assert_int_equal(file_write_atomic(path, template, (int64_t)strlen(template), &err), 0);
    snprintf(set, sizeof(set), "data.chat_template=%s", path);
    const char *words[32] = {"serve", config, "--port", "0", "--context", "120", "--set", set};
    int n = 8;
    for (; *options; options++) words[n++] = *options;
    server.pid = process_start(server.dir, words);
    server.port = atoi(wait_for_log("listening on http://127.0.0.1:"));
    assert_true(server.port > 0);
}
#define START(...) start((const char *const[]){__VA_ARGS__, NULL})

/* SIGTERM; the server ends by itself, and its sanitizers find nothing. */
static void stop(void)
{
    kill(server.pid, SIGTERM);
    const int code = process_finish(server.dir, server.pid);
    if (code) fail_msg("exit code %d: %s", code, said.err);
}

/* ---- a client ---- */

static int connect_here(void)
{
    const struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)server.port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const struct timeval patience = {.tv_sec = 60};
    assert_true(fd >= 0);
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&to, sizeof(to)), 0);
    return fd;
}

static bool put(int fd, const char *text, int64_t size)
{
    while (size > 0) {
        const ssize_t n = send(fd, text, (size_t)size, MSG_NOSIGNAL);
        if (n <= 0) return false;
        text += n, size -= n;
    }
    return true;
}

/* Reads all bytes until the server closes the connection. */
static void get(int fd, char *reply)
{
    int64_t size = 0;
    ssize_t n;
    while (size < REPLY - 1 && (n = recv(fd, reply + size, (size_t)(REPLY - 1 - size), 0)) > 0) size += n;
    reply[size] = 0;
    close(fd);
}

static void put_request(int fd, const char *headers, const char *path, const char *body)
{
    char head[1024];
    snprintf(head, sizeof(head), "%s %s HTTP/1.1\r\nHost: localhost:%d\r\n%sContent-Length: %zu\r\n\r\n",
             body ? "POST" : "GET", path, server.port, headers, body ? strlen(body) : 0);
    put(fd, head, (int64_t)strlen(head));
    if (body) put(fd, body, (int64_t)strlen(body));
}

/* Returns the HTTP status; the body goes into reply. */
static int ask_with(char *reply, const char *headers, const char *path, const char *body)
{
    char all[512];
    const int fd = connect_here();
    int status = 0;
    snprintf(all, sizeof(all), "Connection: close\r\n%s", headers);
    put_request(fd, all, path, body);
    get(fd, reply);
    sscanf(reply, "HTTP/1.1 %d", &status);
    const char *end = strstr(reply, "\r\n\r\n");
    if (end) memmove(reply, end + 4, strlen(end + 4) + 1);
    return status;
}

static char reply[REPLY];
static int ask(const char *path, const char *body) { return ask_with(reply, "", path, body); }

#define CHAT       "/v1/chat/completions"
#define COMPLETION "/v1/completions"
#define HELLO      "\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]"

/* A string of the reply, found by the keys of `path`: "choices.0.text". */
static const char *text_at(const char *json, const char *path)
{
    static char text[4][8192];
    static int next;
    char *copy = text[next++ % 4], key[64];
    struct err err;
    struct json_doc *doc = json_parse(json, (int64_t)strlen(json), "reply", &err);
    if (!doc) fail_msg("%s in %s", err.msg, json);
    struct json j = json_root(doc);
    const char *value;
    for (int n; *path; path += n + (path[n] == '.')) {
        n = (int)strcspn(path, ".");
        snprintf(key, sizeof(key), "%.*s", n, path);
        j = json_type(j) == JSON_ARRAY ? json_at(j, atoi(key)) : json_find(j, key);
    }
    int64_t size;
    if (json_str(j, &value, &size, &err)) fail_msg("%s in %s", err.msg, json);
    snprintf(copy, sizeof(text[0]), "%s", value);
    json_free(doc);
    return copy;
}

/* What `generate` writes after "The cat". */
static const char *generated(const char *adapter)
{
    static char text[8192];
    const int code =
        adapter ? RUN("generate", server.config, "--adapter", adapter, "--prompt", "The cat", "--tokens", "9", "--json")
                : RUN("generate", server.config, "--base", "--prompt", "The cat", "--tokens", "9", "--json");
    if (code) fail_msg("%s", said.err);
    snprintf(text, sizeof(text), "%s", text_at(said.out, "text"));
    return text;
}

/* ---- tests ---- */

static void texts(void **state)
{
    (void)state;
    if (!can_serve()) return;
    char folder[MT_PATH], adapter[MT_PATH], body[512], parts[8192] = "";
    snprintf(folder, MT_PATH, "%s", fixture("parity/case_a"));
    START("--adapters", folder, "--slots", "1");
    assert_int_equal(ask("/v1/models", NULL), 200);
    static const char *const names[] = {"case_a", "adapter_final", "adapter_init"};
    assert_string_equal(text_at(reply, "data.0.id"), names[0]);
    for (int i = 0; i < 3; i++) {
        assert_says(reply, names[i]);
        snprintf(adapter, MT_PATH, "%s/%s", folder, names[i]);
        char *copy = mem_strdup(reply);
        const char *want = generated(i ? adapter : NULL);
        snprintf(body, sizeof(body),
                 "{\"model\": \"%s\", \"prompt\": \"The cat\", \"max_tokens\": 9, \"temperature\": 0}", names[i]);
        if (ask(COMPLETION, body) != 200) fail_msg("%s", reply);
        assert_string_equal(text_at(reply, "choices.0.text"), want);
        snprintf(reply, sizeof(reply), "%s", copy);
        mem_free(copy);
    }
    /* the same text in a stream, also with a seed */
    if (ask(CHAT, "{" HELLO ", \"seed\": 3, \"ignore_eos\": true, \"max_tokens\": 90}") != 200) fail_msg("%s", reply);
    char want[8192];
    snprintf(want, sizeof(want), "%s", text_at(reply, "choices.0.message.content"));
    assert_string_equal(text_at(reply, "model"), names[0]); /* the request names none */
    assert_says(reply, "\"finish_reason\": \"length\"");
    assert_says(reply, "\"completion_tokens\": 90");
    if (ask(CHAT, "{" HELLO ", \"seed\": 3, \"ignore_eos\": true, \"max_tokens\": 90, \"stream\": true, "
                  "\"stream_options\": {\"include_usage\": true}}") != 200)
        fail_msg("%s", reply);
    assert_says(reply, "data: [DONE]");
    assert_says(reply, "\"completion_tokens\": 90");
    int n = 0;
    for (char *at = reply; (at = strstr(at, "data: {")); n++) {
        char *end = strstr(at, "\n\n");
        assert_non_null(end);
        *end = 0;
        if (strstr(at, "\"delta\": {") && strstr(at, "\"content\": ")) {
            const size_t used = strlen(parts);
            snprintf(parts + used, sizeof(parts) - used, "%s", text_at(at + 6, "choices.0.delta.content"));
        }
        at = end + 1;
    }
    assert_true(n > 4);
    assert_string_equal(parts, want);
    stop();
    assert_says(said.err, "adapter adapter_init loaded");
    assert_says(said.err, "case_a: ");
    assert_null(strstr(said.err, "Hello"));
}

/* Tokens in the last reply's usage. */
static int64_t usage(const char *key)
{
    char name[64];
    snprintf(name, sizeof(name), "\"%s\": ", key);
    const char *at = strstr(reply, name);
    if (!at) fail_msg("no %s in %s", key, reply);
    return atoll(at + strlen(name));
}

static void put_turn(struct text_buf *messages, const char *role, const char *content)
{
    if (messages->size) text_put(messages, ", ");
    text_put(messages, "{\"role\": ");
    text_put_string(messages, role);
    text_put(messages, ", \"content\": ");
    text_put_string(messages, content);
    text_put(messages, "}");
}

static void ask_turn(const char *model, const struct text_buf *messages)
{
    char body[4096];
    snprintf(body, sizeof(body), "{\"model\": \"%s\", \"messages\": [%s], \"max_tokens\": 6, \"temperature\": 0}",
             model, messages->text);
    if (ask(CHAT, body) != 200) fail_msg("%s", reply);
}

/* A client that sends its conversation each time: the earlier prompt is not computed again, except for tokens that
 * differ because template or tokenizer join it otherwise with what follows. Another model's cache is not used. A new
 * server gives the same text. */
static void turns(void **state)
{
    (void)state;
    if (!can_serve()) return;
    struct text_buf messages = {0};
    char folder[MT_PATH + 16], last[8192];
    int64_t before = 0;
    snprintf(folder, sizeof(folder), "adapter=%s/adapter_final", fixture("parity/case_a"));
    START("--adapter", folder);
    for (int i = 0; i < 3; i++) {
        put_turn(&messages, "user", i ? "And then?" : "The cat sat");
        ask_turn("case_a", &messages);
        const int64_t n = usage("prompt_tokens"), cached = usage("cached_tokens");
        if (i ? cached < before - 2 || cached >= n : cached != 0)
            fail_msg("turn %d: %lld tokens in the cache, of %lld", i, (long long)cached, (long long)n);
        before = n;
        snprintf(last, sizeof(last), "%s", text_at(reply, "choices.0.message.content"));
        if (i < 2) put_turn(&messages, "assistant", last);
    }
    ask_turn("case_a", &messages);
    assert_int_equal(usage("cached_tokens"), before - 1);
    assert_string_equal(text_at(reply, "choices.0.message.content"), last);
    ask_turn("adapter", &messages);
    assert_int_equal(usage("cached_tokens"), 0);
    stop();
    assert_says(said.err, "(0 in the cache)");
    START("--adapter", folder);
    ask_turn("case_a", &messages);
    assert_int_equal(usage("cached_tokens"), 0);
    assert_string_equal(text_at(reply, "choices.0.message.content"), last);
    stop();
    text_free(&messages);
}

static void forms(void **state)
{
    (void)state;
    if (!can_serve()) return;
    START("--sequences", "8");
    if (ask(COMPLETION,
            "{\"prompt\": [\"The cat\", \"One two\"], \"n\": 2, \"max_tokens\": 4, \"logprobs\": 2, \"echo\": "
            "true, \"temperature\": 0}") != 200)
        fail_msg("%s", reply);
    assert_int_equal(strncmp(text_at(reply, "choices.0.text"), "The cat", 7), 0);
    assert_string_equal(text_at(reply, "choices.0.text"), text_at(reply, "choices.1.text"));
    assert_int_equal(strncmp(text_at(reply, "choices.3.text"), "One two", 7), 0);
    assert_says(reply, "\"token_logprobs\": [null, -");
    if (ask(COMPLETION, "{\"prompt\": \"The cat\", \"max_tokens\": 0, \"logprobs\": 0, \"echo\": true}") != 200)
        fail_msg("%s", reply);
    assert_string_equal(text_at(reply, "choices.0.text"), "The cat");
    assert_says(reply, "\"token_logprobs\": [null, -");
    assert_says(reply, "\"completion_tokens\": 0");
    assert_int_equal(ask(COMPLETION, "{\"prompt\": \"The cat\", \"max_tokens\": 0, \"echo\": true}"), 200);
    if (ask(COMPLETION, "{\"prompt\": [5, 6, 7], \"max_tokens\": 30, \"stop\": [\"e\", \"a\"]}") != 200)
        fail_msg("%s", reply);
    assert_null(strpbrk(text_at(reply, "choices.0.text"), "ea"));
    if (ask(CHAT, "{" HELLO ", \"max_completion_tokens\": 2, \"logprobs\": true, \"top_logprobs\": 2, \"logit_bias\": "
                  "{\"7\": 100}, \"top_k\": 4, \"user\": \"u\"}") != 200)
        fail_msg("%s", reply);
    assert_says(reply, "\"top_logprobs\": [{\"token\": ");
    char first[8192];
    snprintf(first, sizeof(first), "%s", text_at(reply, "choices.0.logprobs.content.0.token"));
    assert_string_equal(text_at(reply, "choices.0.logprobs.content.1.token"), first); /* the bias decides */
    if (ask(CHAT,
            "{" HELLO ", \"max_tokens\": 3, \"ignore_eos\": true, \"min_tokens\": 2, \"repetition_penalty\": 1.1, "
            "\"stop_token_ids\": [3], \"temperature\": 0.5, \"top_p\": 0.9, \"min_p\": 0.1}") != 200)
        fail_msg("%s", reply);
    stop();
}

static const struct wrong {
    const char *path, *body;
    int status;
    const char *says;
} wrongs[] = {
    {"/v1/nothing", NULL, 404, "no such path"},
    {CHAT, NULL, 405, "another method"},
    {"/v1/models", "{}", 405, "another method"},
    {CHAT, "", 400, "request"},
    {CHAT, "{\"messages\": [", 400, "not valid JSON"},
    {CHAT, "[]", 400, "not a JSON object"},
    {CHAT, "{}", 400, "messages"},
    {CHAT, "{\"messages\": []}", 400, "messages"},
    {CHAT, "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}", 400, "end with a user's"},
    {CHAT, "{\"messages\": [{\"content\": \"a\"}]}", 400, "role"},
    {CHAT, "{" HELLO ", \"model\": \"x\"}", 404, "no model x"},
    {CHAT, "{" HELLO ", \"temperature\": -1}", 400, "temperature"},
    {CHAT, "{" HELLO ", \"temperature\": \"1\"}", 400, "\"param\": \"temperature\""},
    {CHAT, "{" HELLO ", \"top_logprobs\": 21, \"logprobs\": true}", 400, "top_logprobs"},
    {CHAT, "{" HELLO ", \"top_logprobs\": 2}", 400, "needs logprobs"},
    {CHAT, "{" HELLO ", \"n\": 0}", 400, "n"},
    {CHAT, "{" HELLO ", \"max_tokens\": 121}", 400, "--context"},
    {CHAT, "{" HELLO ", \"stop\": \"\"}", 400, "stop string is empty"},
    {CHAT, "{" HELLO ", \"logit_bias\": {\"x\": 1}}", 400, "logit_bias"},
    {CHAT, "{" HELLO ", \"stream_options\": {}}", 400, "needs stream"},
    {CHAT, "{" HELLO ", \"stream\": true, \"stream_options\": \"x\"}", 400, "\"param\": \"stream_options\""},
    {CHAT, "{" HELLO ", \"stream\": true, \"stream_options\": {\"include_usage\": 1}}", 400, "stream_options"},
    {CHAT, "{" HELLO ", \"stream\": \"yes\"}", 400, "\"param\": \"stream\""},
    {CHAT, "{" HELLO ", \"tools\": \"x\"}", 400, "tools: expected a list"},
    {CHAT, "{" HELLO ", \"user\": 1}", 400, "user: expected a string"},
    {CHAT, "{" HELLO ", \"metadata\": []}", 400, "metadata: expected an object"},
    {CHAT, "{" HELLO ", \"chat_template_kwargs\": 1}", 400, "\"param\": \"chat_template_kwargs\""},
    {CHAT, "{" HELLO ", \"max_completion_tokens\": 2, \"max_tokens\": \"x\"}", 400, "\"param\": \"max_tokens\""},
    {CHAT, "{\"messages\": \"x\"}", 400, "\"param\": \"messages\""},
    {CHAT, "{" HELLO ", \"tool_choice\": \"required\"}", 400, "auto and none"},
    {CHAT, "{" HELLO ", \"response_format\": {\"type\": \"json_object\"}}", 400, "does not support"},
    {CHAT, "{" HELLO ", \"temperatur\": 1}", 400, "did you mean temperature?"},
    {CHAT, "{\"messages\": [{\"role\": \"user\"}]}", 400, "\"param\": \"messages\""},
    {CHAT, "{" HELLO ", \"guided_regex\": \"a\"}", 400, "\"param\": \"guided_regex\""},
    {CHAT, "{\"messages\": [{\"role\": \"user\", \"content\": \"refuse\"}]}", 400,
     ": template.jinja:1: the template refuses"},
    {COMPLETION, "{}", 400, "prompt is missing"},
    {COMPLETION, "{\"prompt\": [1000000]}", 400, "key `prompt[0]`: 1000000 is not"},
    {COMPLETION, "{\"prompt\": \"a\", \"messages\": []}", 400, "does not support"},
    {COMPLETION, "{\"prompt\": \"a\", \"echo\": true, \"stream\": true}", 400, "echo with stream"},
};

static void errors(void **state)
{
    (void)state;
    if (!can_serve()) return;
    START("--set", "train.seed=1");
    for (int64_t i = 0; i < MT_LEN(wrongs); i++) {
        const int status = ask(wrongs[i].path, wrongs[i].body);
        assert_null(strstr(reply, server.dir));
        if (status != wrongs[i].status || !strstr(reply, wrongs[i].says) || strncmp(reply, "{\"error\": {", 11) != 0)
            fail_msg("%s %s: %d %s", wrongs[i].path, wrongs[i].body, status, reply);
    }
    assert_says(wait_for_log("has no adapter yet"), "base model is served");
    assert_int_equal(ask_with(reply, "Origin: http://example.org\r\n", "/v1/models", NULL), 403);
    stop();
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof(at);
    char port[16];
    assert_true(!bind(fd, (struct sockaddr *)&at, size) && !listen(fd, 1) &&
                !getsockname(fd, (struct sockaddr *)&at, &size));
    snprintf(port, sizeof(port), "%d", ntohs(at.sin_port));
    assert_int_equal(RUN("serve", server.config, "--port", port), 1);
    assert_says(said.err, "choose another --port");
    assert_null(strstr(said.err, "loaded")); /* the port is taken before the model is loaded */
    close(fd);
    assert_int_equal(RUN("serve", server.config, "--host", "0.0.0.0"), 1);
    assert_says(said.err, "--api-key-file");
    assert_int_equal(RUN("serve", server.config, "--adapter", "/nowhere"), 1);
    assert_says(said.err, "/nowhere");
    assert_int_equal(RUN("serve", server.config, "--host", "no.such.host.invalid", "--api-key", "k"), 1);
    assert_says(said.err, "--host no.such.host.invalid");
}

static void keys(void **state)
{
    (void)state;
    if (!can_serve()) return;
    START("--api-key", "secret");
    assert_int_equal(ask("/v1/models", NULL), 401);
    assert_says(reply, "needs an API key");
    assert_int_equal(ask("/", NULL), 200); /* the page needs no key: it asks the user for one */
    assert_says(reply, "<title>moetrain serve</title>");
    assert_says(reply, "</html>");
    static const char *const bad[] = {"secre", "secrets", "", "Secret"};
    char header[128];
    for (int i = 0; i < MT_LEN(bad); i++) {
        snprintf(header, sizeof(header), "Authorization: Bearer %s\r\n", bad[i]);
        assert_int_equal(ask_with(reply, header, "/v1/models", NULL), 401);
    }
    assert_int_equal(ask_with(reply, "Authorization: Bearer secret\r\n", "/v1/models", NULL), 200);
    stop();
}

/* Bodies that are too large, requests that are cut off or slow, two requests at once, clients that go away. */
static void hostile(void **state)
{
    (void)state;
    if (!can_serve()) return;
    START("--max-body-mb", "1", "--connections", "32");
    char *large = mem_alloc((2 << 20) + 1), answer[16];
    memset(large, ' ', 2 << 20);
    assert_int_equal(ask(CHAT, large), 413);
    mem_free(large);
    int fd = connect_here();
    static const char huge[] = "POST " CHAT " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999\r\n\r\n";
    put(fd, huge, (int64_t)strlen(huge));
    get(fd, reply); /* closed without reading it */
    fd = connect_here();
    static const char garbage[] = "\x16\x03\x01\x02\r\n\r\n\r\n";
    put(fd, garbage, (int64_t)sizeof(garbage));
    get(fd, reply);
    int idle[8];
    for (int i = 0; i < 8; i++) { /* clients that send half a request and wait */
        idle[i] = connect_here();
        put(idle[i], huge, i % 2 ? 20 : 60);
    }
    fd = connect_here();
    put_request(fd, "", "/v1/models", NULL);
    put_request(fd, "Connection: close\r\n", "/v1/models", NULL);
    get(fd, reply);
    const char *first = strstr(reply, "\"object\": \"list\"");
    assert_true(first && strstr(first + 1, "\"object\": \"list\"")); /* pipelined */
    for (int i = 0; i < 6; i++) {                                    /* clients that close before the answer */
        fd = connect_here();
        put_request(fd, "", CHAT,
                    i % 2 ? "{" HELLO ", \"ignore_eos\": true, \"n\": 4, \"stream\": true}"
                          : "{" HELLO ", \"ignore_eos\": true, \"n\": 4}");
        if (i % 2) assert_true(recv(fd, answer, sizeof(answer), 0) > 0);
        close(fd);
    }
    wait_for_log(", cancelled");
    if (ask(CHAT, "{" HELLO ", \"max_tokens\": 2}") != 200) fail_msg("%s", reply);
    for (int i = 0; i < 8; i++) close(idle[i]);
    stop();
}

static void limits(void **state)
{
    (void)state;
    if (!can_serve()) return;
    START("--queue", "1", "--sequences", "1");
    static const char busy[] = "{" HELLO ", \"ignore_eos\": true, \"n\": 100, \"stream\": true}";
    char answer[16];
    int fd = connect_here();
    put_request(fd, "", CHAT, busy);
    assert_true(recv(fd, answer, sizeof(answer), 0) > 0);
    const int second = connect_here();
    put_request(second, "Connection: close\r\n", CHAT, "{" HELLO "}");
    get(second, reply);
    assert_says(reply, "HTTP/1.1 429");
    assert_says(reply, "Retry-After: 1");
    kill(server.pid, SIGTERM); /* requests in progress go on, new ones are refused */
    for (int i = 0; i < 500 && ask(CHAT, "{" HELLO "}") != 503; i++) usleep(10000);
    assert_says(reply, "closing");
    stop(); /* a second signal cancels requests in progress */
    get(fd, reply);
    assert_says(reply, "the server is closing");
    START("--connections", "1", "--sequences", "1");
    fd = connect_here();
    put_request(fd, "", CHAT, busy);
    assert_true(recv(fd, answer, sizeof(answer), 0) > 0);
    assert_int_equal(ask("/v1/models", NULL), 503);
    assert_says(reply, "{\"error\": {\"message\": \"as many requests");
    assert_says(reply, "--connections");
    assert_int_equal(ask("/health", NULL), 200);
    close(fd);
    stop();
    START("--timeout", "0.05");
    assert_int_equal(ask(CHAT, "{" HELLO ", \"ignore_eos\": true, \"n\": 100}"), 503);
    assert_says(reply, "--timeout");
    stop();
}

/* ---- many clients ---- */

struct client {
    pthread_t thread;
    int number;
    char *reply, text[ROUNDS][1024];
};

static void ask_number(struct client *c, int round)
{
    char body[256];
    const int seed = c->number * ROUNDS + round;
    snprintf(body, sizeof(body), "{\"model\": \"%s\", \"prompt\": \"Number %d\", \"seed\": %d, \"max_tokens\": %d}",
             c->number % 3   ? "adapter_final"
             : c->number % 2 ? "adapter_init"
                             : "",
             seed, seed, 5 + seed % 9);
    const int status = ask_with(c->reply, "", COMPLETION, body);
    const char *at = status == 200 ? strstr(c->reply, "\"text\": ") : NULL;
    const char *end = at ? strstr(at, "\"finish_reason\"") : NULL;
    snprintf(c->text[round], sizeof(c->text[0]), "%d %.*s", status, end ? (int)(end - at) : 0, at ? at : "");
}

static void *run_client(void *user)
{
    struct client *c = user;
    for (int i = 0; i < ROUNDS; i++) ask_number(c, i);
    return NULL;
}

static void many(void **state)
{
    (void)state;
    static struct client clients[CLIENTS];
    char want[1024];
    if (!can_serve()) return;
    START("--adapters", fixture("parity/case_a"), "--slots", "1", "--sequences", "4");
    for (int i = 0; i < CLIENTS; i++) {
        clients[i] = (struct client){.number = i, .reply = mem_alloc(REPLY)};
        assert_int_equal(pthread_create(&clients[i].thread, NULL, run_client, &clients[i]), 0);
    }
    for (int i = 0; i < CLIENTS; i++) pthread_join(clients[i].thread, NULL);
    for (int i = 0; i < CLIENTS; i++) { /* the same requests, one at a time */
        for (int k = 0; k < ROUNDS; k++) {
            snprintf(want, sizeof(want), "%s", clients[i].text[k]);
            assert_int_equal(strncmp(want, "200 ", 4), 0);
            ask_number(&clients[i], k);
            assert_string_equal(clients[i].text[k], want);
        }
        mem_free(clients[i].reply);
    }
    stop();
}

/* ---- more adapters than a pass takes, and than slots ---- */

enum { ADAPTERS = 40, AT_ONCE = 8 };

/* Writes n adapters of different strength: a0, a1, ... in a new folder. */
static const char *write_adapters(int n)
{
    static char folder[MT_PATH];
    char command[4 * MT_PATH];
    snprintf(folder, MT_PATH, "%s", scratch_dir());
    snprintf(command, sizeof(command),
             "cd '%s' && for i in $(seq 0 %d); do cp -r '%s' a$i && sed -i \"s/\\\"lora_alpha\\\": [0-9.]*/"
             "\\\"lora_alpha\\\": $((8 * i + 1))/\" a$i/adapter_config.json; done",
             folder, n - 1, fixture("parity/case_a/adapter_final"));
    assert_int_equal(system(command), 0);
    return folder;
}

static void ask_adapter(struct client *c, int adapter, int tokens, char text[1024])
{
    char body[256];
    snprintf(
        body, sizeof(body),
        "{\"model\": \"a%d\", \"prompt\": \"The cat\", \"max_tokens\": %d, \"temperature\": 0, \"ignore_eos\": true}",
        adapter, tokens);
    const int status = ask_with(c->reply, "", COMPLETION, body);
    const char *at = status == 200 ? strstr(c->reply, "\"text\": ") : NULL;
    const char *end = at ? strstr(at, "\"finish_reason\"") : NULL;
    snprintf(text, 1024, "%d %.*s", status, end ? (int)(end - at) : 0, at ? at : "");
}

static int n_adapters, n_clients;
static char adapter_texts[ADAPTERS][1024];

static void *run_adapters(void *user)
{
    struct client *c = user;
    for (int i = c->number; i < n_adapters; i += n_clients) ask_adapter(c, i, 24, adapter_texts[i]);
    return NULL;
}

/* Requests of n adapters at once; returns the number of different texts. Compares with one at a time. */
static int check_adapters(int n, int n_thread, bool compare)
{
    static struct client clients[ADAPTERS];
    static char want[1024];
    int n_text = 0;
    n_adapters = n;
    n_clients = n_thread;
    for (int i = 0; i < n_thread; i++) {
        clients[i] = (struct client){.number = i, .reply = mem_alloc(REPLY)};
        assert_int_equal(pthread_create(&clients[i].thread, NULL, run_adapters, &clients[i]), 0);
    }
    for (int i = 0; i < n_thread; i++) pthread_join(clients[i].thread, NULL);
    for (int i = 0; i < n; i++) {
        bool known = false;
        snprintf(want, sizeof(want), "%s", adapter_texts[i]);
        assert_int_equal(strncmp(want, "200 ", 4), 0);
        if (compare) ask_adapter(&clients[0], i, 24, adapter_texts[i]);
        assert_string_equal(adapter_texts[i], want);
        for (int k = 0; k < i; k++) known |= !strcmp(adapter_texts[k], want);
        n_text += !known;
    }
    for (int i = 0; i < n_thread; i++) mem_free(clients[i].reply);
    return n_text;
}

/* All 40 adapters are in memory and in passes of 8; then with 5 slots, so that adapters replace each other. */
static void many_adapters(void **state)
{
    (void)state;
    static char first[ADAPTERS][1024];
    if (!can_serve()) return;
    const char *folder = write_adapters(ADAPTERS);
    START("--adapters", folder, "--slots", "40", "--sequences", "40");
    assert_in_range(check_adapters(ADAPTERS, ADAPTERS, true), 3, ADAPTERS);
    check_adapters(9, 9, false);
    check_adapters(17, 17, false);
    memcpy(first, adapter_texts, sizeof(first));
    stop();
    START("--adapters", folder, "--slots", "5", "--sequences", "16");
    check_adapters(ADAPTERS, AT_ONCE, false);
    for (int i = 0; i < ADAPTERS; i++) assert_string_equal(adapter_texts[i], first[i]);
    stop();
}

/* Clients that keep the only slot in use do not keep another adapter waiting. */
enum { BUSY = 80 };
struct busy {
    struct client client;
    atomic_int asked;
    atomic_bool enough;
};
static void *run_busy(void *user)
{
    struct busy *b = user;
    for (; b->asked < BUSY && !b->enough; b->asked++) ask_adapter(&b->client, 0, 60 + b->asked % 29, b->client.text[0]);
    return NULL;
}

static void waits_in_turn(void **state)
{
    (void)state;
    static struct busy busy[7];
    struct client other = {.reply = mem_alloc(REPLY)};
    char text[1024];
    if (!can_serve()) return;
    START("--adapters", write_adapters(2), "--slots", "1", "--sequences", "8");
    for (int i = 0; i < MT_LEN(busy); i++) {
        busy[i].client = (struct client){.reply = mem_alloc(REPLY)};
        busy[i].asked = 7 * i;
        busy[i].enough = false;
        assert_int_equal(pthread_create(&busy[i].client.thread, NULL, run_busy, &busy[i]), 0);
    }
    wait_for_log("adapter a0 loaded");
    ask_adapter(&other, 1, 9, text);
    for (int i = 0; i < MT_LEN(busy); i++) {
        assert_true(busy[i].asked < BUSY);
        busy[i].enough = true;
    }
    assert_int_equal(strncmp(text, "200 ", 4), 0);
    for (int i = 0; i < MT_LEN(busy); i++) {
        pthread_join(busy[i].client.thread, NULL);
        mem_free(busy[i].client.reply);
    }
    mem_free(other.reply);
    stop();
}

/* An adapter that appears while the server runs. */
static void appears(void **state)
{
    (void)state;
    if (!can_serve()) return;
    char folder[MT_PATH], command[4 * MT_PATH], named[MT_PATH + 8];
    snprintf(folder, MT_PATH, "%s", scratch_dir());
    snprintf(named, sizeof(named), "mine=%s", fixture("parity/case_a/adapter_init"));
    snprintf(command, sizeof(command),
             "mkdir '%s/broken' '%s/case_a' && echo '{}' | tee '%s/broken/adapter_config.json' > "
             "'%s/case_a/adapter_config.json'",
             folder, folder, folder, folder);
    assert_int_equal(system(command), 0);
    START("--adapters", folder, "--adapter", named);
    assert_int_equal(ask(COMPLETION, "{\"model\": \"broken\", \"prompt\": \"The cat\"}"), 500);
    assert_says(reply, "broken");
    assert_null(strstr(reply, folder)); /* only the log names paths */
    assert_int_equal(ask(COMPLETION, "{\"model\": \"later\", \"prompt\": \"The cat\"}"), 404);
    snprintf(command, sizeof(command), "cp -r '%s' '%s/later'", fixture("parity/case_a/adapter_final"), folder);
    assert_int_equal(system(command), 0);
    if (ask(COMPLETION, "{\"model\": \"later\", \"prompt\": \"The cat\", \"max_tokens\": 9, \"temperature\": 0}") !=
        200)
        fail_msg("%s", reply);
    assert_string_equal(text_at(reply, "choices.0.text"), generated(fixture("parity/case_a/adapter_final")));
    assert_int_equal(ask("/v1/models", NULL), 200);
    assert_says(reply, "\"later\"");
    assert_says(reply, "\"mine\"");
    snprintf(command, sizeof(command), "rm -r '%s/later'", folder);
    assert_int_equal(system(command), 0);
    assert_int_equal(ask("/v1/models", NULL), 200);
    assert_null(strstr(reply, "\"later\""));
    assert_int_equal(ask(COMPLETION, "{\"model\": \"later\", \"prompt\": \"The cat\"}"), 404);
    stop();
    assert_says(said.err, folder);
    assert_says(said.err, "another model is named case_a");
}

int test_serve(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts),         cmocka_unit_test(turns),         cmocka_unit_test(forms),
        cmocka_unit_test(errors),        cmocka_unit_test(keys),          cmocka_unit_test(hostile),
        cmocka_unit_test(limits),        cmocka_unit_test(many),          cmocka_unit_test(appears),
        cmocka_unit_test(many_adapters), cmocka_unit_test(waits_in_turn),
    };
    return cmocka_run_group_tests_name("serve", tests, NULL, NULL);
}

/* test_serve_message.c - answers as messages: reasoning and tool calls in each form, whole and as a stream cut at every
 * byte, whose parts must only grow. */
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "data/tokenizer/tokenizer.h"
#include "tests/test.h"
#include "train/models/message.h"

#define THINK(kind)                                                                                                    \
    {                                                                                                                  \
        .calls = MESSAGE_##kind, .think = true                                                                         \
    }
#define HEAD "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant"

static const char tools[] =
    "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"properties\": {\"a\": {\"type\": "
    "\"string\"}, \"b\": {\"type\": \"integer\"}}}}}]";

static const struct row {
    struct message_rules rules;
    bool open, plain;                               /* the prompt ended with <think>; no calls are wanted */
    const char *text, *reasoning, *content, *calls; /* calls: name(arguments) of each */
} rows[] = {
    {{.think = false}, false, false, "<think>a</think> b", "", "<think>a</think> b", ""},
    {THINK(JSON), false, false, "<think>\na b\n</think>\n\nc", "a b", "c", ""},
    {THINK(JSON), true, false, "a b\n</think>\n\nc", "a b", "c", ""},
    {THINK(JSON), true, false, "cut off", "cut off", "", ""},
    {THINK(JSON), false, false, "no mark", "", "no mark", ""},
    {THINK(JSON), false, false, "<thin air>", "", "<thin air>", ""},
    {THINK(JSON), false, false, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x\"}}\n</tool_call>", "", "",
     "f({\"a\": \"x\"})"},
    {THINK(JSON), false, false,
     "Yes.\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", "
     "\"arguments\": \"{\\\"a\\\": 1}\"}\n</tool_call>",
     "", "Yes.", "f({})g({\"a\": 1})"},
    {THINK(JSON), false, false, "<tool_call>\nnot json\n</tool_call>", "", "<tool_call>\nnot json\n</tool_call>", ""},
    {THINK(JSON), false, false, "<tool_call>\n{\"name\": \"f\"", "", "<tool_call>\n{\"name\": \"f\"", ""},
    {THINK(JSON), false, true, "<tool_call>\n{\"name\": \"f\"}\n</tool_call>", "",
     "<tool_call>\n{\"name\": \"f\"}\n</tool_call>", ""},
    {THINK(XML), false, false,
     "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n12\n</parameter>\n</function>\n"
     "</tool_call>",
     "", "", "f({\"a\": \"12\", \"b\": 12})"},
    {THINK(XML), false, false, "<tool_call>\n<function=f>\n</function>\n</tool_call> ", "", "", "f({})"},
    {THINK(ARG_KEY), false, false,
     "<think></think>\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
     "<arg_value>[1, 2]</arg_value>\n</tool_call>",
     "", "", "f({\"a\": \"1\", \"b\": [1, 2]})"},
    {THINK(ARG_KEY), false, false, "<tool_call>f\n</tool_call>", "", "", "f({})"},
    {THINK(DSML), true, false,
     "Hm.</think>Yes.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" "
     "string=\"true\">1</｜DSML｜parameter>\n<｜DSML｜parameter name=\"b\" string=\"false\">[1, "
     "{}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke "
     "name=\"g\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
     "Hm.", "Yes.", "f({\"a\": \"1\", \"b\": [1, {}]})g({})"},
    {THINK(DSML), false, false, "<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>", "",
     "<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>", ""},
    {THINK(INVOKE), true, false,
     "Hm.</think>\n\n<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"a\">12</parameter>\n<parameter "
     "name=\"b\">12</parameter>\n</invoke>\n<invoke name=\"g\">\n</invoke>\n</minimax:tool_call>",
     "Hm.", "", "f({\"a\": \"12\", \"b\": 12})g({})"},
    {THINK(PYTHON), false, false,
     "Yes.<|tool_call_start|>[f(a='it\\'s, {\\n', b=2), g(c = [True, None, {'k': \"v\"}])]<|tool_call_end|>", "",
     "Yes.", "f({\"a\": \"it's, {\\n\", \"b\": 2})g({\"c\": [true, null, {\"k\": \"v\"}]})"},
    {THINK(PYTHON), false, false, "<|tool_call_start|>[f(), g(a=x)]<|tool_call_end|>", "",
     "<|tool_call_start|>[f(), g(a=x)]<|tool_call_end|>", ""},
    {THINK(GEMMA), false, false,
     "<|channel>thought\nHm.\n<channel|>Yes.<|tool_call>call:f{a:<|\"|>x: '{<|\"|>,b:-2.5,c:{d:[1,true]}}<tool_call|>"
     "<|tool_call>call:g{}<tool_call|>",
     "Hm.", "Yes.", "f({\"a\": \"x: '{\", \"b\": -2.5, \"c\": {\"d\": [1, true]}})g({})"},
    {THINK(GEMMA), false, false, "<|tool_call>call:f{a:<b>}<tool_call|>", "", "<|tool_call>call:f{a:<b>}<tool_call|>",
     ""},
    {THINK(GEMMA), false, false, "<|tool_call>call:f{a:<|\"|>x}<tool_call|>", "",
     "<|tool_call>call:f{a:<|\"|>x}<tool_call|>", ""},
    {{.calls = MESSAGE_HARMONY}, false, false, HEAD "<|channel|>final<|message|>So.", "Why?", "So.", ""},
    {{.calls = MESSAGE_HARMONY},
     false,
     false,
     HEAD "<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
          "<|constrain|>json<|message|>{\"a\": \"x\"}",
     "Why?",
     "I ask.",
     "f({\"a\": \"x\"})"},
    {{.calls = MESSAGE_HARMONY},
     false,
     false,
     HEAD " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
     "Why?",
     "",
     "f({})"},
    {{.calls = MESSAGE_HARMONY}, false, false, "no channels < here", "", "no channels < here", ""},
    {{.calls = MESSAGE_HARMONY}, false, false, "<|channel|>final<|mess", "", "", ""},
    {{.calls = MESSAGE_HARMONY}, false, false, "", "", "", ""},
};

static void put_calls(char *out, size_t cap, const struct message *m)
{
    *out = 0;
    for (int64_t i = 0; i < m->n_call; i++)
        snprintf(out + strlen(out), cap - strlen(out), "%s(%s)", m->calls[i].name.text, m->calls[i].arguments.text);
}

static void whole(void **state)
{
    (void)state;
    struct message m = {.n_call = 0};
    struct err err;
    char calls[512];
    struct json_doc *doc = json_parse(tools, sizeof(tools) - 1, "tools", &err);
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        const struct row *r = &rows[i];
        const struct message_input in = {
            .rules = r->rules, .think_open = r->open, .wants_calls = !r->plain, .whole = true, .tools = json_root(doc)};
        message_parse(&m, &in, r->text, (int64_t)strlen(r->text));
        put_calls(calls, sizeof(calls), &m);
        if (strcmp(m.reasoning.text, r->reasoning) != 0 || strcmp(m.content.text, r->content) != 0 ||
            strcmp(calls, r->calls) != 0)
            fail_msg("%s: reasoning \"%s\", content \"%s\", calls \"%s\"", r->text, m.reasoning.text, m.content.text,
                     calls);
    }
    message_free(&m);
    json_free(doc);
}

static void grows_to(const char *text, const char *what, const char *before, const char *after)
{
    if (strncmp(before, after, strlen(before)) != 0) fail_msg("%s: %s \"%s\" became \"%s\"", text, what, before, after);
}

/* What a stream has sent is never taken back: at each length all parts begin with those of the length before. */
static void cut(void **state)
{
    (void)state;
    struct message m = {.n_call = 0};
    struct err err;
    struct json_doc *doc = json_parse(tools, sizeof(tools) - 1, "tools", &err);
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        const struct row *r = &rows[i];
        char reasoning[512] = "", content[512] = "", calls[512] = "", now[512];
        const int64_t size = (int64_t)strlen(r->text);
        struct message_input in = {
            .rules = r->rules, .think_open = r->open, .wants_calls = !r->plain, .tools = json_root(doc)};
        for (int64_t n = 0; n <= size + 1; n++) {
            char *copy = mem_strndup(r->text, MT_MIN(n, size)); /* a sanitizer reports reads after its end */
            in.whole = n > size;
            message_parse(&m, &in, copy, MT_MIN(n, size));
            mem_free(copy);
            put_calls(now, sizeof(now), &m);
            grows_to(r->text, "reasoning", reasoning, m.reasoning.text);
            grows_to(r->text, "content", content, m.content.text);
            grows_to(r->text, "calls", calls, now);
            snprintf(reasoning, sizeof(reasoning), "%s", m.reasoning.text);
            snprintf(content, sizeof(content), "%s", m.content.text);
            snprintf(calls, sizeof(calls), "%s", now);
        }
        assert_string_equal(content, r->content);
    }
    message_free(&m);
    json_free(doc);
}

/* ---- what templates write */

static const char conversation[] =
    "{\"messages\": [{\"role\": \"user\", \"content\": \"?\"}%s], \"tools\": [{\"type\": \"function\", "
    "\"function\": {\"name\": \"f\", \"description\": \"d\", \"parameters\": {\"type\": \"object\", "
    "\"properties\": {\"a\": {\"type\": \"string\", \"description\": \"e\"}, \"b\": {\"type\": \"integer\", "
    "\"description\": \"e\"}}}}}]}";
static const char answer[] =
    ", {\"role\": \"assistant\", \"content\": \"\", \"tool_calls\": [{\"id\": \"c\", \"type\": \"function\", "
    "\"function\": {\"name\": \"f\", \"arguments\": {\"a\": \"1\", \"b\": 2}}}]}";

static struct json_doc *render(struct text_buf *out, const struct chat_template *t, const char *more, bool prompt)
{
    char row[1024];
    struct err err;
    const struct chat_options opt = {.generation_prompt = prompt};
    snprintf(row, sizeof(row), conversation, more);
    struct json_doc *doc = json_parse(row, (int64_t)strlen(row), "row", &err);
    if (!doc || chat_template_render(out, t, json_root(doc), &opt, &err)) fail_msg("%s", err.msg);
    return doc;
}

/* The call that a template writes into an answer is read back, and has the template's form. */
static void round_trip(const struct chat_template *t, enum message_calls calls, const char *name,
                       const struct tokenizer *tok)
{
    static const char call_end[] = "<|call|>";
    struct text_buf prompt = {0}, whole_text = {0};
    struct message m = {.n_call = 0};
    json_free(render(&prompt, t, "", true));
    struct json_doc *doc = render(&whole_text, t, answer, false);
    const struct message_rules rules = message_rules_of(t);
    assert_int_equal(rules.calls, calls);
    int64_t same = 0;
    while (same < prompt.size && prompt.text[same] == whole_text.text[same]) same++;
    const struct message_input in = {
        .rules = rules, .wants_calls = true, .whole = true, .tools = json_find(json_root(doc), "tools")};
    const char *begin = whole_text.text + same, *end = strstr(begin, "</tool_call>");
    int64_t size = end ? end + 12 - begin : whole_text.size - same;
    if (calls == MESSAGE_HARMONY) { /* an answer has no end token */
        size -= (int64_t)strlen(call_end);
        assert_memory_equal(begin + size, call_end, strlen(call_end));
    }
    if (calls == MESSAGE_JSON || calls == MESSAGE_XML || calls == MESSAGE_ARG_KEY) {
        const char *mark = strstr(begin, "<tool_call>");
        assert_non_null(mark);
        size -= mark - begin;
        begin = mark;
    }
    message_parse(&m, &in, begin, size);
    if (!message_is_formed(&in, tok, begin, size)) fail_msg("%s: %s", name, begin);
    if (m.n_call != 1 || strcmp(m.calls[0].name.text, "f") != 0) fail_msg("%s: %s", name, begin);
    struct err err;
    const char *text;
    int64_t value;
    struct json_doc *read = json_parse(m.calls[0].arguments.text, m.calls[0].arguments.size, "arguments", &err);
    if (!read || json_get_str(json_root(read), "a", &text, &err) ||
        json_get_i64(json_root(read), "b", 2, 2, &value, &err))
        fail_msg("%s: %s in %s", name, err.msg, m.calls[0].arguments.text);
    assert_string_equal(text, "1");
    json_free(read);
    json_free(doc);
    message_free(&m);
    text_free(&prompt);
    text_free(&whole_text);
}

static void templates(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        enum message_calls calls;
    } known[] = {{"qwen3.5 style", MESSAGE_XML},
                 {"qwen3-coder style", MESSAGE_XML},
                 {"glm-4.5 style", MESSAGE_ARG_KEY},
                 {"glm-4.7 style", MESSAGE_ARG_KEY}};
    struct chat_template *t;
    struct err err;
    char path[MT_PATH];
    const char *text;
    struct tokenizer *tok = tokenizer_open(fixture("../../configs/tiny-gptoss"), &err);
    if (!tok) fail_msg("%s", err.msg);
    struct json_doc *doc = json_load(fixture("jinja/chats.json"), 1 << 20, &err);
    if (!doc) fail_msg("%s", err.msg);
    for (int64_t i = 0; i < MT_LEN(known); i++) {
        if (json_get_str(json_find(json_find(json_root(doc), "templates"), known[i].name), "chat_template", &text,
                         &err) ||
            file_in(path, scratch_dir(), "t.jinja", &err) ||
            file_write_atomic(path, text, (int64_t)strlen(text), &err) ||
            chat_template_load(&t, fixture("parity/case_a"), path, &err))
            fail_msg("%s", err.msg);
        chat_template_probe(t);
        round_trip(t, known[i].calls, known[i].name, tok);
        chat_template_free(t);
    }
    json_free(doc);
    if (chat_template_load(&t, fixture("../../configs/tiny-gptoss"), NULL, &err)) fail_msg("%s", err.msg);
    chat_template_probe(t);
    round_trip(t, MESSAGE_HARMONY, "gpt-oss", tok);
    chat_template_free(t);
    t = chat_template_deepseek();
    round_trip(t, MESSAGE_DSML, "DeepSeek V4", tok);
    chat_template_free(t);
    tokenizer_free(tok);
    assert_int_equal(message_rules_of(NULL).calls, MESSAGE_PLAIN);
}

/* The marks of a template say how its calls are written. */
static void marks(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        struct message_rules rules;
    } of[] = {{"{{ messages[0] }}{{ '</think><minimax:tool_call>' }}", THINK(INVOKE)},
              {"{{ messages[0] }}{{ '<|tool_call_start|>[' }}", {.calls = MESSAGE_PYTHON}},
              {"{{ messages[0] }}{{ '<channel|><|tool_call>call:' }}", THINK(GEMMA)},
              {"{{ messages[0] }}{{ '</think><tool_call>' }}", THINK(JSON)}};
    for (int64_t i = 0; i < MT_LEN(of); i++) {
        struct chat_template *t;
        struct err err;
        char path[MT_PATH];
        if (file_in(path, scratch_dir(), "t.jinja", &err) ||
            file_write_atomic(path, of[i].text, (int64_t)strlen(of[i].text), &err) ||
            chat_template_load(&t, fixture("parity/case_a"), path, &err))
            fail_msg("%s", err.msg);
        const struct message_rules rules = message_rules_of(t);
        if (rules.calls != of[i].rules.calls || rules.think != of[i].rules.think) fail_msg("%s", of[i].text);
        chat_template_free(t);
    }
}

#define ASK   "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
#define FINAL "<|channel|>final<|message|>So."
#define CALL  "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>"

/* Which answers have the form of the template (the verifier `format`). */
static void form(void **state)
{
    (void)state;
    static const struct {
        struct message_rules rules;
        bool open, formed;
        const char *text;
    } of[] = {
        {{.calls = MESSAGE_HARMONY}, false, true, HEAD FINAL},
        {{.calls = MESSAGE_HARMONY}, false, true, FINAL},
        {{.calls = MESSAGE_HARMONY},
         false,
         true,
         HEAD "<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant" FINAL},
        {{.calls = MESSAGE_HARMONY}, false, true, HEAD ASK "{\"a\": 1}"},
        {{.calls = MESSAGE_HARMONY}, false, true, " to=functions.f<|channel|>commentary json<|message|>{}"},
        {{.calls = MESSAGE_HARMONY}, false, false, "So."},
        {{.calls = MESSAGE_HARMONY}, false, false, ""},
        {{.calls = MESSAGE_HARMONY}, false, false, "<|channel|>analysis<|message|>Why?"}, /* no final */
        {{.calls = MESSAGE_HARMONY}, false, false, HEAD "<|channel|>final<|message|> "},
        {{.calls = MESSAGE_HARMONY}, false, false, HEAD "<|channel|>other<|message|>So."},
        {{.calls = MESSAGE_HARMONY}, false, false, HEAD "So."},
        {{.calls = MESSAGE_HARMONY}, false, false, HEAD "<|channel|>final So."},
        {{.calls = MESSAGE_HARMONY}, false, false, HEAD HEAD "<|start|>assistant" FINAL},
        {{.calls = MESSAGE_HARMONY}, false, false, FINAL "<|end|><|start|>assistant" FINAL},
        {{.calls = MESSAGE_HARMONY}, false, false, FINAL "<|end|>"},
        {{.calls = MESSAGE_HARMONY}, false, false, FINAL "<|channel|>"},
        {{.calls = MESSAGE_HARMONY}, false, false, "<|channel|><|channel|>final<|message|>So."},
        {{.calls = MESSAGE_HARMONY}, false, false, "x" FINAL},
        {{.calls = MESSAGE_HARMONY}, false, false, "<|channel|>analysis<|message|>Why?<|end|>" FINAL},
        {{.calls = MESSAGE_HARMONY}, false, false, "<|channel|>analysis<|message|>Why?<|end|><|start|>user" FINAL},
        {{.calls = MESSAGE_HARMONY}, false, false, ASK "{\"a\": "},
        {{.calls = MESSAGE_HARMONY}, false, false, "<|channel|>final to=functions.f<|message|>{}"},
        {THINK(JSON), false, true, "<think>\na\n</think>\n\nb"},
        {THINK(JSON), false, true, "b"},
        {THINK(JSON), true, true, "a</think>b"},
        {THINK(JSON), false, true, "<think>a</think>" CALL "\n" CALL},
        {THINK(JSON), true, false, "b"}, /* not closed */
        {THINK(JSON), false, false, "<think>a"},
        {THINK(JSON), false, false, "<think>a</think>"},
        {THINK(JSON), false, false, "a</think>b"},
        {THINK(JSON), false, false, "<think>a</think>b</think>c"},
        {THINK(JSON), false, false, "<think>a<think>b</think>c"},
        {THINK(JSON), false, false, "b<think>a</think>"},
        {THINK(JSON), false, false, "<think>" CALL "</think>b"},
        {THINK(JSON), false, false, "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n"},
        {THINK(JSON), false, false, "<tool_call>\nnot json\n</tool_call>"},
        {THINK(JSON), false, false, CALL "</tool_call>"},
        {THINK(JSON), false, false, "b<|end|>"},
        {THINK(GEMMA), false, true,
         "<|channel>thought\nHm.\n<channel|>Yes.<|tool_call>call:f{a:<|\"|>x<|\"|>}<tool_call|>"},
        {THINK(GEMMA), false, false, "<|channel>thought\nHm.\n"},
        {THINK(GEMMA), false, false, "Hm.\n<channel|>Yes."},
        {{.think = false}, false, true, "<think>b"}, /* the template has no such mark */
        {{.think = false}, false, false, "b<|return|>c"},
        {{.think = false}, false, false, " \n"}};
    struct err err;
    struct tokenizer *tok = tokenizer_open(fixture("../../configs/tiny-gptoss"), &err);
    if (!tok) fail_msg("%s", err.msg);
    for (int i = 0; i < MT_LEN(of); i++) {
        const struct message_input in = {.rules = of[i].rules, .think_open = of[i].open};
        const int64_t size = (int64_t)strlen(of[i].text);
        char *text = mem_strndup(of[i].text, size); /* for AddressSanitizer */
        if (message_is_formed(&in, tok, text, size) != of[i].formed) fail_msg("\"%s\"", text);
        for (int64_t n = 0; n < size; n++) (void)message_is_formed(&in, tok, text, n);
        mem_free(text);
    }
    tokenizer_free(tok);
}

int test_serve_message(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(whole), cmocka_unit_test(cut), cmocka_unit_test(templates),
                                       cmocka_unit_test(marks), cmocka_unit_test(form)};
    return cmocka_run_group_tests_name("serve_message", tests, NULL, NULL);
}

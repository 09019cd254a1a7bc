/* test_chat.c - compares gpt-oss's conversations and DeepSeek V4's format with the published template and encoder; loss
 * spans, errors, ids of special tokens. tests/parity/make_{chat,deepseek}_vectors.py write the expected texts. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "data/chat/chat_deepseek.h"
#include "data/chat/chat_reader.h"
#include "data/file/file.h"
#include "data/rows.h"

static struct json_doc *load(const char *name, int64_t least)
{
    struct err err;
    struct json_doc *doc = json_load(fixture(name), 1 << 20, &err);
    if (!doc) fail_msg("%s", err.msg);
    assert_true(json_count(json_root(doc)) >= least);
    return doc;
}

static struct json_doc *load_cases(void) { return load("chat/harmony.json", 30); }

/* The chat template of gpt-oss; kwargs: its variables. */
static struct chat_template *load_gptoss(const char *kwargs)
{
    struct err err;
    struct chat_template *t;
    if (chat_template_load(&t, fixture("../../configs/tiny-gptoss"), NULL, &err) ||
        chat_template_set_kwargs(t, kwargs, &err))
        fail_msg("%s", err.msg);
    chat_template_probe(t);
    return t;
}

static struct chat_options options_of(struct json c)
{
    struct err err;
    struct chat_options o = {0};
    struct json j = json_find(c, "options");
    assert_false(json_opt_str(j, "date", &o.date, &err) ||
                 json_opt_bool(j, "generation_prompt", &o.generation_prompt, &err));
    return o;
}

static void check(const struct text_buf *t, struct json c, const char *name)
{
    struct json spans = json_find(c, "spans");
    struct err err;
    const char *text;
    int64_t size;
    assert_false(json_str(json_find(c, "text"), &text, &size, &err));
    int64_t same = 0;
    while (same < size && same < t->size && t->text[same] == text[same]) same++;
    if (same < size || same < t->size)
        fail_msg("%s: byte %d: \"%.60s\" is not \"%.60s\"", name, (int)same, t->text + same, text + same);
    if (t->n_spans != json_count(spans)) fail_msg("%s: %d spans", name, (int)t->n_spans);
    for (int64_t k = 0; k < t->n_spans; k++)
        for (int64_t end = 0; end < 2; end++) {
            int64_t at = -1;
            assert_false(json_i64(json_at(json_at(spans, k), end), 0, size, &at, &err));
            if (t->spans[k][end] != at) fail_msg("%s: span %d: %d", name, (int)k, (int)t->spans[k][end]);
        }
}

/* The text of a case, which r holds until the next call. Only the rows that transformers would refuse are rewritten for
 * the template. */
static const struct text_buf *read_case(struct chat_reader *r, struct json c)
{
    static const char *const rewritten[] = {"null is absent", "no calls"};
    struct err err;
    const struct chat_options options = options_of(c);
    const struct json row = json_find(c, "row");
    const char *name;
    assert_false(json_get_str(c, "name", &name, &err));
    const int rc = str_in(name, rewritten, MT_LEN(rewritten))
                       ? chat_reader_samples(r, row, LOSS_ASSISTANT, true, &options, &err)
                       : chat_samples_make(&r->samples, r->template, row, LOSS_ASSISTANT, true, &options, &err);
    if (rc) fail_msg("%s: %s", name, err.msg);
    return &r->samples.items[0];
}

static void vectors(void **state)
{
    (void)state;
    struct json_doc *doc = load_cases();
    struct chat_template *plain = load_gptoss("{}"),
                         *set = load_gptoss("{\"reasoning_effort\":\"high\",\"model_identity\":\"You are a test.\"}");
    for (int64_t i = 0; i < json_count(json_root(doc)); i++) {
        struct err err;
        const struct json c = json_at(json_root(doc), i);
        const char *name;
        assert_false(json_get_str(c, "name", &name, &err));
        struct chat_reader r = {.template = strcmp(name, "options") ? plain : set};
        check(read_case(&r, c), c, name);
        chat_reader_free(&r);
    }
    chat_template_free(plain);
    chat_template_free(set);
    json_free(doc);
}

/* Rendering appends to the buffer; after an error the buffer has the earlier text only. */
static void appends(void **state)
{
    (void)state;
    struct err err;
    struct text_buf t = {0};
    struct chat_template *template;
    struct chat_options options = {0};
    const char *text = "{% for m in messages %}{% generation %}{{ m.content + '' }}{% endgeneration %}|{% endfor %}";
    static const char good[] = "{\"messages\":[{\"role\":\"assistant\",\"content\":\"b\"}]}";
    static const char bad[] = "{\"messages\":[{\"role\":\"assistant\",\"content\":\"b\"},{\"role\":\"nobody\"}]}";
    char path[MT_PATH];
    snprintf(path, sizeof(path), "%s/t.jinja", scratch_dir());
    assert_int_equal(file_write_atomic(path, text, (int64_t)strlen(text), &err), 0);
    assert_int_equal(chat_template_load(&template, scratch_dir(), path, &err), 0);
    struct json_doc *a = json_parse(good, (int64_t)strlen(good), "a", &err),
                    *b = json_parse(bad, (int64_t)strlen(bad), "b", &err);
    assert_true(a && b);
    assert_int_equal(chat_template_render(&t, template, json_root(a), &options, &err), 0);
    int64_t size = t.size;
    assert_int_equal(t.n_spans, 1);
    assert_int_equal(chat_template_render(&t, template, json_root(b), &options, &err), -1);
    assert_int_equal(t.size, size);
    assert_int_equal(t.n_spans, 1);
    assert_int_equal(chat_template_render(&t, template, json_root(a), &options, &err), 0);
    assert_int_equal(t.size, 2 * size);
    assert_int_equal(t.n_spans, 2);
    assert_int_equal(t.spans[1][0], size + t.spans[0][0]);
    assert_int_equal(t.spans[1][1], size + t.spans[0][1]);
    assert_memory_equal(t.text, t.text + size, (size_t)size);
    json_free(a);
    json_free(b);
    chat_template_free(template);
    text_free(&t);
    text_free(&t);
}

#define USER        "{\"role\":\"user\",\"content\":\"q\"}"
#define ONE(m)      "{\"messages\":[" USER "," m "]}"
#define CALL(f)     ONE("{\"role\":\"assistant\",\"tool_calls\":[" f "]}")
#define TOOLS(t)    "{\"messages\":[" USER "],\"tools\":" t "}"
#define FUNCTION(f) TOOLS("[{\"function\":{" f "}}]")
#define SPEC(s)     FUNCTION("\"name\":\"f\",\"description\":\"d\",\"parameters\":{" s "}")

#define A "{\"role\":\"assistant\",\"content\":\"a\"}"

static const struct {
    const char *row, *error;
} refusals[] = {
    {"{}", "key `messages`: is missing"},
    {"[]", "key `messages`: is missing"},
    {"{\"messages\":{}}", "key `messages`: must be an array, not an object"},
    {"{\"messages\":[]}", "key `messages`: is empty"},
    {ONE("5"), "key `messages[1].role`: is missing"},
    {ONE("{\"content\":\"x\"}"), "key `messages[1].role`: is missing"},
    {ONE("{\"role\":\"robot\",\"content\":\"x\"}," A),
     "`messages[1]`: the chat template does not write `content` of this"},
    {ONE("{\"role\":\"system\",\"content\":\"x\"}," A),
     "of this message of role \"system\", so the model would not see it"},
    {ONE("{\"role\":\"developer\",\"content\":\"x\"}," A), "of this message of role \"developer\""},
    {ONE("{\"role\":\"user\"}"), "key `messages[1]`: has no content"},
    {ONE("{\"role\":\"user\",\"content\":null}"), "key `messages[1]`: has no content"},
    {ONE("{\"role\":\"assistant\",\"content\":\"\",\"thinking\":{}}"), "`+` is not defined between str and dict"},
    {ONE("{\"role\":\"assistant\",\"content\":\"a<|channel|>analysis<|message|>\"}"),
     "You have passed a message containing <|channel|> tags in the content field"},
    {ONE("{\"role\":\"assistant\",\"content\":\"<<|channel|>final<|message|>b\"}"), "tags in the content field"},
    {ONE("{\"role\":\"assistant\",\"content\":\"a\",\"thinking\":\"<|channel|>final<|message|>\"}"),
     "tags in the thinking field"},
    {ONE("{\"role\":\"assistant\",\"content\":\"a\",\"reasoning_content\":\"<|channel|>final<|message|>\"}"),
     "tags in the thinking field"},
    {ONE("{\"role\":\"assistant\",\"content\":\"a\",\"thinking\":\"\",\"reasoning\":\"<|channel|>final<|message|>\"}"),
     "tags in the thinking field"},
    {ONE("{\"role\":\"tool\",\"content\":\"x\"}"), "there was no previous assistant message with a tool call"},
    {CALL("{\"name\":\"f\",\"arguments\":{}},{\"name\":\"g\",\"arguments\":{}}"),
     "tool_calls`: has 2 calls, and the chat template writes only one"},
    {ONE("{\"role\":\"assistant\",\"tool_calls\":{\"a\":1,\"b\":2}}"), "key `messages[1].tool_calls.name`: is missing"},
    {CALL("{\"arguments\":{}}"), "key `messages[1].tool_calls[0].name`: is missing"},
    {CALL("{\"function\":{\"name\":\"f\",\"arguments\":\"{x\"}}"),
     "function.arguments`: the arguments of a call must be an object"},
    {CALL("{\"name\":\"f\",\"arguments\":1}"), "[0].arguments`: the arguments of a call must be an object"},
    {CALL("7"), "key `messages[1].tool_calls[0]`: is not JSON of a call"},
    {ONE("{\"role\":\"assistant\",\"content\":\"a\",\"thinking\":\"b\",\"tool_calls\":[{\"name\":\"f\","
         "\"arguments\":{}}]}"),
     "Cannot pass both content and thinking in an assistant message with tool calls"},
    {"{\"messages\":[" USER ",{\"role\":\"assistant\",\"tool_calls\":[{\"name\":\"f\",\"arguments\":{}}]}," A
     ",{\"role\":\"tool\",\"content\":1}]}",
     "there was no previous assistant message with a tool call"},
    {"{\"messages\":[" USER "],\"chat_template_kwargs\":[1]}", "key `chat_template_kwargs`: must be an object"},
    {"{\"messages\":[" USER "],\"chat_template_kwargs\":{\"reasoning_effort\":1}}", "`+` is not defined between str"},
    {TOOLS("5"), "key `tools`: must be a list of tools, a tool, or its JSON"},
    {TOOLS("{\"a\":1}"), "'function' is undefined"},
    {TOOLS("\"[\""), "is a string that is not valid JSON of a tool"},
    {TOOLS("[{\"name\":\"f\"}]"), "'description' is undefined"},
    {FUNCTION("\"name\":\"f\""), "'description' is undefined"},
    {FUNCTION("\"description\":\"d\""), "'name' is undefined"},
    {SPEC("\"properties\":[1]"), "the method `items` of a list"},
    {SPEC("\"properties\":{\"a\":{\"description\":[1]}}"), "`+` is not defined between str and list"},
    {SPEC("\"properties\":{\"a\":{\"enum\":[1],\"default\":1}}"), "`+` is not defined between str and int"},
    {SPEC("\"properties\":{\"a\":{\"oneOf\":[{\"description\":1}]}}"), "`+` is not defined between str and int"},
    {SPEC("\"properties\":{\"a\":{\"type\":\"object\",\"properties\":[1]}}"), "the method `items` of a list"},
    {SPEC("\"properties\":{\"a\":{\"type\":\"object\",\"properties\":{\"b\":{}},\"required\":true}}"),
     "bool cannot be iterated over"},
};

static void refused(void **state)
{
    (void)state;
    const struct chat_options options = {0};
    struct chat_template *t = load_gptoss("{}");
    struct chat_reader r = {.template = t};
    for (int64_t i = 0; i < MT_LEN(refusals); i++) {
        struct err err = {.msg = ""};
        struct json_doc *doc = json_parse(refusals[i].row, (int64_t)strlen(refusals[i].row), "f:1", &err);
        if (!doc) fail_msg("%s", err.msg);
        if (!chat_reader_samples(&r, json_root(doc), LOSS_ASSISTANT, false, &options, &err))
            fail_msg("%s was not refused", refusals[i].row);
        if (strncmp(err.msg, "f:1: ", 5) || !strstr(err.msg, refusals[i].error))
            fail_msg("%s gives: %s", refusals[i].row, err.msg);
        json_free(doc);
    }
    chat_reader_free(&r);
    chat_template_free(t);
}

/* A row's chat_template_kwargs replace data.chat_kwargs. */
static void own_variables(void **state)
{
    (void)state;
    static const char *const rows[][3] = {
        {"null", "You are M.\n", "\n\nReasoning: low\n"},
        {"{\"reasoning_effort\":\"high\",\"builtin_tools\":null}", "You are M.\n", "\n\nReasoning: high\n"},
        {"{\"model_identity\":\"You are N.\",\"other\":1}", "You are N.\n", "\n\nReasoning: low\n"}};
    const struct chat_options options = {0};
    struct chat_template *template = load_gptoss("{\"reasoning_effort\":\"low\",\"model_identity\":\"You are M.\"}");
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        char row[256];
        struct err err;
        struct text_buf t = {0};
        snprintf(row, sizeof(row), "{\"messages\":[" USER "],\"chat_template_kwargs\":%s}", rows[i][0]);
        struct json_doc *doc = json_parse(row, (int64_t)strlen(row), "row", &err);
        if (!doc || chat_template_render(&t, template, json_root(doc), &options, &err)) fail_msg("%s", err.msg);
        if (!strstr(t.text, rows[i][1]) || !strstr(t.text, rows[i][2])) fail_msg("%s", t.text);
        json_free(doc);
        text_free(&t);
    }
    chat_template_free(template);
}

/* Loss spans begin and end at token boundaries: each special token is one token, and no token crosses the end of a
 * span. */
static void edges_are_token_edges(void **state)
{
    (void)state;
    struct err err;
    struct json_doc *doc = load_cases();
    struct tokenizer *tok = tokenizer_load(fixture("../../configs/tiny-gptoss/tokenizer.json"), &err);
    if (!tok) fail_msg("%s", err.msg);
    struct token_list list = {0};
    struct chat_template *template = load_gptoss("{}");
    struct chat_reader r = {.template = template};
    for (int64_t i = 0; i < json_count(json_root(doc)); i++) {
        const struct text_buf *t = read_case(&r, json_at(json_root(doc), i));
        list.count = 0;
        assert_int_equal(tokenizer_encode(tok, t->text, t->size, true, &list, &err), 0);
        for (int64_t k = 0; k < t->n_spans; k++) {
            int64_t begins = 0, ends = 0;
            for (int64_t n = 0; n < list.count; n++) {
                begins += list.begin[n] == t->spans[k][0];
                ends += list.end[n] == t->spans[k][1];
            }
            assert_int_equal(begins, 1);
            assert_int_equal(ends, 1);
        }
    }
    token_list_free(&list);
    chat_reader_free(&r);
    chat_template_free(template);
    tokenizer_free(tok);
    json_free(doc);
}

/* ---- DeepSeek V4 */

static void deepseek_vectors(void **state)
{
    (void)state;
    const struct chat_options options = {0};
    struct json_doc *doc = load("chat/deepseek.json", 20);
    struct chat_template *t = chat_template_deepseek();
    struct text_buf text = {0};
    char name[32];
    struct err err;
    for (int64_t i = 0; i < json_count(json_root(doc)); i++) {
        const struct json c = json_at(json_root(doc), i);
        snprintf(name, sizeof(name), "case %d", (int)i);
        text.size = text.n_spans = 0;
        if (chat_template_render(&text, t, json_find(c, "row"), &options, &err)) fail_msg("%s: %s", name, err.msg);
        check(&text, c, name);
    }
    text_free(&text);
    chat_template_free(t);
    json_free(doc);
}

static void deepseek_refusals(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {ONE("{\"role\":\"robot\"}"), "key `messages[1]`: role \"robot\" is unknown"},
        {ONE("{\"role\":\"developer\",\"content\":\"\"}"), "key `messages[1]`: has no content"},
        {ONE("{\"role\":\"user\",\"content\":[]}"),
         "key `messages[1].content`: must be a string, not an array: write the"},
        {ONE("{\"role\":\"user\",\"task\":\"sing\"}"), "key `messages[1]`: task \"sing\" is unknown"},
        {ONE("{\"role\":\"tool\",\"content\":[{\"type\":\"image\"}]}"), "content[0]`: type \"image\" is not supported"},
        {CALL("{\"name\":\"f\",\"arguments\":[1]}"), "arguments`: must be an object"},
        {CALL("{\"name\":\"f\",\"arguments\":\"[1]\"}"), "arguments`: arguments: must be an object"},
        {TOOLS("{\"a\":1}"), "key `tools`: must be an array"},
        {TOOLS("[{\"name\":\"f\"}]"), "key `tools[0].function`: is missing"},
        {"{\"messages\":[]}", "key `messages`: is empty"},
        {"{\"messages\":[" USER "],\"chat_template_kwargs\":{\"thinking_mode\":\"deep\"}}", "thinking_mode \"deep\""},
        {"{\"messages\":[" USER "],\"chat_template_kwargs\":{\"reasoning_effort\":\"low\"}}",
         "reasoning_effort \"low\""}};
    const struct chat_options options = {0};
    struct chat_template *t = chat_template_deepseek();
    struct text_buf text = {0};
    for (int64_t i = 0; i < MT_LEN(bad); i++) {
        struct err err = {.msg = ""};
        struct json_doc *doc = json_parse(bad[i][0], (int64_t)strlen(bad[i][0]), "f:1", &err);
        assert_non_null(doc);
        if (!chat_template_render(&text, t, json_root(doc), &options, &err)) fail_msg("%s is taken", bad[i][0]);
        if (!strstr(err.msg, bad[i][1])) fail_msg("%s gives: %s", bad[i][0], err.msg);
        assert_int_equal(text.size + text.n_spans, 0);
        json_free(doc);
    }
    text_free(&text);
    chat_template_free(t);
}

/* The texts of all loss spans, each followed by "|", each sample by "/". */
static void assert_trained(const char *kwargs, bool whole, int64_t unshown, const char *expected)
{
    char row[512], got[512] = "";
    const struct chat_options options = {0};
    struct chat_template *t = chat_template_deepseek();
    struct chat_samples samples = {0};
    struct err err;
    snprintf(row, sizeof(row),
             "{\"messages\":[" USER ",{\"role\":\"assistant\",\"thinking\":\"why a\",\"content\":\"a\"}," USER
             ",{\"role\":\"assistant\",\"thinking\":\"why b\",\"content\":\"b\"}],\"chat_template_kwargs\":{%s}}",
             kwargs);
    struct json_doc *doc = json_parse(row, (int64_t)strlen(row), "row", &err);
    assert_non_null(doc);
    if (chat_samples_make(&samples, t, json_root(doc), LOSS_ASSISTANT, whole, &options, &err)) fail_msg("%s", err.msg);
    for (int64_t i = 0; i < samples.count; i++) {
        const struct text_buf *s = &samples.items[i];
        for (int64_t k = 0; k < s->n_spans; k++)
            snprintf(got + strlen(got), sizeof(got) - strlen(got), "%.*s|", (int)(s->spans[k][1] - s->spans[k][0]),
                     s->text + s->spans[k][0]);
        strcat(got, "/");
    }
    assert_string_equal(got, expected);
    assert_int_equal(samples.n_unshown, unshown);
    chat_samples_free(&samples);
    chat_template_free(t);
    json_free(doc);
}

/* Each answer is trained after the prompt of inference, which has no reasoning of earlier turns. */
static void deepseek_samples(void **state)
{
    (void)state;
    assert_trained("", false, 2, "a" DEEPSEEK_EOS "|b" DEEPSEEK_EOS "|/");
    assert_trained("\"thinking\":true", false, 0, "why a</think>a" DEEPSEEK_EOS "|/why b</think>b" DEEPSEEK_EOS "|/");
    assert_trained("\"thinking\":true", true, 1, "a" DEEPSEEK_EOS "|why b</think>b" DEEPSEEK_EOS "|/");
    assert_trained("\"thinking\":true,\"drop_thinking\":false", false, 0,
                   "why a</think>a" DEEPSEEK_EOS "|why b</think>b" DEEPSEEK_EOS "|/");
}

/* Reasoning at the start of a content is treated as the field `reasoning_content`: no second <think>, and a count of
 * answers whose reasoning the template does not show. */
static void deepseek_takes_reasoning_from_the_content(void **state)
{
    (void)state;
    static const struct {
        const char *answer, *kwargs, *expected;
        int64_t unshown;
    } cases[] = {
        {"\"content\":\"<think>why</think>a\"", "\"thinking\":true", "why</think>a" DEEPSEEK_EOS, 0},
        {"\"content\":\"<think>\\nwhy\\n</think>\\n\\na\"", "\"thinking\":true", "why</think>a" DEEPSEEK_EOS, 0},
        {"\"content\":\"<think>why</think>a\"", "", "a" DEEPSEEK_EOS, 1},
        {"\"content\":\"<think></think>a\"", "", "a" DEEPSEEK_EOS, 0},
        {"\"reasoning_content\":\"\",\"reasoning\":\"why\",\"content\":\"a\"", "\"thinking\":true",
         "why</think>a" DEEPSEEK_EOS, 0},
        {"\"reasoning\":\"why\",\"content\":\"a\"", "", "a" DEEPSEEK_EOS, 1},
        {"\"thinking\":\"own\",\"content\":\"<think>why</think>a\"", "\"thinking\":true",
         "own</think><think>why</think>a" DEEPSEEK_EOS, 0},
        {"\"content\":\"a <think>why</think>\"", "", "a <think>why</think>" DEEPSEEK_EOS, 0},
        {"\"content\":\"<think>why\"", "", "<think>why" DEEPSEEK_EOS, 0},
    };
    const struct chat_options options = {0};
    struct chat_template *t = chat_template_deepseek();
    for (int i = 0; i < MT_LEN(cases); i++) {
        char row[512];
        struct chat_samples samples = {0};
        struct err err;
        snprintf(row, sizeof(row),
                 "{\"messages\":[" USER ",{\"role\":\"assistant\",%s}],\"chat_template_kwargs\":{%s}}", cases[i].answer,
                 cases[i].kwargs);
        struct json_doc *doc = json_parse(row, (int64_t)strlen(row), "row", &err);
        assert_non_null(doc);
        if (chat_samples_make(&samples, t, json_root(doc), LOSS_ASSISTANT, false, &options, &err))
            fail_msg("%s", err.msg);
        const struct text_buf *s = &samples.items[0];
        assert_int_equal(samples.count, 1);
        assert_int_equal(s->n_spans, 1);
        assert_string_equal(s->text + s->spans[0][0], cases[i].expected);
        assert_int_equal(samples.n_unshown, cases[i].unshown);
        chat_samples_free(&samples);
        json_free(doc);
    }
    chat_template_free(t);
}

/* Template variables from the configuration; those of a row override them. */
static void kwargs(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"{", "JSON"},
        {"[1]", "must be an object"},
        {"{\"thinkin\": true}", "does not read the variable \"thinkin\"; it reads thinking, enable_thinking, "},
        {"{\"mode\": true}", "does not read the variable \"mode\""},
        {"{\"thinking\": 1}", "key `thinking`: must be true or false, not an integer"},
        {"{\"thinking_mode\": \"deep\"}", "thinking_mode \"deep\": must be \"thinking\" or \"chat\""},
        {"{\"reasoning_effort\": \"low\"}", "reasoning_effort \"low\": must be \"high\" or \"max\""}};
    static const char row[] = "{\"messages\":[" USER "],\"chat_template_kwargs\":{\"thinking_mode\":\"chat\"}}";
    static const char bare[] = "{\"messages\":[" USER "]}";
    const struct chat_options options = {0};
    struct chat_template *t = chat_template_deepseek();
    struct text_buf text = {0};
    struct err err;
    for (int i = 0; i < MT_LEN(bad); i++) {
        assert_int_equal(chat_template_set_kwargs(t, bad[i][0], &err), -1);
        if (!strstr(err.msg, bad[i][1])) fail_msg("%s", err.msg);
    }
    const uint64_t before = chat_template_hash(t);
    assert_int_equal(chat_template_set_kwargs(t, "{\"thinking\": true}", &err), 0);
    assert_true(chat_template_hash(t) != before);
    for (int own = 0; own < 2; own++) {
        struct json_doc *doc = json_parse(row, (int64_t)strlen(row), "row", &err);
        struct json_doc *plain = json_parse(bare, (int64_t)strlen(bare), "row", &err);
        assert_true(doc && plain);
        text.size = 0;
        assert_int_equal(chat_template_render(&text, t, json_root(own ? doc : plain), &options, &err), 0);
        assert_string_equal(text.text, own ? DEEPSEEK_BOS "<｜User｜>q<｜Assistant｜></think>"
                                           : DEEPSEEK_BOS "<｜User｜>q<｜Assistant｜><think>");
        json_free(doc);
        json_free(plain);
    }
    text_free(&text);
    chat_template_free(t);
}

/* A checkpoint without a template, whose tokenizer has V4's special tokens, uses V4's format; a template overrides it.
 */
static void deepseek_is_recognised(void **state)
{
    (void)state;
    static const char *const marks[] = {DEEPSEEK_BOS, DEEPSEEK_EOS, "<｜User｜>", "<｜Assistant｜>",
                                        "<think>",    "</think>",   "｜DSML｜",   "<｜latest_reminder｜>"};
    char path[MT_PATH], text[8192];
    const char *dir = scratch_dir();
    struct chat_template *t;
    struct err err;
    snprintf(path, sizeof(path), "%s/tokenizer.json", dir);
    for (int64_t n = MT_LEN(marks); n >= MT_LEN(marks) - 1; n--) {
        size_t used = 0;
        used += (size_t)snprintf(text, sizeof(text),
                                 "{\"version\":\"1.0\",\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},"
                                 "\"merges\":[]},\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\","
                                 "\"add_prefix_space\":false,\"use_regex\":true},\"added_tokens\":[");
        for (int64_t i = 0; i < n; i++)
            used += (size_t)snprintf(text + used, sizeof(text) - used,
                                     "%s{\"id\":%d,\"content\":\"%s\",\"single_word\":false,\"lstrip\":false,"
                                     "\"rstrip\":false,\"normalized\":false,\"special\":true}",
                                     i ? "," : "", (int)i + 1, marks[i]);
        used += (size_t)snprintf(text + used, sizeof(text) - used, "]}");
        assert_int_equal(file_write_atomic(path, text, (int64_t)used, &err), 0);
        struct tokenizer *tok = tokenizer_load(path, &err);
        if (!tok) fail_msg("%s", err.msg);
        assert_int_equal(row_template(&t, tok, dir, NULL, &err), 0);
        assert_int_equal(chat_template_is_deepseek(t), n == MT_LEN(marks));
        chat_template_free(t);
        if (n == MT_LEN(marks)) {
            char mine[MT_PATH];
            snprintf(mine, sizeof(mine), "%s/mine.jinja", dir);
            assert_int_equal(file_write_atomic(mine, "{{ messages }}", 14, &err), 0);
            assert_int_equal(row_template(&t, tok, dir, mine, &err), 0);
            assert_true(t && !chat_template_is_deepseek(t));
            chat_template_free(t);
        }
        tokenizer_free(tok);
    }
}

int test_chat(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(deepseek_vectors),
        cmocka_unit_test(deepseek_refusals),
        cmocka_unit_test(deepseek_samples),
        cmocka_unit_test(deepseek_takes_reasoning_from_the_content),
        cmocka_unit_test(deepseek_is_recognised),
        cmocka_unit_test(kwargs),
        cmocka_unit_test(vectors),
        cmocka_unit_test(appends),
        cmocka_unit_test(refused),
        cmocka_unit_test(own_variables),
        cmocka_unit_test(edges_are_token_edges),
    };
    return cmocka_run_group_tests_name("chat", tests, NULL, NULL);
}

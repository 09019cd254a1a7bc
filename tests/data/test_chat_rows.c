/* test_chat_rows.c - rows of conversations: all that a row says is in the rendered text, or the row is refused; names
 * and forms of other programs; keys that switch loss. */
#include "tests/rows.h"

#include <stdio.h>
#include <string.h>

#include "data/chat/chat_named.h"
#include "data/file/file.h"

/* Like Qwen3: strings only, `in` fails for null, no other roles. */
#define CALLING                                                                                                        \
    "{% if tools %}<t>{% for t in tools %}{{ t | tojson }}{% endfor %}</t>{% endif %}{% for m in messages %}"          \
    "{% if m.role == 'user' or m.role == 'system' %}<|{{ m.role }}|>{{ '' + m.content }}"                              \
    "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content.split('</think>')[-1] if '</think>' in m.content else " \
    "m.content }}{% for c in m.tool_calls or [] %}<c>{\"name\": \"{{ c.function.name }}\", \"arguments\": "            \
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}</c>"             \
    "{% endfor %}<|im_end|>{% elif m.role == 'tool' %}<|tool|>{{ m.content }}{% endif %}{% endfor %}"                  \
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
/* ChatML: any role, and nothing but contents. */
#define PLAIN                                                                                                          \
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"                                     \
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
/* Like Mistral's v3: the template writes the system prompt into the last question, and only where this question is the
 * last message. */
#define LAST_QUESTION                                                                                                  \
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set rest = messages[1:] %}{% else %}"    \
    "{% set rest = messages %}{% endif %}<s>{% for m in rest %}{% if m.role == 'user' %}"                              \
    "{% if loop.last and s is defined %}[INST]{{ s }}\n\n{{ m.content }}[/INST]{% else %}[INST]{{ m.content }}[/INST]" \
    "{% endif %}{% elif m.role == 'assistant' %}{{ m.content }}<|im_end|>{% else %}"                                   \
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
/* Lists of parts are taken, and images get a token. */
#define PARTS                                                                                                          \
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"                     \
    "{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}{% endif %}<|im_end|>"         \
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"

#define M(role, content)        "{\"role\": \"" role "\", \"content\": \"" content "\"}"
#define MJ(role, content)       "{\"role\": \"" role "\", \"content\": " content "}"
#define MX(role, content, more) "{\"role\": \"" role "\", \"content\": \"" content "\", " more "}"
#define Q                       M("user", "q")
#define A                       M("assistant", "a")
#define F(arguments)            "{\"function\": {\"name\": \"f\", \"arguments\": " arguments "}}"
#define CALL(arguments)         "\"tool_calls\": [" F(arguments) "]"
#define ROW(messages)           "{\"messages\": [" messages "]}"
#define ROWX(messages, more)    "{\"messages\": [" messages "], " more "}"
#define TOOL(more)              "{\"type\": \"function\", \"function\": {\"name\": \"f\"" more "}}"
#define QA                      "<|user|>q<|assistant|>[[a<|im_end|>]]"
#define PLAIN_QA                "<|user|>q<|im_end|><|assistant|>[[a<|im_end|>]]"

struct row {
    const char *template, *row, *expected; /* template: NULL is gpt-oss's (rows_chat). expected: the samples with loss
                                              in [[ ]] and "/" between them, or "!" and words of the error */
};

static struct chat_template *load(const char *text)
{
    static const char config[] = "{\"eos_token\": \"<|im_end|>\"}";
    const char *dir = scratch_dir();
    char path[MT_PATH];
    struct err err;
    struct chat_template *t;
    snprintf(path, sizeof(path), "%s/tokenizer_config.json", dir);
    rows_write_file(path, config, (int64_t)strlen(config));
    snprintf(path, sizeof(path), "%s/t.jinja", dir);
    rows_write_file(path, text, (int64_t)strlen(text));
    if (chat_template_load(&t, dir, path, &err)) fail_msg("%s", err.msg);
    chat_template_probe(t);
    return t;
}

static void put_sample(struct text_buf *out, const struct row_sample *s)
{
    int64_t at = 0;
    for (int64_t k = 0; k < s->n_spans; at = s->spans[k++][1]) {
        text_put_bytes(out, s->text + at, s->spans[k][0] - at);
        text_put(out, "[[");
        text_put_bytes(out, s->text + s->spans[k][0], s->spans[k][1] - s->spans[k][0]);
        text_put(out, "]]");
    }
    text_put_bytes(out, s->text + at, s->size - at);
}

/* Reads the row twice: the second time its shape is known. */
static void check(const struct row *row, struct row_options opt)
{
    struct chat_template *t = row->template ? load(row->template) : NULL;
    struct err err;
    opt.chat = t ? t : rows_chat;
    struct row_reader reader = {.opt = &opt, .tok = rows_tok};
    struct text_buf got = {0};
    struct json_doc *doc = json_parse(row->row, (int64_t)strlen(row->row), "row", &err);
    if (!doc) fail_msg("%s", err.msg);
    for (int round = 0; round < 2; round++) {
        got.size = 0;
        text_put(&got, "");
        const int rc = row_read(&reader, json_root(doc), &err);
        for (int64_t i = 0; !rc && i < reader.n; i++) {
            if (i) text_put(&got, "/");
            put_sample(&got, &reader.samples[i]);
        }
        const bool wrong = row->expected[0] == '!' ? !rc || !strstr(err.msg, row->expected + 1)
                                                   : rc || strcmp(got.text, row->expected) != 0;
        if (wrong) fail_msg("%s\ngives  %s\nnot    %s", row->row, rc ? err.msg : got.text, row->expected);
    }
    json_free(doc);
    text_free(&got);
    row_reader_free(&reader);
    chat_template_free(t);
}

static void check_all(const struct row *rows, int64_t n, struct row_options opt)
{
    for (int64_t i = 0; i < n; i++) check(&rows[i], opt);
}

/* A row is refused if the rendered text lacks any part of it. */
static void dropped_parts(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {PLAIN, ROW(Q "," A), PLAIN_QA},
        {PLAIN, ROW(Q "," MX("assistant", "", CALL("{}"))), "!does not write `tool_calls` of this message"},
        {PLAIN, ROW(Q "," MX("assistant", "a", CALL("{}"))), "!`messages[1]`: the chat template does not write"},
        {PLAIN, ROW(Q "," MX("assistant", "a", "\"function_call\": {\"name\": \"f\", \"arguments\": \"{}\"}")),
         "!does not write `tool_calls`"},
        {PLAIN, ROWX(Q "," A, "\"tools\": [" TOOL("") "]"), "!does not write `tools` of this row"},
        {PLAIN, ROWX(Q "," A, "\"tools\": [], \"documents\": null, \"images\": []"), PLAIN_QA},
        {PLAIN, ROWX(Q "," A, "\"documents\": [{\"text\": \"d\"}]"), "!does not write `documents`"},
        {PLAIN, ROW(MX("user", "q", "\"images\": [\"a.png\"]") "," A), "!`messages[0]`: has `images`: images, audio"},
        {PLAIN, ROW(Q "," MX("assistant", "a", "\"audio\": {\"id\": \"x\"}")), "!`messages[1]`: has `audio`"},
        {PLAIN, ROWX(Q "," A, "\"video\": \"a.mp4\""), "!has `video`"},
        {PLAIN, ROWX(Q "," A, "\"functions\": [{\"name\": \"f\"}]"), "!does not write `tools` of this row"},
        {PLAIN, ROWX(Q "," A, "\"functions\": [], \"video\": null"), PLAIN_QA},
        {PLAIN, ROWX(Q "," A, "\"images\": [\"a.png\"]"), "!has `images`: images, audio and video are not trained"},
        {PLAIN, ROW(Q "," MX("assistant", "a", "\"refusal\": \"no\"")), "!does not write `refusal`"},
        {PLAIN, ROW(Q "," MX("assistant", "a", "\"refusal\": null")), PLAIN_QA},
        {PLAIN, ROW(Q "," MX("assistant", "a", "\"name\": \"n\", \"audio\": null")), PLAIN_QA},
        {CALLING, ROW(Q "," M("judge", "j") "," A), "!`content` of this message of role \"judge\""},
        {CALLING, ROW(M("user", "a") "," M("judge", "a") "," A), "!of role \"judge\""}, /* equal texts */
        {CALLING, ROW(Q "," A "," M("judge", "j")), "!of role \"judge\""}, /* a message after the last answer */
        {CALLING, ROW(Q "," A "," Q), QA},
        {PLAIN, ROW(Q "," A "," M("judge", "j")), PLAIN_QA}, /* PLAIN writes any role */
        {LAST_QUESTION, ROW(Q "," A "," M("system", "late") "," Q "," A), "!roles must alternate"},
        {PARTS,
         ROW(MJ("user", "[{\"type\": \"image\", \"image\": \"u\"}, {\"type\": \"text\", \"text\": \"q\"}]") "," A),
         "!`messages[0].content[0]`: is a part of type \"image\": images, audio and video are not trained"},
    };
    check_all(rows, MT_LEN(rows), (struct row_options){0});
}

static void gptoss_names_dropped_parts(void **state)
{
    (void)state;
    static const char calls[] = ROW(Q ",{\"role\": \"assistant\", \"tool_calls\": [" TOOL(
        ", \"arguments\": {}") "," TOOL(", \"arguments\": {}") "," TOOL(", \"arguments\": {}") "]}");
    static const char refusal[] = "{\"role\": \"assistant\", \"content\": null, \"refusal\": \"no\"}";
    static const char one[] =
        "!`messages[1].tool_calls`: has 3 calls, and the chat template writes only one: give each";
    static const char lost[] = "!`messages[1]`: the chat template does not write `refusal` of this message of role "
                               "\"assistant\", so the model would not see it";
    static const struct row scalars[] = {
        {NULL, ROW(Q "," MJ("system", "5") "," A), "!does not write `content` of this message of role \"system\""},
        {NULL, ROW(Q "," MJ("system", "0") "," A), "!does not write `content` of this message of role \"system\""},
        {NULL, ROW(Q "," A "," M("judge", "j")), "!does not write `content` of this message of role \"judge\""},
        {NULL, ROW(Q "," M("judge", "j") "," A),
         "!the template knows no role \"judge\", only user, assistant, system, tool, developer"}};
    char row[512];
    for (int64_t i = 0; i < MT_LEN(scalars); i++) check(&scalars[i], (struct row_options){0});
    snprintf(row, sizeof(row), "{\"messages\": [%s,%s]}", Q, refusal);
    check(&(struct row){NULL, calls, one}, (struct row_options){0});
    check(&(struct row){NULL, row, lost}, (struct row_options){0});
}

/* With data.dropped = warn the rest of a row is trained, except answers of which the template writes nothing. */
static void dropped_parts_with_a_warning(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {PLAIN, ROW(Q "," MX("assistant", "", CALL("{}"))), ""},
        {PLAIN, ROW(Q "," MX("assistant", "", CALL("{}")) "," Q "," A),
         "<|user|>q<|im_end|><|assistant|><|im_end|><|user|>q<|im_end|><|assistant|>[[a<|im_end|>]]"},
        {PLAIN, ROWX(Q "," MX("assistant", "a", CALL("{}")), "\"tools\": [" TOOL("") "]"), PLAIN_QA},
        {CALLING, ROW(Q "," M("judge", "j") "," A), QA},
        {CALLING, ROW(MJ("user", "[{\"type\": \"image\"}, \"q\"]") "," A), QA},
    };
    check_all(rows, MT_LEN(rows), (struct row_options){.dropped = DROPPED_WARN});
    struct dataset ds;
    struct dataset_options opt = rows_options();
    opt.dropped = DROPPED_WARN;
    opt.chat = load(PLAIN);
    rows_load(&ds,
              rows_write(ROWX(Q "," A, "\"documents\": [{\"text\": \"d\"}]") "\n" ROW(
                  Q "," M("assistant", "")) "\n" ROW(Q "," A) "\n"),
              &opt);
    assert_int_equal(ds.counts.n_dropped, 1);
    assert_int_equal(ds.counts.n_blank, 1);
    assert_int_equal(ds.counts.n_unanswered, 1);
    assert_int_equal(ds.n_docs, 2);
    dataset_free(&ds);
    chat_template_free((struct chat_template *)(uintptr_t)opt.chat);
}

/* Roles of other programs, where the template does not know them. */
static void roles_of_other_programs(void **state)
{
    (void)state;
#define CALLED "<|user|>q<|assistant|>[[<c>{\"name\": \"f\", \"arguments\": {\"x\": 1}}</c><|im_end|>]]"
#define RESULT "<|tool|>r<|assistant|>[[a<|im_end|>]]"
    static const struct row rows[] = {
        {CALLING, ROW(M("developer", "d") "," Q "," A), "<|system|>d" QA},
        {PLAIN, ROW(M("developer", "d") "," Q "," A),
         "<|developer|>d<|im_end|><|user|>q<|im_end|><|assistant|>[[a<|im_end|>]]"},
        {CALLING, ROW(M("human", "q") "," M("gpt", "a")), QA},
        {PLAIN, ROW(M("human", "q") "," M("bot", "a")), PLAIN_QA},
        {CALLING, ROW(Q "," MX("assistant", "", CALL("{\"x\": 1}")) "," M("function", "r") "," A), CALLED RESULT},
        {CALLING, ROW(Q "," MX("assistant", "", CALL("{\"x\": 1}")) "," M("ipython", "r") "," A), CALLED RESULT},
        {CALLING,
         ROW(Q "," MX("assistant", "", "\"function_call\": {\"name\": \"f\", \"arguments\": {\"x\": 1}}") "," M(
             "observation", "r") "," A),
         CALLED RESULT},
        {CALLING,
         ROW(Q "," MJ("tool_call", "{\"name\": \"f\", \"arguments\": {\"x\": 1}}") "," M("tool_response", "r") "," A),
         CALLED RESULT},
        {CALLING,
         ROW(Q "," M("assistant", "b") "," M(
             "tool_call", "{\\\"name\\\": \\\"f\\\", \\\"arguments\\\": {\\\"x\\\": "
                          "1}}") "," M("tool_call", "{\\\"name\\\": \\\"g\\\", \\\"arguments\\\": {}}")),
         "<|user|>q<|assistant|>[[b<c>{\"name\": \"f\", \"arguments\": {\"x\": 1}}</c><c>{\"name\": \"g\", "
         "\"arguments\": {}}</c><|im_end|>]]"},
        {CALLING,
         ROW(Q "," MX("assistant", "b", "\"loss\": false") "," MJ(
             "tool_call", "{\"name\": \"f\", \"arguments\": {\"x\": 1}}, \"loss\": true")),
         "<|user|>q<|assistant|>b<|im_end|><|assistant|>[[<c>{\"name\": \"f\", \"arguments\": {\"x\": "
         "1}}</c><|im_end|>]]"}, /* two answers, of which one has loss */
        {CALLING, ROW(Q "," M("tool_call", "no call")), "!is not JSON of a call"},
        {CALLING,
         "{\"conversations\": [{\"from\": \"human\", \"value\": \"q\"}, {\"from\": \"gpt\", \"value\": \"a\"}]}", QA},
        {CALLING, "{\"conversations\": [" Q "," A "], \"system\": \"s\"}", "<|system|>s" QA},
        {CALLING, ROWX(Q "," A, "\"system\": \"s\""), "<|system|>s" QA},
        {CALLING, ROWX(M("system", "t") "," Q "," A, "\"system\": \"s\""), "!two system prompts"},
        {NULL, ROW(M("function", "r")), "!no previous assistant message with a tool call"},
    };
    check_all(rows, MT_LEN(rows), (struct row_options){0});
}

/* Contents of other forms: parts, null, missing. */
static void contents(void **state)
{
    (void)state;
#define TEXT(text) "{\"type\": \"text\", \"text\": \"" text "\", \"image_url\": null}"
    static const struct row rows[] = {
        {CALLING, ROW(MJ("user", "[" TEXT("q") "]") "," MJ("assistant", "[" TEXT("a") "]")), QA},
        {CALLING, ROW(MJ("user", "[{\"text\": \"b\"}, \"c\"]") "," A), "<|user|>bc<|assistant|>[[a<|im_end|>]]"},
        {PARTS, ROW(MJ("user", "[" TEXT("q") "]") "," A), PLAIN_QA},
        {CALLING, ROW(MJ("user", "[" TEXT("q") ", {\"type\": \"image_url\"}]") "," A), "!part of type \"image_url\""},
        {CALLING, ROW(Q "," MJ("assistant", "[{\"type\": \"thinking\", \"thinking\": \"t\"}, " TEXT("a") "]")),
         "!part of type \"thinking\""},
        {CALLING,
         ROW(Q ","
               "{\"role\": \"assistant\", \"content\": null, " CALL("{\"x\": 1}") "}"),
         CALLED},
        {CALLING,
         ROW(Q ","
               "{\"role\": \"assistant\", " CALL("{\"x\": 1}") "}"),
         CALLED},
        {CALLING,
         ROW(Q ","
               "{\"role\": \"assistant\", \"content\": null}"),
         ""},
        {PLAIN,
         ROW(Q ","
               "{\"role\": \"assistant\"}"),
         ""},
        {PLAIN, ROW(Q "," M("assistant", " \\n")), ""},
        {PLAIN, ROW(Q "," MX("assistant", "", "\"reasoning\": \"r\"")), ""}, /* PLAIN drops the reasoning */
        {PLAIN,
         ROW(Q ","
               "{\"role\": \"assistant\", \"content\": null, \"refusal\": \"no\"}"),
         "!`refusal`"},
        {PLAIN, ROW("{\"role\": \"user\", \"content\": null}," A), "!has no content"},
        {NULL, ROW(MJ("user", "[" TEXT("q") "]") "," A),
         "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: "
         "2024-06\nCurrent date: 2025-06-28\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. "
         "Channel must be included for every message.<|end|><|start|>user<|message|>q<|end|><|start|>assistant[["
         "<|channel|>final<|message|>a<|return|>]]"},
    };
    check_all(rows, MT_LEN(rows), (struct row_options){0});
}

/* Numbers become text where the template takes only text. An object that the template leaves out is an error. */
static void contents_that_are_no_text(void **state)
{
    (void)state;
#define STRICT                                                                                                         \
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if m.content is string else '' }}<|im_end|>{% endfor %}"      \
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
#define RESULTS                                                                                                        \
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'tool' %}"                                                 \
    "{% for x in m.content %}{{ x.output if x.output is defined else x }}{% endfor %}"                                 \
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    static const struct row rows[] = {
        {STRICT, ROW(Q "," MJ("assistant", "42")), "<|user|>q<|im_end|><|assistant|>[[42<|im_end|>]]"},
        {STRICT, ROW(Q "," MJ("assistant", "0")), "<|user|>q<|im_end|><|assistant|>[[0<|im_end|>]]"},
        {STRICT, ROW(MJ("user", "-1.5") "," A), "<|user|>-1.5<|im_end|><|assistant|>[[a<|im_end|>]]"},
        {PLAIN, ROW(Q "," MJ("assistant", "42")), "<|user|>q<|im_end|><|assistant|>[[42<|im_end|>]]"},
        {STRICT, ROW(Q "," MJ("assistant", "{\"text\": \"a\"}")), "!does not write `content`"},
        {STRICT, ROW(Q "," MJ("tool", "{\"n\": 1}") "," A), "!does not write `content`"},
        {RESULTS, ROW(Q "," MJ("tool", "{\"n\": \"r\"}") "," A), "!does not write `content`"}, /* only the key */
        {RESULTS, ROW(Q "," MJ("tool", "[{\"output\": \"r\"}, 1, \"s\"]") "," A),
         "<|user|>q<|im_end|><|tool|>r1s<|im_end|><|assistant|>[[a<|im_end|>]]"},
        {PLAIN, ROW(MJ("user", "[\"q\"]") "," A), PLAIN_QA},
        {PARTS, ROW(MJ("user", "[\"q\"]") "," A), PLAIN_QA},
        {PARTS, ROW(MJ("user", "[{\"text\": \"q\"}]") "," A), PLAIN_QA},
        {PARTS, ROW(MJ("user", "[{\"type\": \"text\", \"value\": \"q\"}], \"loss_weight\": 0.0") "," A), PLAIN_QA},
        {PLAIN, ROW(MJ("user", "[{\"type\": \"input_audio\"}]") "," A), "!images, audio and video are not trained"},
        {"{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
         ROW(MJ("user", "[{\"type\": \"image_url\", \"image_url\": {\"url\": \"u\"}}]") "," A),
         "!type \"image_url\": images, audio and video are not trained"},
#define HARMONY                                                                                                        \
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: "         \
    "2024-06\nCurrent date: 2025-06-28\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. "        \
    "Channel must be included for every message."
        {NULL, ROW(MJ("user", "[{\"type\": \"text\", \"text\": \"q\"}]") "," MJ("assistant", "7")),
         HARMONY "<|end|><|start|>user<|message|>q<|end|><|start|>assistant[[<|channel|>final<|message|>7<|return|>]]"},
        {NULL, ROW(Q "," MX("assistant", "", CALL("{}")) "," MJ("tool", "[1, {\"n\": 2}]") "," A),
         HARMONY "<|end|><|start|>user<|message|>q<|end|><|start|>assistant[[ to=functions.f<|channel|>commentary "
                 "json<|message|>{}<|call|>]]<|start|>functions.f to=assistant<|channel|>commentary<|message|>[1, "
                 "{\"n\": 2}]<|end|><|start|>assistant[[<|channel|>final<|message|>a<|return|>]]"},
        {NULL, ROW(Q "," MX("assistant", "", CALL("{}")) "," MJ("tool", "null") "," A),
         HARMONY
         "<|end|><|start|>user<|message|>q<|end|><|start|>assistant[[ to=functions.f<|channel|>commentary "
         "json<|message|>{}<|call|>]]<|start|>functions.f to=assistant<|channel|>commentary<|message|>null<|end|>"
         "<|start|>assistant[[<|channel|>final<|message|>a<|return|>]]"},
        {NULL, ROWX(Q "," A, "\"tools\": [{\"name\": \"f\", \"description\": \"d\"}]"),
         HARMONY "\nCalls to these tools must go to the commentary channel: 'functions'.<|end|><|start|>developer"
                 "<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n// d\ntype f = () => any;\n\n} // "
                 "namespace functions<|end|><|start|>user<|message|>q<|end|><|start|>assistant[[<|channel|>final"
                 "<|message|>a<|return|>]]"},
    };
    check_all(rows, MT_LEN(rows), (struct row_options){0});
}

/* gpt-oss: a final answer removes the reasoning before the calls, and ends in <|end|> unless it is the last message. */
static void gptoss_calls_with_reasoning(void **state)
{
    (void)state;
#define TURN(more)  MX("assistant", "", CALL("{}") more) "," M("tool", "t") ","
#define CONTEXT     HARMONY "<|end|><|start|>user<|message|>q<|end|><|start|>assistant"
#define THINKS(r)   "<|channel|>analysis<|message|>" r "<|end|><|start|>assistant"
#define CALLING_F   " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
#define RESULTED    "<|start|>functions.f to=assistant<|channel|>commentary<|message|>\"t\"<|end|><|start|>assistant"
#define FINAL(c, e) "<|channel|>final<|message|>" c e
#define AGAIN       FINAL("a", "<|end|>") "<|start|>user<|message|>q<|end|><|start|>assistant"
    static const char row[] = ROW(Q "," TURN(", \"thinking\": \"r\"") TURN(", \"thinking\": \"s\"")
                                      MX("assistant", "a", "\"thinking\": \"w\"") "," Q "," M("assistant", "b"));
    static const struct row split = {
        NULL, row,
        CONTEXT "[[" THINKS("r") CALLING_F "]]" RESULTED "[[" THINKS("s") CALLING_F "]]" RESULTED "[[" THINKS("w")
            FINAL("a", "<|return|>") "]]/" CONTEXT CALLING_F RESULTED CALLING_F RESULTED AGAIN
                                     "[[" FINAL("b", "<|return|>") "]]"};
    static const struct row whole = {
        NULL, row,
        CONTEXT "[[" CALLING_F "]]" RESULTED "[[" CALLING_F "]]" RESULTED "[[" FINAL(
            "a", "<|end|>") "]]<|start|>user<|message|>q<|end|><|start|>assistant[[" FINAL("b", "<|return|>") "]]"};
    check(&split, (struct row_options){0});
    check(&whole, (struct row_options){.whole = true});
}

/* A template that removes reasoning from the start of a content. */
static void reasoning_in_contents(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {CALLING, ROW(Q "," M("assistant", "<think>r</think>a")), QA},
        {CALLING, ROW(Q "," M("assistant", "<think>\\nr\\n</think>\\n")), ""},
        {PLAIN, ROW(Q "," M("assistant", "<think>r</think>")),
         "<|user|>q<|im_end|><|assistant|>[[<think>r</think><|im_end|>]]"},
    };
    check_all(rows, MT_LEN(rows), (struct row_options){0});
    struct dataset ds;
    struct dataset_options opt = rows_options();
    opt.chat = load(CALLING);
    rows_load(
        &ds,
        rows_write(ROW(Q "," M("assistant", "<think>r</think>a")) "\n" ROW(Q "," M("assistant", "r</think>")) "\n"),
        &opt);
    assert_int_equal(ds.counts.n_unshown, 2);
    assert_int_equal(ds.counts.n_blank, 1);
    dataset_free(&ds);
    chat_template_free((struct chat_template *)(uintptr_t)opt.chat);
}

/* An answer before the first question, where the template renders no prompt for it. */
static void unprompted_answers(void **state)
{
    (void)state;
#define ASKING                                                                                                         \
    "{% if messages[0].role == 'system' %}!{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"          \
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
#define OPENED "<|assistant|>o<|im_end|><|user|>q<|im_end|><|assistant|>[[a<|im_end|>]]"
    static const struct row rows[] = {
        {PLAIN, ROW(M("assistant", "o") "," Q "," A),
         "<|assistant|>[[o<|im_end|>]]<|user|>q<|im_end|><|assistant|>[[a<|im_end|>]]"},
        {ASKING, ROW(M("assistant", "o") "," Q "," A), OPENED},
        {ASKING, ROW(A), ""},
    };
    check_all(rows, MT_LEN(rows), (struct row_options){0});
    check(&rows[1], (struct row_options){.whole = true});
    struct dataset ds;
    struct dataset_options opt = rows_options();
    opt.chat = load(ASKING);
    rows_load(&ds, rows_write(ROW(M("assistant", "o") "," Q "," A) "\n"), &opt);
    assert_int_equal(ds.counts.n_unprompted, 1);
    dataset_free(&ds);
    chat_template_free((struct chat_template *)(uintptr_t)opt.chat);
}

static void calls_and_tools(void **state)
{
    (void)state;
#define CALLED_F     "<|user|>q<|assistant|>[[<c>{\"name\": \"f\", \"arguments\": {}}</c><|im_end|>]]"
#define CALLS(value) ROW(Q "," MX("assistant", "", "\"tool_calls\": " value))
/* Like Mistral and DeepSeek: a message with the key `tool_calls` is a call, and the template needs all keys of a call.
 */
#define STRICT_CALLS                                                                                                   \
    "{% for t in tools or [] %}<t>{{ t.function.name + t.function.description }}</t>{% endfor %}"                      \
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls is defined %}{% for c in m.tool_calls %}"               \
    "{{ c.type + c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ '' + m.content }}"      \
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
#define STRICT_F "<|user|>q<|im_end|><|assistant|>[[functionf{}<|im_end|>]]"
    static const struct row written[] = {
        {CALLING, CALLS("\"[{\\\"function\\\": {\\\"name\\\": \\\"f\\\", \\\"arguments\\\": {}}}]\""), CALLED_F},
        {CALLING, CALLS("[\"{\\\"name\\\": \\\"f\\\"}\"]"), CALLED_F},
        {CALLING, CALLS(F("{}")), CALLED_F},
        {CALLING, CALLS("\"f()\""), "!is not JSON of a call"},
        {CALLING, CALLS("[1]"), "!is not JSON of a call"},
        {CALLING, CALLS("\"[]\""), ""},
        {CALLING, ROW(Q "," M("assistant", "<think>\\n\\n</think>\\n\\n")), ""},
        {STRICT_CALLS, CALLS("[{\"name\": \"f\", \"arguments\": {}}]"), STRICT_F},
        {STRICT_CALLS, CALLS("[" F("{}") "]"), STRICT_F},
        {STRICT_CALLS, ROW(Q "," MX("assistant", "a", "\"tool_calls\": []")), PLAIN_QA},
        {PLAIN, ROW(Q "," MJ("assistant", "0")), "<|user|>q<|im_end|><|assistant|>[[0<|im_end|>]]"},
        {STRICT_CALLS, ROW(Q "," MX("assistant", "a", "\"tool_calls\": [[]]")), PLAIN_QA},
        {STRICT_CALLS, ROW(Q "," MX("assistant", "a", "\"tool_calls\": \"[ ]\"")), PLAIN_QA},
        {STRICT_CALLS, ROW(Q "," MX("assistant", "a", "\"function_call\": \"[]\"")), PLAIN_QA},
        {STRICT_CALLS, ROW(MX("user", "q", "\"tool_calls\": []") "," MX("assistant", "a", "\"tool_calls\": \"\"")),
         PLAIN_QA},
        {STRICT_CALLS, ROWX(Q "," A, "\"functions\": [{\"name\": \"f\", \"description\": \"d\"}]"),
         "<t>fd</t>" PLAIN_QA},
        {STRICT_CALLS,
         "{\"conversations\": [" Q "," A "], \"functions\": \"[{\\\"name\\\": \\\"f\\\", \\\"description\\\": "
         "\\\"d\\\"}]\"}",
         "<t>fd</t>" PLAIN_QA},
        {STRICT_CALLS, ROWX(Q "," A, "\"tools\": [{\"name\": \"f\", \"description\": \"d\"}]"), "<t>fd</t>" PLAIN_QA},
        {CALLING, ROW(Q "," MJ("tool_calls", "[{\"name\": \"f\"}]") "," M("tool_results", "r") "," A),
         "<|user|>q<|assistant|>[[<c>{\"name\": \"f\", \"arguments\": {}}</c><|im_end|>]]" RESULT},
        {CALLING, ROW(Q "," MX("assistant", "", CALL("{}")) "," M("environment", "r") "," A), CALLED_F RESULT},
        {"{% for m in messages %}<|{{ m.role }}|>{{ '' + m.content }}<|im_end|>{% endfor %}"
         "{% if add_generation_prompt %}<|assistant|>{% endif %}",
         ROW(Q "," MJ("tool_call", "{\"name\": \"f\"}")), "!does not write `tool_calls`"},
    };
    check_all(written, MT_LEN(written), (struct row_options){0});
#define C(arguments) ROW(Q "," MX("assistant", "", CALL(arguments)))
#define T(tool)      "<t>" tool "</t>" QA
    static const struct row rows[] = {
        {CALLING, C("{\"x\": 1}"), CALLED},
        {CALLING, C("\"{\\\"x\\\": 1}\""), CALLED},
        {CALLING, C("{\"x\": 1, \"y\": null}"), CALLED},
        {CALLING, C("null"), "<|user|>q<|assistant|>[[<c>{\"name\": \"f\", \"arguments\": {}}</c><|im_end|>]]"},
        {CALLING, C("\"\""), "<|user|>q<|assistant|>[[<c>{\"name\": \"f\", \"arguments\": {}}</c><|im_end|>]]"},
        {CALLING, C("\"null\""), "<|user|>q<|assistant|>[[<c>{\"name\": \"f\", \"arguments\": {}}</c><|im_end|>]]"},
        {CALLING, C("\"x = 1\""), "!must be an object, or the JSON"},
        {CALLING, C("[1]"), "!must be an object, or the JSON"},
        {CALLING, ROW(Q "," MX("assistant", "", "\"tool_calls\": [{\"function\": {\"name\": \"f\"}}]")),
         "<|user|>q<|assistant|>[[<c>{\"name\": \"f\", \"arguments\": {}}</c><|im_end|>]]"},
        {CALLING, ROW(Q "," MX("assistant", "", "\"tool_calls\": [{\"function\": {\"arguments\": {}}}]")), "!name"},
        {CALLING, ROWX(Q "," A, "\"tools\": [" TOOL("") "]"), T(TOOL(""))},
        {CALLING, ROWX(Q "," A, "\"tools\": [" TOOL(", \"description\": null") "]"), T(TOOL(""))},
        {CALLING, ROWX(Q "," A, "\"tools\": " TOOL("")), T(TOOL(""))},
        {CALLING, ROWX(Q "," A, "\"tools\": [\"{\\\"name\\\": \\\"f\\\"}\"]"), T("{\"name\": \"f\"}")},
        {CALLING, ROWX(Q "," A, "\"tools\": \"{\\\"name\\\": \\\"f\\\"}\""), T("{\"name\": \"f\"}")},
        {CALLING, ROWX(Q "," A, "\"tools\": \"[{\\\"name\\\": \\\"f\\\"}]\""), T("{\"name\": \"f\"}")},
        {CALLING, ROWX(Q "," A, "\"tools\": \"\""), QA},
        {CALLING, ROWX(Q "," A, "\"tools\": [\"f\"]"), "!not valid JSON of a tool"},
    };
    check_all(rows, MT_LEN(rows), (struct row_options){0});
    struct dataset ds;
    struct dataset_options opt = rows_options();
    opt.chat = load(CALLING);
    rows_load(&ds, rows_write(C("{\"x\": null, \"y\": {\"z\": null}}") "\n"), &opt);
    assert_int_equal(ds.counts.n_nulls, 2);
    dataset_free(&ds);
    chat_template_free((struct chat_template *)(uintptr_t)opt.chat);
}

/* A template that writes the system prompt into the last question: each sample has it where it is at inference. Where
 * that is impossible (one text for all answers), the row is refused. */
static void system_prompt_in_the_last_question(void **state)
{
    (void)state;
#define TURNS ROW(M("system", "s") "," Q "," A "," M("user", "q2") "," M("assistant", "a2"))
    static const struct row rows[] = {
        {LAST_QUESTION, ROW(Q "," A), "<s>[INST]q[/INST][[a<|im_end|>]]"},
        {LAST_QUESTION, ROW(M("system", "s") "," Q "," A), "<s>[INST]s\n\nq[/INST][[a<|im_end|>]]"},
        {LAST_QUESTION, ROW(M("system", "q") "," M("user", "qq") "," A), "<s>[INST]q\n\nqq[/INST][[a<|im_end|>]]"},
        {LAST_QUESTION, TURNS,
         "<s>[INST]s\n\nq[/INST][[a<|im_end|>]]/<s>[INST]q[/INST]a<|im_end|>[INST]s\n\nq2[/INST][[a2<|im_end|>]]"},
    };
    static const struct row whole = {LAST_QUESTION, TURNS,
                                     "!does not write `content` of this message of role \"system\""};
    check_all(rows, MT_LEN(rows), (struct row_options){0});
    check(&whole, (struct row_options){.whole = true});
    check(&whole, (struct row_options){.loss_on = LOSS_ALL});
}

/* Keys of other trainers that switch loss. */
static void keys_that_switch_loss(void **state)
{
    (void)state;
#define S(more)         ROW(Q "," MX("assistant", "a", more) "," M("user", "r") "," M("assistant", "b"))
#define FIRST           "<|user|>q<|assistant|>[[a<|im_end|>]]<|user|>r<|assistant|>[[b<|im_end|>]]"
#define SECOND          "<|user|>q<|assistant|>a<|im_end|><|user|>r<|assistant|>[[b<|im_end|>]]"
#define D(detail)       ROW(Q "," MX("assistant", "h\\u00e9llo you", detail))
#define DETAIL(b, e, t) "{\"begin_offset\": " b ", \"end_offset\": " e ", \"train\": " t "}"
    static const struct row rows[] = {
        {CALLING, S("\"loss\": true"), FIRST},
        {CALLING, S("\"loss\": null"), FIRST},
        {CALLING, S("\"loss\": false"), SECOND},
        {CALLING, S("\"loss\": 0"), SECOND},
        {CALLING, S("\"loss\": 1.0"), FIRST},
        {CALLING, S("\"loss\": 0.5"), "!`loss` must be 0 or 1"},
        {CALLING, S("\"loss\": \"no\""), "!`loss` must be true, false, 0 or 1"},
        {CALLING, S("\"loss_scale\": 0"), SECOND},
        {CALLING, S("\"training\": false"), SECOND},
        {CALLING, S("\"training\": false, \"train_detail\": [" DETAIL("0", "0", "true") "]"), SECOND},
        {CALLING, S("\"train_detail\": []"), SECOND},
        {CALLING, S("\"training\": true, \"train_detail\": []"), FIRST},
        {CALLING, ROW(MX("user", "q", "\"training\": true") "," A), "!not an answer"},
        {CALLING, ROW(MX("user", "q", "\"training\": false") "," A), QA},
        {CALLING, D("\"train_detail\": [" DETAIL("1", "2", "true") "]"),
         "<|user|>q<|assistant|>h[[\xc3\xa9l]]lo you[[<|im_end|>]]"},
        {CALLING,
         D("\"train_detail\": [" DETAIL("6", "99", "true") "," DETAIL("0", "0", "true") "," DETAIL("1", "5",
                                                                                                   "false") "]"),
         "<|user|>q<|assistant|>[[h]]\xc3\xa9llo [[you<|im_end|>]]"},
        {CALLING, D("\"train_detail\": [{\"begin_offset\": 0}]"), "!end_offset"},
        {CALLING, ROW(Q "," MJ("assistant", "[{\"text\": \"no \", \"train\": false}, {\"text\": \"yes\"}]")),
         "<|user|>q<|assistant|>no [[yes<|im_end|>]]"},
        {CALLING, S("\"loss_mask\": [1]"), "!has `loss_mask`, which seems to say"},
        {CALLING, S("\"masked\": false"), "!has `masked`"},
        {CALLING, S("\"isMasked\": true"), "!has `isMasked`"},
        {CALLING, S("\"mask\": null, \"glossary\": 1, \"unmaskable\": 2"), FIRST},
        {CALLING, ROWX(Q "," A, "\"loss_mask\": [0, 1]"), "!has `loss_mask`"},
        {CALLING, ROWX(Q "," A, "\"mask\": null, \"source\": \"loss\""), QA},
        {CALLING, "{\"prompt\": \"a\", \"completion\": \"b\", \"loss_mask\": [1]}", "!has `loss_mask`"},
        {CALLING,
         "{\"conversations\": [{\"from\": \"human\", \"value\": \"q\"}, {\"from\": \"gpt\", \"value\": \"a\", "
         "\"loss_mask\": 0}]}",
         "!has `loss_mask`"},
        {CALLING,
         "{\"conversations\": [{\"from\": \"human\", \"value\": \"q\"}, {\"from\": \"gpt\", \"value\": \"a\", "
         "\"loss\": false}]}",
         ""},
    };
    static const struct row last = {CALLING, S("\"loss\": true"), FIRST},
                            only = {CALLING, S("\"train\": true"), SECOND};
    check_all(rows, MT_LEN(rows), (struct row_options){0});
    check(&last, (struct row_options){.loss_on = LOSS_LAST});
    check(&only, (struct row_options){.loss_on = LOSS_LAST});
}

/* The message for data without answers does not name seq_len. */
static void rows_without_answers(void **state)
{
    (void)state;
    struct dataset_options opt = rows_options();
    opt.chat = load(CALLING);
    rows_refused(rows_write(ROW(Q) "\n" ROW(Q "," MX("assistant", "a", "\"loss\": 0")) "\n"), &opt,
                 "no row has an answer with loss (2 rows)");
    chat_template_free((struct chat_template *)(uintptr_t)opt.chat);
}

/* Named templates whose turns do not end with the tokenizer's eos_token, or whose prompt opens a block of reasoning. */
static void loss_of_named_templates(void **state)
{
    (void)state;
#define BEGUN(role)       "<|im_start|>" role "\n"
#define ENDED(role, text) BEGUN(role) text "<|im_end|>\n"
#define THOUGHT                                                                                                        \
    ROW(Q "," MX("assistant", "a", "\"reasoning_content\": \"w\"") "," M("user", "r") "," MX(                          \
        "assistant", "b", "\"reasoning_content\": \"v\""))
    const struct row rows[] = {
        {chat_named_text("gemma4"), ROW(Q "," A), "<|turn>user\nq<turn|>\n<|turn>model\n[[a<turn|>\n]]"},
        {chat_named_text("gemma4"), THOUGHT,
         "<|turn>user\nq<turn|>\n<|turn>model\n[[<|channel>thought\nw\n<channel|>a<turn|>\n]]/"
         "<|turn>user\nq<turn|>\n<|turn>model\na<turn|>\n<|turn>user\nr<turn|>\n<|turn>model\n"
         "[[<|channel>thought\nv\n<channel|>b<turn|>\n]]"},
        {chat_named_text("lfm2"), THOUGHT,
         ENDED("user", "q") BEGUN("assistant") "[[<think>w</think>a<|im_end|>]]\n/" ENDED("user", "q")
             ENDED("assistant", "a") ENDED("user", "r") BEGUN("assistant") "[[<think>v</think>b<|im_end|>]]\n"},
        {chat_named_text("minimax"),
         ROW(M("system", "S") "," Q "," MX("assistant", "a", "\"reasoning_content\": \"w\"")),
         "]~!b[]~b]system\nS[e~[\n]~b]user\nq[e~[\n]~b]ai\n<think>\n[[w\n</think>\n\na[e~[\n]]"},
        {chat_named_text("minimax"), ROW(Q "," A),
         "]~!b[]~b]system\nYou are a helpful assistant.[e~[\n]~b]user\nq[e~[\n]~b]ai\n[[a[e~[\n]]"},
        {chat_named_text("nemotron"), THOUGHT,
         ENDED("system", "") ENDED("user", "q") BEGUN("assistant") "<think>\n[[w\n</think>\na<|im_end|>]]\n/" ENDED(
             "system", "") ENDED("user", "q") ENDED("assistant", "<think></think>\na") ENDED("user", "r")
             BEGUN("assistant") "<think>\n[[v\n</think>\nb<|im_end|>]]\n"},
        {chat_named_text("nemotron"), ROW(Q "," A),
         ENDED("system", "") ENDED("user", "q") BEGUN("assistant") "<think>[[</think>a<|im_end|>]]\n"},
    };
    check_all(rows, MT_LEN(rows), (struct row_options){0});
}

int test_chat_rows(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(dropped_parts),
                                       cmocka_unit_test(gptoss_names_dropped_parts),
                                       cmocka_unit_test(gptoss_calls_with_reasoning),
                                       cmocka_unit_test(dropped_parts_with_a_warning),
                                       cmocka_unit_test(roles_of_other_programs),
                                       cmocka_unit_test(contents),
                                       cmocka_unit_test(contents_that_are_no_text),
                                       cmocka_unit_test(unprompted_answers),
                                       cmocka_unit_test(reasoning_in_contents),
                                       cmocka_unit_test(calls_and_tools),
                                       cmocka_unit_test(system_prompt_in_the_last_question),
                                       cmocka_unit_test(keys_that_switch_loss),
                                       cmocka_unit_test(rows_without_answers),
                                       cmocka_unit_test(loss_of_named_templates)};
    return cmocka_run_group_tests_name("chat_rows", tests, rows_load_tokenizer, rows_free_tokenizer);
}

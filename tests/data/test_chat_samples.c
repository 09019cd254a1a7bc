/* test_chat_samples.c - the start of an answer's loss when the generation prompt differs from the rendered answer. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "data/chat/chat_samples.h"
#include "data/file/file.h"
#include "data/rows.h"
#include "data/json/text.h"

/* Like Nemotron 3: the prompt opens a reasoning block, and an answer without reasoning has an empty block. Only the
 * last answer keeps its reasoning. */
#define EMPTY_BLOCK                                                                                                    \
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% if loop.last and "              \
    "m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% else %}<think></think>{% endif %}"         \
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n" \
    "{% endif %}"
/* Like DeepSeek: the prompt opens a reasoning block, which answers do not have. */
#define NO_BLOCK                                                                                                       \
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}"        \
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
/* The prompt has another role than the answer. */
#define OTHER_ROLE(asked, written)                                                                                     \
    "{% for m in messages %}{{ '" written "' if m.role == 'assistant' else '<|user|>' }}{{ m.content }}<|im_end|>"     \
    "{% endfor %}{% if add_generation_prompt %}" asked "{% endif %}"

static struct chat_template *load(const char *text)
{
    static const char config[] = "{\"eos_token\": \"<|im_end|>\"}";
    const char *dir = scratch_dir();
    char path[MT_PATH];
    struct err err;
    struct chat_template *t;
    snprintf(path, sizeof(path), "%s/tokenizer_config.json", dir);
    assert_int_equal(file_write_atomic(path, config, (int64_t)strlen(config), &err), 0);
    snprintf(path, sizeof(path), "%s/t.jinja", dir);
    assert_int_equal(file_write_atomic(path, text, (int64_t)strlen(text), &err), 0);
    if (chat_template_load(&t, dir, path, &err)) fail_msg("%s", err.msg);
    return t;
}

/* The samples, each followed by "/", with loss spans in [[ ]]. */
static void put_samples(struct text_buf *out, const struct chat_samples *s)
{
    for (int64_t i = 0; i < s->count; i++) {
        const struct text_buf *one = &s->items[i];
        int64_t at = 0;
        for (int64_t k = 0; k < one->n_spans; at = one->spans[k++][1]) {
            text_put_bytes(out, one->text + at, one->spans[k][0] - at);
            text_put(out, "[[");
            text_put_bytes(out, one->text + one->spans[k][0], one->spans[k][1] - one->spans[k][0]);
            text_put(out, "]]");
        }
        text_put_bytes(out, one->text + at, one->size - at);
        if (i + 1 < s->count) text_put(out, "/");
    }
}

/* The samples of a conversation (put_samples); or the error message. */
static void make_row(struct text_buf *out, const struct chat_template *t, const char *row, bool whole)
{
    struct chat_samples s = {0};
    const struct chat_options opt = {0};
    struct err err = {""};
    struct json_doc *doc = json_parse(row, (int64_t)strlen(row), "row", &err);
    assert_non_null(doc);
    out->size = 0;
    text_put(out, "");
    if (chat_samples_make(&s, t, json_root(doc), LOSS_ASSISTANT, whole, &opt, &err))
        text_put(out, err.msg);
    else
        put_samples(out, &s);
    chat_samples_free(&s);
    json_free(doc);
}

static void make(struct text_buf *out, const char *template, const char *answers[2], const char *more, bool whole)
{
    struct chat_template *t = load(template);
    char row[1024];
    snprintf(
        row, sizeof(row),
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"%s\"%s}, "
        "{\"role\": \"user\", \"content\": \"c\"}, {\"role\": \"assistant\", \"content\": \"%s\"%s}]}",
        answers[0], more, answers[1], more);
    make_row(out, t, row, whole);
    chat_template_free(t);
}

static void parted_headers(void **state)
{
    (void)state;
    static const struct {
        const char *template, *answers[2], *more;
        bool whole;
        const char *expected;
    } rows[] = {
        {EMPTY_BLOCK,
         {"b", "d"},
         "",
         false,
         "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>[[</think>b<|im_end|>]]\n<|im_start|>user\nc"
         "<|im_end|>\n<|im_start|>assistant\n<think>[[</think>d<|im_end|>]]\n"},
        {EMPTY_BLOCK,
         {"b", "d"},
         ", \"reasoning_content\": \"r\"",
         false,
         "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n[[r\n</think>\nb<|im_end|>]]\n/"
         "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think></think>b<|im_end|>\n<|im_start|>user\nc"
         "<|im_end|>\n<|im_start|>assistant\n<think>\n[[r\n</think>\nd<|im_end|>]]\n"},
        {EMPTY_BLOCK,
         {"b", "d"},
         ", \"reasoning_content\": null, \"reasoning\": \"r\"",
         false,
         "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n[[r\n</think>\nb<|im_end|>]]\n/"
         "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think></think>b<|im_end|>\n<|im_start|>user\nc"
         "<|im_end|>\n<|im_start|>assistant\n<think>\n[[r\n</think>\nd<|im_end|>]]\n"},
        {NO_BLOCK, {"b", "d"}, "", false, "<|user|>a<|assistant|>[[b<|im_end|>]]<|user|>c<|assistant|>[[d<|im_end|>]]"},
        {NO_BLOCK, {"b", "d"}, "", true, "<|user|>a<|assistant|>[[b<|im_end|>]]<|user|>c<|assistant|>[[d<|im_end|>]]"},
        {NO_BLOCK, /* the answers begin with characters of the prompt's <think> */
         {"<thin", "<"},
         "",
         false,
         "<|user|>a<|assistant|>[[<thin<|im_end|>]]<|user|>c<|assistant|>[[<<|im_end|>]]"},
        {NO_BLOCK, {"b", "d"}, ", \"train\": false", false, ""},
        {OTHER_ROLE("<|assistant|>", "<|model|>"),
         {"b", "d"},
         "",
         false,
         "messages[3]`: the generation prompt does not"},
        {OTHER_ROLE("<|s|>assistant\n", "<|s|>ai\n"), {"b", "d"}, "", false, "messages[3]`: the generation prompt"},
        {OTHER_ROLE("<|s|>assistant\n", "<|s|>model\n"), {"b", "d"}, "", false, "messages[3]`: the generation prompt"},
        {OTHER_ROLE("assistant:", "model:"), {"b", "d"}, "", true, "messages[1]`: the generation prompt does not"},
    };
    struct text_buf got = {0};
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        const char *answers[2] = {rows[i].answers[0], rows[i].answers[1]};
        make(&got, rows[i].template, answers, rows[i].more, rows[i].whole);
        const bool error = !strncmp(rows[i].expected, "messages", 8);
        if (error ? !strstr(got.text, rows[i].expected) : strcmp(got.text, rows[i].expected) != 0)
            fail_msg("%s\ngives %s\nnot   %s", rows[i].template, got.text, rows[i].expected);
    }
    text_free(&got);
}

/* Like GLM-4.5: no token ends a turn, and answers before the last question have no reasoning. */
#define GLM                                                                                                            \
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"  \
    "{% endif %}{% endfor %}<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n<think>"          \
    "{% if loop.index0 > ns.last %}{{ m.reasoning_content }}{% endif %}</think>\n{{ m.content }}{% else %}"            \
    "{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}\n{{ m.content }}{% endif %}{% endfor %}"    \
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
#define EMPTY_ANSWER                                                                                                   \
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"                                               \
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
#define LINES                                                                                                          \
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '<|im_end|>\n' if m.role == 'assistant' }}{% endfor %}"  \
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
#define U(text)       "{\"role\": \"user\", \"content\": \"" text "\"}"
#define SYSTEM        "{\"role\": \"system\", \"content\": \"s\"}"
#define TOOL          "{\"role\": \"tool\", \"content\": \"t\"}"
#define A(text, more) "{\"role\": \"assistant\", \"content\": \"" text "\"" more "}"
#define R             ", \"reasoning_content\": \"r\""

static void write_in(const char *dir, const char *name, const char *text)
{
    char path[MT_PATH];
    struct err err;
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    assert_int_equal(file_write_atomic(path, text, (int64_t)strlen(text), &err), 0);
}

#define ADDED(id, text, special)                                                                                       \
    "{\"id\":" id ",\"content\":\"" text "\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,"                 \
    "\"normalized\":false,\"special\":" special "}"

/* The checkpoint's template. `file`, config.json or generation_config.json, holds eos_token_id. */
static struct chat_template *load_glm(const char *template, const char *file, const char *ids)
{
    const char *dir = scratch_dir();
    char path[MT_PATH], config[256];
    struct err err;
    struct chat_template *t = NULL;
    write_in(dir, "tokenizer_config.json", "{\"eos_token\": \"<|endoftext|>\"}");
    write_in(dir, "chat_template.jinja", template);
    write_in(dir, "tokenizer.json",
             "{\"version\":\"1.0\",\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]},\"normalizer\":null,"
             "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true},"
             "\"added_tokens\":[" ADDED("1", "<|endoftext|>", "true") "," ADDED("2", "<|user|>", "true") "," ADDED(
                 "3", "<|observation|>", "true") "," ADDED("4", "<|assistant|>", "false") "," ADDED("5", "<|im_end|>",
                                                                                                    "true") "]}");
    snprintf(config, sizeof(config), "{\"eos_token_id\": %s}", ids);
    write_in(dir, "config.json", "{\"eos_token_id\": 1}");
    write_in(dir, file, config);
    snprintf(path, sizeof(path), "%s/tokenizer.json", dir);
    struct tokenizer *tok = tokenizer_load(path, &err);
    if (!tok || row_template(&t, tok, dir, NULL, &err)) fail_msg("%s", err.msg);
    tokenizer_free(tok);
    return t;
}

/* The next role's token carries loss when eos_token_id lists it and the template has no other end of turn. */
static void role_token_ends_turn(void **state)
{
    (void)state;
    static const char list[] = "[1, 2, 3, 4]", generation[] = "generation_config.json";
    static const char two[] = U("a") "," A("b", "") "," U("c") "," A("d", "");
    static const struct {
        const char *template, *file, *ids, *messages;
        bool whole;
        const char *expected;
    } rows[] = {
        {GLM, generation, list, two, false,
         "<sop><|user|>\na<|assistant|>[[\n<think></think>\nb<|user|>]]\nc<|assistant|>[[\n<think></"
         "think>\nd<|user|>]]"},
        {GLM, "config.json", list, two, true,
         "<sop><|user|>\na<|assistant|>[[\n<think></think>\nb<|user|>]]\nc<|assistant|>[[\n<think></"
         "think>\nd<|user|>]]"},
        {GLM, generation, "1", two, false,
         "<sop><|user|>\na<|assistant|>[[\n<think></think>\nb]]<|user|>\nc<|assistant|>[[\n<think></think>\nd]]"},
        {GLM, generation, "[1, 3, 99]", two, false,
         "<sop><|user|>\na<|assistant|>[[\n<think></think>\nb]]<|user|>\nc<|assistant|>[[\n<think></think>\nd]]"},
        {GLM, generation, list, U("a") "," A("b", R) "," TOOL "," A("d", R), false,
         "<sop><|user|>\na<|assistant|>[[\n<think>r</think>\nb<|observation|>]]\nt<|assistant|>[[\n<think>r</"
         "think>\nd<|user|>]]"},
        {GLM, generation, list, U("a") "," A("b", ", \"tool_calls\": [{}]"), false,
         "<sop><|user|>\na<|assistant|>[[\n<think></think>\nb<|observation|>]]"},
        {GLM, generation, "[1, 2]", U("a") "," A("b", ", \"tool_calls\": [{}]"), true,
         "<sop><|user|>\na<|assistant|>[[\n<think></think>\nb]]"},
        {EMPTY_ANSWER, generation, list, U("a") "," A("", ""), false, ""}, /* an empty answer has no loss */
        {GLM, generation, list, U("a") "," A("b", "") "," U("c"), false,
         "<sop><|user|>\na<|assistant|>[[\n<think></think>\nb<|user|>]]"},
        {GLM, generation, list, U("a") "," A("b", ", \"train\": false"), true,
         "<sop><|user|>\na<|assistant|>\n<think></think>\nb"},
        {GLM, generation, list, U("a") "," A("b", ", \"train\": false") "," U("c") "," A("d", ""), false,
         "<sop><|user|>\na<|assistant|>\n<think></think>\nb<|user|>\nc<|assistant|>[[\n<think></think>\nd<|user|>]]"},
        {GLM, generation, list, U("a") "," A("b", "") "," A("d", ""), false, /* <|assistant|> ends no turn */
         "<sop><|user|>\na<|assistant|>[[\n<think></think>\nb]]<|assistant|>[[\n<think></think>\nd<|user|>]]"},
        {GLM, generation, list, U("a") "," A("b", R) "," U("c") "," A("d", R), false,
         "<sop><|user|>\na<|assistant|>[[\n<think>r</think>\nb<|user|>]]/"
         "<sop><|user|>\na<|assistant|>\n<think></think>\nb<|user|>\nc<|assistant|>[[\n<think>r</think>\nd<|user|>]]"},
        {GLM, generation, list, U("a") "," A("b", R) "," U("c") "," A("d", R), true,
         "<sop><|user|>\na<|assistant|>[[\n<think></think>\nb<|user|>]]\nc<|assistant|>[[\n<think>r</"
         "think>\nd<|user|>]]"},
        {GLM, generation, list, U("a") "," A("b", R) "," SYSTEM "," U("c") "," A("d", R), true,
         "messages[1]`: the answer cannot be found"},
        {NO_BLOCK, generation, "[1, 2, 5]", two, false, /* a listed token already ends the turn */
         "<|user|>a<|assistant|>[[b<|im_end|>]]<|user|>c<|assistant|>[[d<|im_end|>]]"},
        {LINES, generation, "[1, 2, 5]", two, false,
         "<|user|>a<|assistant|>[[b<|im_end|>\n]]<|user|>c<|assistant|>[[d<|im_end|>\n]]"},
    };
    struct text_buf got = {0};
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        char row[1024];
        struct chat_template *t = load_glm(rows[i].template, rows[i].file, rows[i].ids);
        snprintf(row, sizeof(row), "{\"messages\": [%s]}", rows[i].messages);
        make_row(&got, t, row, rows[i].whole);
        const bool error = !strncmp(rows[i].expected, "messages", 8);
        if (error ? !strstr(got.text, rows[i].expected) : strcmp(got.text, rows[i].expected) != 0)
            fail_msg("row %lld\ngives %s\nnot   %s", (long long)i, got.text, rows[i].expected);
        chat_template_free(t);
    }
    text_free(&got);
}

/* Arguments of calls as objects and as strings: strings that are no JSON of an object; empty and null arguments;
 * templates that skip strings, that take both forms (they get the row's), and that would write a string as JSON of a
 * string. */
static void arguments_of_calls(void **state)
{
    (void)state;
#define CALLS(of)                                                                                                      \
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}{% set a = "               \
    "c.function.arguments %}" of "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
#define ITEMS "{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}"
#define ARG(value)                                                                                                     \
    U("a")                                                                                                             \
    "," A("b", ", \"tool_calls\": [{\"function\": {\"name\": \"f\", \"arguments\": " value "}, \"id\": "               \
               "\"i\"}]")
    static const struct {
        const char *template, *messages, *expected;
    } rows[] = {
        {CALLS(ITEMS), ARG("{\"x\": 1.0, \"y\": [null]}"), "<|user|>a<|assistant|>[[bx=1.0;y=[None];]]"},
        {CALLS(ITEMS), ARG("\"{\\\"x\\\": 1.0, \\\"y\\\": [null]}\""), "<|user|>a<|assistant|>[[bx=1.0;y=[None];]]"},
        {CALLS(ITEMS), ARG("\"\""), "<|user|>a<|assistant|>[[b]]"},
        {CALLS(ITEMS), ARG("null"), "<|user|>a<|assistant|>[[b]]"},
        {CALLS(ITEMS), ARG("\"x\""),
         "messages[1].tool_calls[0].function.arguments`: is a string that is not the JSON of an object"},
        {CALLS(ITEMS), ARG("\"[1]\""), "arguments`: is a string that is not the JSON of an object"},
        {CALLS("{% if a is mapping %}" ITEMS "{% endif %}"), ARG("\"{\\\"x\\\": 1}\""),
         "<|user|>a<|assistant|>[[bx=1;]]"},
        {CALLS("{{ '!' + a }}"), ARG("{\"x\": [1, \"\u00e9\"]}"),
         "<|user|>a<|assistant|>[[b!{\"x\": [1, \"\u00e9\"]}]]"},
        {CALLS("{{ '!' + a }}"), ARG("\"x\""), "<|user|>a<|assistant|>[[b!x]]"},
        {CALLS("{{ a }}"), ARG("{\"x\": 1}"), "<|user|>a<|assistant|>[[b{'x': 1}]]"},
        {CALLS("{{ a }}"), ARG("\"{\\\"x\\\":1}\""), "<|user|>a<|assistant|>[[b{\"x\":1}]]"},
        {CALLS("{{ a|tojson }}"), ARG("\"{\\\"x\\\":1}\""), "<|user|>a<|assistant|>[[b{\"x\": 1}]]"},
    };
    struct text_buf got = {0};
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        char row[1024];
        struct chat_template *t = load_glm(rows[i].template, "config.json", "1");
        snprintf(row, sizeof(row), "{\"messages\": [%s]}", rows[i].messages);
        make_row(&got, t, row, false);
        const bool error = rows[i].expected[0] != '<';
        if (error ? !strstr(got.text, rows[i].expected) : strcmp(got.text, rows[i].expected) != 0)
            fail_msg("row %lld\ngives %s\nnot   %s", (long long)i, got.text, rows[i].expected);
        chat_template_free(t);
    }
    text_free(&got);
}

/* Files that data.chat_template names by mistake: an empty one, a configuration. */
static void files_that_are_no_template(void **state)
{
    (void)state;
    static const char *const files[] = {"", "{# messages #}", "[model]\npath = m\n"};
    const char *dir = scratch_dir();
    char path[MT_PATH];
    struct err err;
    struct chat_template *t;
    snprintf(path, sizeof(path), "%s/t.jinja", dir);
    for (int64_t i = 0; i < MT_LEN(files); i++) {
        write_in(dir, "t.jinja", files[i]);
        assert_int_equal(chat_template_load(&t, dir, path, &err), -1);
        if (!strstr(err.msg, "t.jinja is no chat template: it does not read `messages`")) fail_msg("%s", err.msg);
    }
}

/* Loading a template renders short conversations. This template writes nothing for them. */
static void template_that_may_write_nothing(void **state)
{
    (void)state;
    struct text_buf got = {0};
    struct chat_template *t =
        load_glm("{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}", "config.json", "1");
    make_row(&got, t, "{\"messages\": [" U("a") "," A("b", "") "]}", false);
    assert_string_equal(got.text, "");
    chat_template_free(t);
    text_free(&got);
}

/* The next role's token is also appended with loss on everything and with loss on the last answer. */
static void role_token_with_other_losses(void **state)
{
    (void)state;
    static const char row[] = "{\"messages\": [" U("a") "," A("b", "") "," U("c") "," A("d", "") "]}";
    static const struct {
        enum loss_on loss;
        const char *expected;
    } rows[] = {
        {LOSS_ALL, "[[<sop><|user|>\na<|assistant|>\n<think></think>\nb<|user|>\nc<|assistant|>\n<think></think>\n"
                   "d<|user|>]]"},
        {LOSS_LAST, "<sop><|user|>\na<|assistant|>\n<think></think>\nb<|user|>\nc<|assistant|>[[\n<think></think>\n"
                    "d<|user|>]]"},
    };
    struct text_buf got = {0};
    struct err err;
    struct chat_template *t = load_glm(GLM, "config.json", "[1, 2, 3]");
    struct json_doc *doc = json_parse(row, sizeof(row) - 1, "row", &err);
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct chat_samples s = {0};
        const struct chat_options opt = {0};
        if (chat_samples_make(&s, t, json_root(doc), rows[i].loss, true, &opt, &err)) fail_msg("%s", err.msg);
        got.size = 0;
        put_samples(&got, &s);
        assert_string_equal(got.text, rows[i].expected);
        assert_int_equal(s.n_appended, 1);
        chat_samples_free(&s);
    }
    json_free(doc);
    chat_template_free(t);
    text_free(&got);
}

/* Like GLM-4.7 and Qwen3.5: the prompt opens a block that earlier answers lack. One text holds both answers. */
#define OPEN_BLOCK(last)                                                                                               \
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' and " last                                   \
    " %}<think>\n{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"                                          \
    "{{ '<|im_end|>' if m.role == 'assistant' }}{% endfor %}"                                                          \
    "{% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}"
/* Only the last answer has an end of turn. */
#define END_OF_TEXT                                                                                                    \
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"                                               \
    "{% if add_generation_prompt %}<|assistant|>{% else %}<|im_end|>{% endif %}"

static void whole_conversations(void **state)
{
    (void)state;
    static const struct {
        const char *template, *expected;
    } rows[] = {
        {OPEN_BLOCK("loop.last"),
         "<|user|>\na<|assistant|>\n[[b<|im_end|>]]<|user|>\nc<|assistant|>\n<think>\n[[r</think>d<|im_end|>]]"},
        {OPEN_BLOCK("true"), "<|user|>\na<|assistant|>\n<think>\n[[r</think>b<|im_end|>]]<|user|>\nc<|assistant|>\n"
                             "<think>\n[[r</think>d<|im_end|>]]"},
        {END_OF_TEXT, "messages[1]`: the answer cannot be found in the whole conversation"},
    };
    static const char *const answers[2] = {"b", "d"};
    struct text_buf got = {0};
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        make(&got, rows[i].template, (const char *[2]){answers[0], answers[1]}, R, true);
        const bool error = !strncmp(rows[i].expected, "messages", 8);
        if (error ? !strstr(got.text, rows[i].expected) : strcmp(got.text, rows[i].expected) != 0)
            fail_msg("%s\ngives %s\nnot   %s", rows[i].template, got.text, rows[i].expected);
    }
    text_free(&got);
}

/* Answers whose loss begins with an empty reasoning block: in the answer, or opened by the prompt. */
static void empty_blocks(void **state)
{
    (void)state;
    static const struct {
        const char *template, *messages;
        int64_t n_empty[2]; /* with a sample per answer; with one text for all answers, in which earlier answers have an
                               empty block instead of reasoning */
    } rows[] = {
        {EMPTY_BLOCK, U("a") "," A("b", "") "," U("c") "," A("d", ""), {2, 2}},
        {EMPTY_BLOCK, U("a") "," A("b", R) "," U("c") "," A("d", ""), {1, 2}},
        {EMPTY_BLOCK, U("a") "," A("b", ", \"train\": false") "," U("c") "," A("d", R), {0, 0}},
        {NO_BLOCK, U("a") "," A("b", ""), {0, 0}},
        {NO_BLOCK, U("a") "," A("<think> x</think>b", ""), {0, 0}},
        {GLM, U("a") "," A("b", ""), {1, 1}},
        {OPEN_BLOCK("true"), U("a") "," A("b", ""), {1, 1}}, /* the prompt opens the block */
        {OPEN_BLOCK("true"), U("a") "," A("b", R), {0, 0}},
    };
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        for (int whole = 0; whole < 2; whole++) {
            char row[1024];
            struct err err;
            struct chat_samples s = {0};
            const struct chat_options opt = {0};
            struct chat_template *t = load(rows[i].template);
            snprintf(row, sizeof(row), "{\"messages\": [%s]}", rows[i].messages);
            struct json_doc *doc = json_parse(row, (int64_t)strlen(row), "row", &err);
            if (chat_samples_make(&s, t, json_root(doc), LOSS_ASSISTANT, whole, &opt, &err)) fail_msg("%s", err.msg);
            if (s.n_empty != rows[i].n_empty[whole])
                fail_msg("row %lld has %lld empty blocks", (long long)i, (long long)s.n_empty);
            chat_samples_free(&s);
            chat_template_free(t);
            json_free(doc);
        }
    }
}

/* Caches of ids and loss masks depend on these tokens. */
static void hash_covers_role_tokens(void **state)
{
    (void)state;
    struct chat_template *one = load_glm(GLM, "config.json", "1"), *more = load_glm(GLM, "config.json", "[1, 2]");
    assert_true(chat_template_hash(one) != chat_template_hash(more));
    chat_template_free(one);
    chat_template_free(more);
}

int test_chat_samples(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(parted_headers),
                                       cmocka_unit_test(role_token_ends_turn),
                                       cmocka_unit_test(empty_blocks),
                                       cmocka_unit_test(arguments_of_calls),
                                       cmocka_unit_test(files_that_are_no_template),
                                       cmocka_unit_test(template_that_may_write_nothing),
                                       cmocka_unit_test(role_token_with_other_losses),
                                       cmocka_unit_test(whole_conversations),
                                       cmocka_unit_test(hash_covers_role_tokens)};
    return cmocka_run_group_tests_name("chat_samples", tests, NULL, NULL);
}

/* test_chat_samples.c - the start of an answer's loss when the generation prompt differs from the rendered answer. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "data/chat/chat_samples.h"
#include "data/file.h"
#include "data/text.h"

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

/* The samples of a conversation, each followed by "/", with loss spans in [[ ]]; or the error message. */
static void make(struct text_buf *out, const char *template, const char *answers[2], const char *more, bool whole)
{
    struct chat_template *t = load(template);
    struct chat_samples s = {0};
    const struct chat_options opt = {0};
    char row[1024];
    struct err err = {""};
    snprintf(
        row, sizeof(row),
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"%s\"%s}, "
        "{\"role\": \"user\", \"content\": \"c\"}, {\"role\": \"assistant\", \"content\": \"%s\"%s}]}",
        answers[0], more, answers[1], more);
    struct json_doc *doc = json_parse(row, (int64_t)strlen(row), "row", &err);
    assert_non_null(doc);
    out->size = 0;
    text_put(out, "");
    const int rc = chat_samples_make(&s, t, json_root(doc), LOSS_ASSISTANT, whole, &opt, &err);
    if (rc) text_put(out, err.msg);
    for (int64_t i = 0; !rc && i < s.count; i++) {
        const struct text_buf *one = &s.items[i];
        int64_t at = 0;
        for (int64_t k = 0; k < one->n_spans; at = one->spans[k++][1]) {
            text_put_bytes(out, one->text + at, one->spans[k][0] - at);
            text_put(out, "[[");
            text_put_bytes(out, one->text + one->spans[k][0], one->spans[k][1] - one->spans[k][0]);
            text_put(out, "]]");
        }
        text_put_bytes(out, one->text + at, one->size - at);
        if (i + 1 < s.count) text_put(out, "/");
    }
    chat_samples_free(&s);
    chat_template_free(t);
    json_free(doc);
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

int test_chat_samples(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(parted_headers)};
    return cmocka_run_group_tests_name("chat_samples", tests, NULL, NULL);
}

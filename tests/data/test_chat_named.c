/* test_chat_named.c - chat templates by name, against transformers (tests/parity/make_named.py); data.system. */
#include "tests/rows.h"

#include <stdio.h>
#include <string.h>

#include "data/chat/chat_named.h"
#include "data/file/file.h"
#include "data/system_prompt.h"

static struct chat_template *load(const char *template)
{
    struct chat_template *t;
    struct err err;
    const char *dir = scratch_dir(), *config = "{\"bos_token\": \"<s>\", \"eos_token\": \"</s>\"}";
    if (file_write_in(dir, "tokenizer_config.json", config, (int64_t)strlen(config), &err) ||
        chat_template_load(&t, dir, template, &err))
        fail_msg("%s", err.msg);
    return t;
}

static void named_templates(void **state)
{
    (void)state;
    struct err err;
    struct json_doc *cases = json_load(fixture("chat/named.json"), 1 << 20, &err);
    assert_non_null(cases);
    assert_int_equal(json_count(json_root(cases)), 80);
    for (int64_t i = 0; i < json_count(json_root(cases)); i++) {
        const struct json c = json_at(json_root(cases), i);
        struct chat_options opt = {.date = CHAT_DATE};
        struct text_buf out = {0};
        const char *name, *text;
        assert_int_equal(json_get_str(c, "name", &name, &err), 0);
        assert_int_equal(json_get_str(c, "text", &text, &err), 0);
        assert_int_equal(json_get_bool(c, "prompt", &opt.generation_prompt, &err), 0);
        struct chat_template *t = load(name);
        if (chat_template_render(&out, t, c, &opt, &err)) fail_msg("%s", err.msg);
        assert_string_equal(out.text, text);
        assert_string_equal(chat_template_foreign(t), chat_named_text(name)); /* goes into the adapter's directory */
        text_free(&out);
        chat_template_free(t);
    }
    json_free(cases);
    assert_null(chat_named_text("chat"));
    assert_string_equal(chat_named_token("chatml", 1), "<|im_end|>");
    assert_null(chat_named_token("chatml", 2));
    assert_null(chat_named_token("mistral", 0));
    assert_null(chat_named_token("file.jinja", 0));
}

/* The documents of both rows are equal. */
static void assert_equal_rows(const char *row, const char *expected, const char *system, const char *columns)
{
    struct dataset a, b;
    struct dataset_options opt = rows_options();
    rows_load(&b, rows_write(expected), &opt);
    opt.system = system;
    opt.columns = columns;
    rows_load(&a, rows_write(row), &opt);
    assert_int_equal(a.n_tokens, b.n_tokens);
    assert_memory_equal(a.ids, b.ids, (size_t)a.n_tokens * sizeof(*a.ids));
    assert_memory_equal(a.mask, b.mask, (size_t)a.n_tokens);
    dataset_free(&a);
    dataset_free(&b);
}

#define QA     "{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": \"a\"}"
#define WITH   "{\"messages\": [{\"role\": \"system\", \"content\": \"Say \\\"x\\\"\"}, " QA "]}"
#define OTHER  "{\"messages\": [{\"role\": \"developer\", \"content\": \"y\"}, " QA "]}"
#define PROMPT "Say \"x\""

static void system_messages(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"{\"messages\": [" QA "]}", NULL},
        {WITH, NULL},
        {"{\"conversations\": [{\"from\": \"human\", \"value\": \"q\"}, {\"from\": \"gpt\", \"value\": \"a\"}]}", NULL},
        {"{\"instruction\": \"q\", \"output\": \"a\"}", NULL},
        {"{\"question\": \"q\", \"answer\": \"a\"}", "user=question,assistant=answer"},
        {"{\"prompt\": [{\"role\": \"user\", \"content\": \"q\"}], \"completion\": [{\"role\": \"assistant\", "
         "\"content\": \"a\"}]}",
         NULL}};
    for (int64_t i = 0; i < MT_LEN(rows); i++) assert_equal_rows(rows[i][0], WITH, PROMPT, rows[i][1]);
    assert_equal_rows(OTHER, OTHER, PROMPT, NULL);
    assert_equal_rows("{\"text\": \"ab\"}", "{\"text\": \"ab\"}", PROMPT, NULL);
    assert_equal_rows("{\"system\": \"y\", \"instruction\": \"q\", \"output\": \"a\"}",
                      "{\"system\": \"y\", \"instruction\": \"q\", \"output\": \"a\"}", PROMPT, NULL);
}

static void templates_without_system(void **state)
{
    (void)state;
    static const char *const texts[][2] = {
        {"{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}", NULL},
        {"{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}\n{% endif %}{% endfor %}",
         "data.system: the chat template writes no system message: write the text into the first question"},
        {"{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{ "
         "m.content }}{% endfor %}",
         "no system here"}};
    for (int64_t i = 0; i < MT_LEN(texts); i++) {
        struct err err = {""};
        struct chat_template *t = load(rows_write(texts[i][0]));
        const int rc = system_prompt_check(t, " be \"brief\"\n", &err);
        assert_int_equal(rc, texts[i][1] ? -1 : 0);
        if (rc && !strstr(err.msg, texts[i][1])) fail_msg("%s", err.msg);
        chat_template_free(t);
    }
}

int test_chat_named(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(named_templates),
        cmocka_unit_test(system_messages),
        cmocka_unit_test(templates_without_system),
    };
    return cmocka_run_group_tests(tests, rows_load_tokenizer, rows_free_tokenizer);
}

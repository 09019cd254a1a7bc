/* test_export_chat.c - data.chat_template beside the adapter and in merged exports; the templates of the base model
 * otherwise. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "tests/process.h"

#define BASE   "{% for m in messages %}{{ m.content }}{% endfor %}"
#define TOOLS  "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
#define CUSTOM "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"

/* In one of eight static buffers. */
static const char *in(const char *dir, const char *name)
{
    static char path[8][2 * MT_PATH];
    static int next;
    struct err err;
    char *p = path[next++ % 8];
    assert_int_equal(str_format(p, sizeof(path[0]), &err, "path", "%s/%s", dir, name), 0);
    return p;
}

static void put(const char *dir, const char *name, const char *text)
{
    struct err err;
    assert_int_equal(file_write_atomic(in(dir, name), text, (int64_t)strlen(text), &err), 0);
}

/* A checkpoint with a template for rows, and one for rows with tools. */
static const char *make_base(void)
{
    static const char *const files[] = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"};
    static char dir[MT_PATH];
    struct err err;
    assert_int_equal(str_format(dir, sizeof(dir), &err, "path", "%s/base", scratch_dir()), 0);
    assert_int_equal(file_make_dirs(in(dir, "additional_chat_templates"), &err), 0);
    for (int i = 0; i < MT_LEN(files); i++) {
        struct file_map map;
        char name[64];
        snprintf(name, sizeof(name), "parity/case_a/%s", files[i]);
        assert_int_equal(file_map_open(&map, fixture(name), &err), 0);
        assert_int_equal(file_write_atomic(in(dir, files[i]), map.data, map.size, &err), 0);
        file_map_close(&map);
    }
    put(dir, "chat_template.jinja", BASE);
    put(dir, "additional_chat_templates/tool_use.jinja", TOOLS);
    return dir;
}

static void assert_text(const char *path, const char *text)
{
    char read[1024];
    process_read(path, read, sizeof(read));
    assert_string_equal(read, text);
}

static int export_to(const char *config, const char *sets[2], const char *format, const char *out)
{
    return RUN("export", config, "--set", sets[0], "--set", sets[1], "--set", "data.eval=", "--force", "--to", format,
               "--out", out);
}

static void custom(void **state)
{
    (void)state;
    static const char *const formats[] = {"merged-bf16", "merged-mxfp4", "peft"};
    const char *base = make_base(), *config = process_config(""), *dir = scratch_dir();
    char model[MT_PATH + 16], template[MT_PATH + 32];
    const char *sets[2] = {model, template};
    snprintf(model, sizeof(model), "model.path=%s", base);
    snprintf(template, sizeof(template), "data.chat_template=%s/mine.jinja", dir);
    put(dir, "mine.jinja", CUSTOM);
    if (RUN("train", config, "--set", sets[0], "--set", sets[1])) fail_msg("%s", said.err);
    assert_text(process_output(config, "adapter/chat_template.jinja"), CUSTOM);
    put(dir, "mine.jinja", CUSTOM "changed after the training");
    for (int i = 0; i < MT_LEN(formats); i++) {
        char out[MT_PATH];
        struct err err;
        assert_int_equal(str_format(out, sizeof(out), &err, "path", "%s/%s", dir, formats[i]), 0);
        if (export_to(config, sets, formats[i], out)) fail_msg("%s", said.err);
        assert_says(said.err, "which differs from that of the base model");
        assert_text(in(out, "chat_template.jinja"), CUSTOM);
        assert_false(file_exists(in(out, "additional_chat_templates")));
    }
}

static void of_the_base(void **state)
{
    (void)state;
    const char *base = make_base(), *config = process_config(""), *dir = scratch_dir();
    char out[MT_PATH];
    struct err err;
    assert_int_equal(str_format(out, sizeof(out), &err, "path", "%s/merged", dir), 0);
    char model[MT_PATH + 16];
    const char *sets[2] = {model, "data.chat_template="};
    snprintf(model, sizeof(model), "model.path=%s", base);
    if (RUN("train", config, "--set", sets[0])) fail_msg("%s", said.err);
    assert_false(file_exists(process_output(config, "adapter/chat_template.jinja")));
    if (export_to(config, sets, "merged-bf16", out)) fail_msg("%s", said.err);
    assert_null(strstr(said.err, "chat template of the training"));
    assert_text(in(out, "chat_template.jinja"), BASE);
    assert_text(in(out, "additional_chat_templates/tool_use.jinja"), TOOLS);
    assert_null(strstr(said.err, "nor has the export"));
    snprintf(model, sizeof(model), "model.path=%s", fixture("parity/case_a"));
    assert_int_equal(str_format(out, sizeof(out), &err, "path", "%s/none", dir), 0);
    if (export_to(config, sets, "peft", out)) fail_msg("%s", said.err);
    assert_says(said.err, "the base model has no chat template, nor has the export");
}

int test_export_chat(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(custom), cmocka_unit_test(of_the_base)};
    return cmocka_run_group_tests_name("export_chat", tests, NULL, NULL);
}

/* test_typescript.c - tool definitions as TypeScript, which the chat templates of Kimi-K2.5 and K2.6 read from
 * `tools_ts_str`. The expected texts are written by hand. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "data/chat/chat_template.h"
#include "data/file/file.h"

#define HEAD "# Tools\n\n## functions\nnamespace functions {\n"

/* The text of a template that writes what it is given. */
static char *render(const char *tools, const char *more)
{
    static const char template[] = "{% if tools_ts_str is defined %}{{ tools_ts_str }}{% else %}{{ tools | tojson }}"
                                   "{% endif %}{% if not thinking or preserve_thinking %}off{% endif %}";
    const char *dir = scratch_dir();
    char path[256];
    struct chat_template *t;
    struct text_buf row = {0}, out = {0};
    struct err err;
    const struct chat_options opt = {0};
    snprintf(path, sizeof(path), "%s/chat_template.jinja", dir);
    assert_int_equal(file_write_atomic(path, template, (int64_t)strlen(template), &err), 0);
    if (chat_template_load(&t, dir, NULL, &err)) fail_msg("%s", err.msg);
    text_put(&row, "{\"messages\": [], \"tools\": ");
    text_put(&row, tools);
    text_put(&row, more);
    text_put(&row, "}");
    struct json_doc *doc = json_parse(row.text, row.size, "row", &err);
    if (!doc) fail_msg("%s", err.msg);
    if (chat_template_render(&out, t, json_root(doc), &opt, &err)) fail_msg("%s", err.msg);
    json_free(doc);
    text_free(&row);
    chat_template_free(t);
    return out.text;
}

/* One function with these parameters. */
static void assert_function(const char *parameters, const char *expected)
{
    struct text_buf tools = {0}, want = {0};
    text_put(&tools, "[{\"type\": \"function\", \"function\": {\"parameters\": ");
    text_put(&tools, parameters);
    text_put(&tools, ", \"name\": \"f\"}}]");
    text_put(&want, HEAD);
    text_put(&want, expected);
    text_put(&want, "}\n");
    char *text = render(tools.text, "");
    assert_string_equal(text, want.text);
    mem_free(text);
    text_free(&tools);
    text_free(&want);
}

static void types(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"{\"type\": \"string\"}", "string"},
        {"{\"type\": \"integer\"}", "number"},
        {"{\"type\": \"null\"}", "null"},
        {"true", "any"},
        {"false", "null"},
        {"{}", "any"},
        {"{\"type\": [\"object\", \"array\", \"integer\", \"null\"]}", "{} | Array<any> | number | null"},
        {"{\"enum\": [\"a\", \"b \\\"c\\\"\", 1, 2.0, true]}", "\"a\" | \"b \"c\"\" | 1 | 2.0 | True"},
        {"{\"type\": [\"null\", \"string\"], \"enum\": [\"a\", null]}", "\"a\" | None"},
        {"{\"anyOf\": [{\"type\": \"string\"}, {\"type\": \"array\", \"items\": {\"type\": \"number\"}}]}",
         "string | Array<number>"},
        {"{\"type\": \"array\"}", "Array<any>"},
        {"{\"type\": \"array\", \"items\": {\"type\": \"array\", \"items\": {\"type\": \"string\"}}}",
         "Array<Array<string>>"},
        {"{\"type\": \"object\"}", "{}"},
        {"{\"type\": \"object\", \"additionalProperties\": true}", "{\n    [k: string]: any\n  }"},
        {"{\"type\": \"object\", \"properties\": {\"y\": {\"type\": \"string\"}}, \"additionalProperties\": false}",
         "{\n    y?: string,\n    [k: string]: never\n  }"},
    };
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        char parameters[512], expected[512];
        snprintf(parameters, sizeof(parameters), "{\"type\": \"object\", \"properties\": {\"x\": %s}}", rows[i][0]);
        snprintf(expected, sizeof(expected), "type f = (_: {\n  x?: %s\n}) => any;\n", rows[i][1]);
        assert_function(parameters, expected);
    }
}

static void comments(void **state)
{
    (void)state;
    assert_function("{}", "type f = (_: {}) => any;\n");
    assert_function(
        "{\"type\": \"object\", \"required\": [\"z\", \"b\"], \"properties\": {"
        "\"z\": {\"type\": \"string\", \"pattern\": \"^a\", \"minLength\": 1, \"maxLength\": 9},"
        "\"a\": {\"type\": \"integer\", \"description\": \"one\\n\\ntwo\", \"minimum\": 0, \"maximum\": 2.5, "
        "\"default\": 1},"
        "\"b\": {\"type\": \"array\", \"maxItems\": 3, \"items\": {\"type\": \"string\", \"description\": \"item\"}},"
        "\"c\": {\"type\": \"boolean\", \"default\": false},"
        "\"d\": {\"type\": \"object\", \"default\": {\"l\": [1], \"k\": \"\xc3\xa9\"}, \"minItems\": 1}}}",
        "type f = (_: {\n"
        "  // maxItems: 3\n"
        "  b: Array<\n"
        "    // item\n"
        "    string\n"
        "  >,\n"
        "  // maxLength: 9, minLength: 1, pattern: ^a\n"
        "  z: string,\n"
        "  // one\n"
        "\n"
        "  // two\n"
        "  // maximum: 2.5, minimum: 0\n"
        "  // Default: 1\n"
        "  a?: number,\n"
        "  // Default: False\n"
        "  c?: boolean,\n"
        "  // Default: {\"k\": \"\xc3\xa9\", \"l\": [1]}\n"
        "  d?: {}\n"
        "}) => any;\n");
}

static void references(void **state)
{
    (void)state;
    assert_function(
        "{\"type\": \"object\", \"properties\": {\"p\": {\"$ref\": \"#/$defs/Point\", \"description\": \"where\"}}, "
        "\"$defs\": {\"Point\": {\"type\": \"object\", \"description\": \"A point\", \"required\": [\"x\"], "
        "\"properties\": {\"x\": {\"type\": \"number\"}}}, \"Any\": {}}}",
        "interface Any any\n"
        "// A point\n"
        "interface Point {\n"
        "  x: number\n"
        "}\n"
        "type f = (_: {\n"
        "  // where\n"
        "  p?: Point\n"
        "}) => any;\n");
    assert_function("{\"type\": \"object\", \"required\": [\"v\"], \"additionalProperties\": true, \"properties\": "
                    "{\"v\": {\"type\": \"number\"}, \"next\": {\"$ref\": \"#\"}}}",
                    "interface parameters {\n"
                    "  next?: parameters,\n" /* in the order of names, without additionalProperties */
                    "  v: number\n"
                    "}\n"
                    "type f = (_: parameters) => any;\n");
}

static void lists(void **state)
{
    (void)state;
    static const struct {
        const char *tools, *more, *text;
    } rows[] = {
        {"[{\"type\": \"function\", \"function\": {\"name\": \"b\", \"description\": \"first\"}}, {\"type\": "
         "\"_plugin\"}, "
         "{\"type\": \"function\", \"function\": {\"name\": \"a\", \"parameters\": null}}]",
         "", HEAD "// first\ntype b = (_: {}) => any;\ntype a = (_: {}) => any;\n}\n"},
        {"[{\"type\": \"other\"}]", "", ""},
        {"\"[{\\\"type\\\": \\\"function\\\", \\\"function\\\": {\\\"name\\\": \\\"a\\\"}}]\"", "",
         HEAD "type a = (_: {}) => any;\n}\n"},
        /* what Kimi's tokenizer cannot write is JSON, sorted */
        {"[{\"type\": \"function\", \"function\": {\"parameters\": {\"properties\": {\"x\": {\"b\": 1, \"a\": 2}}}}}]",
         "",
         "[{\"function\": {\"parameters\": {\"properties\": {\"x\": {\"a\": 2, \"b\": 1}}}}, \"type\": \"function\"}]"},
        {"[{\"type\": \"function\", \"function\": {\"parameters\": {\"properties\": {\"x\": {\"$ref\": "
         "\"#/$defs/A\"}}}}}]",
         "",
         "[{\"function\": {\"parameters\": {\"properties\": {\"x\": {\"$ref\": \"#/$defs/A\"}}}}, \"type\": "
         "\"function\"}]"},
        {"[]", "", "[]"},
        {"[]", ", \"chat_template_kwargs\": {\"thinking\": false}", "[]off"},
    };
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        char *text = render(rows[i].tools, rows[i].more);
        assert_string_equal(text, rows[i].text);
        mem_free(text);
    }
}

int test_typescript(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(types), cmocka_unit_test(comments),
                                       cmocka_unit_test(references), cmocka_unit_test(lists)};
    return cmocka_run_group_tests_name("typescript", tests, NULL, NULL);
}

/* test_verify_schema.c - JSON Schema: keywords one by one, references, hostile schemas and values, refusals. */
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/text.h"
#include "tests/test.h"
#include "train/reward/verify.h"

static const char *write_schema(const char *text)
{
    static char path[MT_PATH];
    struct err err;
    snprintf(path, sizeof(path), "%s/schema.json", scratch_dir());
    if (file_write_atomic(path, text, (int64_t)strlen(text), &err)) fail_msg("%s", err.msg);
    return path;
}

static void expect(const char *schema, const char *answer, bool right)
{
    const struct verify_options opt = {.kind = REWARD_JSON, .schema = write_schema(schema)};
    const struct verify_answer a = {.content = {answer, (int64_t)strlen(answer)}};
    struct verifier v;
    struct err err;
    if (verifier_open(&v, &opt, "reward.a: schema", &err)) fail_msg("%s: %s", schema, err.msg);
    if ((verifier_score(&v, &a, (struct verify_text){.text = NULL}) > 0.5) != right)
        fail_msg("%s for %s: expected %d", schema, answer, right);
    verifier_close(&v);
}

static void keywords(void **state)
{
    (void)state;
    static const struct {
        const char *schema, *right[3], *wrong[3];
    } rows[] = {
        {"true", {"1", "null", "{}"}, {"{", "NaN", ""}},
        {"false", {NULL}, {"1", "null", "{}"}},
        {"{\"type\": \"integer\"}", {"1", "1.0", "100000000000000000000"}, {"1.5", "\"1\"", "true"}},
        {"{\"type\": \"number\"}", {"1", "1.5", "-0"}, {"\"1\"", "null", "[]"}},
        {"{\"type\": [\"string\", \"null\"]}", {"\"\"", "null"}, {"0", "[]", "false"}},
        {"{\"enum\": [1, \"a\", {\"b\": [2]}]}", {"1.0", "\"a\"", "{\"b\": [2]}"}, {"2", "{\"b\": []}", "null"}},
        {"{\"const\": null}", {"null"}, {"0", "false", "{}"}},
        {"{\"minimum\": 0, \"exclusiveMaximum\": 10}", {"0", "9.99", "\"a\""}, {"-1", "10", "1e3"}},
        {"{\"maximum\": 2, \"exclusiveMinimum\": 0}", {"2", "0.5", "[]"}, {"2.1", "0", "-1"}},
        {"{\"minLength\": 2, \"maxLength\": 3}",
         {"\"ab\"", "\"\\u00e4\\u00f6\\u00fc\"", "1"},
         {"\"a\"", "\"abcd\"", "\"\""}},
        {"{\"pattern\": \"^a+$\"}", {"\"aa\"", "1"}, {"\"ab\"", "\"\"", "\"ba\""}},
        {"{\"minItems\": 1, \"maxItems\": 2, \"items\": {\"type\": \"integer\"}}",
         {"[1]", "[1, 2]", "{}"},
         {"[]", "[1, 2, 3]", "[\"1\"]"}},
        {"{\"uniqueItems\": true}", {"[1, 2]", "[]", "[[1], [2]]"}, {"[1, 1.0]", "[{}, {}]", "[null, null]"}},
        {"{\"properties\": {\"a\": {\"type\": \"integer\"}}, \"required\": [\"a\"]}",
         {"{\"a\": 1}", "{\"a\": 1, \"b\": 2}", "[]"},
         {"{}", "{\"a\": \"1\"}", "{\"b\": 1}"}},
        {"{\"type\": \"object\", \"properties\": {\"a\": {}}, \"additionalProperties\": false}",
         {"{}", "{\"a\": 1}"},
         {"{\"b\": 1}", "{\"a\": 1, \"b\": 1}", "[]"}},
        {"{\"additionalProperties\": {\"type\": \"string\"}, \"minProperties\": 1, \"maxProperties\": 2}",
         {"{\"a\": \"b\"}", "1"},
         {"{}", "{\"a\": 1}", "{\"a\": \"\", \"b\": \"\", \"c\": \"\"}"}},
        {"{\"anyOf\": [{\"type\": \"integer\"}, {\"minimum\": 2}]}", {"1", "2.5", "\"a\""}, {"1.5", "-0.5", "0.1"}},
        {"{\"oneOf\": [{\"type\": \"integer\"}, {\"minimum\": 2}]}", {"1", "2.5"}, {"3", "1.5", "2"}},
        {"{\"allOf\": [{\"type\": \"integer\"}, {\"minimum\": 2}]}", {"2", "3"}, {"1", "2.5", "null"}},
        {"{\"not\": {\"type\": \"integer\"}}", {"1.5", "null", "{}"}, {"1", "2.0", "-1"}},
        {"{\"$defs\": {\"n\": {\"anyOf\": [{\"type\": \"null\"}, {\"type\": \"object\", \"properties\": {\"next\": "
         "{\"$ref\": "
         "\"#/$defs/n\"}}, \"required\": [\"next\"]}]}}, \"$ref\": \"#/$defs/n\", \"title\": \"list\"}",
         {"null", "{\"next\": null}", "{\"next\": {\"next\": null}}"},
         {"{}", "{\"next\": 1}", "{\"next\": {\"next\": {}}}"}},
        {"{\"items\": {\"$ref\": \"#\"}, \"type\": \"array\"}", {"[]", "[[], [[]]]"}, {"[1]", "[[{}]]", "null"}},
    };
    for (int i = 0; i < MT_LEN(rows); i++)
        for (int k = 0; k < 3; k++) {
            if (rows[i].right[k]) expect(rows[i].schema, rows[i].right[k], true);
            if (rows[i].wrong[k]) expect(rows[i].schema, rows[i].wrong[k], false);
        }
    expect("{\"type\": \"object\"}", "```json\n{}\n```", true);
}

/* Schemas and values on which a check could take for ever, or exhaust the stack. */
static void hostile(void **state)
{
    (void)state;
    struct text_buf deep = {0}, wide = {0};
    expect("{\"$ref\": \"#\"}", "1", false);
    expect("{\"not\": {\"$ref\": \"#\"}}", "1", false);
    expect("{\"allOf\": [{\"not\": {\"$ref\": \"#\"}}]}", "1", false);
    expect("{\"$defs\": {\"a\": {\"anyOf\": [{\"$ref\": \"#/$defs/a\"}, {\"$ref\": \"#/$defs/a\"}]}}, \"$ref\": "
           "\"#/$defs/a\"}",
           "{}", false);
    for (int i = 0; i < 200; i++) text_put(&deep, "[");
    for (int i = 0; i < 200; i++) text_put(&deep, "]");
    expect("{\"items\": {\"oneOf\": [{\"$ref\": \"#\"}, {\"allOf\": [{\"$ref\": \"#\"}, false]}]}}", deep.text, false);
    for (int i = 0; i < 20000; i++) text_put(&wide, i ? ", [[1]]" : "[[0]");
    text_put(&wide, "]");
    expect("{\"uniqueItems\": true}", wide.text, false);
    text_free(&deep);
    text_free(&wide);
}

static void refusals(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"{\"properties\": {\"a\": {\"format\": \"email\"}}}", "the schema has \"format\" (`properties.a.format`)"},
        {"{\"patternProperties\": {}}", "\"patternProperties\""},
        {"{\"type\": \"int\"}", "`type`: expected a type"},
        {"{\"type\": [\"integer\", \"int\"]}", "`type`: expected a type"},
        {"{\"minLength\": -1}", "`minLength`: expected a whole number"},
        {"{\"required\": \"a\"}", "`required`: expected a list of texts"},
        {"{\"anyOf\": []}", "`anyOf`: expected a list that is not empty"},
        {"{\"anyOf\": [1]}", "expected a schema"},
        {"{\"$ref\": \"#/$defs/a\"}", "`$ref`: expected"},
        {"{\"$ref\": \"https://example.com/a.json\"}", "`$ref`: expected"},
        {"{\"pattern\": \"(\"}", "reward.a: schema"},
        {"[1]", "expected a schema"},
        {"{", "reward.a: schema"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        const struct verify_options opt = {.kind = REWARD_JSON, .schema = write_schema(rows[i][0])};
        struct verifier v;
        struct err err = {.msg = ""};
        assert_int_equal(verifier_open(&v, &opt, "reward.a: schema", &err), -1);
        if (!strstr(err.msg, rows[i][1])) fail_msg("%s is not in: %s", rows[i][1], err.msg);
        verifier_close(&v);
    }
}

int test_verify_schema(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(keywords), cmocka_unit_test(hostile),
                                       cmocka_unit_test(refusals)};
    return cmocka_run_group_tests_name("verify_schema", tests, NULL, NULL);
}

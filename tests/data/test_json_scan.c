/* test_json_scan.c - json_scan extracts values of a JSON text and reads their items one by one: the result equals that
 * of jansson, or both refuse the text. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "data/tokenizer/json_scan.h"

static const char *const keys[] = {"p", "q"};

static struct json_doc *parse_without(const char *text, int64_t size, struct json_part parts[2], struct err *err)
{
    return json_scan_without(text, size, "f.json", "m", keys, parts, 2, err);
}

/* The value under m is extracted or stays in the tree; all other values stay. */
static void cut(void **state)
{
    (void)state;
    static const struct {
        const char *text, *p, *q;
    } rows[] = {
        {"{}", NULL, NULL},
        {"{\"m\":{}}", NULL, NULL},
        {"{\"m\":{\"p\":[1,[2]],\"q\":{\"a\":\"]}\\\"\"}}}", "[1,[2]]", "{\"a\":\"]}\\\"\"}"},
        {" {\"x\" : {\"p\":[1]}, \"m\":{ \"q\" : [ ] , \"y\":-1.5e3,\"p\":{}}, \"z\":\"}\"} ", "{}", "[ ]"},
        {"{\"p\":[1],\"\\u006d\":{\"\\u0070\":[\"\\\\\"]}}", "[\"\\\\\"]", NULL},
        {"{\"m\":{\"p\":7,\"q\":\"[\"}}", NULL, NULL},
        {"{\"m\":[{\"p\":[1]}]}", NULL, NULL},
    };
    struct err err;
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct json_part parts[2];
        struct json_doc *doc = parse_without(rows[i].text, (int64_t)strlen(rows[i].text), parts, &err);
        if (!doc) fail_msg("row %d: %s", (int)i, err.msg);
        const char *want[] = {rows[i].p, rows[i].q};
        for (int k = 0; k < 2; k++) {
            struct json there = json_find(json_find(json_root(doc), "m"), keys[k]);
            assert_int_equal(parts[k].text != NULL, want[k] != NULL);
            if (!want[k]) continue;
            assert_int_equal(parts[k].size, strlen(want[k]));
            assert_memory_equal(parts[k].text, want[k], (size_t)parts[k].size);
            assert_int_equal(json_type(there), want[k][0] == '{' ? JSON_OBJECT : JSON_ARRAY);
            assert_int_equal(json_count(there), 0);
        }
        json_free(doc);
    }
    struct json_part parts[2];
    static const char twice[] = "{\"m\":{\"p\":[\n],\"p\":[]}}";
    assert_null(parse_without(twice, sizeof(twice) - 1, parts, &err));
    assert_string_equal(err.msg, "f.json: not valid JSON: line 2, byte 17: duplicate object key near '\"p\"'");
}

/* Reads the value at s and compares it with the tree; -1: the scan refuses it. */
static int compare(struct json_scan *s, struct json tree, struct err *err)
{
    int more;
    for (int64_t i = 0; (more = json_scan_next(s, err)) == 1; i++) {
        const char *text, *same;
        int64_t size, value, n;
        struct json item = json_at(tree, i);
        if (s->key && s->depth == 1 && tree.node) {
            assert_true(json_member(tree, i, &same, &item));
            assert_int_equal(s->key_size, strlen(same));
            assert_memory_equal(s->key, same, (size_t)s->key_size);
        }
        if (json_scan_is_array(s)) {
            if (json_scan_array(s, err) || compare(s, item, err)) return -1;
        } else if (*s->at == '"') {
            if (json_scan_str(s, &text, &size, err)) return -1;
            if (!tree.node) continue;
            assert_int_equal(json_str(item, &same, &n, err), 0);
            assert_int_equal(n, size);
            assert_memory_equal(text, same, (size_t)n);
        } else {
            if (json_scan_i64(s, INT64_MIN / 100, INT64_MAX / 100, &value, err)) return -1;
            if (!tree.node) continue;
            assert_int_equal(json_i64(item, INT64_MIN, INT64_MAX, &n, err), 0);
            assert_int_equal(n, value);
        }
    }
    return more;
}

/* Whether the scan can read the value: strings, arrays and small integers, in an outermost object. */
static bool readable(struct json j, bool outermost)
{
    int64_t value;
    struct err err;
    struct json item;
    const char *key;
    enum json_type t = json_type(j);
    if (t == JSON_ARRAY)
        for (int64_t i = 0; i < json_count(j); i++)
            if (!readable(json_at(j, i), false)) return false;
    if (t == JSON_OBJECT)
        for (int64_t i = 0; json_member(j, i, &key, &item); i++)
            if (!readable(item, false)) return false;
    if (t == JSON_INT) return json_i64(j, INT64_MIN / 100, INT64_MAX / 100, &value, &err) == 0;
    if (t == JSON_STRING) return json_str(j, &key, &value, &err) == 0; /* no half of a surrogate pair */
    return t == JSON_ARRAY || (t == JSON_OBJECT && outermost);
}

/* Whether the scan accepts the value in {"m":{"p":PART}}. */
static bool scan(const char *part, int64_t part_size, struct err *err)
{
    char text[256];
    struct json_part parts[2];
    int size = snprintf(text, sizeof(text), "{\"m\":{\"p\":%.*s}}", (int)part_size, part);
    assert_true(size > 0 && size < (int)sizeof(text));
    struct json_doc *tree = json_parse(text, size, "f.json", err);
    struct json node = tree ? json_find(json_find(json_root(tree), "m"), "p") : (struct json){0};
    bool must = tree && (json_type(node) == JSON_ARRAY || json_type(node) == JSON_OBJECT) && readable(node, true);
    struct json_doc *doc = parse_without(text, size, parts, err);
    assert_true(doc || !tree);
    bool taken = false;
    if (doc && parts[0].text) {
        struct json_scan s;
        taken = !json_scan_open(&s, parts[0], json_find(json_find(json_root(doc), "m"), "p"), err) &&
                !compare(&s, node, err);
        json_scan_close(&s);
    }
    if (must && !taken) fail_msg("%s: %s", text, err->msg);
    if (taken && !tree && !strstr(err->msg, "NUL") && !strstr(err->msg, "duplicate"))
        fail_msg("%s: taken, but jansson says: %s", text, err->msg);
    json_free(doc);
    json_free(tree);
    return taken;
}

static void values(void **state)
{
    (void)state;
    static const struct {
        const char *part, *error; /* NULL: accepted */
    } rows[] = {
        {"[]", NULL},
        {"[ \"a\" ,\n\t\"b c\", [\"d\", [] , [1]],-7,0]", NULL},
        {"{\"a\":1,\"\":[2]}", NULL},
        {"[\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0120\\u00e9\\uD83D\\uDE00\\u0000 \xc4\xa0\xe2\x96\x81\"]", NULL},
        {"{\"\\u0120a\":1}", NULL},
        {"[1,]", "key `m.p[1]`: not valid JSON from here: ]"},
        {"[,1]", "key `m.p[0]`: not valid JSON from here: ,1]"},
        {"[1 2]", "key `m.p[0]`: not valid JSON from here: 2]"},
        {"[1}]", "not valid JSON"},
        {"[[1}]", "not valid JSON"},
        {"{\"a\":1]}", "not valid JSON"},
        {"{\"a\" 1}", "key `m.p.a`: not valid JSON"},
        {"{a:1}", "not valid JSON from here: a:1}"},
        {"[\"\\x\"]", "not valid JSON"},
        {"[\"\\ud800\"]", "not valid JSON"},
        {"[\"\\ud800\\u0041\"]", "not valid JSON"},
        {"[\"\\udc00\"]", "not valid JSON"},
        {"[\"\\u12\"]", "not valid JSON"},
        {"[\"\\u12g4\"]", "not valid JSON"},
        {"[\"a\nb\"]", "not valid JSON from here"},
        {"[\"\xff\"]", "key `m.p`: is not valid UTF-8"},
        {"[01]", "must be an integer"},
        {"[-]", "must be an integer"},
        {"[1.0]", "key `m.p[0]`: must be an integer, not a number"},
        {"[1e2]", "must be an integer"},
        {"[null]", "must be an integer, not null"},
        {"[true]", "must be an integer, not a boolean"},
        {"[{}]", "must be an integer, not an object"},
        {"[922337203685477581]", "922337203685477581 is not between"},
        {"[99999999999999999999999]", "is not between"},
    };
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct err err = {.msg = ""};
        bool taken = scan(rows[i].part, (int64_t)strlen(rows[i].part), &err);
        if (taken != !rows[i].error) fail_msg("%s: %s", rows[i].part, err.msg);
        if (!taken && !strstr(err.msg, rows[i].error)) fail_msg("%s: %s", rows[i].part, err.msg);
    }
}

/* The values with bytes changed, removed and inserted. */
static void damaged(void **state)
{
    (void)state;
    static const char *const seeds[] = {"[\"a\\u0120\",[\"b\\n\",\"\\ud83d\\ude00\"],-12,[]]",
                                        "{\"a\":1,\"\xc4\xa0t\":20,\"\\\\\":[3, \"x\"]}"};
    static const char bytes[] = "[]{}\",:\\u0d-1 a\n\xc4\xa0";
    int64_t taken = 0;
    for (uint64_t round = 0; round < 100000; round++) {
        char text[128];
        struct err err = {.msg = ""};
        uint64_t key = rng_key(round, "damage");
        int64_t size = (int64_t)strlen(seeds[round % 2]);
        memcpy(text, seeds[round % 2], (size_t)size);
        for (uint64_t k = 0; k <= round % 3; k++) {
            int64_t at = (int64_t)(rng_uniform(key, 3 * k) * (double)size);
            char byte = bytes[(int)(rng_uniform(key, 3 * k + 1) * (double)(sizeof(bytes) - 1))];
            double what = rng_uniform(key, 3 * k + 2);
            if (what < 0.3) memmove(text + at, text + at + 1, (size_t)(--size - at));
            if (what > 0.6) memmove(text + at + 1, text + at, (size_t)(size++ - at));
            if (what >= 0.3 && at < size) text[at] = byte;
        }
        taken += scan(text, size, &err);
    }
    assert_in_range(taken, 1000, 99000);
}

int test_json_scan(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(cut), cmocka_unit_test(values), cmocka_unit_test(damaged)};
    return cmocka_run_group_tests_name("json_scan", tests, NULL, NULL);
}

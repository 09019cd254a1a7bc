/* test_json.c - parse errors, typed getters and their messages, iteration, writing, truncated texts, failing
 * allocations. */
#include "tests/test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/json/json.h"

/* of jansson, whose header only json.c includes */
void json_get_alloc_funcs(void *(**alloc)(size_t), void (**release)(void *));

static struct json_doc *parse(const char *text, struct err *err)
{
    return json_parse(text, (int64_t)strlen(text), "f.json", err);
}

static void refused(void **state)
{
    (void)state;
    static const struct {
        const char *text, *error;
    } rows[] = {
        {"", "f.json: not valid JSON: byte 0: unexpected token near end of file"},
        {"{\"a\":1,\n\"a\":2}", "line 2, byte 11: duplicate object key near '\"a\"'"},
        {"{\"a\":1} x", "byte 9: end of file expected near 'x'"},
        {"[1,]", "byte 4: unexpected token near ']'"},
        {"[\"\xff\"]", " is not UTF-8 (byte 0xff): convert the file"},
        {"[\"\xc0\x80\"]", "not UTF-8 (byte 0xc0)"},
        {"[\"\xed\xa0\x80\"]", "not UTF-8 (byte 0xed)"},
        {"[\"a\nb\"]", "byte 3: unexpected newline near '\"a'"},
        {"[\"a\002b\"]", "control character 0x2"},
        {"[01]", "byte 2: invalid token near '0'"},
        {"[\001]", "invalid token near ' '"}, /* no control character reaches the terminal */
        /* texts that are still errors although NaN, long numbers and lone surrogates are accepted as in Python */
        {"{\"a\": NaN,\n\"b\": }", "f.json: not valid JSON: line 2: unexpected token near '}'"},
        {"{\"a\": NaN, \"a\": NaN}", "not valid JSON: duplicate object key near '\"a\"'"},
        {"[\"\\ud83d\\u12\"]", "invalid escape"},
        {"[+99999999999999999999]", "invalid token"},
        {"[1e400e5]", "f.json: not valid JSON: "},
        {"[99999999999999999999-1]", "f.json: not valid JSON: "},
        {"[1.e400]", "f.json: not valid JSON: "},
        {"[00099999999999999999999]", "f.json: not valid JSON: "},
        {"[-]", "f.json: not valid JSON: "},
        {"[.1e999999]", "f.json: not valid JSON: "},
        {"[nan]", "f.json: not valid JSON: "},
        {"[NaN2]", "f.json: not valid JSON: "},
        {"[1NaN]", "f.json: not valid JSON: "},
        {"[Nah]", "f.json: not valid JSON: "},
        {"[-Infinite]", "f.json: not valid JSON: "},
        {"[\"a", "f.json: not valid JSON: "},
        {"[\"\\", "f.json: not valid JSON: "},
        {"[\"\\ud83d", "f.json: not valid JSON: "},
    };
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct err err = {.msg = ""};
        assert_null(parse(rows[i].text, &err));
        if (!strstr(err.msg, rows[i].error)) fail_msg("%s gives: %s", rows[i].text, err.msg);
    }
}

/* The limit counts values, not bytes, as the tree takes up to 100 times the memory of the text. */
static void values(void **state)
{
    (void)state;
    struct err err;
    const int64_t n = JSON_VALUES;
    char *text = mem_alloc(3 * n);
    memset(text, '[', 1);
    for (int64_t i = 0; i < n; i++) memcpy(text + 1 + 2 * i, "0,", 2);
    text[2 * n] = ']';
    assert_null(json_parse(text, 2 * n + 1, "f.json", &err));
    if (!strstr(err.msg, "f.json: 4194305 JSON values, more than the 4194304")) fail_msg("%s", err.msg);
    mem_free(text);
    static const char row[] =
        "{\"a\": [1, {\"b\": \"[,:,]\"}]}"; /* seven values; the punctuation in the string does not count */
    struct json_doc *doc = json_parse_row(row, sizeof(row) - 1, 7, "row", &err);
    assert_non_null(doc);
    json_free(doc);
    assert_null(json_parse_row(row, sizeof(row) - 1, 6, "row", &err));
}

/* Numbers that neither int64 nor double holds, anywhere. They keep their digits. */
static void wide_numbers(void **state)
{
    (void)state;
    static const struct {
        const char *text, *kept; /* kept: the text kept; NULL: `text` itself */
        double value;            /* 0: every getter fails */
    } rows[] = {{"18446744073709551615", NULL, 18446744073709551616.0},
                {"-9223372036854775809", NULL, -9223372036854775808.0},
                {"1000000000000000019884624838656", NULL, 1e30},
                {"1e999", "Infinity", 0},
                {"-1.5E+400", "-Infinity", 0},
                {"NaN", NULL, 0},
                {"Infinity", NULL, 0},
                {"-Infinity", NULL, 0}};
    struct err err;
    char text[160];
    for (int i = 0; i < MT_LEN(rows); i++) {
        const char *s, *kept = rows[i].kept ? rows[i].kept : rows[i].text;
        double d = 0;
        int64_t n = 0, size;
        snprintf(text, sizeof(text), "{\"s\": \"\\\": 1e999\", \"a\":[{\"b\":%s },7], \"nul\": \"\\u0000#1\"}",
                 rows[i].text);
        struct json_doc *doc = parse(text, &err);
        if (!doc) fail_msg("%s", err.msg);
        const struct json root = json_root(doc), b = json_find(json_at(json_find(root, "a"), 0), "b");
        assert_int_equal(json_type(b), JSON_REAL);
        assert_string_equal(json_wide(b), kept);
        assert_true(json_truthy(b));
        assert_int_equal(json_f64(b, &d, &err), rows[i].value == 0 ? -1 : 0);
        assert_true(d == rows[i].value);
        if (d == 0)
            assert_non_null(strstr(err.msg, "f.json: key `a[0].b`: must be a number that fits in 64 bits, not "));
        assert_int_equal(json_i64(b, INT64_MIN, INT64_MAX, &n, &err), -1);
        assert_non_null(strstr(err.msg, kept));
        assert_int_equal(json_str(b, &s, &size, &err), -1);
        assert_string_equal(err.msg, "f.json: key `a[0].b`: must be a string, not a number");
        assert_null(json_wide(json_find(root, "s")));
        assert_null(json_wide(json_find(root, "absent")));
        assert_int_equal(json_get_str(root, "s", &s, &err), 0);
        assert_string_equal(s, "\": 1e999");
        assert_int_equal(json_str(json_find(root, "nul"), &s, &size, &err), 0); /* no number */
        assert_int_equal(size, 3);
        assert_memory_equal(s, "\0#1", 3);
        json_free(doc);
    }
    static const char cut[] = "{\"a\": NaN}\0}"; /* text after a NUL is not dropped */
    assert_null(json_parse(cut, sizeof(cut) - 1, "f.json", &err));
    struct json_doc *doc = parse("{\"a\": 9223372036854775807}", &err);
    assert_int_equal(json_type(json_find(json_root(doc), "a")), JSON_INT);
    json_free(doc);
}

/* A half of a surrogate pair is refused where it is read. */
static void surrogates(void **state)
{
    (void)state;
    struct err err;
    const char *s;
    int64_t size;
    struct json_doc *doc =
        parse("\xef\xbb\xbf{\"a\": \"x\\ud83d\\u0041\", \"b\": \"\\ud83d\\ude00\", \"\\udc00\": 1, \"c\\u0000\": 2,"
              "\"d\": \"\\ude00\\\\ud83d\"}",
              &err);
    if (!doc) fail_msg("%s", err.msg);
    const struct json root = json_root(doc);
    assert_int_equal(json_get_str(root, "a", &s, &err), -1);
    assert_string_equal(err.msg, "f.json: key `a`: has half of a surrogate pair, which is no character");
    assert_int_equal(json_str(json_find(root, "d"), &s, &size, &err), -1);
    assert_int_equal(json_get_str(root, "b", &s, &err), 0);
    assert_string_equal(s, "\xf0\x9f\x98\x80");
    assert_true(json_has(root, "\xef\xbf\xbd") && json_has(root, "c\xef\xbf\xbd"));
    json_free(doc);
}

/* As in Python the last of equal keys counts, in files alone. */
static void duplicate_keys(void **state)
{
    (void)state;
    struct err err;
    int64_t n = 0;
    char path[256];
    snprintf(path, sizeof(path), "%s/c.json", scratch_dir());
    static const char text[] = "{\"a\": 1, \"b\": [Infinity], \"a\": 2}";
    assert_int_equal(file_write_atomic(path, text, sizeof(text) - 1, &err), 0);
    struct json_doc *doc = json_load(path, 1000, &err);
    if (!doc) fail_msg("%s", err.msg);
    assert_int_equal(json_get_i64(json_root(doc), "a", 0, 9, &n, &err), 0);
    assert_int_equal(n, 2);
    json_free(doc);
    assert_null(json_parse_row(text, sizeof(text) - 1, 100, "row", &err));
}

static void depth(void **state)
{
    (void)state;
    struct err err;
    char text[2000];
    for (int n = 250; n <= 260; n++) {
        memset(text, '[', (size_t)n);
        memset(text + n, ']', (size_t)n);
        text[2 * n] = 0;
        struct json_doc *doc = parse(text, &err);
        assert_int_equal(doc != NULL, n <= 256);
        if (!doc) assert_string_equal(err.msg, "f.json: not valid JSON: byte 256: nested deeper than 256 levels");
        json_free(doc);
    }
    strcpy(text, "[\"\\\"");
    memset(text + 4, '[', 1000); /* brackets in a string do not count as depth, also after an escaped quote */
    strcpy(text + 1004, "\",[],{}]");
    struct json_doc *doc = parse(text, &err);
    assert_non_null(doc);
    json_free(doc);
}

static const char sample[] =
    "{\"i\":-7,\"r\":1.5,\"w\":150000.0,\"big\":9007199254740994.0,\"t\":true,\"f\":false,\"s\":\"a\\u00e9\","
    "\"nul\":\"a\\u0000b\",\"z\":null,\"o\":{\"k\":[10,\"x\",{\"y\":2}]},\"a\":[]}";

static void getters(void **state)
{
    (void)state;
    struct err err;
    struct json_doc *doc = parse(sample, &err);
    assert_non_null(doc);
    struct json j = json_root(doc), v;
    int64_t i = 0, size;
    double d = 0;
    bool b = false;
    const char *s = NULL;
    assert_int_equal(json_get_i64(j, "i", -10, 10, &i, &err), 0);
    assert_int_equal(i, -7);
    assert_int_equal(json_get_i64(j, "w", 0, INT64_MAX, &i, &err), 0);
    assert_int_equal(i, 150000);
    assert_int_equal(json_get_f64(j, "i", &d, &err), 0);
    assert_true(d == -7);
    assert_int_equal(json_get_f64(j, "r", &d, &err), 0);
    assert_true(d == 1.5);
    assert_int_equal(json_get_bool(j, "t", &b, &err), 0);
    assert_true(b);
    assert_int_equal(json_get_bool(j, "f", &b, &err), 0);
    assert_false(b);
    assert_int_equal(json_get_str(j, "s", &s, &err), 0);
    assert_string_equal(s, "a\xc3\xa9");
    assert_int_equal(json_str(json_find(j, "nul"), &s, &size, &err), 0);
    assert_int_equal(size, 3);
    assert_memory_equal(s, "a\0b", 4);
    assert_int_equal(json_get_object(j, "o", &v, &err), 0);
    assert_int_equal(json_get_array(v, "k", &v, &err), 0);
    assert_int_equal(json_count(v), 3);
    assert_int_equal(json_i64(json_at(v, 0), 0, 10, &i, &err), 0);
    assert_int_equal(json_get_i64(json_at(v, 2), "y", 0, 10, &i, &err), 0);
    assert_int_equal(i, 2);
    assert_true(json_has(j, "z") && !json_has(j, "zz") && !json_has(v, "z"));

    i = 5;
    d = 5;
    b = true;
    s = "unchanged";
    assert_int_equal(json_opt_i64(j, "none", 0, 1, &i, &err), 0);
    assert_int_equal(json_opt_i64(j, "z", 0, 1, &i, &err), 0);
    assert_int_equal(json_opt_f64(j, "z", &d, &err), 0);
    assert_int_equal(json_opt_bool(j, "z", &b, &err), 0);
    assert_int_equal(json_opt_str(j, "none", &s, &err), 0);
    assert_true(i == 5 && d == 5 && b && !strcmp(s, "unchanged"));
    assert_int_equal(json_opt_i64(j, "i", -7, -7, &i, &err), 0);
    assert_int_equal(json_opt_f64(j, "r", &d, &err), 0);
    assert_int_equal(json_opt_bool(j, "f", &b, &err), 0);
    assert_int_equal(json_opt_str(j, "s", &s, &err), 0);
    assert_true(i == -7 && d == 1.5 && !b && !strcmp(s, "a\xc3\xa9"));
    json_free(doc);
}

static void messages(void **state)
{
    (void)state;
    struct err err;
    struct json_doc *doc = parse(sample, &err);
    assert_non_null(doc);
    struct json j = json_root(doc), k, out;
    assert_int_equal(json_get_array(json_find(j, "o"), "k", &k, &err), 0);
    int64_t i = 0;
    double d;
    bool b;
    const char *s;
#define FAILS(call, text)                                                                                              \
    do {                                                                                                               \
        assert_int_equal(call, -1);                                                                                    \
        assert_string_equal(err.msg, text);                                                                            \
    } while (0)
    FAILS(json_get_i64(j, "none", 0, 1, &i, &err), "f.json: key `none`: is missing; it must be an integer");
    FAILS(json_get_i64(j, "s", 0, 1, &i, &err), "f.json: key `s`: must be an integer, not a string");
    FAILS(json_get_i64(j, "r", 0, 9, &i, &err), "f.json: key `r`: must be an integer, not 1.5");
    FAILS(json_get_i64(j, "big", 0, INT64_MAX, &i, &err), "f.json: key `big`: must be an integer, not 9.0072e+15");
    FAILS(json_get_i64(j, "i", 1, 9, &i, &err), "f.json: key `i`: -7 is not between 1 and 9");
    FAILS(json_opt_i64(j, "i", -9, -8, &i, &err), "f.json: key `i`: -7 is not between -9 and -8");
    FAILS(json_get_f64(j, "z", &d, &err), "f.json: key `z`: must be a number, not null");
    FAILS(json_opt_f64(j, "t", &d, &err), "f.json: key `t`: must be a number, not a boolean");
    FAILS(json_get_bool(j, "i", &b, &err), "f.json: key `i`: must be true or false, not an integer");
    FAILS(json_get_str(j, "nul", &s, &err), "f.json: key `nul`: contains a NUL character");
    FAILS(json_get_object(j, "a", &out, &err), "f.json: key `a`: must be an object, not an array");
    FAILS(json_get_array(j, "o", &out, &err), "f.json: key `o`: must be an array, not an object");
    FAILS(json_i64(json_at(k, 1), 0, 1, &i, &err), "f.json: key `o.k[1]`: must be an integer, not a string");
    FAILS(json_i64(json_at(k, 3), 0, 1, &i, &err), "f.json: key `o.k[3]`: is missing; it must be an integer");
    FAILS(json_get_str(json_at(k, 2), "y", &s, &err), "f.json: key `o.k[2].y`: must be a string, not an integer");
    FAILS(json_get_i64(json_find(json_find(j, "no"), "such"), "key", 0, 1, &i, &err),
          "f.json: key `no.such.key`: is missing; it must be an integer");
    FAILS(json_error(j, &err, "%d is wrong", 3), "f.json: 3 is wrong");
#undef FAILS
    assert_int_equal(i, 0);
    json_free(doc);

    char text[700]; /* a key that is too long for the path in a message */
    snprintf(text, sizeof(text), "{\"%0500d\":{\"x\":1}}", 0);
    doc = parse(text, &err);
    const char *key;
    assert_true(json_member(json_root(doc), 0, &key, &j));
    assert_int_equal(json_get_str(j, "x", &s, &err), -1);
    assert_int_equal(strlen(err.msg), strlen("f.json: key ``: must be a string, not an integer") + sizeof(j.path) - 1);
    json_free(doc);
}

/* Members have the order of the file. Nested iteration and access to an earlier member work. */
static void members(void **state)
{
    (void)state;
    struct err err;
    struct json_out o = {0};
    char key[16];
    json_out_open(&o, NULL, '{');
    for (int i = 0; i < 300; i++) {
        snprintf(key, sizeof(key), "k%d", (i * 7) % 300);
        json_out_open(&o, key, '{');
        for (int k = 0; k < 3; k++) json_out_i64(&o, (const char *[]){"c", "a", "b"}[k], 10 * i + k);
        json_out_close(&o, '}');
    }
    json_out_close(&o, '}');
    struct json_doc *doc = json_parse(o.text, o.size, "f.json", &err);
    json_out_free(&o);
    assert_non_null(doc);
    struct json root = json_root(doc), inner, value;
    const char *name;
    int64_t v;
    for (int i = 0; i < 300; i++) {
        snprintf(key, sizeof(key), "k%d", (i * 7) % 300);
        assert_true(json_member(root, i, &name, &inner));
        assert_string_equal(name, key);
        for (int k = 0; k < 3; k++) {
            assert_true(json_member(inner, k, &name, &value));
            assert_int_equal(json_i64(value, 0, 3000, &v, &err), 0);
            assert_int_equal(v, 10 * i + k);
        }
        assert_false(json_member(inner, 3, &name, &value));
    }
    assert_false(json_member(root, 300, &name, &inner));
    assert_false(json_member(root, -1, &name, &inner));
    assert_true(json_member(root, 17, &name, &inner)); /* an earlier member */
    assert_string_equal(name, "k119");
    assert_false(json_member(value, 0, &name, &inner)); /* no object */
    assert_int_equal(json_count(value), 0);
    assert_int_equal(json_type(json_at(root, 0)), JSON_ABSENT);
    json_free(doc);
    json_free(NULL);
}

static void writing(void **state)
{
    (void)state;
    struct json_out o = {0};
    json_out_open(&o, NULL, '{');
    json_out_str(&o, "s", "a\"\\\n\t\b\f\r\001\x7f/\xc3\xa9\xf0\x9f\x98\x80");
    json_out_str(&o, "bad", "\xff|\xc3|\xc0\x80|\xed\xa0\x80|\xf4\x90\x80\x80|\xe2\x82");
    json_out_str(&o, "q\"", NULL);
    json_out_open(&o, "n", '[');
    json_out_i64(&o, NULL, INT64_MIN);
    json_out_f64(&o, NULL, 0.1);
    json_out_f64(&o, NULL, NAN);
    json_out_f64(&o, NULL, -INFINITY);
    json_out_f64(&o, NULL, 1.0 / 3);
    json_out_f64(&o, NULL, 5e-324);
    json_out_f64(&o, NULL, -0.0);
    json_out_f64(&o, NULL, 32);
    json_out_f64(&o, NULL, 60);
    json_out_f64(&o, NULL, -4e14);
    json_out_f64(&o, NULL, 1e15);
    json_out_real(&o, NULL, 32);
    json_out_real(&o, NULL, 1e300);
    json_out_real(&o, NULL, -0.5);
    json_out_real(&o, NULL, INFINITY);
    json_out_close(&o, ']');
    json_out_open(&o, "e", '{');
    json_out_close(&o, '}');
    json_out_bool(&o, "t", true);
    json_out_close(&o, '}');
#define BAD "\xef\xbf\xbd"
    assert_string_equal(o.text,
                        "{\"s\":\"a\\\"\\\\\\n\\t\\b\\f\\r\\u0001\x7f/\xc3\xa9\xf0\x9f\x98\x80\","
                        "\"bad\":\"" BAD "|" BAD "|" BAD BAD "|" BAD BAD BAD "|" BAD BAD BAD BAD "|" BAD BAD "\","
                        "\"q\\\"\":null,\"n\":[-9223372036854775808,0.1,null,null,0.3333333333333333,5e-324,-0.0,32,"
                        "60,-400000000000000,1e+15,32.0,1e+300,-0.5,null],"
                        "\"e\":{},\"t\":true}");
#undef BAD
    assert_int_equal(o.size, strlen(o.text));
    json_out_free(&o);
    assert_null(o.text);
    o.indent = true;
    json_out_open(&o, NULL, '{');
    json_out_open(&o, "a", '[');
    json_out_i64(&o, NULL, 1);
    json_out_i64(&o, NULL, 2);
    json_out_close(&o, ']');
    json_out_open(&o, "b", '[');
    json_out_close(&o, ']');
    json_out_close(&o, '}');
    assert_string_equal(o.text, "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": []\n}"); /* as json.dumps(indent=2) */
    json_out_free(&o);
    for (int i = 0; i < 2; i++) { /* several roots, like the lines of a JSONL file */
        json_out_open(&o, NULL, '[');
        json_out_close(&o, ']');
    }
    assert_string_equal(o.text, "[][]");
    json_out_free(&o);
}

/* Every double reads back bit for bit. */
static void doubles(void **state)
{
    (void)state;
    struct err err;
    for (uint64_t i = 0; i < 2000; i++) {
        uint64_t bits = rng_u64(1, i);
        double d, back;
        memcpy(&d, &bits, 8);
        if (!isfinite(d)) continue;
        struct json_out o = {0};
        json_out_open(&o, NULL, '{');
        json_out_f64(&o, "d", d);
        json_out_close(&o, '}');
        struct json_doc *doc = json_parse(o.text, o.size, "f.json", &err);
        assert_non_null(doc);
        assert_int_equal(json_get_f64(json_root(doc), "d", &back, &err), 0);
        assert_memory_equal(&d, &back, 8);
        json_free(doc);
        json_out_free(&o);
    }
}

static void cut(void **state)
{
    (void)state;
    struct err err;
    for (int64_t n = 0; n < (int64_t)strlen(sample); n++) {
        char *text = mem_alloc(n); /* exactly n bytes, so that a sanitizer detects a read past them */
        memcpy(text, sample, (size_t)n);
        assert_null(json_parse(text, n, "f.json", &err));
        assert_non_null(strstr(err.msg, "f.json: not valid JSON: "));
        mem_free(text);
    }
}

static void files(void **state)
{
    (void)state;
    struct err err;
    char path[256];
    snprintf(path, sizeof(path), "%s/c.json", scratch_dir());
    assert_int_equal(file_write_atomic(path, sample, (int64_t)strlen(sample), &err), 0);
    struct json_doc *doc = json_load(path, 1000, &err);
    assert_non_null(doc);
    assert_int_equal(json_count(json_root(doc)), 11);
    json_free(doc);
    assert_null(json_load(path, 100, &err));
    assert_non_null(strstr(err.msg, "c.json: larger than the limit of 100 B"));
    assert_null(json_load("/none/c.json", 100, &err));
    assert_int_equal(file_write_atomic(path, "{\n 7}", 5, &err), 0);
    assert_null(json_load(path, 100, &err));
    assert_non_null(strstr(err.msg, "c.json: not valid JSON: line 2, byte 4:"));
}

/* jansson uses our allocator: when memory runs out, the process ends with status 1 and a message. */
static void no_memory(void **state)
{
    (void)state;
    struct err err;
    void *(*alloc)(size_t);
    void (*release)(void *);
    json_free(parse("[]", &err));
    json_get_alloc_funcs(&alloc, &release);
    assert_true(release == mem_free);
    fflush(stdout);
    pid_t child = fork();
    assert_true(child >= 0);
    if (!child) {
        if (!freopen("/dev/null", "w", stderr)) _exit(2);
        _exit(alloc(SIZE_MAX / 4) ? 3 : 4);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
}

int test_json(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(refused),        cmocka_unit_test(wide_numbers), cmocka_unit_test(surrogates),
        cmocka_unit_test(duplicate_keys), cmocka_unit_test(depth),        cmocka_unit_test(values),
        cmocka_unit_test(getters),        cmocka_unit_test(messages),     cmocka_unit_test(members),
        cmocka_unit_test(writing),        cmocka_unit_test(doubles),      cmocka_unit_test(cut),
        cmocka_unit_test(files),          cmocka_unit_test(no_memory),
    };
    return cmocka_run_group_tests_name("json", tests, NULL, NULL);
}

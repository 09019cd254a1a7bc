/* fuzz_json.c - fuzzes data/json/json.h: parses the input, calls every getter on every value, writes it, parses the
 * output.
 */
#include <stdlib.h>
#include <string.h>

#include "data/json/json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Every getter on the member `key` of j: all must return, and only those of the right type succeed. */
static void get_all(struct json j, const char *key, struct json value)
{
    struct err err;
    struct json out;
    const char *s = "";
    double d = 0;
    int64_t i = 0;
    bool b = false;
    enum json_type t = json_type(value);
    bool is_null = t == JSON_NULL;
    MT_REQUIRE(json_find(j, key).node == value.node && json_has(j, key), "member %s is not found", key);
    MT_REQUIRE(json_get_i64(j, key, INT64_MIN, INT64_MAX, &i, &err) == 0 ? t == JSON_INT || t == JSON_REAL
                                                                         : t != JSON_INT,
               "integer");
    MT_REQUIRE(json_wide(value) || (json_get_f64(j, key, &d, &err) == 0) == (t == JSON_INT || t == JSON_REAL),
               "number");
    MT_REQUIRE((json_get_bool(j, key, &b, &err) == 0) == (t == JSON_BOOL), "boolean");
    MT_REQUIRE((json_get_object(j, key, &out, &err) == 0) == (t == JSON_OBJECT), "object");
    MT_REQUIRE((json_get_array(j, key, &out, &err) == 0) == (t == JSON_ARRAY), "array");
    MT_REQUIRE(json_get_str(j, key, &s, &err) != 0 || t == JSON_STRING, "string");
    MT_REQUIRE(json_wide(value) ||
                   (json_opt_f64(j, key, &d, &err) == 0) == (t == JSON_INT || t == JSON_REAL || is_null),
               "number or null");
    MT_REQUIRE((json_opt_bool(j, key, &b, &err) == 0) == (t == JSON_BOOL || is_null), "boolean or null");
    if (json_opt_i64(j, key, -9, 9, &i, &err) == 0 && !is_null) MT_REQUIRE(i >= -9 && i <= 9, "range");
    if (json_opt_str(j, key, &s, &err)) MT_REQUIRE(t != JSON_NULL && err.msg[0], "string or null");
}

/* Writes j under key (NULL in arrays); returns the number of nodes. Strings are truncated at their first NUL. */
static int64_t walk(struct json_out *o, const char *key, struct json j)
{
    struct err err;
    struct json value;
    const char *s;
    int64_t n = 1, size;
    bool b;
    double d;
    enum json_type t = json_type(j);
    if (t == JSON_OBJECT) {
        json_out_open(o, key, '{');
        int64_t i = 0;
        for (; json_member(j, i, &s, &value); i++) {
            get_all(j, s, value);
            n += walk(o, s, value);
        }
        MT_REQUIRE(i == json_count(j), "%lld of %lld members", (long long)i, (long long)json_count(j));
        json_out_close(o, '}');
    } else if (t == JSON_ARRAY) {
        json_out_open(o, key, '[');
        for (int64_t i = 0; i < json_count(j); i++) n += walk(o, NULL, json_at(j, i));
        MT_REQUIRE(json_type(json_at(j, json_count(j))) == JSON_ABSENT, "an element behind the last");
        json_out_close(o, ']');
    } else if (json_str(j, &s, &size, &err) == 0) {
        MT_REQUIRE((int64_t)strlen(s) <= size, "string");
        json_out_str(o, key, s);
    } else if (json_bool(j, &b, &err) == 0)
        json_out_bool(o, key, b);
    else if (t == JSON_INT && json_i64(j, INT64_MIN, INT64_MAX, &size, &err) == 0)
        json_out_i64(o, key, size);
    else if (json_f64(j, &d, &err) == 0)
        json_out_f64(o, key, d);
    else
        json_out_str(o, key, NULL);
    return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct err err = {.msg = ""};
    struct json_doc *doc = json_parse((const char *)data, (int64_t)size, "fuzz", &err);
    if (!doc) {
        MT_REQUIRE(err.msg[0], "an error without a message");
        return 0;
    }
    struct json_out o = {.indent = size % 2};
    int64_t n = walk(&o, NULL, json_root(doc));
    json_free(doc);
    doc = json_parse(o.text, o.size, "what was written", &err);
    MT_REQUIRE(doc, "%s: %s", err.msg, o.text);
    struct json_out again = {.indent = o.indent};
    MT_REQUIRE(walk(&again, NULL, json_root(doc)) == n, "another number of nodes: %s", o.text);
    MT_REQUIRE(again.size == o.size && !memcmp(again.text, o.text, (size_t)o.size), "%s became %s", o.text, again.text);
    json_out_free(&again);
    json_out_free(&o);
    json_free(doc);
    return 0;
}

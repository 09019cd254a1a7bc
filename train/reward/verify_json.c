/* verify_json.c - see verify_json.h. */
#include "train/reward/verify_json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/json/text.h"

/* Values that json_str or json_f64 do not take are compared as texts. */
static bool same_text(struct json a, struct json b)
{
    struct text_buf x = {0}, y = {0};
    const bool same = !text_put_json(&x, a, NULL) && !text_put_json(&y, b, NULL) && x.size == y.size &&
                      !memcmp(x.text, y.text, (size_t)x.size);
    text_free(&x);
    text_free(&y);
    return same;
}

static bool is_number(struct json j) { return json_type(j) == JSON_INT || json_type(j) == JSON_REAL; }

/* Digits of whole numbers, else a double's 17 digits: equal values have equal texts, whatever their sizes. */
static void put_number(struct text_buf *out, struct json j)
{
    char text[400]; /* the largest double has 309 digits */
    double v = 0;
    if (json_type(j) == JSON_INT || json_wide(j)) {
        if (text_put_number(out, j, NULL)) out->size = 0;
        return;
    }
    if (json_f64(j, &v, NULL)) return;
    snprintf(text, sizeof(text), v == floor(v) ? "%.0f" : "%.17g", v == 0 ? 0 : v);
    text_put(out, text);
}

static bool same_number(struct json a, struct json b)
{
    struct text_buf x = {0}, y = {0};
    put_number(&x, a);
    put_number(&y, b);
    const bool same = x.size && x.size == y.size && !memcmp(x.text, y.text, (size_t)x.size);
    text_free(&x);
    text_free(&y);
    return same;
}

/* NaN and infinity, which Python writes, are not JSON; 1e999 has no value to compare. */
static bool is_finite(struct json j)
{
    const char *key, *wide = json_wide(j);
    struct json value;
    if (wide) return !strpbrk(wide, "Ny");
    for (int64_t i = 0; json_item(j, i, &key, &value); i++)
        if (!is_finite(value)) return false;
    return true;
}

/* json_parse limits the depth. */
static bool same_value(struct json a, struct json b)
{
    const char *key;
    struct json value;
    if (is_number(a) && is_number(b)) return same_number(a, b);
    if (json_type(a) != json_type(b) || json_count(a) != json_count(b)) return false;
    if (json_type(a) != JSON_ARRAY && json_type(a) != JSON_OBJECT) return same_text(a, b);
    for (int64_t i = 0; json_item(a, i, &key, &value); i++) {
        const struct json other = key ? json_find(b, key) : json_at(b, i);
        if (json_type(other) == JSON_ABSENT || !same_value(value, other)) return false;
    }
    return true;
}

/* Without a line of ``` or ```json before it, and ``` after it. */
static struct verify_text without_fence(struct verify_text t)
{
    text_trim(&t.text, &t.size);
    const char *line = t.size >= 6 && !memcmp(t.text, "```", 3) && !memcmp(t.text + t.size - 3, "```", 3)
                           ? memchr(t.text, '\n', (size_t)t.size)
                           : NULL;
    if (!line) return t;
    return (struct verify_text){line + 1, t.size - 3 - (line + 1 - t.text)};
}

static struct json_doc *parse(struct verify_text t, const char *name)
{
    struct json_doc *doc = t.text ? json_parse_row(t.text, t.size, JSON_ROW_VALUES, name, NULL) : NULL;
    if (!doc || is_finite(json_root(doc))) return doc;
    json_free(doc);
    return NULL;
}

enum verdict verify_json(struct verify_text answer, struct verify_text reference)
{
    struct json_doc *b = parse(reference, "reference"), *a = NULL;
    if (reference.text && !b) return VERDICT_NONE;
    a = parse(without_fence(answer), "answer");
    const bool right = a && (!b || same_value(json_root(a), json_root(b)));
    json_free(a);
    json_free(b);
    return right ? VERDICT_RIGHT : VERDICT_WRONG;
}

/* same_json.c - see same_json.h. */
#include "train/reward/same_json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/json/text.h"

/* Compares values that json_str or json_f64 do not read, as texts. */
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

/* Writes a number as text: all digits of a whole number, 17 digits of others. Equal values have equal texts, also very
 * large ones. */
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

bool same_json(struct json a, struct json b)
{
    const char *key;
    struct json value;
    if (is_number(a) && is_number(b)) return same_number(a, b);
    if (json_type(a) != json_type(b) || json_count(a) != json_count(b)) return false;
    if (json_type(a) != JSON_ARRAY && json_type(a) != JSON_OBJECT) return same_text(a, b);
    for (int64_t i = 0; json_item(a, i, &key, &value); i++) {
        const struct json other = key ? json_find(b, key) : json_at(b, i);
        if (json_type(other) == JSON_ABSENT || !same_json(value, other)) return false;
    }
    return true;
}

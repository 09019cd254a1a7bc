/* verify_json.c - see verify_json.h. */
#include "train/reward/verify_json.h"

#include <string.h>

#include "data/json/text.h"
#include "train/reward/same_json.h"

/* Whether all numbers in j are finite. NaN and infinity, which Python writes, are not JSON, and 1e999 has no value to
 * compare. */
static bool is_finite(struct json j)
{
    const char *key, *wide = json_wide(j);
    struct json value;
    if (wide) return !strpbrk(wide, "Ny");
    for (int64_t i = 0; json_item(j, i, &key, &value); i++)
        if (!is_finite(value)) return false;
    return true;
}

/* The text without its code fence, which is a first line that begins with ``` and ``` at the end. Without a fence, the
 * whole text. */
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

enum verdict verify_json(struct verify_text answer, struct verify_text reference, struct schema *schema)
{
    struct json_doc *b = parse(reference, "reference"), *a = NULL;
    if (reference.text && !b) return VERDICT_NONE;
    a = parse(without_fence(answer), "answer");
    const bool right =
        a && (!schema || schema_accepts(schema, json_root(a))) && (!b || same_json(json_root(a), json_root(b)));
    json_free(a);
    json_free(b);
    return right ? VERDICT_RIGHT : VERDICT_WRONG;
}

/* base_check.c - see base_check.h. */
#include "train/adapter/base_check.h"

#include <stdio.h>
#include <string.h>

#include "model/arch/arch_values.h"

void base_check_record(struct base_model *m, uint64_t sample, const struct base_hash *h, const struct arch *a)
{
    struct json_out o = {0};
    base_model_free(m);
    m->sample = sample;
    if (h) m->weights = base_hash_text(h);
    arch_values_write(&o, NULL, a);
    m->config = json_out_take(&o);
}

void base_check_config(struct changes *c, struct json saved, const struct arch *a)
{
    struct arch_value v;
    struct err unused;
    const char *old;
    for (int64_t i = 0; arch_value(a, i, &v); i++) {
        if (!json_has(saved, v.name)) continue;
        if (json_get_str(saved, v.name, &old, &unused)) old = "?";
        if (strcmp(old, v.text)) changes_add(c, v.name, old, v.text);
    }
}

static bool has_text(struct json j, const char *key, const char *text)
{
    struct err unused;
    const char *have;
    return json_has(j, key) && !json_get_str(j, key, &have, &unused) && !strcmp(have, text);
}

enum { NAMED = 6 }; /* parts of the weights that a message names at most: with another model all parts differ */
static void add_part(struct changes *c, const char *name)
{
    if (c->n < NAMED) {
        changes_add(c, name, NULL, NULL);
        return;
    }
    c->n++;
    c->unnamed++;
}

/* Lists the parts whose hashes differ, and the parts that only `then` or only `now` has. */
static void compare_weights(struct changes *c, struct json then, struct json now)
{
    const char *name, *hash;
    struct json value;
    struct err unused;
    for (int64_t i = 0; json_member(now, i, &name, &value); i++)
        if (json_get_str(now, name, &hash, &unused) || !has_text(then, name, hash)) add_part(c, name);
    for (int64_t i = 0; json_member(then, i, &name, &value); i++)
        if (!json_has(now, name)) add_part(c, name);
}

static struct json_doc *parse(const char *text)
{
    struct err unused;
    return text ? json_parse(text, (int64_t)strlen(text), "base model", &unused) : NULL;
}

bool base_check_differs(char text[BASE_TEXT], const struct base_model *then, const struct base_model *now,
                        const struct arch *a, const char *path)
{
    struct json_doc *old = parse(then->weights), *new = parse(now->weights), *config = parse(then->config);
    struct changes parts = {.n = 0}, values = {.n = 0};
    if (old && new) compare_weights(&parts, json_root(old), json_root(new));
    if (config) base_check_config(&values, json_root(config), a);
    const bool sampled = then->sample && now->sample && then->sample != now->sample, weights = sampled || parts.n;
    int n = 0;
    text[0] = 0;
    if (weights) n = snprintf(text, BASE_TEXT, "the weights in model.path = %s are not the same", path);
    if (parts.n) n += snprintf(text + n, (size_t)(BASE_TEXT - n), " (%.640s)", changes_text(&parts));
    if (values.n)
        snprintf(text + n, (size_t)(BASE_TEXT - n), "%sconfig.json in %s has other values (%.640s)", n ? ", and " : "",
                 weights ? "it" : path, changes_text(&values));
    json_free(old);
    json_free(new);
    json_free(config);
    return weights || values.n;
}

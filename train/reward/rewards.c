/* rewards.c - see rewards.h. */
#include "train/reward/rewards.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/json/text.h"

struct reward {
    struct reward_key key;
    struct verifier verifier;
};
struct rewards {
    const struct config *cfg;
    struct reward of[REWARDS_MOST];
    int64_t n, n_item, cap, step;
    double *values, *totals; /* [cap, n], [cap] */
    int64_t nulls[REWARDS_MOST];
};

/* ---- opening ---- */

static int open_reward(struct reward *r, struct err *err)
{
    const struct reward_key *k = &r->key;
    const struct verify_options opt = {.kind = k->kind,
                                       .ignore_case = k->ignore_case,
                                       .tolerance = k->tolerance,
                                       .pattern = k->pattern,
                                       .max = k->max,
                                       .cache = k->cache,
                                       .n = k->n};
    char name[REWARD_NAME + 24];
    snprintf(name, sizeof(name), "reward.%s: pattern", k->name);
    return verifier_open(&r->verifier, &opt, name, err);
}

struct rewards *rewards_open(const struct config *c, struct err *err)
{
    struct rewards *r = mem_alloc(sizeof(*r));
    int rc = 0;
    r->cfg = c;
    while (!rc && reward_keys_get(c->reward.NAME, r->n, &r->of[r->n].key)) rc = open_reward(&r->of[r->n++], err);
    if (!rc && !r->n)
        rc = err_set(err, "no rewards: add a section [reward] with NAME = KIND ARGUMENTS, e.g. correct = last_number");
    if (!rc) return r;
    rewards_close(r);
    return NULL;
}

void rewards_close(struct rewards *r)
{
    if (!r) return;
    for (int64_t i = 0; i < r->n; i++) {
        verifier_close(&r->of[i].verifier);
        reward_key_free(&r->of[i].key);
    }
    mem_free(r->values);
    mem_free(r->totals);
    mem_free(r);
}

int64_t rewards_count(const struct rewards *r) { return r->n; }
const char *rewards_name(const struct rewards *r, int64_t i) { return r->of[i].key.name; }
double rewards_weight(const struct rewards *r, int64_t i) { return r->of[i].key.weight; }

/* ---- items ---- */

void rewards_begin(struct rewards *r, int64_t step)
{
    r->step = step;
    r->n_item = 0;
    memset(r->nulls, 0, sizeof(r->nulls));
}

/* The column as text: a string, or the JSON of another value; NULL: missing or null. */
static int reference_of(struct text_buf *text, struct verify_text *out, struct json columns, const char *name,
                        struct err *err)
{
    const struct json value = json_find(columns, name);
    text->size = 0;
    *out = (struct verify_text){.text = NULL};
    if (!json_given(value)) return 0;
    if (json_type(value) == JSON_STRING) return json_str(value, &out->text, &out->size, err);
    if (text_put_json(text, value, err)) return -1;
    *out = (struct verify_text){text->text, text->size};
    return 0;
}

static int score(struct reward *r, const struct reward_item *item, struct json columns, double *value, struct err *err)
{
    struct text_buf text = {0};
    struct verify_text reference = {.text = NULL};
    const bool has = verifier_has_reference(r->key.kind);
    const int rc = has ? reference_of(&text, &reference, columns, r->key.reference, err) : 0;
    if (!rc) *value = verifier_score(&r->verifier, &item->answer, reference);
    text_free(&text);
    return rc;
}

int rewards_submit(struct rewards *r, const struct reward_item *item, struct err *err)
{
    const char *columns = item->columns ? item->columns : "{}";
    struct json_doc *doc = json_parse_row(columns, (int64_t)strlen(columns), JSON_ROW_VALUES, "columns", err);
    int rc = doc ? 0 : -1;
    if (!rc && json_type(json_root(doc)) != JSON_OBJECT) rc = err_set(err, "columns: expected an object");
    if (r->n_item == r->cap) {
        const int64_t before = r->cap;
        r->cap = MT_MAX(2 * before, 64);
        r->values = mem_grow(r->values, before * r->n, r->cap * r->n, sizeof(*r->values));
        r->totals = mem_grow(r->totals, before, r->cap, sizeof(*r->totals));
    }
    double *values = r->values + r->n_item * r->n;
    for (int64_t i = 0; !rc && i < r->n; i++) rc = score(&r->of[i], item, json_root(doc), &values[i], err);
    r->n_item += !rc;
    json_free(doc);
    return rc;
}

int rewards_collect(struct rewards *r, struct reward_results *out, struct err *err)
{
    (void)err;
    for (int64_t row = 0; row < r->n_item; row++) {
        double total = 0;
        int64_t n_null = 0;
        for (int64_t i = 0; i < r->n; i++) {
            const double value = r->values[row * r->n + i];
            const bool null = isnan(value);
            r->nulls[i] += null;
            n_null += null;
            if (!null) total += r->of[i].key.weight * value;
        }
        r->totals[row] = n_null == r->n ? (double)NAN : total;
    }
    *out = (struct reward_results){.n = r->n_item, .values = r->values, .totals = r->totals, .nulls = r->nulls};
    return 0;
}

/* rewards.c - see rewards.h. */
#include "train/reward/rewards.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/json/text.h"
#include "train/reward/judge.h"
#include "train/reward/reward_command.h"

struct reward {
    struct reward_key key;
    struct verifier verifier;      /* of a built-in one */
    struct reward_command command; /* REWARD_COMMAND */
    struct judge *judge;           /* REWARD_JUDGE */
};
struct rewards {
    struct reward of[REWARDS_MOST];
    int64_t n, n_item, cap;
    bool has_command;
    double *values, *totals; /* [cap, n], [cap] */
    int64_t nulls[REWARDS_MOST], missing[REWARDS_MOST];
    struct reward_mean *metrics; /* [n_metric of REWARDS_MOST REWARD_METRICS] */
    int64_t n_metric;
};

static bool is_command(const struct reward *r) { return r->key.kind == REWARD_COMMAND; }
static bool is_judge(const struct reward *r) { return r->key.kind == REWARD_JUDGE; }
static bool is_environment(const struct reward *r) { return r->key.kind == REWARD_ENVIRONMENT; }
static bool is_builtin(const struct reward *r) { return !is_command(r) && !is_judge(r) && !is_environment(r); }

/* ---- opening ---- */

static int open_builtin(struct reward *r, struct err *err)
{
    const struct reward_key *k = &r->key;
    const struct verify_options opt = {.kind = k->kind,
                                       .ignore_case = k->ignore_case,
                                       .tolerance = k->tolerance,
                                       .pattern = k->pattern,
                                       .schema = k->schema,
                                       .max = k->max,
                                       .cache = k->cache,
                                       .n = k->n};
    char name[REWARD_NAME + 24];
    snprintf(name, sizeof(name), "reward.%s: %s", k->name, k->schema ? "schema" : "pattern");
    return verifier_open(&r->verifier, &opt, name, err);
}

static int open_command(struct reward *r, const struct config *c, struct err *err)
{
    char name[REWARD_NAME + 8];
    snprintf(name, sizeof(name), "reward.%s", r->key.name);
    if (is_judge(r)) {
        const struct judge_options opt = {.name = name,
                                          .url = r->key.words.words[1],
                                          .model = r->key.model,
                                          .prompt_file = r->key.prompt,
                                          .key_file = r->key.key,
                                          .timeout_s = c->reward.timeout_s};
        return (r->judge = judge_open(&opt, err)) ? 0 : -1;
    }
    if (reward_command_open(&r->command, name, r->key.words.words + 1, err)) return -1;
    r->command.timeout_s = c->reward.timeout_s;
    r->command.nan_is_null = c->reward.on_nan == CFG_NAN_NULL;
    return 0;
}

/* A command is started after the checks of all others. */
struct rewards *rewards_open(const struct config *c, bool asks, struct err *err)
{
    struct rewards *r = mem_alloc(sizeof(*r));
    int rc = 0;
    while (r->n < REWARDS_MOST && reward_keys_get(c->reward.NAME, r->n, &r->of[r->n].key)) r->n++;
    if (!r->n)
        rc = err_set(err, "no rewards: add a section [reward] with NAME = KIND ARGUMENTS, e.g. correct = last_number");
    for (int64_t i = 0; !rc && i < r->n; i++)
        if (is_builtin(&r->of[i])) rc = open_builtin(&r->of[i], err);
    for (int64_t i = 0; asks && !rc && i < r->n; i++) {
        if (is_command(&r->of[i]) || is_judge(&r->of[i])) rc = open_command(&r->of[i], c, err);
        r->has_command |= is_command(&r->of[i]);
    }
    r->metrics = mem_array(REWARDS_MOST * REWARD_METRICS, sizeof(*r->metrics));
    if (!rc) return r;
    rewards_close(r);
    return NULL;
}

void rewards_close(struct rewards *r)
{
    if (!r) return;
    for (int64_t i = 0; i < r->n; i++) {
        verifier_close(&r->of[i].verifier);
        reward_command_close(&r->of[i].command);
        judge_close(r->of[i].judge);
        reward_key_free(&r->of[i].key);
    }
    mem_free(r->values);
    mem_free(r->totals);
    mem_free(r->metrics);
    mem_free(r);
}

int64_t rewards_count(const struct rewards *r) { return r->n; }
const char *rewards_name(const struct rewards *r, int64_t i) { return r->of[i].key.name; }
double rewards_weight(const struct rewards *r, int64_t i) { return r->of[i].key.weight; }

double rewards_total(const struct rewards *r, const double *values)
{
    double total = 0;
    int64_t n = 0;
    for (int64_t i = 0; i < r->n; i++) {
        if (isnan(values[i])) continue;
        total += r->of[i].key.weight * values[i];
        n++;
    }
    return n ? total : NAN;
}

/* ---- items ---- */

int rewards_begin(struct rewards *r, int64_t step, struct err *err)
{
    r->n_item = 0;
    for (int64_t i = 0; i < r->n; i++) {
        if (is_judge(&r->of[i])) judge_begin(r->of[i].judge, step);
        if (is_command(&r->of[i]) && reward_command_begin(&r->of[i].command, step, err)) return -1;
    }
    return 0;
}

/* The column as text: a string, or the JSON of another value; NULL: the column is missing or null. */
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
    struct verify_answer answer = item->answer;
    if (!answer.content.text) answer.content.text = ""; /* an empty answer */
    if (!answer.whole.text) answer.whole.text = "";
    const int rc = has && r->key.reference ? reference_of(&text, &reference, columns, r->key.reference, err) : 0;
    if (!rc) *value = verifier_score(&r->verifier, &answer, reference);
    text_free(&text);
    return rc;
}

/* What a command gets of an item. */
static void put_row(struct text_buf *out, const struct reward_item *item)
{
    char number[16];
    text_put(out, "{");
    program_put_member(out, "prompt", item->prompt);
    text_put_key(out, "completion");
    text_put_quoted(out, item->answer.whole.text, item->answer.whole.size);
    text_put_key(out, "completion_ids");
    text_put(out, "[");
    for (int64_t i = 0; i < item->answer.n_ids; i++) {
        snprintf(number, sizeof(number), "%s%d", i ? ", " : "", item->answer.ids[i]);
        text_put(out, number);
    }
    text_put(out, "]");
    text_put_key(out, "finish_reason");
    text_put_string(out, item->finish_reason);
    program_put_member(out, "columns", item->columns ? item->columns : "{}");
    text_put(out, "}");
}

static int score_all(struct rewards *r, const struct reward_item *item, struct json columns, struct err *err)
{
    double *values = r->values + r->n_item * r->n;
    struct text_buf row = {0};
    int rc = 0;
    if (r->has_command) put_row(&row, item);
    for (int64_t i = 0; !rc && i < r->n; i++) {
        struct reward *of = &r->of[i];
        const struct verify_text text = item->answer.content;
        if (is_environment(of)) {
            values[i] = item->environment ? *item->environment : (double)NAN;
            continue;
        }
        rc = is_command(of) ? reward_command_add(&of->command, row.text, row.size, err)
             : is_judge(of) ? judge_add(of->judge, item->prompt, text.text, text.size, columns, err)
                            : score(of, item, columns, &values[i], err);
    }
    text_free(&row);
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
    if (!rc) rc = score_all(r, item, json_root(doc), err);
    r->n_item += !rc;
    json_free(doc);
    return rc;
}

/* ---- results ---- */

static int end_one(struct reward *r, struct err *err)
{
    if (is_judge(r)) judge_end(r->judge);
    return is_command(r) ? reward_command_end(&r->command, err) : 0;
}

/* *open: it has rewards to come. */
static int work_one(struct reward *r, bool *open, struct err *err)
{
    *open = false;
    if (is_builtin(r) || is_environment(r)) return 0;
    if (is_judge(r) ? judge_work(r->judge, err) : reward_command_work(&r->command, err)) return -1;
    *open = is_judge(r) ? !judge_done(r->judge) : !reward_command_done(&r->command);
    return 0;
}

/* 1: stop() is true. */
static int wait_for_all(struct rewards *r, bool (*stop)(void), struct err *err)
{
    for (int64_t i = 0; i < r->n; i++)
        if (end_one(&r->of[i], err)) return -1;
    for (;;) {
        struct pollfd fds[REWARDS_MOST * PROGRAM_FDS];
        bool open, any = false, judges = false;
        int n = 0;
        for (int64_t i = 0; i < r->n; i++) {
            if (work_one(&r->of[i], &open, err)) return -1;
            any |= open;
            judges |= open && is_judge(&r->of[i]);
            if (open && is_command(&r->of[i])) n += program_fds(&r->of[i].command.program, fds + n);
        }
        if (!any) return 0;
        if (stop && stop()) return 1;
        poll(fds, (nfds_t)n, judges ? 5 : 50); /* short, to notice timeouts; a signal is for the caller */
        progress();
    }
}

static void take_judge(struct rewards *r, int64_t i)
{
    const struct judge *j = r->of[i].judge;
    for (int64_t row = 0; row < r->n_item; row++) r->values[row * r->n + i] = judge_values(j)[row];
    r->missing[i] = judge_missing(j);
}

static void take_command(struct rewards *r, int64_t i)
{
    const struct reward_command *c = &r->of[i].command;
    for (int64_t row = 0; row < r->n_item; row++) r->values[row * r->n + i] = c->values[row];
    r->missing[i] = c->n_missing;
    for (int64_t m = 0; m < c->n_metric; m++) {
        struct reward_mean *mean = &r->metrics[r->n_metric++];
        snprintf(mean->name, sizeof(mean->name), "%s/%s", r->of[i].key.name, c->metrics[m].name);
        mean->mean = c->metrics[m].sum / (double)c->metrics[m].n;
    }
}

int rewards_collect(struct rewards *r, struct reward_results *out, bool (*stop)(void), struct err *err)
{
    const int rc = wait_for_all(r, stop, err);
    if (rc) return rc;
    memset(r->nulls, 0, sizeof(r->nulls));
    r->n_metric = 0;
    for (int64_t i = 0; i < r->n; i++) {
        if (is_command(&r->of[i])) take_command(r, i);
        if (is_judge(&r->of[i])) take_judge(r, i);
    }
    for (int64_t row = 0; row < r->n_item; row++) {
        const double *values = r->values + row * r->n;
        for (int64_t i = 0; i < r->n; i++) r->nulls[i] += isnan(values[i]);
        r->totals[row] = rewards_total(r, values);
    }
    *out = (struct reward_results){.n = r->n_item,
                                   .values = r->values,
                                   .totals = r->totals,
                                   .nulls = r->nulls,
                                   .missing = r->missing,
                                   .metrics = r->metrics,
                                   .n_metric = r->n_metric};
    return 0;
}

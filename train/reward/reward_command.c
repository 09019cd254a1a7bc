/* reward_command.c - see reward_command.h. */
#include "train/reward/reward_command.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define NOTHING_LOST "no row was waiting for an answer"

int reward_command_open(struct reward_command *c, const char *key, char *const argv[], struct err *err)
{
    *c = (struct reward_command){.timeout_s = 60};
    return program_open(&c->program, key, argv, err);
}

void reward_command_close(struct reward_command *c)
{
    program_close(&c->program);
    mem_free(c->values);
    mem_free(c->answered);
    *c = (struct reward_command){.n = 0};
}

/* ---- answers ---- */

/* NaN and infinity are numbers of Python's JSON. */
static bool is_not_finite(struct json j)
{
    const char *wide = json_type(j) == JSON_REAL ? json_wide(j) : NULL;
    return wide && strpbrk(wide, "NI");
}

static int add_metric(struct reward_command *c, const char *name, double value, struct err *err)
{
    int64_t i = 0;
    while (i < c->n_metric && strcmp(c->metrics[i].name, name)) i++;
    if (i == REWARD_METRICS) return err_set(err, "there are more than %d \"metrics\"", REWARD_METRICS);
    if (i == c->n_metric) {
        c->metrics[c->n_metric++] = (struct reward_metric){.n = 0};
        snprintf(c->metrics[i].name, sizeof(c->metrics[i].name), "%s", name);
    }
    c->metrics[i].sum += value;
    c->metrics[i].n++;
    return 0;
}

static int read_metrics(struct reward_command *c, struct json metrics, struct err *err)
{
    const char *name;
    struct json value;
    double v;
    if (!json_given(metrics)) return 0;
    if (json_type(metrics) != JSON_OBJECT) return err_set(err, "\"metrics\": expected an object");
    for (int64_t i = 0; json_member(metrics, i, &name, &value); i++) {
        const enum json_type type = json_type(value);
        if (strlen(name) >= sizeof(c->metrics[0].name)) return err_set(err, "a name in \"metrics\" is too long");
        if (type == JSON_NULL || (c->nan_is_null && is_not_finite(value))) continue;
        if ((type != JSON_INT && type != JSON_REAL) || json_f64(value, &v, NULL))
            return err_set(err, "\"metrics\": \"%.64s\": expected a number that is finite", name);
        if (add_metric(c, name, v, err)) return -1;
    }
    return 0;
}

static int read_answer(struct reward_command *c, struct json answer, struct err *err)
{
    static const char *const known[] = {"id", "reward", "metrics"};
    int64_t id;
    double value;
    if (json_type(answer) != JSON_OBJECT) return err_set(err, "expected an object");
    if (program_check_keys(answer, known, MT_LEN(known), err)) return -1;
    if (json_i64(json_find(answer, "id"), 0, INT64_MAX, &id, NULL)) return err_set(err, "it has no \"id\" of a row");
    if (id < c->first_id || id >= c->first_id + c->n)
        return err_set(err, "id %lld is of no row of step %lld", (long long)id, (long long)c->step);
    if (c->answered[id - c->first_id]) return err_set(err, "id %lld was answered before", (long long)id);
    if (!json_has(answer, "reward")) return err_set(err, "it has no \"reward\"");
    if (program_reward(json_find(answer, "reward"), c->nan_is_null, &value, err) ||
        read_metrics(c, json_find(answer, "metrics"), err))
        return -1;
    c->values[id - c->first_id] = value;
    c->answered[id - c->first_id] = true;
    c->n_open--;
    return 0;
}

static int take_line(void *user, const char *text, int64_t size, struct err *err)
{
    struct reward_command *c = user;
    struct err why;
    struct json_doc *doc = json_parse_row(text, size, JSON_ROW_VALUES, "answer", &why);
    const int rc = doc ? read_answer(c, json_root(doc), &why) : -1;
    json_free(doc);
    return rc ? program_bad_line(&c->program, err, text, size, why.msg) : 0;
}

/* ---- a step ---- */

/* The rows of the step that have no answer, and its later rows, get no reward. */
static int fail(struct reward_command *c, const char *why, struct err *err)
{
    char lost[128];
    snprintf(lost, sizeof(lost), "it answered %lld row%s of step %lld, the rewards of the others are null",
             (long long)(c->n - c->n_open), str_plural(c->n - c->n_open), (long long)c->step);
    c->failed = true;
    c->n_missing = c->n_open;
    c->n_open = 0;
    return program_restart(&c->program, why, lost, err);
}

int reward_command_begin(struct reward_command *c, int64_t step, struct err *err)
{
    const struct program_reader reader = {.line = take_line, .user = c};
    c->first_id += c->n;
    c->step = step;
    c->n = c->n_open = c->n_missing = c->n_metric = 0;
    c->failed = false;
    c->until = 0;
    if (program_work(&c->program, &reader, err)) return -1;
    return program_ended(&c->program) ? program_restart(&c->program, NULL, NOTHING_LOST, err) : 0;
}

int reward_command_add(struct reward_command *c, const char *row, int64_t size, struct err *err)
{
    struct text_buf line = {0};
    char head[96];
    int rc = 0;
    if (c->n == c->cap) {
        const int64_t before = c->cap;
        c->cap = MT_MAX(2 * before, 64);
        c->values = mem_grow(c->values, before, c->cap, sizeof(*c->values));
        c->answered = mem_grow(c->answered, before, c->cap, sizeof(*c->answered));
    }
    c->values[c->n] = (double)NAN;
    c->answered[c->n] = false;
    const int64_t id = c->first_id + c->n++;
    if (c->failed) return c->n_missing++, 0;
    c->n_open++;
    snprintf(head, sizeof(head), "{\"id\": %lld, \"step\": %lld, ", (long long)id, (long long)c->step);
    text_put(&line, head);
    text_put_bytes(&line, row + 1, size - 1);
    text_put(&line, "\n");
    rc = program_put(&c->program, line.text, line.size, err);
    text_free(&line);
    return rc ? rc : reward_command_work(c, err);
}

int reward_command_end(struct reward_command *c, struct err *err)
{
    char line[64];
    c->until = clock_ms() + 1e3 * c->timeout_s;
    if (c->failed) return 0;
    const int n = snprintf(line, sizeof(line), "{\"end\": %lld}\n", (long long)c->step);
    return program_put(&c->program, line, n, err) ? -1 : reward_command_work(c, err);
}

bool reward_command_done(const struct reward_command *c) { return c->failed || (c->until > 0 && !c->n_open); }

int reward_command_work(struct reward_command *c, struct err *err)
{
    const struct program_reader reader = {.line = take_line, .user = c};
    char why[64];
    if (c->failed) return 0;
    if (program_work(&c->program, &reader, err)) return -1;
    if (reward_command_done(c)) return c->program.n_failed = 0;
    if (program_ended(&c->program))
        return c->n_open ? fail(c, NULL, err) : program_restart(&c->program, NULL, NOTHING_LOST, err);
    if (!c->until || clock_ms() < c->until) return 0;
    snprintf(why, sizeof(why), "gave no answer for %g s", c->timeout_s);
    return fail(c, why, err);
}

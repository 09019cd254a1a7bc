/* score_rollouts.c - see score_rollouts.h. */
#include "train/rollout/score_rollouts.h"

#include <math.h>
#include <string.h>

#include "data/file/file.h"
#include "train/generate/answer_text.h"
#include "train/launch/process.h"
#include "train/models/message.h"
#include "train/reward/rewards.h"
#include "train/run/prompt_rows.h"
#include "train/rollout/rollout_lines.h"

enum { BATCH = 256 }; /* rows of a step, or more to end a group */

/* Of numbers that come one by one; nulls do not count. */
struct sums {
    int64_t n, n_null, n_missing;
    double mean, squares, least, most; /* squares: sum of squared differences to the mean */
};
struct score {
    const struct score_options *o;
    struct run run;
    struct prompt_rows prompts;
    struct rewards *rewards;
    struct message_rules rules;
    struct message message;
    struct json_doc *docs[2 * BATCH]; /* [n] rows of the batch */
    int64_t n, n_row, n_unknown, step, last_group;
    struct sums total, of[REWARDS_MOST];
    struct text_buf line;
    struct file_writer out;
    bool writes;
};

static void add_number(struct sums *s, double v)
{
    if (isnan(v)) {
        s->n_null++;
        return;
    }
    const double before = v - s->mean;
    s->least = s->n ? fmin(s->least, v) : v;
    s->most = s->n ? fmax(s->most, v) : v;
    s->mean += before / (double)++s->n;
    s->squares += before * (v - s->mean);
}

/* ---- a row ---- */

static int ids_of(struct token_list *ids, const struct score *s, struct json row, const char *key, struct err *err)
{
    struct json list;
    int64_t id;
    if (json_get_array(row, key, &list, err)) return -1;
    token_list_reserve(ids, MT_MAX(json_count(list), 1));
    for (int64_t i = 0; i < json_count(list); i++) {
        if (json_i64(json_at(list, i), 0, s->run.arch.vocab - 1, &id, err)) return -1;
        ids->ids[ids->count++] = (int32_t)id;
    }
    return ids->count ? 0 : json_error(row, err, "%s is empty", key);
}

static const struct prompt_row *prompt_of(const struct score *s, const struct token_list *ids)
{
    for (int64_t i = 0; i < s->prompts.n; i++) {
        const struct token_list *have = &s->prompts.of[i].prompt.ids;
        if (have->count == ids->count && !memcmp(have->ids, ids->ids, (size_t)ids->count * sizeof(*ids->ids)))
            return &s->prompts.of[i];
    }
    return NULL;
}

/* The text of a completion: the row's `text`; if it has none, the text of the tokens up to the end token. */
static int text_of(struct answer_text *text, const struct score *s, struct json row, const struct prompt *p,
                   const struct token_list *ids, struct err *err)
{
    const struct json own = json_find(row, "text");
    const char *given;
    int64_t size;
    *text = (struct answer_text){.tok = s->run.tok};
    answer_text_begin(text);
    if (json_given(own)) {
        if (json_str(own, &given, &size, err)) return -1;
        text_put_bytes(&text->text, given, size);
        return 0;
    }
    const int64_t last = ids->count - 1;
    bool ended = false;
    for (int64_t i = 0; i < p->n_ends; i++) ended |= p->ends[i] == ids->ids[last];
    for (int64_t i = 0; i <= last - ended; i++) (void)answer_text_add(text, ids->ids[i]);
    answer_text_end(text);
    return 0;
}

/* Writes the columns for the rewards: the row's own `columns`, otherwise those of its prompt. */
static int columns_of(struct text_buf *out, const struct prompt_row *prompt, struct json row, struct err *err)
{
    const struct json own = json_find(row, "columns");
    if (!json_given(own)) return text_put(out, prompt ? prompt->columns : "{}"), 0;
    return text_put_json(out, own, err);
}

static int submit(struct score *s, struct json row, struct err *err)
{
    struct prompt prompt = {.n_ends = 0};
    struct token_list before = {0}, ids = {0};
    struct answer_text text = {.tok = NULL};
    struct text_buf columns = {0};
    const char *finish = "stop";
    double of_environment = (double)NAN;
    int rc = ids_of(&before, s, row, "prompt_ids", err) || ids_of(&ids, s, row, "completion_ids", err) ||
             json_opt_str(row, "finish_reason", &finish, err) ||
             json_opt_f64(row, "environment_reward", &of_environment, err) ||
             prompt_document(&prompt, &s->run, before.ids, before.count, err) ||
             text_of(&text, s, row, &prompt, &ids, err);
    const struct prompt_row *from = rc ? NULL : prompt_of(s, &before);
    if (!rc) rc = columns_of(&columns, from, row, err);
    if (!rc) {
        const bool open = prompt_opens_reasoning(&prompt, s->run.tok);
        const struct message_input in = {.rules = s->rules, .think_open = open, .whole = true};
        message_parse(&s->message, &in, text.text.text, text.text.size);
        const struct text_buf *content = &s->message.content;
        const struct text_buf *whole = s->rules.calls == MESSAGE_HARMONY ? content : &text.text;
        const struct reward_item item = {
            .prompt = from ? from->text : "null",
            .columns = columns.text,
            .answer = {.content = {content->text ? content->text : "", content->size},
                       .whole = {whole->text ? whole->text : "", whole->size},
                       .think_open = open,
                       .formed = !strcmp(finish, "stop") &&
                                 message_is_formed(&in, s->run.tok, text.text.text, text.text.size),
                       .ids = ids.ids,
                       .n_ids = ids.count},
            .finish_reason = finish,
            .environment = &of_environment};
        s->n_unknown += !from;
        if ((rc = rewards_submit(s->rewards, &item, err))) err_prefix(err, "%s", json_name(row));
    }
    prompt_free(&prompt);
    token_list_free(&before);
    token_list_free(&ids);
    answer_text_free(&text);
    text_free(&columns);
    return rc ? -1 : 0;
}

/* ---- a batch ---- */

static int write_row(struct score *s, struct json row, double total, const double *values, struct err *err)
{
    struct text_buf *out = &s->line;
    const char *key;
    struct json value;
    out->size = 0;
    text_put(out, "{");
    for (int64_t i = 0; json_member(row, i, &key, &value); i++) {
        if (!strcmp(key, "reward") || !strcmp(key, "rewards")) continue;
        text_put_comma(out);
        text_put_string(out, key);
        text_put(out, ": ");
        if (text_put_json(out, value, err)) return -1;
    }
    rollout_rewards_put(out, s->rewards, total, values);
    text_put(out, "}\n");
    return file_writer_put(&s->out, out->text, out->size, err);
}

static int end_batch(struct score *s, struct err *err)
{
    struct reward_results got;
    const int64_t n = rewards_count(s->rewards);
    int rc = rewards_collect(s->rewards, &got, NULL, err);
    for (int64_t r = 0; !rc && r < s->n; r++) {
        add_number(&s->total, got.totals[r]);
        for (int64_t i = 0; i < n; i++) add_number(&s->of[i], got.values[r * n + i]);
        if (s->writes) rc = write_row(s, json_root(s->docs[r]), got.totals[r], got.values + r * n, err);
    }
    for (int64_t i = 0; !rc && i < n; i++) s->of[i].n_missing += got.missing[i];
    for (int64_t r = 0; r < s->n; r++) json_free(s->docs[r]);
    s->n = 0;
    return rc ? rc : rewards_begin(s->rewards, ++s->step, err);
}

static int add_row(struct score *s, const char *line, int64_t size, const char *where, struct err *err)
{
    int64_t group = -1;
    struct json_doc *doc = json_parse_row(line, size, JSON_VALUES, where, err);
    if (!doc) return -1;
    const struct json row = json_root(doc);
    int rc = json_opt_i64(row, "group", 0, INT64_MAX, &group, err);
    const bool full = s->n >= BATCH && (group < 0 || group != s->last_group || s->n == 2 * BATCH);
    if (!rc && full) rc = end_batch(s, err);
    if (!rc) rc = submit(s, row, err);
    if (rc) return json_free(doc), -1;
    s->docs[s->n++] = doc;
    s->last_group = group;
    s->n_row++;
    progress();
    return 0;
}

static int read_rows(struct score *s, struct err *err)
{
    char *line, where[MT_PATH + 32];
    int64_t size;
    int more = 0, rc = 0;
    struct line_reader *reader = line_reader_open(s->o->rollouts, err);
    if (!reader) return -1;
    while (!rc && (more = line_reader_next(reader, &line, &size, err)) > 0) {
        snprintf(where, sizeof(where), "%s:%lld", s->o->rollouts, (long long)line_reader_line(reader));
        if (size) rc = add_row(s, line, size, where, err);
    }
    line_reader_close(reader);
    if (rc || more < 0) return -1;
    return s->n_row ? end_batch(s, err) : err_set(err, "%s has no rows", s->o->rollouts);
}

/* ---- the command ---- */

static void print_sums(FILE *out, const char *name, const char *weight, const struct sums *s)
{
    const double std = s->n > 1 ? sqrt(s->squares / (double)(s->n - 1)) : 0;
    fprintf(out, "%-24s %8s", name, weight);
    if (s->n)
        fprintf(out, " %10.4f %10.4f %10.4f %10.4f", s->mean, std, s->least, s->most);
    else
        fprintf(out, " %10s %10s %10s %10s", "-", "-", "-", "-");
    fprintf(out, " %7lld %7lld\n", (long long)s->n_null, (long long)s->n_missing);
}

static void print_all(const struct score *s, FILE *out)
{
    char weight[32];
    fprintf(out, "%-24s %8s %10s %10s %10s %10s %7s %7s\n", "reward", "weight", "mean", "std", "min", "max", "null",
            "missing");
    for (int64_t i = 0; i < rewards_count(s->rewards); i++) {
        snprintf(weight, sizeof(weight), "%g", rewards_weight(s->rewards, i));
        print_sums(out, rewards_name(s->rewards, i), weight, &s->of[i]);
    }
    print_sums(out, "sum of weight * reward", "", &s->total);
    fprintf(out, "%lld rows\n", (long long)s->n_row);
    if (s->n_unknown && s->prompts.n)
        log_warn("%lld of %lld rows have a prompt that is in none of the rows of prompts: rewards get no columns for "
                 "them",
                 (long long)s->n_unknown, (long long)s->n_row);
}

static int open_all(struct score *s, const struct config *cfg, struct err *err)
{
    struct dataset_options unused;
    if (s->o->output && file_check_new(s->o->output, err)) return -1;
    if (run_open_headers(&s->run, cfg, err) || run_open_tokenizer(&s->run, &unused, NULL, err)) return -1;
    s->rules = message_rules_of(s->run.chat);
    if (s->o->prompts &&
        prompt_rows_load(&s->prompts, &s->run, s->o->prompts, cfg->data.columns, s->run.arch.max_len, err))
        return -1;
    if (!(s->rewards = rewards_open(cfg, true, err)) || rewards_begin(s->rewards, 0, err)) return -1;
    if (!s->o->output) return 0;
    if (file_writer_open(&s->out, s->o->output, err)) return -1;
    s->writes = true;
    process_delete_on_signal(s->out.tmp);
    return 0;
}

int score_rollouts(const struct score_options *o, const struct config *cfg, FILE *report, struct err *err)
{
    struct score *s = mem_alloc(sizeof(*s));
    s->o = o;
    int rc = open_all(s, cfg, err) || read_rows(s, err) ? -1 : 0;
    process_delete_on_signal(NULL);
    if (s->writes && file_writer_close(&s->out, !rc, rc ? NULL : err)) rc = -1;
    if (!rc) print_all(s, report);
    for (int64_t r = 0; r < s->n; r++) json_free(s->docs[r]);
    rewards_close(s->rewards);
    prompt_rows_free(&s->prompts);
    message_free(&s->message);
    text_free(&s->line);
    run_close(&s->run);
    mem_free(s);
    return rc;
}

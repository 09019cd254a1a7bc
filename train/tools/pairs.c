/* pairs.c - makes rows of preferences from judged answers. Both input files have the same order of rows, so one pass
 * reads them. */
#include "train/tools/pairs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "data/json/text.h"
#include "data/rows.h"

/* Lines of a JSONL file as objects, one ahead. */
struct lines {
    struct line_reader *reader;
    const char *path;
    struct json_doc *doc; /* NULL at the end */
    int64_t number;       /* of doc, from 0 */
    struct text_buf id;   /* of doc: `id`, or the number */
};

static int next_line(struct lines *l, struct err *err)
{
    char *line, where[MT_PATH + 32];
    int64_t size;
    json_free(l->doc);
    l->doc = NULL;
    const int more = line_reader_next(l->reader, &line, &size, err);
    if (more < 1) return more;
    snprintf(where, sizeof(where), "%s:%lld", l->path, (long long)++l->number + 1);
    if (!(l->doc = json_parse_row(line, size, JSON_ROW_VALUES, where, err))) return -1;
    const struct json id = json_find(json_root(l->doc), "id");
    l->id.size = 0;
    snprintf(where, sizeof(where), "%lld", (long long)l->number);
    if (json_given(id)) return text_put_json(&l->id, id, err);
    text_put(&l->id, where);
    return 0;
}

static int open_lines(struct lines *l, const char *path, struct err *err)
{
    *l = (struct lines){.path = path, .number = -1};
    l->reader = line_reader_open(path, err);
    return l->reader ? next_line(l, err) : -1;
}

static void close_lines(struct lines *l)
{
    if (l->reader) line_reader_close(l->reader);
    json_free(l->doc);
    text_free(&l->id);
}

/* The best and the worst answer of one row, and their scores. */
struct judged {
    char *best, *worst;
    double high, low;
    int64_t n, n_cut, n_nul; /* of n: cut by the limit of tokens; with a NUL character, which training refuses */
};

static void free_judged(struct judged *j)
{
    mem_free(j->best);
    mem_free(j->worst);
    *j = (struct judged){.high = -INFINITY, .low = INFINITY};
}

/* `right`, else `reward`; NaN: not judged. */
static int score_of(struct json answer, double *score, struct err *err)
{
    const struct json right = json_find(answer, "right"), reward = json_find(answer, "reward");
    bool yes;
    *score = NAN;
    if (!json_has(answer, "right") && !json_has(answer, "reward"))
        return json_error(answer, err, "has neither `right` nor `reward`: write it with `moetrain eval --generate`");
    if (json_given(reward)) return json_f64(reward, score, err);
    if (!json_given(right)) return 0;
    if (json_bool(right, &yes, err)) return -1;
    *score = yes;
    return 0;
}

/* Compares an answer with the best and the worst. An answer that the token limit truncated cannot be the best. For
 * conversations it takes `content`, the answer without reasoning, if the answer has it. */
static int take(struct judged *j, struct json answer, bool messages, struct err *err)
{
    const char *key = messages && json_has(answer, "content") ? "content" : "text";
    const char *text, *reason = "";
    double score;
    int64_t size;
    if (json_str(json_find(answer, key), &text, &size, err) || json_opt_str(answer, "finish_reason", &reason, err) ||
        score_of(answer, &score, err))
        return -1;
    const bool cut = !strcmp(reason, "length");
    j->n++;
    j->n_cut += cut;
    const bool has_nul = (int64_t)strlen(text) != size;
    j->n_nul += has_nul;
    if (!(fabs(score) < INFINITY) || has_nul || text_is_blank(text, size)) return 0;
    if (score > j->high && !cut) {
        mem_free(j->best);
        j->best = mem_strdup(text);
        j->high = score;
    }
    if (score < j->low) {
        mem_free(j->worst);
        j->worst = mem_strdup(text);
        j->low = score;
    }
    return 0;
}

static bool is_answer(struct json message)
{
    const char *role;
    return !json_get_str(message, "role", &role, NULL) && !strcmp(role, "assistant");
}

/* The messages of a conversation; absent: the prompt is a text. */
static struct json messages_of(struct json row)
{
    const struct json prompt = json_find(row, "prompt");
    return json_type(prompt) == JSON_ARRAY ? prompt : json_find(row, "messages");
}

/* Writes the prompt of a row: its text, or its messages without an answer at the end. */
static int put_prompt(struct text_buf *out, struct json row, bool *messages, struct err *err)
{
    const struct json list = messages_of(row), prompt = json_find(row, "prompt");
    int64_t n = json_count(list);
    *messages = json_type(list) == JSON_ARRAY;
    text_put(out, "{\"prompt\": ");
    if (!*messages && json_type(prompt) != JSON_STRING)
        return json_error(row, err, "has neither `prompt` nor `messages`: pairs need the prompt as text or messages");
    if (!*messages) return text_put_json(out, prompt, err);
    if (n && is_answer(json_at(list, n - 1))) n--;
    text_put(out, "[");
    for (int64_t i = 0; i < n; i++) {
        text_put_comma(out);
        if (text_put_json(out, json_at(list, i), err)) return -1;
    }
    text_put(out, "]");
    return 0;
}

static void put_side(struct text_buf *out, const char *key, const char *text, bool message)
{
    text_put_key(out, key);
    if (message) text_put(out, "[{\"role\": \"assistant\", \"content\": ");
    text_put_string(out, text);
    if (message) text_put(out, "}]");
}

static int put_pair(struct text_buf *out, struct json row, const struct judged *j, struct err *err)
{
    const struct json tools = json_find(row, "tools");
    bool messages;
    if (put_prompt(out, row, &messages, err)) return -1;
    put_side(out, "chosen", j->best, messages);
    put_side(out, "rejected", j->worst, messages);
    if (json_given(tools)) text_put_key(out, "tools");
    if (json_given(tools) && text_put_json(out, tools, err)) return -1;
    text_put(out, "}\n");
    return 0;
}

/* Moves `rows` to the row with the id of the next answer, and takes all answers with this id. */
static int next_row(struct lines *rows, struct lines *answers, struct judged *j, struct err *err)
{
    free_judged(j);
    while (rows->doc && strcmp(rows->id.text, answers->id.text) != 0)
        if (next_line(rows, err)) return -1;
    if (!rows->doc)
        return json_error(json_root(answers->doc), err,
                          "no row of %s has the id %s, or it comes before that of an earlier answer", rows->path,
                          answers->id.text);
    while (answers->doc && !strcmp(rows->id.text, answers->id.text))
        if (take(j, json_root(answers->doc), json_type(messages_of(json_root(rows->doc))) == JSON_ARRAY, err) ||
            next_line(answers, err))
            return -1;
    return 0;
}

/* ---- what training refuses ---- */

struct trainer {
    struct tokenizer *tok; /* NULL: nothing is refused */
    struct chat_template *chat;
    struct row_options opt;
    struct row_reader rows;
    int64_t n_refused,
        n_spelled; /* n_spelled: pairs that spell a special token, as far as one can see without a tokenizer */
};

static int open_trainer(struct trainer *t, const char *checkpoint, struct err *err)
{
    struct err why;
    if (!checkpoint) return 0;
    if (file_check_kind(checkpoint, true, &why)) return err_set(err, "--checkpoint %s", why.msg);
    if (!(t->tok = tokenizer_open(checkpoint, err)) || row_template(&t->chat, t->tok, checkpoint, NULL, err)) return -1;
    t->opt = (struct row_options){.format = DATA_PREFERENCE, .chat = t->chat};
    t->rows = (struct row_reader){.opt = &t->opt, .tok = t->tok};
    return 0;
}

static void close_trainer(struct trainer *t)
{
    row_reader_free(&t->rows);
    chat_template_free(t->chat);
    tokenizer_free(t->tok);
}

/* Reads both answers of the pair as training does. False: it refuses one. */
static bool takes(struct trainer *t, const char *pair, int64_t size, const char *id)
{
    const char *mark = strstr(pair, "<|");
    struct err why;
    if (!t->tok) {
        t->n_spelled += mark && strstr(mark, "|>");
        return true;
    }
    struct json_doc *doc = json_parse_row(pair, size, JSON_ROW_VALUES, "pair", &why);
    int rc = doc ? 0 : -1;
    for (int i = 0; i < 2 && !rc; i++) {
        t->rows.worse = i;
        rc = row_read(&t->rows, json_root(doc), &why);
    }
    json_free(doc);
    if (rc && ++t->n_refused == 1) log_warn("the pair of row %s is left out, as training refuses it: %s", id, why.msg);
    return !rc;
}

static void tell_of_trainer(const struct trainer *t)
{
    if (t->n_refused > 1) log_warn("%lld pairs are left out, as training refuses them", (long long)t->n_refused);
    if (t->n_spelled)
        log_warn("%lld pair%s <|..|>, perhaps a special token that the chat template refuses: with --checkpoint DIR "
                 "such pairs are left out",
                 (long long)t->n_spelled, t->n_spelled == 1 ? " has" : "s have");
}

static int no_pairs(const struct pairs_options *o, int64_t n_answer, int64_t n_cut, struct err *err)
{
    char cut[160] = "";
    if (n_cut)
        snprintf(cut, sizeof(cut),
                 "raise --tokens (%lld of %lld answers are cut, and these are never the better ones), ",
                 (long long)n_cut, (long long)n_answer);
    return err_set(err, "%s: no row has a better and a worse answer: %sraise --samples or --temperature", o->answers,
                   cut);
}

int pairs_run(const struct pairs_options *o, FILE *report, struct err *err)
{
    struct lines rows, answers = {.path = o->answers};
    struct judged j = {.n = 0};
    struct text_buf out = {0};
    struct trainer trainer = {.tok = NULL};
    int64_t n_row = 0, n_answer = 0, n_cut = 0, n_nul = 0, n_pair = 0;
    if (file_check_new(o->out, err)) return -1;
    int rc = open_lines(&rows, o->rows, err);
    if (!rc) rc = open_lines(&answers, o->answers, err);
    if (!rc) rc = open_trainer(&trainer, o->checkpoint, err);
    text_put(&out, "");
    while (!rc && answers.doc && !(rc = next_row(&rows, &answers, &j, err))) {
        n_row++;
        n_answer += j.n;
        n_cut += j.n_cut;
        n_nul += j.n_nul;
        if (!(j.high > j.low)) continue;
        const int64_t before = out.size;
        if ((rc = put_pair(&out, json_root(rows.doc), &j, err))) break;
        if (takes(&trainer, out.text + before, out.size - before, rows.id.text))
            n_pair++;
        else
            out.size = before;
    }
    if (!rc && n_nul)
        log_warn("%lld answer%s a NUL character, which training refuses: left out", (long long)n_nul,
                 n_nul == 1 ? " has" : "s have");
    if (!rc) tell_of_trainer(&trainer);
    if (!rc && !n_pair && trainer.n_refused)
        rc = err_set(err, "%s: training refuses every pair: correct the answers, or the chat template of %s",
                     o->answers, o->checkpoint);
    else if (!rc && !n_pair)
        rc = no_pairs(o, n_answer, n_cut, err);
    if (!rc) rc = file_write_atomic(o->out, out.text, out.size, err);
    if (!rc)
        fprintf(report, "%s: %lld pairs of %lld rows with %lld answers; train on it with objective.kind = dpo\n",
                o->out, (long long)n_pair, (long long)n_row, (long long)n_answer);
    text_free(&out);
    free_judged(&j);
    close_trainer(&trainer);
    close_lines(&rows);
    close_lines(&answers);
    return rc;
}

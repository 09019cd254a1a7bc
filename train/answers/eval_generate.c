/* eval_generate.c - see eval_generate.h. */
#include "train/answers/eval_generate.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "train/reward/eval_score.h"
#include "train/answers/questions.h"
#include "train/generate/engine_work.h"
#include "train/reward/verify.h"
#include "train/models/message.h"
#include "train/state/stop.h"

enum { AHEAD = 2 /* rows in the engine for each of its sequences */ };

struct eval_generate {
    const struct eval_generate_options *o;
    struct config *cfg;
    struct run run;
    struct verifier verifier;
    struct questions qs;
    struct engine_work work;
    struct engine *engine;
    struct message_rules rules;
    struct message message;
    int fd;                                          /* of the output; -1: none */
    int64_t n_begun, n_written, n_left;              /* rows: in the engine so far; in `out`; to be answered */
    int64_t n_sample, n_tok, n_cut, n_none, n_right; /* samples; NONE and RIGHT of them */
    bool failed;
};

/* ---- answers ---- */

static void put_line(struct question *q, const struct sample *s, const struct text_buf *content, enum verdict verdict)
{
    struct text_buf *out = &q->line;
    char number[96];
    text_put(out, "{\"id\": ");
    text_put(out, q->r.id);
    snprintf(number, sizeof(number), ", \"sample\": %lld, \"right\": %s, \"tokens\": %lld", (long long)s->index,
             verdict == VERDICT_NONE    ? "null"
             : verdict == VERDICT_RIGHT ? "true"
                                        : "false",
             (long long)s->n);
    text_put(out, number);
    text_put(out, s->end == SAMPLE_LENGTH ? ", \"finish_reason\": \"length\"" : ", \"finish_reason\": \"stop\"");
    text_put(out, ", \"reference\": ");
    if (q->reference)
        text_put_quoted(out, q->reference, q->reference_size);
    else
        text_put(out, "null");
    text_put(out, ", \"content\": ");
    text_put_quoted(out, content->text, content->size);
    text_put(out, ", \"text\": ");
    text_put_quoted(out, s->text, s->text_size);
    text_put(out, "}\n");
}

static void judge(void *user, const struct sample *s)
{
    struct question *q = user;
    struct eval_generate *g = q->owner;
    const struct message_input in = {.rules = g->rules, .think_open = q->opened, .whole = true};
    if (s->end == SAMPLE_FAILED) {
        g->failed = true;
    } else {
        message_parse(&g->message, &in, s->text, s->text_size);
        const struct text_buf *content = &g->message.content;
        const struct verify_answer answer = {.content = {content->text, content->size},
                                             .whole = {s->text, s->text_size},
                                             .think_open = q->opened,
                                             .formed = s->end != SAMPLE_LENGTH &&
                                                       message_is_formed(&in, g->run.tok, s->text, s->text_size)};
        const enum verdict v =
            verifier_judge(&g->verifier, &answer, (struct verify_text){q->reference, q->reference_size});
        q->score.n_right += v == VERDICT_RIGHT;
        q->score.n_none += v == VERDICT_NONE;
        g->n_right += v == VERDICT_RIGHT;
        g->n_none += v == VERDICT_NONE;
        g->n_tok += s->n;
        g->n_cut += s->end == SAMPLE_LENGTH;
        if (g->fd >= 0) put_line(q, s, content, v);
    }
    g->n_sample++;
    g->n_left -= ++q->score.n == q->r.q.n;
}

static int write_rows(struct eval_generate *g, struct err *err)
{
    for (; g->n_written < g->qs.n && g->fd >= 0; g->n_written++) {
        struct question *q = &g->qs.items[g->n_written];
        if (q->score.n < q->r.q.n) break;
        for (int64_t at = 0, n; at < q->line.size; at += n) {
            n = write(g->fd, q->line.text + at, (size_t)(q->line.size - at));
            if (n < 0 && errno != EINTR) return err_set(err, "%s cannot be written: %s", g->o->output, strerror(errno));
            n = MT_MAX(n, 0);
        }
        text_free(&q->line);
    }
    return 0;
}

static int add_rows(struct eval_generate *g, struct err *err)
{
    const int64_t most = AHEAD * g->run.generation.n_seq;
    while (g->n_begun < g->qs.n && g->n_begun - (g->qs.n - g->n_left) < most) {
        struct question *q = &g->qs.items[g->n_begun++];
        q->owner = g;
        q->r.q.user = q;
        q->r.q.done = judge;
        if (engine_add(g->engine, &q->r.q, err) < 0) return err_prefix(err, "row %s", q->r.id);
    }
    return 0;
}

static int answer_all(struct eval_generate *g, struct err *err)
{
    bool busy = true;
    g->n_left = g->qs.n;
    engine_work_begin(&g->work);
    stop_take_signals("complete rows are written, without a result");
    while (g->n_begun < g->qs.n || busy) {
        if (stop_asked()) {
            log_info("interrupted after %lld of %lld samples, without a result: eval --generate begins again, it does "
                     "not continue",
                     (long long)g->n_sample, (long long)g->work.n_sample);
            return EXIT_SIGNAL;
        }
        if (add_rows(g, err)) return -1;
        busy = engine_step(g->engine);
        progress();
        if (g->failed) return err_set(err, "the logits are not finite: check the adapter and the model");
        if (write_rows(g, err)) return -1;
        engine_work_tell(&g->work, g->engine, 0, g->n_sample, false);
    }
    engine_work_tell(&g->work, g->engine, 0, g->n_sample, true);
    return 0;
}

/* ---- results ---- */

static void report(struct eval_generate *g, const char *adapter)
{
    struct eval_score score = {.n = 0};
    struct json_out o = {0};
    struct eval_row *rows = mem_array(MT_MAX(g->qs.n, 1), sizeof(*rows));
    int64_t no_reference = 0;
    char error_text[64] = "";
    for (int64_t i = 0; i < g->qs.n; i++) {
        rows[i] = g->qs.items[i].score;
        no_reference += rows[i].n_none > 0;
        if (!rows[i].n_none) eval_score_add(&score, rows[i].n, rows[i].n_right);
    }
    const double mean = eval_score_mean(&score), error = eval_score_error(&score);
    const double tokens = (double)g->n_tok / (double)g->n_sample, cut = (double)g->n_cut / (double)g->n_sample;
    json_out_open(&o, NULL, '{');
    json_out_str(&o, "event", "eval_generate");
    json_out_str(&o, "adapter", adapter);
    json_out_str(&o, "verifier", g->o->verifier);
    json_out_i64(&o, "rows", score.n);
    json_out_i64(&o, "no_reference", no_reference);
    json_out_i64(&o, "samples", g->n_sample);
    json_out_f64(&o, "accuracy", mean);
    json_out_f64(&o, "standard_error", error);
    eval_score_put_pass(&o, "pass_at", rows, g->qs.n);
    json_out_f64(&o, "mean_tokens", tokens);
    json_out_f64(&o, "cut", cut);
    json_out_close(&o, '}');
    if (no_reference)
        log_warn("%lld rows have no reference that %s can compare: they do not count", (long long)no_reference,
                 g->o->verifier);
    if (g->verifier.n_limited)
        log_warn("--pattern took too many steps on %lld answers: they count as wrong",
                 (long long)g->verifier.n_limited);
    if (score.n > 1) snprintf(error_text, sizeof(error_text), " +- %.1f (standard error)", 100 * error);
    log_info("accuracy %.1f %%%s over %lld row%s, %.0f tokens on average, %.1f %% truncated", 100 * mean, error_text,
             (long long)score.n, str_plural(score.n), tokens, 100 * cut);
    printf("%.*s\n", (int)o.size, o.text);
    json_out_free(&o);
    mem_free(rows);
}

/* ---- opening ---- */

static int open_verifier(struct eval_generate *g, struct err *err)
{
    const struct verify_options opt = {.kind = (enum reward_kind)config_choice_index(VERIFIERS, g->o->verifier),
                                       .ignore_case = g->o->ignore_case,
                                       .tolerance = g->o->tolerance,
                                       .pattern = g->o->pattern};
    if (g->o->pattern && opt.kind != REWARD_REGEX) return err_set(err, "--pattern is for --verifier regex");
    if (g->o->tolerance > 0 && opt.kind != REWARD_LAST_NUMBER)
        return err_set(err, "--tolerance is for --verifier last_number");
    return verifier_open(&g->verifier, &opt, "--pattern", err);
}

static int open_questions(struct eval_generate *g, struct err *err)
{
    const struct eval_generate_options *o = g->o;
    struct dataset_options opt;
    struct row_defaults d = {.params = sample_params_default(), .n = o->samples, .seed = o->seed};
    const int64_t most = o->rows ? o->rows : INT64_MAX;
    d.params.temperature = o->temperature;
    d.params.top_p = o->top_p;
    d.params.top_k = o->top_k;
    d.params.max_tokens = o->tokens;
    if (sample_params_check(&d.params, err)) return err_prefix(err, "--temperature, --top-p, --top-k");
    if (o->input)
        return run_open_tokenizer(&g->run, &opt, NULL, err) ||
                       questions_read(&g->qs, &g->run, o->input, o->reference, &d, most, err)
                   ? -1
                   : 0;
    if (g->cfg->data.prompts)
        return err_set(err, "data.eval has prompts of online RL: name their file by --input FILE and the key of the "
                            "right answer by --reference KEY, or leave out --verifier for the rewards of [reward]");
    if (run_open_data(&g->run, false, err)) return -1;
    if (!g->run.eval.n_docs)
        return err_set(err, "nothing to evaluate on: set data.eval, or data.eval_split with data.train, or --input");
    return questions_held_out(&g->qs, &g->run, &d, most, err);
}

/* Error: the verifier can compare no row's reference. Whether it can does not depend on the answer, so an empty answer
 * is judged. */
static int check_references(struct eval_generate *g, struct err *err)
{
    const struct verify_answer none = {.content = {"", 0}, .whole = {"", 0}};
    for (int64_t i = 0; i < g->qs.n; i++) {
        const struct question *q = &g->qs.items[i];
        const struct verify_text reference = {q->reference, q->reference_size};
        if (verifier_judge(&g->verifier, &none, reference) != VERDICT_NONE) return 0;
    }
    return err_set(err, "%s: no row has a reference that %s can compare in %s: %schoose another --verifier",
                   g->o->input ? g->o->input : "held-out data", g->o->verifier,
                   g->o->reference ? g->o->reference : "its completion or last answer",
                   g->o->input ? "name its key with --reference, or " : "");
}

static int open_output(struct eval_generate *g, struct err *err)
{
    if (!g->o->output) return 0;
    if (file_check_new(g->o->output, err)) return -1;
    g->fd = file_open_own(g->o->output, O_WRONLY, err);
    return g->fd < 0 ? -1 : 0;
}

static int open_all(struct eval_generate *g, const char *adapter, struct err *err)
{
    struct run *r = &g->run;
    if (g->cfg->environment.command[0])
        log_warn("environment.command has no effect with --verifier: the model answers once; leave out --verifier for "
                 "the rewards of whole completions");
    if (open_verifier(g, err) || run_open_headers(r, g->cfg, err) || open_questions(g, err) ||
        check_references(g, err) || open_output(g, err))
        return -1;
    for (int64_t i = 0; i < g->qs.n; i++) engine_work_add(&g->work, &g->qs.items[i].r.q);
    g->cfg->train.micro_batch = 1;
    g->rules = message_rules_of(r->chat);
    if (engine_work_fit(&g->work, r, g->cfg, adapter, err) || run_open_model(r, adapter, PLAN_GENERATE, err)) return -1;
    return (g->engine = engine_open_planned(r, err)) ? 0 : -1;
}

int eval_generate_run(const struct eval_generate_options *o, const char *adapter, struct config *cfg, struct err *err)
{
    struct eval_generate g = {.o = o, .cfg = cfg, .fd = -1};
    int rc = open_all(&g, adapter, err);
    if (!rc) rc = answer_all(&g, err);
    if (!rc) report(&g, adapter);
    engine_close(g.engine);
    if (g.fd >= 0 && close(g.fd) && rc >= 0) rc = err_set(err, "%s cannot be written: %s", o->output, strerror(errno));
    verifier_close(&g.verifier);
    message_free(&g.message);
    questions_free(&g.qs);
    run_close(&g.run);
    return rc;
}

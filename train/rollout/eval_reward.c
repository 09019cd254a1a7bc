/* eval_reward.c - see eval_reward.h. */
#include "train/rollout/eval_reward.h"

#include <math.h>
#include <stdio.h>

#include "data/file/file.h"
#include "train/generate/engine_work.h"
#include "train/reward/eval_score.h"
#include "train/rollout/online_log.h"
#include "train/rollout/rollout_lines.h"

struct evaluation {
    const struct eval_reward_options *o;
    struct config cfg;
    struct run run;
    struct online online;
    struct round_options of;
    struct round round;
};

static int fit(struct evaluation *v, const char *adapter, struct err *err)
{
    struct engine_work work = {.keeps = v->cfg.environment.command[0]};
    struct sample_request q = {.n = v->o->how.samples, .params = v->online.set.params};
    const int64_t n = v->o->rows ? MT_MIN(v->o->rows, v->run.eval.n_docs) : online_eval_prompts(&v->online);
    q.params.routing = false;
    for (int64_t i = 0; i < n; i++) {
        q.n_ids = v->run.eval.doc_off[i + 1] - v->run.eval.doc_off[i];
        if (v->cfg.environment.command[0])
            q.n_ids = v->cfg.data.seq_len - q.params.max_tokens; /* messages of a reset */
        engine_work_add(&work, &q);
    }
    v->cfg.eval.max_batches = n; /* the same prompts, one at a time in the plan */
    v->cfg.train.micro_batch = 1;
    return engine_work_fit(&work, &v->run, &v->cfg, adapter, err);
}

static int open_all(struct evaluation *v, const char *adapter, struct comm *all, struct err *err)
{
    struct run *r = &v->run;
    struct sample_params p = sample_params_default();
    p.temperature = v->o->how.temperature;
    p.top_p = v->o->how.top_p;
    p.top_k = v->o->how.top_k;
    if (sample_params_check(&p, err)) return err_prefix(err, "--temperature, --top-p, --top-k");
    if (!v->cfg.data.eval[0] && !(v->cfg.data.eval_split > 0))
        return err_set(err, "nothing to evaluate on: set data.eval, or data.eval_split with data.train");
    if (v->o->output && !all->rank && file_check_new(v->o->output, err)) return -1;
    if (run_open_headers(r, &v->cfg, err) || run_join(r, all, err) || online_open(&v->online, r, err)) return -1;
    return fit(v, adapter, err) || run_open_model(r, adapter, PLAN_GENERATE, err) ? -1 : 0;
}

/* ---- results ---- */

static const struct round_sample *samples_of(const struct evaluation *v, int64_t prompt)
{
    return &v->round.samples[prompt * v->of.n_sample];
}

/* Counts the values 1 and 0 of a reward as right and wrong. False: it has other values, or none. */
static bool count_right(const struct evaluation *v, int64_t reward, struct eval_row *rows)
{
    bool any = false;
    for (int64_t p = 0; p < v->round.n; p++) {
        rows[p] = (struct eval_row){.n = v->of.n_sample};
        for (int64_t i = 0; i < rows[p].n; i++) {
            const double x = samples_of(v, p)[i].values[reward];
            if (!isnan(x) && x != 0 && x != 1) return false;
            rows[p].n_none += isnan(x);
            rows[p].n_right += x > 0;
            any |= !isnan(x);
        }
    }
    return any;
}

static void put_passes(const struct evaluation *v, struct json_out *out)
{
    const struct rewards *rewards = v->online.rewards;
    struct eval_row *rows = mem_array(MT_MAX(v->round.n, 1), sizeof(*rows));
    char name[REWARD_NAME + 24];
    for (int64_t i = 0; i < rewards_count(rewards); i++) {
        snprintf(name, sizeof(name), "rewards/%s/pass_at", rewards_name(rewards, i));
        if (count_right(v, i, rows)) eval_score_put_pass(out, name, rows, v->round.n);
    }
    mem_free(rows);
}

static void print(const struct evaluation *v, const struct online_eval *e, const char *adapter)
{
    const struct rollout_stats *s = &e->stats;
    struct json_out out = {0};
    char nulls[96];
    online_log_warn(&v->online, s, "held-out prompts");
    log_info("reward %.4f over %lld prompt%s%s, %.0f tokens each, %.1f%% truncated, in %.1f s", f64_for_4f(s->reward),
             (long long)v->round.n, str_plural(v->round.n), online_log_nulls(nulls, s), s->length, 100 * s->cut,
             e->ms / 1e3);
    json_out_open(&out, NULL, '{');
    json_out_str(&out, "event", "eval");
    json_out_str(&out, "adapter", adapter);
    json_out_i64(&out, "prompts", v->round.n);
    json_out_i64(&out, "samples", s->n);
    online_log_stats(&out, &v->online, s, "");
    json_out_i64(&out, "tokens", s->n_tok);
    put_passes(v, &out);
    json_out_close(&out, '}');
    printf("%.*s\n", (int)out.size, out.text);
    json_out_free(&out);
}

static int write_output(const struct evaluation *v, struct err *err)
{
    struct file_writer out;
    struct text_buf line = {0};
    int rc = 0;
    if (file_writer_open(&out, v->o->output, err)) return -1;
    for (int64_t i = 0; i < v->round.n * v->of.n_sample && !rc; i++) {
        const struct round_sample *s = &v->round.samples[i];
        line.size = 0;
        rollout_line_reward(&line, s->line, s->size, v->online.rewards, s->total, s->values);
        rc = file_writer_put(&out, line.text, line.size, err);
    }
    if (file_writer_close(&out, !rc, rc ? NULL : err)) rc = -1;
    text_free(&line);
    return rc;
}

int eval_reward_run(const struct eval_reward_options *o, const struct config *cfg, const char *adapter,
                    struct comm *all, struct err *err)
{
    struct evaluation *v = mem_array(1, sizeof(*v));
    struct online_eval e;
    v->o = o;
    v->cfg = *cfg;
    comm_busy(all, "loading");
    int rc = open_all(v, adapter, all, err);
    const double start = clock_ms();
    if (!rc) {
        comm_busy(all, NULL);
        log_info("answering with %s", adapter ? adapter : "the base model");
        rc = online_eval_sample(&v->online, &o->how, 0, NULL, &v->of, &v->round, err);
    }
    if (!rc) rc = online_eval_read(&v->online, &v->round, &e, err);
    e.ms = clock_ms() - start;
    if (!rc && all->rank == 0 && o->output) rc = write_output(v, err);
    if (!rc && all->rank == 0) print(v, &e, adapter);
    if (!rc) comm_unshare_work(v->run.par.ep);
    round_free(&v->round);
    online_close(&v->online);
    run_close(&v->run);
    mem_free(v);
    return rc;
}

/* eval_reward.c - see eval_reward.h. */
#include "train/rollout/eval_reward.h"

#include "train/generate/engine_work.h"
#include "train/rollout/online_log.h"

struct evaluation {
    struct config cfg;
    struct run run;
    struct online online;
};

/* Sizes of the engine for these prompts. */
static int fit(struct evaluation *v, const char *adapter, struct err *err)
{
    struct engine_work work = {.keeps = v->cfg.environment.command[0]};
    struct sample_request q = {.n = 1, .params = v->online.set.params};
    const int64_t n = online_eval_prompts(&v->online);
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
    if (!v->cfg.data.eval[0] && !(v->cfg.data.eval_split > 0))
        return err_set(err, "nothing to evaluate on: set data.eval, or data.eval_split with data.train");
    if (run_open_headers(r, &v->cfg, err) || run_join(r, all, err) || online_open(&v->online, r, err)) return -1;
    return fit(v, adapter, err) || run_open_model(r, adapter, PLAN_GENERATE, err) ? -1 : 0;
}

static void print(const struct evaluation *v, const struct online_eval *e, const char *adapter)
{
    const struct rollout_stats *s = &e->stats;
    struct json_out out = {0};
    log_info("reward %.4f over %lld prompt%s, %.0f tokens each, %.1f%% truncated, in %.1f s", f64_for_4f(s->reward),
             (long long)s->n, str_plural(s->n), s->length, 100 * s->cut, e->ms / 1e3);
    json_out_open(&out, NULL, '{');
    json_out_str(&out, "event", "eval");
    json_out_str(&out, "adapter", adapter);
    json_out_i64(&out, "prompts", s->n);
    online_log_stats(&out, &v->online, s, "");
    json_out_i64(&out, "tokens", s->n_tok);
    json_out_close(&out, '}');
    printf("%.*s\n", (int)out.size, out.text);
    json_out_free(&out);
}

int eval_reward_run(const struct config *cfg, const char *adapter, struct comm *all, struct err *err)
{
    struct evaluation *v = mem_array(1, sizeof(*v));
    struct online_eval e;
    v->cfg = *cfg;
    comm_busy(all, "loading");
    int rc = open_all(v, adapter, all, err);
    if (!rc) {
        comm_busy(all, NULL);
        log_info("answering with %s", adapter ? adapter : "the base model");
        rc = online_evaluate(&v->online, 0, NULL, &e, err);
    }
    if (!rc && all->rank == 0) print(v, &e, adapter);
    if (!rc) comm_unshare_work(v->run.par.ep);
    online_close(&v->online);
    run_close(&v->run);
    mem_free(v);
    return rc;
}

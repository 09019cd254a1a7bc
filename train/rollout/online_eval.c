/* online_eval.c - see online_eval.h. */
#include "train/rollout/online_eval.h"

#include <string.h>

#include "train/rollout/rollout_lines.h"

static const struct prompt_row *row_of(const struct online *o, int64_t doc)
{
    const struct prompt_rows *rows = o->eval.n ? &o->eval : &o->train;
    return &rows->of[o->run->eval.doc_row[doc]];
}

int online_eval_read(const struct online *o, const struct round *r, struct online_eval *out, struct err *err)
{
    const int64_t n_reward = rewards_count(o->rewards), n = r->n * r->opt->n_sample;
    const struct rollout_options opt = {.vocab = o->run->arch.vocab, .seq_len = o->run->cfg->data.seq_len};
    double *values = mem_array(n * n_reward, sizeof(*values));
    struct rollouts rows = {.n = 0};
    int rc = 0;
    for (int64_t i = 0; i < n && !rc; i++) {
        rc = rollout_line_read(&rows, o->run, r->samples[i].line, r->samples[i].size, &opt, err);
        if (!rc) rows.reward[i] = r->samples[i].total;
        memcpy(values + i * n_reward, r->samples[i].values, (size_t)n_reward * sizeof(*values));
    }
    if (!rc) rollout_stats_of(&out->stats, &rows, r->opt->n_sample, values, n_reward);
    out->stats.n_lost = r->n_lost;
    out->stats.n_unfit = r->n_unfit;
    rollouts_free(&rows);
    mem_free(values);
    return rc;
}

int64_t online_eval_prompts(const struct online *o)
{
    const struct config *cfg = o->run->cfg;
    const int64_t n = o->run->eval.n_docs;
    return cfg->eval.max_batches ? MT_MIN(n, cfg->eval.max_batches * cfg->train.micro_batch) : n;
}

int online_eval_sample(struct online *o, const struct online_eval_options *how, int64_t step, bool (*stop)(void),
                       struct round_options *of, struct round *r, struct err *err)
{
    *of = (struct round_options){.run = o->run,
                                 .rewards = o->rewards,
                                 .rules = o->rules,
                                 .params = o->set.params,
                                 .n_sample = how->samples,
                                 .step = step,
                                 .key = "eval",
                                 .episodes = o->run->cfg->environment.command[0] != 0,
                                 .environment = o->environment,
                                 .n_episode = &o->n_episode,
                                 .stop = stop};
    const int64_t n = online_eval_prompts(o);
    const uint64_t seed = rng_key((uint64_t)how->seed, "eval");
    struct round_prompt *prompts = mem_array(n, sizeof(*prompts));
    for (int64_t i = 0; i < n; i++)
        prompts[i] = (struct round_prompt){.row = row_of(o, i), .group = i, .seed = rng_u64(seed, (uint64_t)i)};
    of->params.temperature = how->temperature;
    of->params.top_p = how->top_p;
    of->params.top_k = how->top_k;
    of->params.min_p = 0;
    of->params.routing = false;
    return round_run(r, of, prompts, n, err);
}

int online_evaluate(struct online *o, int64_t step, bool (*stop)(void), struct online_eval *out, struct err *err)
{
    static const struct online_eval_options once = {.samples = 1, .top_p = 1};
    const double start = clock_ms();
    struct round_options of;
    struct round r;
    int rc = online_eval_sample(o, &once, step, stop, &of, &r, err);
    if (!rc) rc = online_eval_read(o, &r, out, err);
    round_free(&r);
    out->ms = clock_ms() - start;
    return rc;
}

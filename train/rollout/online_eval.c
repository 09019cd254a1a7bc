/* online_eval.c - see online_eval.h. */
#include "train/rollout/online_eval.h"

#include <string.h>

#include "train/rollout/rollout_lines.h"

static const struct prompt_row *row_of(const struct online *o, int64_t doc)
{
    const struct prompt_rows *rows = o->eval.n ? &o->eval : &o->train;
    return &rows->of[o->run->eval.doc_row[doc]];
}

static int read_stats(const struct online *o, const struct round *r, struct rollout_stats *out, struct err *err)
{
    const int64_t n_reward = rewards_count(o->rewards);
    const struct rollout_options opt = {.vocab = o->run->arch.vocab, .seq_len = o->run->cfg->data.seq_len};
    double *values = mem_array(r->n * n_reward, sizeof(*values));
    struct rollouts rows = {.n = 0};
    int rc = 0;
    for (int64_t i = 0; i < r->n && !rc; i++) {
        rc = rollout_line_read(&rows, o->run, r->samples[i].line, r->samples[i].size, &opt, err);
        if (!rc) rows.reward[i] = r->samples[i].total;
        memcpy(values + i * n_reward, r->samples[i].values, (size_t)n_reward * sizeof(*values));
    }
    if (!rc) rollout_stats_of(out, &rows, 1, values, n_reward);
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

int online_evaluate(struct online *o, int64_t step, bool (*stop)(void), struct online_eval *out, struct err *err)
{
    const double start = clock_ms();
    struct round_options opt = {.run = o->run,
                                .rewards = o->rewards,
                                .rules = o->rules,
                                .params = o->set.params,
                                .n_sample = 1,
                                .step = step,
                                .key = "eval",
                                .episodes = o->run->cfg->environment.command[0] != 0,
                                .environment = o->environment,
                                .n_episode = &o->n_episode,
                                .stop = stop};
    const int64_t n = online_eval_prompts(o);
    struct round r;
    struct round_prompt *prompts = mem_array(n, sizeof(*prompts));
    for (int64_t i = 0; i < n; i++) prompts[i] = (struct round_prompt){.row = row_of(o, i), .group = i};
    opt.params.temperature = 0;
    opt.params.top_p = 1;
    opt.params.top_k = 0;
    opt.params.min_p = 0;
    opt.params.routing = false;
    int rc = round_run(&r, &opt, prompts, n, err);
    if (!rc) rc = read_stats(o, &r, &out->stats, err);
    round_free(&r);
    out->ms = clock_ms() - start;
    return rc;
}

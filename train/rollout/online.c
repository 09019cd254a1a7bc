/* online.c - see online.h. */
#include "train/rollout/online.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "data/rollout/advantages.h"
#include "data/rollout/rollout_documents.h"
#include "train/rollout/rollout_lines.h"

int online_open(struct online *o, struct run *r, struct err *err)
{
    const struct config *cfg = r->cfg;
    *o = (struct online){.run = r, .set = online_settings_of(cfg), .first = -1, .of_epoch = -1};
    if (file_in(o->dir, cfg->output.dir, "rollouts", err) || run_open_prompts(r, &o->train, &o->eval, err)) return -1;
    if (r->train.n_docs < o->set.n_group)
        log_warn("a generation batch takes %lld prompts, and there are %lld: prompts occur more than once in a batch",
                 (long long)o->set.n_group, (long long)r->train.n_docs);
    o->rules = message_rules_of(r->chat);
    o->rows.n_routing = choices_layers(&r->arch) * r->arch.top_k;
    if (!(o->rewards = rewards_open(cfg, r->par.ep->rank == 0, err))) return -1;
    if (!cfg->environment.command[0] || r->par.ep->rank) return 0;
    return (o->environment = environment_open(cfg, err)) ? 0 : -1;
}

void online_close(struct online *o)
{
    rewards_close(o->rewards);
    environment_close(o->environment);
    prompt_rows_free(&o->train);
    prompt_rows_free(&o->eval);
    rollouts_free(&o->rows);
    dataset_free(&o->docs);
    mem_free(o->order);
    *o = (struct online){.first = -1};
}

int64_t online_steps(const struct online *o)
{
    const struct config *cfg = o->run->cfg;
    const double prompts = cfg->train.epochs * (double)o->run->train.n_docs;
    if (cfg->train.steps) return cfg->train.steps;
    return MT_MAX((int64_t)ceil(prompts / (double)o->set.n_group - 1e-6), 1) * o->set.n_step;
}

/* ---- prompts in order ---- */

/* As the loader orders documents (data/loader.c). */
static void make_order(struct online *o, int64_t epoch)
{
    const struct config *cfg = o->run->cfg;
    const int64_t n = o->run->train.n_docs;
    const uint64_t key = rng_u64(rng_key((uint64_t)cfg->train.seed, "order of documents"), (uint64_t)epoch);
    if (o->of_epoch == epoch) return;
    if (!o->order) o->order = mem_array(n, sizeof(*o->order));
    for (int64_t i = 0; i < n; i++) o->order[i] = i;
    for (int64_t i = n - 1; cfg->data.shuffle && i > 0; i--) {
        const int64_t j = (int64_t)(rng_u64(key, (uint64_t)i) % (uint64_t)(i + 1)), tmp = o->order[i];
        o->order[i] = o->order[j];
        o->order[j] = tmp;
    }
    o->of_epoch = epoch;
}

/* The prompt at *pos, which moves on. */
static struct round_prompt next_prompt(struct online *o, struct loader_pos *pos)
{
    const struct dataset *ds = &o->run->train;
    if (pos->index >= ds->n_docs) *pos = (struct loader_pos){.epoch = pos->epoch + 1};
    make_order(o, pos->epoch);
    const int64_t row = ds->doc_row[o->order[pos->index]];
    uint64_t seed = rng_u64(rng_key((uint64_t)o->run->cfg->train.seed, "rollout"), (uint64_t)o->first);
    seed = rng_u64(rng_u64(seed, (uint64_t)pos->epoch), (uint64_t)row);
    const struct round_prompt p = {
        .row = &o->train.of[row], .group = pos->epoch * ds->n_docs + pos->index, .seed = seed};
    pos->index++;
    if (pos->index == ds->n_docs) *pos = (struct loader_pos){.epoch = pos->epoch + 1};
    return p;
}

/* ---- a batch ---- */

/* Groups of the rounds that the batch takes. */
struct choice {
    int64_t n, n_flat;
    struct {
        const struct round *round;
        int64_t prompt;
    } * of, *flat;  /* [n_group], [n_flat] */
    int64_t n_kept; /* groups at the beginning of `of` that have loss */
    int64_t cap;
};

static uint64_t hash_environment(uint64_t key, const struct config *cfg)
{
    key = rng_bytes(key, cfg->environment.command, (int64_t)strlen(cfg->environment.command));
    return rng_u64(rng_u64(key, (uint64_t)cfg->environment.turns), (uint64_t)cfg->environment.tokens);
}

/* Makes the batch's key for the journal. within: the run continues within the batch. The adapters have changed since
 * its samples were made, so the key has no hash of the adapters. */
static void make_key(char text[JOURNAL_KEY], const struct online *o, struct loader_pos pos, bool within)
{
    const struct config *cfg = o->run->cfg;
    const struct sample_params *p = &o->set.params;
    const double numbers[] = {(double)o->first,      (double)pos.epoch, (double)pos.index, (double)o->set.n_sample,
                              (double)p->max_tokens, p->temperature,    p->top_p,          p->min_p,
                              (double)p->top_k,      (double)p->routing};
    uint64_t key = rng_key((uint64_t)cfg->train.seed, "generation batch");
    key = rng_u64(rng_u64(key, o->run->train.hash), o->run->model.weights.fingerprint);
    key = rng_bytes(key, numbers, sizeof(numbers));
    key = rng_bytes(key, cfg->reward.NAME, (int64_t)strlen(cfg->reward.NAME));
    if (cfg->environment.command[0]) key = hash_environment(key, cfg);
    const uint64_t adapters = run_hash_adapters(o->run, &o->run->model.adapters);
    snprintf(text, JOURNAL_KEY, "%016" PRIx64, key);
    if (!within) snprintf(text, JOURNAL_KEY, "%016" PRIx64 ".%016" PRIx64, key, adapters);
}

/* Called if the run continues within a batch. Error: the journal does not have all its samples. */
static int check_within(const struct online *o, const struct journal *j, struct err *err)
{
    if (o->n_journal && o->sample_tok <= 0) return 0;
    return err_set(
        err,
        "%s lacks samples of the batch of step %lld, which this run continues: they cannot be sampled again, "
        "because the adapters have changed; continue from another checkpoint (train.resume = DIRECTORY)",
        j->path, (long long)o->first + 1);
}

static void choose(struct choice *c, const struct online *o, const struct round *r)
{
    const int64_t n = o->set.n_sample;
    for (int64_t p = 0; p < r->n; p++) {
        double *totals = mem_array(n, sizeof(*totals));
        for (int64_t i = 0; i < n; i++) totals[i] = r->samples[p * n + i].total;
        const bool flat = o->set.rounds > 1 && rollout_is_flat(totals, n);
        mem_free(totals);
        if (flat) {
            c->flat = mem_reserve(c->flat, &c->cap, c->n_flat + 1, sizeof(*c->flat));
            c->flat[c->n_flat].round = r;
            c->flat[c->n_flat++].prompt = p;
        } else {
            c->of[c->n].round = r;
            c->of[c->n++].prompt = p;
        }
    }
}

/* If dynamic sampling ends before the batch is full, fills it with groups of equal rewards, without loss. */
static void fill(struct choice *c, const struct online *o)
{
    const int64_t lacks = o->set.n_group - c->n;
    c->n_kept = c->n;
    if (lacks && !o->run->par.all->rank)
        log_warn("step %lld: %lld of %lld groups have equal rewards after %lld rounds of sampling: they have no "
                 "loss; use easier or harder prompts, or raise objective.num_generations",
                 (long long)o->first + 1, (long long)lacks, (long long)o->set.n_group, (long long)o->set.rounds);
    for (int64_t i = 0; i < lacks; i++) c->of[c->n++] = c->flat[i];
}

/* Samples rounds until the batch is full. 1: interrupted. */
static int sample(struct online *o, struct round *rounds, struct choice *c, const struct round_options *opt,
                  struct loader_pos *pos, struct err *err)
{
    for (o->n_round = 0; c->n < o->set.n_group && o->n_round < o->set.rounds; o->n_round++) {
        struct round *r = &rounds[o->n_round];
        const int64_t n = o->set.n_group - c->n;
        struct round_prompt *prompts = mem_array(n, sizeof(*prompts));
        for (int64_t i = 0; i < n; i++) prompts[i] = next_prompt(o, pos);
        const int rc = round_run(r, opt, prompts, n, err);
        if (rc) return rc;
        choose(c, o, r);
        o->n_journal += r->n_journal;
        o->n_lost += r->n_lost;
        o->n_unfit += r->n_unfit;
        o->sample_ms += r->sample_ms;
        o->reward_ms += r->reward_ms;
        o->sample_tok += (double)r->n_sampled_tok;
        o->n_prefilled_tok += r->n_prefilled_tok;
        o->n_cached_tok += r->n_cached_tok;
    }
    o->n_flat = c->n_flat;
    fill(c, o);
    return 0;
}

static const struct round_sample *sample_at(const struct online *o, const struct choice *c, int64_t row)
{
    const int64_t n = o->set.n_sample;
    return &c->of[row / n].round->samples[c->of[row / n].prompt * n + row % n];
}

static int take_rows(struct online *o, const struct choice *c, struct err *err)
{
    const int64_t n_reward = rewards_count(o->rewards);
    const struct rollout_options opt = {.vocab = o->run->arch.vocab, .seq_len = o->run->cfg->data.seq_len};
    double *values = mem_array(o->set.n_row * n_reward, sizeof(*values));
    int rc = 0;
    rollouts_clear(&o->rows);
    for (int64_t i = 0; i < o->set.n_row && !rc; i++) {
        const struct round_sample *s = sample_at(o, c, i);
        rc = rollout_line_read(&o->rows, o->run, s->line, s->size, &opt, err);
        if (!rc) o->rows.reward[i] = s->total;
        memcpy(values + i * n_reward, s->values, (size_t)n_reward * sizeof(*values));
    }
    if (!rc) rollout_stats_of(&o->stats, &o->rows, o->set.n_sample, values, n_reward);
    o->stats.n_lost = o->n_lost;
    o->stats.n_unfit = o->n_unfit;
    if (!rc && o->run->cfg->reward.combine == CFG_COMBINE_NORMALIZE) {
        double *weights = mem_array(n_reward, sizeof(*weights));
        for (int64_t k = 0; k < n_reward; k++) weights[k] = rewards_weight(o->rewards, k);
        advantages_normalized_sum(o->rows.reward, values, weights, o->set.n_row, n_reward, o->set.n_sample);
        mem_free(weights);
    }
    mem_free(values);
    return rc;
}

/* Removes the loss and the rewards of all rows after the first n. */
static void drop_rows(struct online *o, int64_t n)
{
    o->n_kept = n;
    for (int64_t i = n; i < o->rows.n; i++) o->rows.reward[i] = (double)NAN;
    if (n < o->rows.n) memset(o->docs.mask + o->docs.doc_off[n], 0, (size_t)(o->docs.n_tokens - o->docs.doc_off[n]));
}

/* Rows as `data.format = rollouts` reads them. */
static int write_rows(const struct online *o, const struct choice *c, struct err *err)
{
    char path[MT_PATH];
    struct text_buf text = {0};
    for (int64_t i = 0; i < o->set.n_row; i++) {
        const struct round_sample *s = sample_at(o, c, i);
        rollout_line_reward(&text, s->line, s->size, o->rewards, o->rows.reward[i], s->values);
    }
    int rc = str_format(path, sizeof(path), err, "output.dir", "%s/step-%06lld.jsonl", o->dir, (long long)o->first + 1);
    if (!rc) rc = file_write_atomic(path, text.text, text.size, err);
    text_free(&text);
    return rc;
}

static int make_batch(struct online *o, struct loader_pos pos, bool within, bool (*stop)(void), struct err *err)
{
    struct run *r = o->run;
    struct journal journal;
    char key[JOURNAL_KEY];
    struct round *rounds = mem_array(o->set.rounds, sizeof(*rounds));
    struct choice c = {.of = mem_array(o->set.n_group, sizeof(*c.of))};
    make_key(key, o, pos, within);
    comm_barrier(r->par.all);
    int rc = journal_open(&journal, o->dir, o->first + 1, r->par.ep->rank ? -1 : r->par.all->rank, key,
                          rewards_count(o->rewards), err);
    const struct round_options opt = {.run = r,
                                      .rewards = o->rewards,
                                      .rules = o->rules,
                                      .params = o->set.params,
                                      .n_sample = o->set.n_sample,
                                      .step = o->first + 1,
                                      .journal = &journal,
                                      .key = journal.key,
                                      .episodes = r->cfg->environment.command[0] != 0,
                                      .environment = o->environment,
                                      .n_episode = &o->n_episode,
                                      .stop = stop};
    if (!rc) rc = sample(o, rounds, &c, &opt, &pos, err);
    if (!rc && within) rc = check_within(o, &journal, err);
    if (!rc) rc = take_rows(o, &c, err);
    if (!rc) {
        dataset_free(&o->docs);
        rollout_documents(&o->docs, &o->rows, r->cfg->objective.mask_truncated);
    }
    if (!rc && !r->par.all->rank && r->cfg->output.rollouts == CFG_ROLLOUTS_ALL) rc = write_rows(o, &c, err);
    if (!rc) drop_rows(o, c.n_kept * o->set.n_sample);
    journal_close(&journal);
    for (int64_t i = 0; i < o->set.rounds; i++) round_free(&rounds[i]);
    mem_free(rounds);
    mem_free(c.of);
    mem_free(c.flat);
    o->after = pos;
    return rc;
}

int online_batch(struct online *o, int64_t step, struct loader_pos pos, bool (*stop)(void), struct err *err)
{
    const int64_t first = step / o->set.n_step * o->set.n_step;
    if (o->first == first) return 0;
    o->first = first;
    o->n_round = o->n_flat = o->n_journal = o->n_lost = o->n_unfit = o->n_prefilled_tok = o->n_cached_tok = 0;
    o->sample_ms = o->reward_ms = o->sample_tok = 0;
    const int rc = make_batch(o, pos, step != first, stop, err);
    if (rc) o->first = -1;
    return rc;
}

bool online_ends(const struct online *o, int64_t step) { return (step + 1) % o->set.n_step == 0; }

void online_saved(const struct online *o, int64_t step)
{
    struct err err;
    if (o->run->par.all->rank) return;
    if (journal_remove(o->dir, step / o->set.n_step * o->set.n_step, &err)) log_warn("%s", err.msg);
}

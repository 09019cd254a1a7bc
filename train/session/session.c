/* session.c - opens a training run, stage by stage. */
#include "train/session/session.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

#include "data/file/atomic_dir.h"
#include "data/file/file.h"
#include "train/config/epochs.h"
#include "train/session/calibrate.h"
#include "train/session/earlier.h"
#include "train/session/inputs.h"
#include "train/session/packing_check.h"
#include "train/session/policy_run.h"
#include "train/session/reference_cache.h"
#include "train/session/route_profile.h"
#include "train/session/run_banner.h"
#include "train/session/saves.h"
#include "train/state/archive.h"
#include "train/state/best.h"

/* ---- output.dir, and the checkpoint to continue from */

static void remove_unfinished(const struct training *t)
{
    static const char *const names[] = {"config.ini.tmp", "metrics.jsonl.tmp", "report.html.tmp"};
    for (int64_t i = 0; i < MT_LEN(names); i++) unlink(training_path(t, names[i]).s);
}

/* Rank 0 locks output.dir and cleans it up; the other ranks wait before they read it. */
static int take_output(struct training *t, struct err *err)
{
    static const char *const adapters[] = {"adapter", "best", BEST_NEW};
    const char *dir = t->run.cfg->output.dir;
    if (training_is_first(t) &&
        (lock_take(&t->lock, dir, err) || archive_recover(dir, err) ||
         atomic_dir_sweep(dir, adapters, MT_LEN(adapters), true, err) || checkpoint_sweep(dir, err)))
        return -1;
    if (training_is_first(t)) {
        archive_links(dir);
        remove_unfinished(t);
    }
    comm_barrier(t->run.par.all);
    return 0;
}

/* After a failed start: deletes an output.dir that this start created. In an existing output.dir the token cache stays
 * for the next start.
 */
static void undo_output(struct training *t)
{
    const char *dir = t->run.cfg->output.dir;
    struct err err;
    if (t->lock.held && t->lock.there < (int64_t)strlen(dir) && file_remove_tree(training_path(t, "cache").s, &err))
        log_warn("%s", err.msg);
    lock_undo(&t->lock, dir);
}

static void close_output(struct training *t) { lock_release(&t->lock); }

static int find_checkpoint(struct training *t, struct err *err)
{
    return resume_find(&t->from, t->run.cfg, &t->run.arch, err);
}

static void close_checkpoint(struct training *t) { resume_free(&t->from); }

/* ---- data and schedule */

static int open_data(struct training *t, struct err *err)
{
    return config_is_online(t->run.cfg) ? online_open(&t->online, &t->run, err) : run_open_data(&t->run, true, err);
}

static void close_data(struct training *t) { online_close(&t->online); }

/* Hash of the held-out rows, eval.max_batches and eval.best: a best_loss is valid only for the same hash. */
static uint64_t eval_hash(const struct training *t)
{
    const uint64_t hash = rng_u64(t->run.eval.hash, (uint64_t)t->run.cfg->eval.max_batches);
    return t->run.cfg->eval.best == CFG_BEST_LOSS ? hash : rng_u64(hash, (uint64_t)t->run.cfg->eval.best);
}

/* Checks settings that count steps. With train.epochs the number of steps is known only here. */
static int check_steps(const struct config *cfg, int64_t total, struct err *err)
{
    if (config_quantises(cfg) && cfg->quant.start >= total)
        return err_set(err, "quant.start = %lld: no step of the run's %lld would be quantised: lower it",
                       (long long)cfg->quant.start, (long long)total);
    if (cfg->optim.warmup_steps > total)
        return err_set(err, "optim.warmup_steps = %lld is more than the run's %lld steps: lower it",
                       (long long)cfg->optim.warmup_steps, (long long)total);
    return 0;
}

/* Called before the model is loaded: sets the schedule and a new state, and checks that the checkpoint fits this
 * run. */
static int open_schedule(struct training *t, struct err *err)
{
    const struct config *cfg = t->run.cfg;
    const struct loader_options lo = run_loader_options(cfg, true);
    struct loader *counting = loader_open(&t->run.train, &lo, (struct loader_pos){0, 0});
    t->schedule = resume_schedule(cfg, config_is_online(cfg) ? online_steps(&t->online)
                                                             : epochs_steps(cfg, counting, training_is_first(t)));
    if (check_steps(cfg, t->schedule.total_steps, err)) {
        loader_close(counting);
        return -1;
    }
    t->state = (struct train_state){.smooth_loss = 0,
                                    .best_loss = INFINITY,
                                    .best_tie = INFINITY,
                                    .eval_step = -1,
                                    .eval_from = -1,
                                    .seed = (uint64_t)cfg->train.seed,
                                    .total_steps = t->schedule.total_steps,
                                    .data_hash = t->run.train.hash,
                                    .eval_hash = eval_hash(t)};
    const struct resume_run this_run = {.cfg = cfg,
                                        .schedule = t->schedule,
                                        .data_hash = t->state.data_hash,
                                        .eval_hash = t->state.eval_hash,
                                        .loader = counting};
    const int rc = resume_check(&t->from, &this_run, err);
    if (!rc && t->from.found && training_is_first(t)) resume_tell(&t->from, &this_run);
    loader_close(counting);
    return rc;
}

/* ---- model and adapters */

/* All ranks must have the same state and adapters. */
static int agree_on_start(struct training *t, struct err *err)
{
    struct comm *ranks = t->run.par.all;
    if (comm_agree(ranks, "base model", rng_key(t->state.model_hash, t->run.base.weights), err)) return -1;
    if (comm_agree(ranks, "newest checkpoint in output.dir (all machines must see the same directory)",
                   (uint64_t)t->state.step, err))
        return -1;
    adapters_broadcast(&t->run.model.adapters, &t->run.dev);
    base_model_copy(&t->run.model.adapters.base, &t->run.base);
    if (model_check_quant(&t->run.model, err) || calibrate_run(&t->run, err)) return -1;
    route_profile_run(&t->run);
    return 0;
}

/* ---- the order of opening: cheap checks before downloads, data before weights */

static int check_ranks(struct training *t, struct err *err) { return run_check_ranks(t->all->world, t->run.cfg, err); }

static int check_inputs(struct training *t, struct err *err) { return inputs_check(t->run.cfg, err); }

static int open_headers(struct training *t, struct err *err) { return run_open_training(&t->run, t->run.cfg, err); }

static void close_headers(struct training *t) { run_close(&t->run); }

static int join(struct training *t, struct err *err) { return run_join(&t->run, t->all, err); }

static void close_generation(struct training *t) { generation_free(&t->generation); }

static int open_prompts(struct training *t, struct err *err) { return eval_prompts_open(&t->samples, &t->run, err); }

static void close_prompts(struct training *t) { eval_prompts_close(&t->samples); }

static int open_profile(struct training *t, struct err *err)
{
    t->profile.dir = t->run.cfg->output.dir;
    t->profile.metrics = training_is_first(t) ? &t->metrics : NULL;
    return config_profile(t->run.cfg->train.profile, &t->profile.first, &t->profile.last, err);
}

static void close_profile(struct training *t) { profile_close(&t->profile); }

static int measure_roofs(struct training *t, struct err *err)
{
    return training_is_first(t) ? prof_measure_roofs(&t->run.dev, err) : 0;
}

static int open_model(struct training *t, struct err *err)
{
    t->run.begins = !t->from.found;
    if (t->samples.n && !config_is_online(t->run.cfg)) t->run.generation = eval_prompts_sizes(&t->samples);
    return run_open_model(&t->run, NULL, PLAN_TRAIN, err);
}

static int print_banner(struct training *t, struct err *err)
{
    (void)err;
    if (training_is_first(t)) run_banner_print(&t->run, t->schedule.total_steps);
    return 0;
}

static int check_packing(struct training *t, struct err *err) { return packing_check_run(&t->run, t->state.pos, err); }

static int open_reference(struct training *t, struct err *err) { return reference_cache_open(&t->run, err); }

static int open_loader(struct training *t, struct err *err)
{
    (void)err;
    const struct comm *ranks = t->run.par.all;
    const struct loader_options lo = run_loader_options(t->run.cfg, true);
    t->loader = loader_open(&t->run.train, &lo, t->state.pos);
    profile_plan(&t->profile, t->state.step + 1, t->schedule.total_steps, ranks->rank, ranks->world);
    return 0;
}

static void close_loader(struct training *t)
{
    if (t->loader) loader_close(t->loader);
}

/* A stage that finds the run complete is the last one. If a stage fails, it and those before it are undone and closed,
 * the last first; so `close` must accept a part that was not opened. */
static const struct stage {
    int (*open)(struct training *, struct err *);
    void (*undo)(struct training *), (*close)(struct training *);
} stages[] = {
    {.open = check_ranks},
    {.open = check_inputs},
    {.open = open_headers, .close = close_headers},
    {.open = join},
    {.open = take_output, .undo = undo_output, .close = close_output},
    {.open = find_checkpoint, .close = close_checkpoint},
    {.open = open_data, .close = close_data},
    {.open = open_schedule},
    {.open = earlier_check_headers},
    {.open = open_prompts, .close = close_prompts},
    {.open = open_profile, .close = close_profile},
    {.open = measure_roofs},
    {.open = open_model},
    {.open = earlier_restore},
    {.open = agree_on_start},
    {.open = policy_run_open, .close = close_generation},
    {.open = earlier_check_model},
    {.open = earlier_leave},
    {.open = print_banner},
    {.open = check_packing},
    {.open = open_reference},
    {.open = open_loader, .close = close_loader},
    {.open = saves_open, .close = saves_close},
};

int session_open(struct training *t, const struct config *cfg, struct comm *all, const struct training_hook *hook,
                 struct err *err)
{
    *t = (struct training){.all = all, .hook = hook, .run.cfg = cfg, .saved_step = -1};
    while (t->n_open < MT_LEN(stages) && !t->complete) {
        if (!stages[t->n_open++].open(t, err)) continue;
        for (int i = t->n_open; i-- > 0;)
            if (stages[i].undo) stages[i].undo(t);
        session_close(t);
        return -1;
    }
    return 0;
}

void session_close(struct training *t)
{
    for (; t->n_open; t->n_open--)
        if (stages[t->n_open - 1].close) stages[t->n_open - 1].close(t);
}

/* earlier.c - see earlier.h. */
#include "train/session/earlier.h"

#include <math.h>
#include <string.h>

#include "data/file/file.h"
#include "train/adapter/adapter_dir.h"
#include "train/objective/run_objective.h"
#include "train/session/saves.h"
#include "train/state/archive.h"
#include "train/state/best.h"
#include "train/state/run_config.h"

/* ---- its outputs */

/* Moves outputs of another run to an archive. With train.resume = never, or a checkpoint of another output.dir, these
 * are all outputs; with auto those of a run that ended before its first checkpoint. */
static int keep_earlier_run(const struct training *t, struct err *err)
{
    const struct config *cfg = t->run.cfg;
    const bool another = strcmp(cfg->train.resume, "auto") != 0;
    if (!another && !file_is_dir(training_path(t, "adapter").s) && !file_is_dir(training_path(t, "best").s)) return 0;
    return archive_run(cfg->output.dir, err);
}

/* Resets the best loss: the next evaluation writes best/ with any loss. */
static void forget_best(struct train_state *s)
{
    s->best_loss = s->best_tie = INFINITY;
    s->best_step = s->n_worse = 0;
    s->eval_step = s->eval_from = -1;
}

/* If the run continues from an earlier step, moves a best/ of a later step to an archive. If train.resume names the
 * checkpoint, also moves later checkpoints: otherwise a later start with auto would continue from them. */
static int leave_later(struct training *t, struct err *err)
{
    const struct config *cfg = t->run.cfg;
    struct best_found best = {.later = false};
    if (training_is_first(t)) best_find(&best, cfg->output.dir, &t->from.state);
    if (!t->complete && comm_host_max(t->run.par.all, best_is_lost(&best, &t->from.state)) > 0) {
        forget_best(&t->state);
        if (training_is_first(t))
            log_info("the best adapter, of step %lld, is gone: the next evaluation writes best/ again",
                     (long long)t->from.state.best_step);
    }
    t->saved_step = t->from.state.step;
    t->saved_best = t->from.state.best_step;
    const bool named = strcmp(cfg->train.resume, "auto") != 0;
    if (!training_is_first(t)) return 0;
    return best_restore(&best, cfg->output.dir, &t->from.state, named, err) ||
                   checkpoint_prune(cfg->output.dir, t->from.state.step, cfg->output.keep, err)
               ? -1
               : 0;
}

int earlier_leave(struct training *t, struct err *err)
{
    const bool same_run = t->from.found && !t->from.elsewhere;
    if (same_run) return leave_later(t, err);
    return training_is_first(t) ? keep_earlier_run(t, err) : 0;
}

/* ---- is it complete? */

/* Whether the checkpoint is the end of this run: no step or evaluation is left, and adapter/ is of this checkpoint. */
static bool at_the_end(const struct training *t)
{
    const struct train_state *s = &t->from.state;
    return t->from.found && (s->step >= t->schedule.total_steps || training_out_of_patience(t, s)) &&
           (s->eval_hash == t->state.eval_hash || !t->run.eval.n_docs) && !training_evaluation_due(t, s) &&
           checkpoint_is_saved(t->from.path, t->run.cfg->output.dir);
}

/* For a run that has no step to make: sets the learning rate and steps to those of its checkpoint, with which it
 * trained. */
static int take_settings(struct training *t, struct err *err)
{
    if (t->run.cfg == &t->settings) return 0;
    t->settings = *t->run.cfg;
    t->run.cfg = &t->settings;
    return resume_take_settings(&t->from, &t->settings, err);
}

static int check_complete(struct training *t, bool loaded, struct err *err)
{
    uint64_t fingerprint;
    if (!(comm_host_min(t->run.par.all, at_the_end(t)) > 0)) return 0;
    if (!loaded && (run_fingerprint(&t->run, &fingerprint, err) ||
                    resume_check_model(&t->from, t->run.cfg, fingerprint, &t->run.base, &t->run.arch, err)))
        return -1;
    t->state = t->from.state;
    t->complete = true;
    if (take_settings(t, err) || (!t->from.elsewhere && leave_later(t, err)) || saves_open(t, err)) return -1;
    return training_is_first(t) && run_config_report_is_old(t->run.cfg) ? saves_report(t, err) : 0;
}

int earlier_check_headers(struct training *t, struct err *err)
{
    if (!run_objective_reference(t->run.cfg) && check_complete(t, false, err)) return -1;
    if (training_is_first(t) && t->hook) t->hook->opened(t->hook->user, &t->run.arch, &t->run.st, t->complete);
    const bool last = t->from.found && t->from.state.step >= t->schedule.total_steps;
    return !t->complete && last ? take_settings(t, err) : 0;
}

int earlier_check_model(struct training *t, struct err *err) { return check_complete(t, true, err); }

/* ---- its state and adapters */

/* Takes over the checkpoint's state, without fields that do not apply to this run. */
static void take_state(struct training *t, const struct train_state *found)
{
    const struct train_state fresh = t->state;
    t->state = *found;
    t->state.total_steps = fresh.total_steps;
    t->state.model_hash = fresh.model_hash;
    if (found->eval_hash == fresh.eval_hash || !t->run.eval.n_docs) return;
    t->state.eval_hash = fresh.eval_hash;
    forget_best(&t->state);
    log_info("other held-out data, or another eval.max_batches or eval.best, than before: losses are not compared with "
             "those up to step %lld, and the next evaluation writes best/ again",
             (long long)t->state.step);
}

int earlier_restore(struct training *t, struct err *err)
{
    const struct config *cfg = t->run.cfg;
    struct adapters *ad = &t->run.model.adapters;
    struct train_state found;
    t->state.model_hash = t->run.model.weights.fingerprint;
    if (resume_check_model(&t->from, cfg, t->state.model_hash, &t->run.base, &t->run.arch, err)) return -1;
    if (t->from.found) {
        if (checkpoint_load(t->from.path, ad, &t->run.dev, &found, err)) return -1;
        take_state(t, &found);
        ad->step = found.step;
        return 0;
    }
    if (!cfg->lora.init_from[0]) return 0;
    char dir[MT_PATH];
    if (adapter_dir_find(dir, "lora.init_from =", cfg->lora.init_from, err) || run_load_adapter(&t->run, ad, dir, err))
        return -1;
    ad->amax.known = ad->amax.calibrated = false; /* measured at the start of that run; this run measures again */
    ad->step = 0;
    return 0;
}

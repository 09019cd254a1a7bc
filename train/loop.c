/* loop.c - the training run. An optimizer step is grad_accum micro-batches of forward, loss and backward, then the norm
 * of the gradient, clipping, AdamW. Rank i mod P computes micro-batch i of a step, so the data of a step do not depend
 * on P. Every rank iterates over all of the data and so knows the number of labels without communication. struct
 * train_state, the adapters and their moments determine the next step: a run that continues from a checkpoint ends with
 * the same bytes as one that never stopped. */
#include "train/loop.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "optim/schedule.h"
#include "train/adapter/adapter_dir.h"
#include "train/state/archive.h"
#include "data/file/atomic_dir.h"
#include "train/state/best.h"
#include "train/session/calibrate.h"
#include "train/config/epochs.h"
#include "train/session/inputs.h"
#include "train/state/lock.h"
#include "train/session/step_checks.h"
#include "train/session/run_banner.h"
#include "train/session/packing_check.h"
#include "train/adapter/peft.h"
#include "train/state/run_config.h"
#include "train/run/chat_file.h"
#include "train/run/model_card.h"
#include "train/report/profile.h"
#include "train/report/report.h"
#include "train/state/resume.h"
#include "train/run/run.h"
#include "train/generate/eval_prompts.h"

static volatile sig_atomic_t stop_signal, tells; /* tells: this rank says what it does */

static void on_signal(int number)
{
    static const char text[] = "\nmoetrain: the state is saved after this step; a second signal ends the run at once\n";
    const int error = errno; /* of the code that is interrupted */
    if (tells && !stop_signal && (number == SIGINT || number == SIGTERM) &&
        write(STDERR_FILENO, text, sizeof(text) - 1) < 0)
        tells = 0;
    if (number != SIGUSR1 || !stop_signal) stop_signal = number; /* SIGUSR1: from the process that started the ranks */
    /* A second SIGINT or SIGTERM ends the process; files on disk stay valid. A closing terminal sends SIGHUP more than
     * once, and a closed pipe SIGPIPE per line: these do not end the save. */
    if (number == SIGHUP || number == SIGPIPE) signal(number, SIG_IGN);
    if (number == SIGINT || number == SIGTERM) signal(number, SIG_DFL);
    errno = error;
}

static bool stop_asked(void) { return stop_signal != 0; }

struct training {
    struct run run;
    struct loader *loader;
    struct metrics metrics;
    struct schedule schedule;
    struct train_state state;
    struct profile profile;
    struct eval_prompts samples;
    struct resume from;
    int64_t saved_step, saved_best; /* step and best_step of the newest checkpoint; saved_step -1: none */
    struct config *settings;        /* run.cfg of a run without a step to make; otherwise NULL */
    struct lock lock;               /* of output.dir, held by rank 0 */
    bool warned;                    /* a warning about memory was printed */
    bool told_chunks;               /* a warning about more chunks was printed */
    bool diverged;                  /* a warning about divergence was printed */
    bool complete;                  /* a checkpoint has the last step, and nothing is left to do */
    bool stopping;                  /* all ranks know that one of them got a signal to stop */
};

/* The rank that prints and writes. */
static bool is_first(const struct training *t) { return t->run.par.all->rank == 0; }

/* Files under output.dir. */
struct out_path {
    char s[MT_PATH];
};
static struct out_path out_path(const struct config *cfg, const char *name)
{
    struct out_path p;
    struct err err;
    if (str_format(p.s, sizeof(p.s), &err, "path", "%s/%s", cfg->output.dir, name)) MT_REQUIRE(false, "%s", err.msg);
    return p;
}

/* ---- one optimizer step */

/* Reads the micro-batches of the next step, and the position of the data after them. */
static struct batch *take_batches(struct training *t, int64_t n, int64_t *labels, int64_t *tokens,
                                  struct loader_pos *pos)
{
    struct batch *b = mem_array(n, sizeof(*b));
    *labels = *tokens = 0;
    for (int64_t i = 0; i < n; i++) {
        loader_next(t->loader, &b[i], pos);
        *labels += b[i].n_label;
        *tokens += b[i].n_tok;
    }
    return b;
}

static struct model_pass pass_of(const struct training *t, int64_t i, int64_t labels)
{
    const uint64_t key = rng_u64(rng_key((uint64_t)t->run.cfg->train.seed, "dropout"), (uint64_t)t->state.step);
    return (struct model_pass){.backward = true,
                               .distill = true,
                               .unquantised = t->run.model.qat.waiting,
                               .loss_scale = 1 / (double)MT_MAX(labels, 1),
                               .aux_share = 1 / (double)t->run.cfg->train.grad_accum,
                               .dropout_key = rng_u64(key, (uint64_t)i),
                               .last = i + t->run.par.all->world >= t->run.cfg->train.grad_accum};
}

/* Forward and backward of this rank's micro-batches; the host does not read gradients and loss yet. False: interrupted.
 * Several ranks finish the step first, and exchange the stop flag while their devices work. */
static bool accumulate(struct training *t, const struct batch *b, int64_t n, int64_t labels)
{
    struct run *r = &t->run;
    device_zero(&r->dev, r->model.adapters.opt.grad);
    model_clear(&r->model);
    struct comm *ranks = r->par.all;
    for (int64_t i = ranks->rank; i < n; i += ranks->world) {
        const struct model_pass pass = pass_of(t, i, labels);
        if (ranks->world == 1 && stop_asked()) return false;
        run_micro_batch(r, &b[i], &pass);
        model_end(&r->model);
    }
    model_sum(&r->model);
    model_norm(&r->model);
    if (ranks->world > 1) t->stopping = comm_host_max(ranks, stop_asked()) > 0;
    return true;
}

/* The first non-finite tensor in the order of the micro-batches, on all ranks. */
static void agree_on_bad(struct comm *ranks, int64_t at, char bad[64])
{
    struct {
        int64_t at;
        char bad[64];
    } own = {.at = at}, *all = mem_array(ranks->world, sizeof(own)), *first = all;
    memcpy(own.bad, bad, sizeof(own.bad));
    comm_host_gather(ranks, all, &own, (int64_t)sizeof(own));
    for (int r = 1; r < ranks->world; r++)
        if (all[r].at < first->at) first = &all[r];
    memcpy(bad, first->bad, sizeof(own.bad));
    mem_free(all);
}

/* Finds the first non-finite tensor of a step: runs the micro-batches again, one at a time.
 */
static void find_bad(struct training *t, const struct batch *b, int64_t n, int64_t labels, char bad[64])
{
    struct model *m = &t->run.model;
    struct model_tally sum;
    if (model_first_bad_grad(m, bad)) snprintf(bad + strlen(bad), 64 - strlen(bad), " (gradient)");
    struct comm *ranks = t->run.par.all;
    int64_t at = n; /* the micro-batch; n: none */
    /* The ranks of t->run.par.ep stay in step to the end. */
    for (int64_t i = ranks->rank; i < (t->run.par.ep->world > 1 ? n : at); i += ranks->world) {
        const struct model_pass pass = pass_of(t, i, labels);
        model_clear(m);
        run_forward(&t->run, &b[i], &pass);
        model_read(m, &sum);
        const bool found = at == n && !isfinite(model_objective(m, &sum));
        if (found) model_first_bad(m, bad);
        model_end(m);
        if (found) at = i;
    }
    if (!*bad) snprintf(bad, 64, "gradient norm");
    agree_on_bad(ranks, at, bad);
}

/* Reads the step's sums, the only wait of the host for the device, and updates the adapters. */
static void update(struct training *t, const struct batch *b, struct step_metrics *m, char bad[64])
{
    struct model *model = &t->run.model;
    struct model_tally sum;
    model_read(model, &sum);
    const double labels = (double)MT_MAX(m->labels, 1);
    m->loss = model_objective(model, &sum) / labels;
    m->distill = model->distill.from != DISTILL_NONE;
    m->ce = sum.nll / labels;
    m->kl = sum.kl / labels;
    m->grad_norm = sum.grad_norm;
    m->skipped = !isfinite(m->loss) || sum.n_bad_grad || !isfinite(sum.grad_norm);
    if (m->skipped) find_bad(t, b, t->run.cfg->train.grad_accum, m->labels, bad);
    if (m->skipped || !m->labels) return;
    adapters_update(&model->adapters, &t->run.dev, m->lr, m->grad_norm);
}

/* Warns when memory exceeds a hard limit. Not in host memory, whose figure includes the mapped checkpoint. */
static void warn_of_memory(struct training *t, int64_t used)
{
    const struct plan *p = &t->run.plan;
    char a[32], b[32];
    if (p->in_host_memory || !p->capped || used <= p->budget || t->warned) return;
    t->warned = true;
    log_warn("%s of device memory are in use, more than train.memory_gb = %s: lower it by the difference",
             str_bytes(a, used), str_bytes(b, p->budget));
}

/* Warns once when unbalanced routing makes the ranks use more chunks per layer, which is slower. */
static void warn_of_chunks(struct training *t)
{
    const struct model *m = &t->run.model;
    const int64_t planned = m->acts.ep.n_chunk;
    if (t->told_chunks || !planned || m->n_chunk <= planned) return;
    t->told_chunks = true;
    log_info("routing is unbalanced: a layer is cut into %lld chunks instead of %lld; raise parallel.capacity_factor "
             "(%g) to avoid that",
             (long long)m->n_chunk, (long long)planned, m->acts.ep.capacity_factor);
}

/* Warns of divergence: from the 10th step with a finite loss on, a smoothed loss above 1.5 times the loss before the
 * first update, plus 0.5; once per start. */
static void warn_of_divergence(struct training *t)
{
    const struct train_state *s = &t->state;
    const int64_t finite = s->step - s->n_nonfinite;
    if (t->diverged || finite < 10 || !(s->smooth_loss > 1.5 * s->first_loss + 0.5)) return;
    t->diverged = true;
    metrics_end_line(&t->metrics);
    log_warn("the loss diverges: %.4f (smoothed) at step %lld, %.4f before the first update. Lower optim.lr, or raise "
             "optim.warmup_steps",
             s->smooth_loss, (long long)s->step, s->first_loss);
}

/* The mean over the first steps, then an exponential mean with weight 0.1. */
static double smoothed(double before, double loss, int64_t n)
{
    const double w = fmax(0.1, 1 / (double)n);
    return n > 1 ? before + w * (loss - before) : loss;
}

/* Before a step: the first quant.start steps are not quantised. With quant.amax = static the scales that the run keeps
 * are of the first step that is, whether it was loaded from a checkpoint or reached. */
static void begin_quantisation(struct training *t)
{
    const int64_t start = t->run.cfg->quant.start;
    t->run.model.qat.waiting = t->state.step < start;
    if (start && t->state.step == start) t->run.model.adapters.amax.known = false;
}

/* One optimizer step. 0: done. LOOP_INTERRUPTED: nothing changed. -1: too many steps without a finite gradient. */
static int step(struct training *t, struct err *err)
{
    const struct config *cfg = t->run.cfg;
    struct train_state *s = &t->state;
    struct step_metrics m = {.step = s->step + 1, .total_steps = t->schedule.total_steps};
    struct loader_pos pos;
    char bad[64] = "";
    const double start = clock_ms(), floor_ms = t->run.dev.floor_ms;
    begin_quantisation(t);
    comm_step(t->run.par.all, m.step);
    profile_step_begin(&t->profile, &t->run.dev, m.step);
    struct batch *b = take_batches(t, cfg->train.grad_accum, &m.labels, &m.tokens, &pos);
    m.lr = schedule_lr(&t->schedule, m.step);
    const bool done = accumulate(t, b, cfg->train.grad_accum, m.labels);
    if (done) update(t, b, &m, bad);
    for (int64_t i = 0; i < cfg->train.grad_accum; i++) batch_free(&b[i]);
    mem_free(b);
    if (!done) return profile_step_cancel(&t->profile), LOOP_INTERRUPTED;
    t->run.model.adapters.step = ++s->step;
    s->pos = pos;
    s->tokens += m.tokens;
    if (m.skipped)
        s->n_nonfinite++;
    else
        s->smooth_loss = smoothed(s->smooth_loss, m.loss, s->step - s->n_nonfinite);
    if (!m.skipped && s->step - s->n_nonfinite == 1) s->first_loss = fmax(s->first_loss, m.loss); /* and at step 0 */
    m.smooth_loss = s->smooth_loss;
    m.ms = clock_ms() - start;
    m.roof = prof_share(&t->run.dev, t->run.dev.floor_ms - floor_ms, m.ms);
    m.mem_bytes = t->run.dev.ops->used_bytes();
    warn_of_memory(t, m.mem_bytes);
    warn_of_chunks(t);
    m.bad = bad;
    if (is_first(t)) metrics_step(&t->metrics, &m, cfg->log.every && s->step % cfg->log.every == 0);
    if (m.skipped && is_first(t)) step_checks_skipped(cfg, s, m.loss);
    if (is_first(t)) warn_of_divergence(t);
    if (profile_step_end(&t->profile, m.step, err)) return -1;
    return m.skipped ? step_checks_check(cfg, s, t->schedule.total_steps, bad, err) : 0;
}

/* ---- evaluation, checkpoints, the end */

/* The model card, on the rank that writes it. */
static char *card_of(const struct training *t)
{
    return is_first(t) ? model_card(&t->run, &t->state, t->schedule.total_steps) : NULL;
}

static int save_adapter(struct training *t, const char *name, struct err *err)
{
    char *card = card_of(t);
    int rc = peft_save(&t->run.model.adapters, &t->run.dev, out_path(t->run.cfg, name).s, t->run.model_name, card, err);
    if (!rc && is_first(t)) rc = chat_file_save(&t->run, out_path(t->run.cfg, name).s, err);
    mem_free(card);
    return rc;
}

/* Changes the state when all is done: an interrupted evaluation is made again when the run continues. */
static int evaluate(struct training *t, struct err *err)
{
    struct train_state *s = &t->state;
    struct eval_metrics e = {.step = s->step, .held_out = s->eval_hash};
    struct metrics *metrics = is_first(t) ? &t->metrics : NULL;
    if (t->run.eval.n_docs && !run_evaluate(&t->run, &e, stop_asked)) return LOOP_INTERRUPTED;
    const bool lowest = e.loss < s->best_loss;
    e.from = s->eval_from < 0 ? s->step : s->eval_from;
    e.best = lowest && s->step > 0; /* step 0 is only the reference: there is no trained adapter to save */
    if (t->run.eval.n_docs && metrics) metrics_eval(metrics, &e);
    if (!eval_prompts_write(&t->samples, metrics, s->step, stop_asked)) return LOOP_INTERRUPTED;
    s->eval_step = s->step;
    if (!t->run.eval.n_docs) return 0;
    s->eval_from = e.from;
    if (s->step == 0 && isfinite(e.loss)) s->first_loss = e.loss;
    if (metrics && !isfinite(e.loss)) step_checks_evaluation(t->run.cfg, s);
    s->n_worse = lowest ? 0 : s->n_worse + 1;
    if (!lowest) return 0;
    s->best_loss = e.loss;
    s->best_step = s->step;
    if (!e.best) return 0;
    comm_busy(t->run.par.all, "saving");
    int rc = save_adapter(t, BEST_NEW, err);
    if (!rc && is_first(t)) rc = best_replace(t->run.cfg->output.dir, t->saved_step, t->saved_best, err);
    comm_busy(t->run.par.all, NULL);
    return rc;
}

static int report(struct training *t, struct err *err)
{
    const struct config *cfg = t->run.cfg;
    if (!cfg->log.report || !is_first(t)) return 0;
    char *text = config_dump(cfg), title[MT_PATH + 32];
    snprintf(title, sizeof(title), "moetrain: %s", t->run.model_name);
    const int rc = report_write(cfg->output.dir, title, text, err);
    mem_free(text);
    return rc;
}

static int save(struct training *t, struct err *err)
{
    const struct config *cfg = t->run.cfg;
    struct model *m = &t->run.model;
    int64_t *rows = mem_array(m->arch.n_layer * m->arch.n_exp, sizeof(*rows));
    model_read_expert_rows(m, rows);
    if (is_first(t)) metrics_experts(&t->metrics, t->state.step, rows, m->arch.n_layer, m->arch.n_exp);
    mem_free(rows);
    comm_busy(t->run.par.all, "saving");
    char *card = card_of(t);
    int rc = checkpoint_save(cfg->output.dir, &m->adapters, &t->run.dev, &t->state, cfg, &m->arch, t->run.model_name,
                             card, cfg->output.keep, err);
    mem_free(card);
    if (!rc) t->saved_step = t->state.step, t->saved_best = t->state.best_step;
    if (!rc) rc = report(t, err);
    comm_busy(t->run.par.all, NULL);
    return rc;
}

static bool evaluation_due(const struct training *t, const struct train_state *state)
{
    const struct config *cfg = t->run.cfg;
    const int64_t s = state->step;
    if (s == state->eval_step) return false; /* the evaluation was made before the run stopped at this step */
    if (s == 0) return cfg->eval.at_start;
    if (s == t->schedule.total_steps) return cfg->eval.at_end;
    return cfg->eval.every && s % cfg->eval.every == 0;
}

/* Stopped by eval.patience? The count is in the checkpoint: such a run ends again at once when restarted. */
static bool out_of_patience(const struct training *t, const struct train_state *state)
{
    const int64_t patience = t->run.cfg->eval.patience;
    return patience && state->n_worse >= patience;
}

static void tell_of_patience(const struct training *t)
{
    const struct train_state *s = &t->state;
    char loss[64] = "finite loss";
    if (isfinite(s->best_loss))
        snprintf(loss, sizeof(loss), "lower loss than %.4f of step %lld", s->best_loss, (long long)s->best_step);
    log_info("eval.patience = %lld: the last %lld evaluations had no %s: stopped after step %lld of %lld; raise "
             "eval.patience to continue",
             (long long)t->run.cfg->eval.patience, (long long)s->n_worse, loss, (long long)s->step,
             (long long)t->schedule.total_steps);
}

static void tell_of_end(const struct training *t)
{
    if (t->state.step < t->schedule.total_steps && out_of_patience(t, &t->state)) tell_of_patience(t);
    best_print(t->run.cfg->output.dir, &t->state);
}

/* The same command, unless train.resume is never or a directory. */
static void tell_how_to_continue(const struct training *t)
{
    log_info("saved step %lld of %lld: run the same command%s to continue", (long long)t->state.step,
             (long long)t->schedule.total_steps,
             strcmp(t->run.cfg->train.resume, "auto") ? " with train.resume = auto" : "");
}

/* Makes steps until the end or an interruption. The state alone decides whether an evaluation or a checkpoint follows a
 * step. If the run was killed before that, it does so when it continues. */
static int steps(struct training *t, struct err *err)
{
    const int64_t every = t->run.cfg->output.save_every, start = t->state.step;
    for (int rc;;) {
        const int64_t s = t->state.step;
        bool last = s >= t->schedule.total_steps;
        const bool due = evaluation_due(t, &t->state);
        if (due && (rc = evaluate(t, err))) return rc;
        if (!last && out_of_patience(t, &t->state)) {
            last = true;
            if (is_first(t)) metrics_stop(&t->metrics, s, t->state.n_worse);
        }
        /* The step that the run continued from has a checkpoint. It is written again only after an evaluation that the
         * stopped run did not make. */
        const bool saving = (s > start || (due && s > 0)) && (last || (every && s % every == 0));
        if (saving && save(t, err)) return -1;
        if (last)
            return saving ? 0 : report(t, err); /* a run that was killed after its last checkpoint may have no report */
        if ((rc = step(t, err))) return rc;
        if (t->stopping && t->state.step < t->schedule.total_steps) return LOOP_INTERRUPTED;
    }
}

/* ---- opening */

/* Archives outputs of another run, so that they are not mixed with this run's: with train.resume = never, or that of a
 * checkpoint elsewhere, all; with auto those of a run that ended before its first checkpoint. */
static int keep_earlier_run(const struct config *cfg, struct err *err)
{
    const bool another = strcmp(cfg->train.resume, "auto") != 0;
    if (!another && !file_is_dir(out_path(cfg, "adapter").s) && !file_is_dir(out_path(cfg, "best").s)) return 0;
    return archive_run(cfg->output.dir, err);
}

/* The next evaluation writes best/ whatever its loss. */
static void forget_best(struct train_state *s)
{
    s->best_loss = INFINITY;
    s->best_step = s->n_worse = 0;
    s->eval_step = s->eval_from = -1;
}

/* A run that continues from an earlier step leaves a best/ of a later one behind. Later checkpoints too, where
 * train.resume names the one to continue from: with auto they would be the newest. */
static int leave_later(struct training *t, struct err *err)
{
    const struct config *cfg = t->run.cfg;
    struct best_found best = {.later = false};
    if (is_first(t)) best_find(&best, cfg->output.dir, &t->from.state);
    if (!t->complete && comm_host_max(t->run.par.all, best_is_lost(&best, &t->from.state)) > 0) {
        forget_best(&t->state);
        if (is_first(t))
            log_info("the best adapter, of step %lld, is gone: the next evaluation writes best/ again",
                     (long long)t->from.state.best_step);
    }
    t->saved_step = t->from.state.step;
    t->saved_best = t->from.state.best_step;
    const bool named = strcmp(cfg->train.resume, "auto") != 0;
    if (!is_first(t)) return 0;
    return best_restore(&best, cfg->output.dir, &t->from.state, named, err) ||
                   checkpoint_prune(cfg->output.dir, t->from.state.step, cfg->output.keep, err)
               ? -1
               : 0;
}

/* Hash of the held-out rows and of the number of micro-batches that best_loss belongs to. */
static uint64_t eval_hash(const struct training *t)
{
    return rng_u64(t->run.eval.hash, (uint64_t)t->run.cfg->eval.max_batches);
}

/* Settings in steps, against those of the run, which train.epochs gives only now. */
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

/* Before the model is loaded: sets the schedule and a new state, and checks that the checkpoint fits this run. */
static int prepare(struct training *t, struct err *err)
{
    const struct config *cfg = t->run.cfg;
    const struct loader_options lo = run_loader_options(cfg, true);
    struct loader *counting = loader_open(&t->run.train, &lo, (struct loader_pos){0, 0});
    t->schedule = resume_schedule(cfg, epochs_steps(cfg, counting, is_first(t)));
    if (check_steps(cfg, t->schedule.total_steps, err)) {
        loader_close(counting);
        return -1;
    }
    t->state = (struct train_state){.smooth_loss = 0,
                                    .best_loss = INFINITY,
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
    if (!rc && t->from.found && is_first(t)) resume_tell(&t->from, &this_run);
    loader_close(counting);
    return rc;
}

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
    log_info("other held-out data, or another eval.max_batches, than before: losses are not compared with those up to "
             "step %lld, and the next evaluation writes best/ again",
             (long long)t->state.step);
}

/* Whether the checkpoint is the end of this run: no step or evaluation is left, and adapter/ is of this checkpoint. */
static bool at_the_end(const struct training *t)
{
    const struct train_state *s = &t->from.state;
    return t->from.found && (s->step >= t->schedule.total_steps || out_of_patience(t, s)) &&
           (s->eval_hash == t->state.eval_hash || !t->run.eval.n_docs) && !evaluation_due(t, s) &&
           checkpoint_is_saved(t->from.path, t->run.cfg->output.dir);
}

/* A run without a step to make has the learning rate and steps of its checkpoint, whatever the command says: with them
 * it trained. */
static int take_settings(struct training *t, struct err *err)
{
    if (t->settings) return 0;
    t->settings = mem_alloc(sizeof(*t->settings));
    *t->settings = *t->run.cfg;
    t->run.cfg = t->settings;
    return resume_take_settings(&t->from, t->settings, err);
}

/* Continues from a checkpoint, or starts from lora.init_from or new adapters. Every rank reads the files. */
static int restore(struct training *t, struct err *err)
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
    ad->amax.known = ad->amax.calibrated = false; /* those of a run's start are of its first adapter */
    ad->step = 0;
    return 0;
}

/* All ranks must have the same state and adapters. */
static int agree_on_start(struct training *t, struct err *err)
{
    struct comm *ranks = t->run.par.all;
    if (comm_agree(ranks, "base model", rng_key(t->state.model_hash, t->run.base.weights), err)) return -1;
    if (comm_agree(ranks, "newest checkpoint in output.dir (all machines must see the same directory)",
                   (uint64_t)t->state.step, err))
        return -1;
    adapters_broadcast(&t->run.model.adapters, &t->run.dev);
    return model_check_quant(&t->run.model, err) || calibrate_run(&t->run, err) ? -1 : 0;
}

static void set_optimizer(struct training *t)
{
    const struct config *cfg = t->run.cfg;
    struct adamw *opt = &t->run.model.adapters.opt;
    opt->beta1 = cfg->optim.beta1;
    opt->beta2 = cfg->optim.beta2;
    opt->eps = cfg->optim.eps;
    opt->weight_decay = cfg->optim.weight_decay;
    opt->clip_norm = cfg->optim.clip_norm;
}

/* Deletes temporary files of a killed run. */
static void remove_unfinished(const struct config *cfg)
{
    static const char *const names[] = {"config.ini.tmp", "metrics.jsonl.tmp", "report.html.tmp"};
    for (int64_t i = 0; i < MT_LEN(names); i++) unlink(out_path(cfg, names[i]).s);
}

/* Rank 0 locks output.dir and cleans it up; then the others read it. */
static int take_output(struct training *t, struct err *err)
{
    static const char *const adapters[] = {"adapter", "best", BEST_NEW};
    const char *dir = t->run.cfg->output.dir;
    if (is_first(t) && (lock_take(&t->lock, dir, err) || archive_recover(dir, err) ||
                        atomic_dir_sweep(dir, adapters, MT_LEN(adapters), true, err) || checkpoint_sweep(dir, err)))
        return -1;
    if (is_first(t)) remove_unfinished(t->run.cfg);
    comm_barrier(t->run.par.all);
    return 0;
}

/* The end of metrics.jsonl at the checkpoint. An evaluation on other held-out data than this run's stays. */
static struct metrics_end metrics_end_of(const struct training *t)
{
    const struct train_state *found = &t->from.state, *now = &t->state;
    const bool again =
        !t->complete && found->eval_hash == now->eval_hash && now->eval_step != found->step && evaluation_due(t, now);
    return (struct metrics_end){.step = found->step,
                                .evaluated = found->eval_step == found->step && !again,
                                .held_out = found->eval_hash,
                                .complete = t->complete};
}

static int open_metrics(struct training *t, struct err *err)
{
    const struct config *cfg = t->run.cfg;
    const struct metrics_end end = metrics_end_of(t), *from = t->from.found ? &end : NULL;
    const int64_t first_step = from && (end.step || end.evaluated) ? end.step + 1 : 0;
    if (metrics_open(&t->metrics, cfg->output.dir, from, err) ||
        (cfg->log.tensorboard && metrics_tensorboard(&t->metrics, first_step, err)))
        return -1;
    metrics_start(&t->metrics, &(struct start_metrics){.step = t->state.step,
                                                       .total_steps = t->schedule.total_steps,
                                                       .run = cfg->output.dir,
                                                       .model = cfg->model.path,
                                                       .data = cfg->data.train,
                                                       .eval_data = cfg->data.eval,
                                                       .device = t->run.dev.name,
                                                       .ranks = t->run.par.all->world});
    return 0;
}

/* Opens the files that say what this run does. Where nothing is left to do they are complete, unless a run to more
 * steps was killed before its first checkpoint. */
static int open_record(struct training *t, struct err *err)
{
    const struct config *cfg = t->run.cfg;
    if (!(t->complete && run_config_is_of(cfg, &t->from)) && run_config_write(cfg, err)) return -1;
    if (!t->complete || !file_exists(out_path(cfg, "metrics.jsonl").s)) return open_metrics(t, err);
    const struct metrics_end end = metrics_end_of(t);
    return metrics_cut(cfg->output.dir, &end, err);
}

/* Sets t->complete when nothing is left to do; the files of the run then stay as they are. Before the model is loaded
 * the fingerprint of its weights is compared; that of a teacher's adapter needs the model. */
static int check_complete(struct training *t, bool loaded, struct err *err)
{
    const char *dir;
    uint64_t fingerprint;
    if (!loaded && config_teacher(t->run.cfg, &dir) == TEACHER_ADAPTER) return 0;
    if (!(comm_host_min(t->run.par.all, at_the_end(t)) > 0)) return 0;
    if (!loaded && (run_fingerprint(&t->run, &fingerprint, err) ||
                    resume_check_model(&t->from, t->run.cfg, fingerprint, &t->run.base, &t->run.arch, err)))
        return -1;
    t->state = t->from.state;
    t->complete = true;
    if (take_settings(t, err) || (!t->from.elsewhere && leave_later(t, err))) return -1;
    if (is_first(t) && open_record(t, err)) return -1;
    return is_first(t) && run_config_report_is_old(t->run.cfg) ? report(t, err) : 0;
}

static int training_open(struct training *t, const struct config *cfg, struct comm *all, const struct loop_hook *hook,
                         struct err *err)
{
    const struct loader_options lo = run_loader_options(cfg, true);
    *t = (struct training){.saved_step = -1, .profile.dir = cfg->output.dir};
    if (run_check_ranks(all->world, cfg, err) || inputs_check(cfg, err) || run_open_training(&t->run, cfg, err) ||
        run_join(&t->run, all, err) || take_output(t, err) || resume_find(&t->from, cfg, &t->run.arch, err) ||
        run_open_data(&t->run, true, err) || prepare(t, err) || check_complete(t, false, err))
        return -1;
    if (is_first(t) && hook) hook->opened(hook->user, &t->run.arch, &t->run.st, t->complete);
    if (t->complete) return 0;
    if (t->from.found && t->from.state.step >= t->schedule.total_steps && take_settings(t, err)) return -1;
    if (eval_prompts_open(&t->samples, &t->run, err) ||
        config_profile(cfg->train.profile, &t->profile.first, &t->profile.last, err) ||
        (is_first(t) && prof_measure_roofs(&t->run.dev, err)) || run_open_model(&t->run, NULL, true, err))
        return -1;
    set_optimizer(t);
    if (restore(t, err) || agree_on_start(t, err) || check_complete(t, true, err)) return -1;
    if (t->complete) return 0;
    base_model_copy(&t->run.model.adapters.base, &t->run.base);
    const bool same_run = t->from.found && !t->from.elsewhere;
    if (same_run ? leave_later(t, err) : is_first(t) && keep_earlier_run(cfg, err)) return -1;
    if (is_first(t)) run_banner_print(&t->run, t->schedule.total_steps);
    if (packing_check_run(&t->run, t->state.pos, err)) return -1;
    t->loader = loader_open(&t->run.train, &lo, t->state.pos);
    profile_plan(&t->profile, t->state.step + 1, t->schedule.total_steps, t->run.par.all->rank, t->run.par.all->world);
    return is_first(t) ? open_record(t, err) : 0;
}

static void training_close(struct training *t)
{
    if (t->loader) loader_close(t->loader);
    profile_close(&t->profile);
    eval_prompts_close(&t->samples);
    run_close(&t->run);
    resume_free(&t->from);
    mem_free(t->settings);
    lock_release(&t->lock);
}

static void take_signals(void)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGUSR1, SIGPIPE};
    for (int i = 0; i < MT_LEN(signals); i++) signal(signals[i], on_signal);
    if (signal(SIGHUP, on_signal) == SIG_IGN) signal(SIGHUP, SIG_IGN); /* nohup */
}

/* A failed start deletes an output.dir that it created. In an existing one, the token cache is kept for the next start.
 */
static void undo_start(struct training *t, const struct config *cfg)
{
    const char *dir = cfg->output.dir;
    struct err err;
    if (t->lock.held && t->lock.there < (int64_t)strlen(dir) && file_remove_tree(out_path(cfg, "cache").s, &err))
        log_warn("%s", err.msg);
    lock_undo(&t->lock, dir);
}

int loop_train(const struct config *cfg, struct comm *all, const struct loop_hook *hook, struct err *err)
{
    struct training *t = mem_alloc(sizeof(*t)); /* 70 KiB: too much for a small stack */
    struct err close_err;
    stop_signal = 0;
    comm_busy(all, "loading");
    int rc = training_open(t, cfg, all, hook,
                           err); /* until it returns there is nothing to save, so a signal ends the process at once */
    if (rc) undo_start(t, cfg);
    tells = !rc && is_first(t);
    take_signals();
    comm_busy(all, NULL);
    if (!rc && !t->complete) rc = steps(t, err);
    if (rc == LOOP_INTERRUPTED) {
        metrics_end_line(&t->metrics);
        if (stop_signal == SIGPIPE)
            log_info("standard output or error was closed after step %lld: saving", (long long)t->state.step);
        else if (stop_signal == SIGUSR1)
            log_info("interrupted after step %lld: saving", (long long)t->state.step);
        else if (stop_signal)
            log_info("interrupted by signal %d after step %lld: saving", (int)stop_signal, (long long)t->state.step);
        else
            log_info("another rank was interrupted after step %lld: saving", (long long)t->state.step);
        if (save(t, err)) rc = -1;
        if (rc >= 0 && is_first(t)) tell_how_to_continue(t);
    }
    if (t->loader && profile_finish(&t->profile, &close_err) && rc >= 0) rc = err_set(err, "%s", close_err.msg);
    comm_busy(all, "saving");
    if (rc >= 0 && !t->complete && save_adapter(t, "adapter", err))
        rc = -1; /* the last state, also after an interruption */
    if (t->metrics.jsonl && metrics_close(&t->metrics, &close_err) && rc >= 0) rc = err_set(err, "%s", close_err.msg);
    if (rc >= 0 && is_first(t)) tell_of_end(t);
    if (rc >= 0) comm_unshare_work(t->run.par.ep);
    training_close(t);
    mem_free(t);
    if (rc >= 0) signal(SIGTERM, SIG_IGN); /* from a launcher, as another rank has exited before this one */
    return rc;
}

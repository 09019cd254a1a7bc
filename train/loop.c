/* loop.c - the training run. An optimizer step is grad_accum micro-batches of forward, loss and backward, then the norm
 * of the gradient, clipping, AdamW. Rank i mod P computes micro-batch i of a step, so the data of a step do not depend
 * on P. Every rank iterates over all data, so the number of labels needs no communication. struct train_state, the
 * adapters and their moments determine the next step. So a run that continues from a checkpoint ends with the same
 * bytes as a run that never stopped. */
#include "train/loop.h"

#include <math.h>
#include <signal.h>
#include <string.h>

#include "train/objective/run_objective.h"
#include "train/rollout/online_log.h"
#include "train/session/policy_run.h"
#include "train/session/saves.h"
#include "train/session/session.h"
#include "train/session/step_checks.h"
#include "train/state/stop.h"

/* ---- one optimizer step */

static bool is_online(const struct training *t) { return config_is_online(t->run.cfg); }

/* Saves the state after an error of a reward or of the sampler, because the user may correct the cause and continue.
 * Returns -1. */
static int save_before(struct training *t)
{
    struct err other;
    metrics_end_line(&t->metrics);
    if (t->state.step && saves_checkpoint(t, &other)) log_warn("%s", other.msg);
    return -1;
}

/* Error, which ends the run: the log-probabilities of trainer and sampler differ too much. */
static int check_sampler(const struct training *t, double difference, struct err *err)
{
    const struct run *r = &t->run;
    const double given = r->cfg->rollout.max_logp_difference;
    /* a rounding difference can change a code of a quantised input */
    const bool coarse = r->dev.act_dtype == DT_BF16 || r->dev.round_bf16 || r->cfg->quant.activations;
    const double allowed = given > 0 ? given : coarse ? 0.02 : 1e-4;
    if (difference <= allowed) return 0;
    return err_set(
        err,
        "step %lld: log-probabilities of trainer and sampler differ by %.3g nats on average, over the bound of "
        "%.3g (rollout.max_logp_difference): this is a bug of moetrain, or a bound too low for this precision",
        (long long)t->state.step + 1, difference, allowed);
}

/* Samples the generation batch of the next step, if it needs a new one, and logs it. */
static int sample(struct training *t, struct err *err)
{
    struct online *o = &t->online;
    const int64_t before = o->first;
    struct online_proof proof;
    if (!is_online(t)) return 0;
    const int rc = online_batch(o, t->state.step, t->state.pos, stop_asked, err);
    if (rc > 0) return LOOP_INTERRUPTED;
    if (rc) return t->saved_step < t->state.step ? save_before(t) : -1;
    if (o->first == before) return 0;
    online_prove(o, &proof);
    if (training_is_first(t)) online_log_batch(&t->metrics, o, &proof);
    return proof.corrected ? 0 : check_sampler(t, proof.given, err);
}

/* Reads the micro-batches of the next step, and the position of the data after them. */
static struct batch *take_batches(struct training *t, int64_t n, struct step_counts *counts, struct loader_pos *pos)
{
    const int64_t shares = policy_is(t->run.cfg) ? 0 : micro_batch_shares(&t->run.model);
    struct batch *b = mem_array(n, sizeof(*b));
    *counts = (struct step_counts){0};
    for (int64_t i = 0; i < n && !is_online(t); i++) micro_batch_next(&b[i], t->loader, pos, shares, counts);
    for (int64_t i = 0; i < n && is_online(t); i++) {
        online_micro_batch(&t->online, t->state.step, i, &b[i]);
        step_counts_add(counts, &b[i]);
    }
    if (is_online(t)) *pos = online_ends(&t->online, t->state.step) ? t->online.after : t->state.pos;
    return b;
}

/* Runs forward and backward of this rank's micro-batches; the host does not read gradients and loss yet. False: a
 * signal interrupted it. With several ranks a step is not interrupted; they exchange the stop flag while their devices
 * compute. */
static bool accumulate(struct training *t, const struct batch *b, int64_t n, const struct step_counts *counts)
{
    struct run *r = &t->run;
    const struct run_objective *o = run_objective(r->cfg);
    const double baseline = o->before_step ? o->before_step(&r->model, b, n) : 0;
    device_zero(&r->dev, r->model.adapters.opt.grad);
    model_clear(&r->model);
    struct comm *ranks = r->par.all;
    for (int64_t i = ranks->rank; i < n; i += ranks->world) {
        struct model_pass pass = training_pass(t, i, counts);
        pass.baseline = baseline;
        if (ranks->world == 1 && stop_asked()) return false;
        run_micro_batch(r, &b[i], &pass);
        model_end(&r->model);
        model_add(&r->model);
    }
    model_sum_step(&r->model);
    model_norm(&r->model);
    if (ranks->world > 1) t->stopping = comm_host_max(ranks, stop_asked()) > 0;
    return true;
}

/* Checks the first step if the adapters begin equal to the reference: its loss must be that of equal models. */
static int check_first(const struct training *t, const struct step_metrics *m, struct err *err)
{
    const struct run_objective *o = run_objective(t->run.cfg);
    if (t->state.step || m->skipped || !o->begins_as_reference || !o->begins_as_reference(t->run.cfg)) return 0;
    return o->first_step(&t->run.model, m->loss, &m->parts, err);
}

/* Checks the sampler by all rows of the step, if they have importance weights. */
static int check_importance(const struct training *t, const struct model_sums *sum, struct err *err)
{
    const double known = sum->importance[IMPORTANCE_KNOWN];
    if (!is_online(t) || !(known > 0)) return 0;
    return check_sampler(t, sum->importance[IMPORTANCE_DIFFERENCE] / known, err);
}

/* Reads the step's sums, for which the host waits for the device, and updates the adapters. The host waits nowhere else
 * in a step. */
static int update(struct training *t, const struct batch *b, const struct step_counts *counts, struct step_metrics *m,
                  char bad[64], struct err *err)
{
    struct model *model = &t->run.model;
    struct model_sums sum;
    model_read(model, &sum);
    m->loss = model_objective(model, &sum, m->labels);
    m->parts = policy_is(t->run.cfg) ? policy_run_parts(t, &sum, m->labels) : model_parts(model, &sum, m->labels);
    m->grad_norm = sum.grad_norm;
    m->skipped = !isfinite(m->loss) || sum.n_bad_grad || !isfinite(sum.grad_norm);
    if (m->skipped) step_checks_find_bad(t, b, t->run.cfg->train.grad_accum, counts, bad);
    if (check_first(t, m, err) || (!m->skipped && check_importance(t, &sum, err))) return -1;
    if (m->skipped || !m->labels) return 0;
    if (training_is_first(t)) step_checks_importance(t, &sum);
    adapters_update(&model->adapters, &t->run.dev, m->lr, m->grad_norm);
    return 0;
}

/* The mean of the loss over the first 10 steps, then an exponential mean with weight 0.1. */
static double smoothed(double before, double loss, int64_t n)
{
    const double w = fmax(0.1, 1 / (double)n);
    return n > 1 ? before + w * (loss - before) : loss;
}

/* Called before a step: the first quant.start steps are not quantised. With quant.amax = static the run keeps the
 * scales of the first quantised step; a run that continues after this step has them from its checkpoint. */
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
    struct step_counts counts;
    char bad[64] = "";
    begin_quantisation(t);
    comm_step(t->run.par.all, m.step);
    const int sampled = sample(t, err);
    if (sampled) return sampled;
    const double start = clock_ms(), floor_ms = t->run.dev.floor_ms;
    profile_step_begin(&t->profile, &t->run.dev, m.step);
    struct batch *b = take_batches(t, cfg->train.grad_accum, &counts, &pos);
    m.labels = counts.labels;
    m.tokens = counts.tokens;
    m.lr = schedule_lr(&t->schedule, m.step);
    policy_run_begin(t, b, &counts);
    const bool done = accumulate(t, b, cfg->train.grad_accum, &counts);
    const int rc = done ? update(t, b, &counts, &m, bad, err) : 0;
    for (int64_t i = 0; i < cfg->train.grad_accum; i++) batch_free(&b[i]);
    mem_free(b);
    if (!done) return profile_step_cancel(&t->profile), LOOP_INTERRUPTED;
    if (rc) return -1;
    t->run.model.adapters.step = ++s->step;
    s->pos = pos;
    s->tokens += m.tokens;
    if (is_online(t)) s->rollout_tokens = (int64_t)t->generation.stats.n_token;
    if (m.skipped)
        s->n_nonfinite++;
    else
        s->smooth_loss = smoothed(s->smooth_loss, m.loss, s->step - s->n_nonfinite);
    if (!m.skipped && s->step - s->n_nonfinite == 1) s->first_loss = fmax(s->first_loss, m.loss); /* and at step 0 */
    m.smooth_loss = s->smooth_loss;
    m.ms = clock_ms() - start;
    if (policy_is(cfg)) objective_put(&m.parts, "step_time", NULL, "%.4g", m.ms / 1e3, 1);
    m.roof = prof_share(&t->run.dev, t->run.dev.floor_ms - floor_ms, m.ms);
    m.mem_bytes = t->run.dev.ops->used_bytes();
    step_checks_device(t, m.mem_bytes);
    m.bad = bad;
    if (training_is_first(t)) metrics_step(&t->metrics, &m, cfg->log.every && s->step % cfg->log.every == 0);
    if (training_is_first(t)) step_checks_loss(t, m.skipped, m.loss);
    if (profile_step_end(&t->profile, m.step, err)) return -1;
    return m.skipped ? step_checks_skipped(t, bad, err) : 0;
}

/* ---- evaluations, checkpoints, the end */

/* The score, of which best/ has the lowest: the loss, or with eval.best = accuracy the share of pairs whose rejected
 * answer has the higher reward. */
static double score_of(const struct config *cfg, const struct eval_metrics *e)
{
    if (cfg->eval.best == CFG_BEST_LOSS) return e->loss;
    for (int i = 0; i < e->parts.n; i++)
        if (!strcmp(e->parts.of[i].name, "rewards/accuracies")) return 1 - e->parts.of[i].mean;
    return e->loss;
}

/* Evaluates the mean reward of held-out prompts; best/ has the highest. */
static int evaluate_rewards(struct training *t, struct err *err)
{
    struct train_state *s = &t->state;
    struct online_eval e;
    const int rc = online_evaluate(&t->online, s->step, stop_asked, &e, err);
    if (rc) return rc > 0 ? LOOP_INTERRUPTED : -1;
    const bool first = s->eval_from < 0, highest = 1 - e.stats.reward < s->best_loss, best = highest && s->step > 0;
    if (training_is_first(t)) online_log_eval(&t->metrics, &t->online, &e, s->step, best, s->eval_hash);
    s->eval_step = s->step;
    if (first) s->eval_from = s->step;
    s->n_worse = highest ? 0 : s->n_worse + 1;
    if (!highest) return 0;
    s->best_loss = 1 - e.stats.reward;
    s->best_step = s->step;
    return best ? saves_best(t, err) : 0;
}

/* Changes the state only at its end, so that a run that continues repeats an interrupted evaluation. */
static int evaluate(struct training *t, struct err *err)
{
    struct train_state *s = &t->state;
    struct eval_metrics e = {.step = s->step, .held_out = s->eval_hash};
    struct metrics *metrics = training_is_first(t) ? &t->metrics : NULL;
    if (is_online(t) && t->run.eval.n_docs) return evaluate_rewards(t, err);
    if (t->run.eval.n_docs && !run_evaluate(&t->run, &e, stop_asked)) return LOOP_INTERRUPTED;
    const double score = score_of(t->run.cfg, &e);
    const bool lowest = score < s->best_loss || (score == s->best_loss && e.loss < s->best_tie);
    e.from = s->eval_from < 0 ? s->step : s->eval_from;
    e.best = lowest && s->step > 0; /* step 0 is only for comparison: there is no trained adapter to save */
    if (t->run.eval.n_docs && metrics) metrics_eval(metrics, &e);
    if (!eval_prompts_write(&t->samples, metrics, s->step, stop_asked)) return LOOP_INTERRUPTED;
    s->eval_step = s->step;
    if (!t->run.eval.n_docs) return 0;
    s->eval_from = e.from;
    if (s->step == 0 && isfinite(e.loss)) s->first_loss = e.loss;
    if (metrics && !isfinite(e.loss)) step_checks_evaluation(t);
    s->n_worse = lowest ? 0 : s->n_worse + 1;
    if (!lowest) return 0;
    s->best_loss = score;
    s->best_tie = e.loss;
    s->best_step = s->step;
    return e.best ? saves_best(t, err) : 0;
}

/* Makes steps until the end or an interruption. Only the state decides whether an evaluation or a checkpoint follows a
 * step. So if the run was killed before one, the run makes it when it continues. */
static int steps(struct training *t, struct err *err)
{
    const int64_t every = t->run.cfg->output.save_every, start = t->state.step;
    for (int rc;;) {
        const int64_t s = t->state.step;
        bool last = s >= t->schedule.total_steps;
        const bool due = training_evaluation_due(t, &t->state);
        if (due && (rc = evaluate(t, err))) return rc;
        if (!last && training_out_of_patience(t, &t->state)) {
            last = true;
            if (training_is_first(t)) metrics_stop(&t->metrics, s, t->state.n_worse);
        }
        /* The step from which the run continued has a checkpoint. It is written again only after an evaluation that was
         * missing. */
        const bool saving = (s > start || (due && s > 0)) && (last || (every && s % every == 0));
        if (saving && saves_checkpoint(t, err)) return -1;
        if (last && saving) return 0;
        if (last)
            return saves_report(
                t, err); /* writes the report, which is missing if the run was killed after its last checkpoint */
        if ((rc = step(t, err))) return rc;
        if (t->stopping && t->state.step < t->schedule.total_steps) return LOOP_INTERRUPTED;
    }
}

/* An interrupted run saves its state. */
static int save_interrupted(struct training *t, struct err *err)
{
    saves_tell_interrupted(t, stop_signal());
    if (saves_checkpoint(t, err)) return -1;
    saves_tell_continuation(t);
    return LOOP_INTERRUPTED;
}

/* Ends an open run with its last state, also after an interruption. Closes files also after an error. */
static int finish(struct training *t, int rc, struct err *err)
{
    struct err close_err;
    if (t->loader && profile_finish(&t->profile, &close_err) && rc >= 0) rc = err_set(err, "%s", close_err.msg);
    comm_busy(t->all, "saving");
    if (rc >= 0 && !t->complete && saves_adapter(t, "adapter", err)) rc = -1;
    if (metrics_close(&t->metrics, &close_err) && rc >= 0) rc = err_set(err, "%s", close_err.msg);
    if (rc < 0) return -1;
    saves_tell_end(t);
    comm_unshare_work(t->run.par.ep);
    return rc;
}

int loop_train(const struct config *cfg, struct comm *all, const struct training_hook *hook, struct err *err)
{
    struct training *t = mem_alloc(sizeof(*t)); /* too large for a small stack */
    comm_busy(all, "loading");
    const bool open = !session_open(t, cfg, all, hook, err);
    /* Before this line there is nothing to save, so a signal ends the process at once. */
    stop_take_signals(open && training_is_first(t) ? "the state is saved after this step" : NULL);
    comm_busy(all, NULL);
    int rc = !open ? -1 : t->complete ? 0 : steps(t, err);
    if (rc == LOOP_INTERRUPTED) rc = save_interrupted(t, err);
    if (open) rc = finish(t, rc, err);
    session_close(t);
    mem_free(t);
    if (rc >= 0) signal(SIGTERM, SIG_IGN); /* a launcher sends it when another rank exits before this one */
    return rc;
}

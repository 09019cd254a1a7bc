/* step_checks.c - see step_checks.h. Before the first update the learning rate cannot be the cause of a loss that is
 * not finite, so the message then has other advice. */
#include "train/session/step_checks.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Sets bad on all ranks to the first non-finite tensor, in the order of the micro-batches. */
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

void step_checks_find_bad(struct training *t, const struct batch *b, int64_t n, const struct step_counts *counts,
                          char bad[64])
{
    struct model *m = &t->run.model;
    struct model_sums sum;
    if (model_first_bad_grad(m, bad)) snprintf(bad + strlen(bad), 64 - strlen(bad), " (gradient)");
    struct comm *ranks = t->run.par.all;
    int64_t at = n; /* the micro-batch; n: none */
    /* The ranks of t->run.par.ep stay in step to the end. */
    for (int64_t i = ranks->rank; i < (t->run.par.ep->world > 1 ? n : at); i += ranks->world) {
        const struct model_pass pass = training_pass(t, i, counts);
        model_clear(m);
        run_forward(&t->run, &b[i], &pass);
        model_read(m, &sum);
        const bool found = at == n && !isfinite(model_objective(m, &sum, counts->labels));
        if (found) model_first_bad(m, bad);
        model_end(m);
        if (found) at = i;
    }
    if (!*bad) snprintf(bad, 64, "gradient norm");
    agree_on_bad(ranks, at, bad);
}

/* Warns when device memory exceeds train.memory_gb. A device in host memory is not checked, because its use includes
 * the mapped checkpoint. */
static void warn_of_memory(struct training *t, int64_t used)
{
    const struct plan *p = &t->run.plan;
    char a[32], b[32];
    if (p->in_host_memory || !p->capped || used <= p->budget || t->warned.memory) return;
    t->warned.memory = true;
    log_warn("%s of device memory are in use, more than train.memory_gb = %s: lower it by the difference",
             str_bytes(a, used), str_bytes(b, p->budget));
}

/* Warns once when unbalanced routing makes the ranks use more chunks per layer, which is slower. */
static void warn_of_chunks(struct training *t)
{
    const struct model *m = &t->run.model;
    const int64_t planned = m->acts.ep.n_chunk;
    if (t->warned.chunks || !planned || m->n_chunk <= planned) return;
    t->warned.chunks = true;
    log_info("routing is unbalanced: a layer is cut into %lld chunks instead of %lld; raise parallel.capacity_factor "
             "(%g) to avoid that",
             (long long)m->n_chunk, (long long)planned, m->acts.ep.capacity_factor);
}

void step_checks_device(struct training *t, int64_t used_bytes)
{
    warn_of_memory(t, used_bytes);
    warn_of_chunks(t);
}

static bool is_untrained(const struct train_state *s) { return s->n_nonfinite == s->step; }

/* What a loss before the first update depends on, in addition to the data; for messages. */
static const char *start_text(const struct config *cfg)
{
    return cfg->lora.init_from[0] ? "the base model's weights, lora.init_from" : "the base model's weights";
}

static void warn_of_skipped(const struct config *cfg, const struct train_state *s, double loss)
{
    const long long step = s->step, most = cfg->train.max_nonfinite;
    if (s->n_nonfinite != 1) return;
    if (is_untrained(s))
        log_warn(
            "step %lld is skipped: its %s is not finite, before any update; the run ends after %lld such steps "
            "(train.max_nonfinite). Check %s and the data; `moetrain eval --base` computes the loss without adapters",
            step, isfinite(loss) ? "gradient" : "loss", most, start_text(cfg));
    else
        log_warn("step %lld is skipped: its loss or gradient is not finite; the run ends after %lld such steps "
                 "(train.max_nonfinite). Lower optim.lr or check the data",
                 step, most);
}

/* Warns of divergence, once per start of the program: from the 10th step with a finite loss on, when the smoothed loss
 * is above 1.5 * first_loss + 0.5. first_loss: the loss before the first update. */
static void warn_of_divergence(struct training *t)
{
    const struct train_state *s = &t->state;
    const int64_t finite = s->step - s->n_nonfinite;
    if (policy_is(t->run.cfg)) return; /* a loss weighted by advantages is near 0 whatever the policy does */
    if (t->warned.diverged || finite < 10 || !(s->smooth_loss > 1.5 * s->first_loss + 0.5)) return;
    t->warned.diverged = true;
    metrics_end_line(&t->metrics);
    log_warn("the loss diverges: %.4f (smoothed) at step %lld, %.4f before the first update. Lower optim.lr, or raise "
             "optim.warmup_steps",
             s->smooth_loss, (long long)s->step, s->first_loss);
}

void step_checks_loss(struct training *t, bool skipped, double loss)
{
    if (skipped) warn_of_skipped(t->run.cfg, &t->state, loss);
    warn_of_divergence(t);
}

void step_checks_importance(struct training *t, const struct model_sums *sum)
{
    if (t->warned.importance || !(sum->importance[IMPORTANCE_KNOWN] > 0) || sum->importance[IMPORTANCE_WEIGHT] > 0)
        return;
    t->warned.importance = true;
    metrics_end_line(&t->metrics);
    log_warn("step %lld: no completion has loss, because all importance weights are outside objective.is_floor = %g "
             "to objective.is_cap = %g: the rows are of another model, adapter or temperature, or the bounds are too "
             "narrow",
             (long long)t->state.step + 1, t->run.cfg->objective.is_floor, t->run.cfg->objective.is_cap);
}

void step_checks_evaluation(const struct training *t)
{
    const struct config *cfg = t->run.cfg;
    const struct train_state *s = &t->state;
    const bool never = s->eval_from == 0 && !isfinite(s->best_loss);
    if (!is_untrained(s) && !never)
        log_warn("the held-out loss at step %lld is not finite: the adapters have diverged. Lower optim.lr, or raise "
                 "optim.warmup_steps",
                 (long long)s->step);
    else
        log_warn("the held-out loss at step %lld is not finite, %s: check %s and the held-out data", (long long)s->step,
                 is_untrained(s) ? "before any update" : "as at step 0", start_text(cfg));
}

int step_checks_skipped(const struct training *t, const char *bad, struct err *err)
{
    const struct config *cfg = t->run.cfg;
    const struct train_state *s = &t->state;
    const bool over = s->n_nonfinite >= cfg->train.max_nonfinite;
    if (is_untrained(s) && (over || s->step == t->schedule.total_steps))
        return err_set(err,
                       "nothing was trained: no step had a finite loss and gradient; not finite in the last one: %s. "
                       "Check the data and %s",
                       bad, start_text(cfg));
    if (!over) return 0;
    return err_set(
        err,
        "stopped after %lld skipped step%s (train.max_nonfinite); not finite in the last one: %s. Lower optim.lr or "
        "check the data",
        (long long)s->n_nonfinite, str_plural(s->n_nonfinite), bad);
}

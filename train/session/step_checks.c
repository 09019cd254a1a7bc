/* step_checks.c - warnings and errors about a loss that is not finite. Before the first update neither the learning
 * rate nor the run is its cause. */
#include "train/session/step_checks.h"

#include <math.h>

static bool is_untrained(const struct train_state *s) { return s->n_nonfinite == s->step; }

/* What decides a loss before the first update, besides the data. */
static const char *start_text(const struct config *cfg)
{
    return cfg->lora.init_from[0] ? "the base model's weights, lora.init_from" : "the base model's weights";
}

void step_checks_skipped(const struct config *cfg, const struct train_state *s, double loss)
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

void step_checks_evaluation(const struct config *cfg, const struct train_state *s)
{
    const bool never = s->eval_from == 0 && !isfinite(s->best_loss);
    if (!is_untrained(s) && !never)
        log_warn("the held-out loss at step %lld is not finite: the adapters have diverged. Lower optim.lr, or raise "
                 "optim.warmup_steps",
                 (long long)s->step);
    else
        log_warn("the held-out loss at step %lld is not finite, %s: check %s and the held-out data", (long long)s->step,
                 is_untrained(s) ? "before any update" : "as at step 0", start_text(cfg));
}

int step_checks_check(const struct config *cfg, const struct train_state *s, int64_t total_steps, const char *bad,
                      struct err *err)
{
    const bool over = s->n_nonfinite >= cfg->train.max_nonfinite;
    if (is_untrained(s) && (over || s->step == total_steps))
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

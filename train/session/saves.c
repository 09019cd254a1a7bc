/* saves.c - see saves.h. */
#include "train/session/saves.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "train/adapter/adapter_norms.h"
#include "train/adapter/peft.h"
#include "train/report/report.h"
#include "train/run/chat_file.h"
#include "train/run/model_card.h"
#include "train/session/policy_run.h"
#include "train/state/best.h"
#include "train/state/run_config.h"

/* The place in metrics.jsonl at which the run continues. If the held-out data have changed, the checkpoint's evaluation
 * stays in the file. */
static struct metrics_end metrics_end_of(const struct training *t)
{
    const struct train_state *found = &t->from.state, *now = &t->state;
    const bool again = !t->complete && found->eval_hash == now->eval_hash && now->eval_step != found->step &&
                       training_evaluation_due(t, now);
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
    const struct log_command_run command = {cfg->log.command, cfg->log.name, cfg->output.dir, from != NULL};
    if (*cfg->log.command && metrics_command(&t->metrics, &command, err)) return -1;
    metrics_start(&t->metrics, &(struct start_metrics){.step = t->state.step,
                                                       .total_steps = t->schedule.total_steps,
                                                       .run = cfg->output.dir,
                                                       .name = cfg->log.name,
                                                       .model = cfg->model.path,
                                                       .data = cfg->data.train,
                                                       .eval_data = cfg->data.eval,
                                                       .device = t->run.dev.name,
                                                       .ranks = t->run.par.all->world,
                                                       .config = cfg});
    return 0;
}

/* If nothing is left to do, the files are already complete, except after a run with more steps that was killed before
 * its first checkpoint.
 */
int saves_open(struct training *t, struct err *err)
{
    const struct config *cfg = t->run.cfg;
    if (!training_is_first(t)) return 0;
    if (!(t->complete && run_config_is_of(cfg, &t->from)) && run_config_write(cfg, err)) return -1;
    if (!t->complete || !file_exists(training_path(t, "metrics.jsonl").s)) return open_metrics(t, err);
    const struct metrics_end end = metrics_end_of(t);
    return metrics_cut(cfg->output.dir, &end, err);
}

void saves_close(struct training *t)
{
    struct err other;
    if (metrics_close(&t->metrics, &other)) log_warn("%s", other.msg);
}

static char *card_of(const struct training *t)
{
    return training_is_first(t) ? model_card(&t->run, &t->state, t->schedule.total_steps) : NULL;
}

int saves_adapter(struct training *t, const char *name, struct err *err)
{
    const struct training_path dir = training_path(t, name);
    char *card = card_of(t);
    int rc = peft_save(&t->run.model.adapters, &t->run.dev, dir.s, t->run.model_name, card, err);
    if (!rc && training_is_first(t)) rc = chat_file_save(&t->run, dir.s, err);
    mem_free(card);
    return rc;
}

int saves_best(struct training *t, struct err *err)
{
    comm_busy(t->run.par.all, "saving");
    int rc = saves_adapter(t, BEST_NEW, err);
    if (!rc && training_is_first(t)) rc = best_replace(t->run.cfg->output.dir, t->saved_step, t->saved_best, err);
    comm_busy(t->run.par.all, NULL);
    return rc;
}

int saves_report(struct training *t, struct err *err)
{
    const struct config *cfg = t->run.cfg;
    if (!cfg->log.report || !training_is_first(t)) return 0;
    char *text = config_dump(cfg), title[MT_PATH + 32];
    snprintf(title, sizeof(title), "moetrain: %s", *cfg->log.name ? cfg->log.name : t->run.model_name);
    const int rc = report_write(cfg->output.dir, title, text, err);
    mem_free(text);
    return rc;
}

/* Writes the event `experts`: rows of every expert since the last such event, and current norms of their adapters. */
static void record_experts(struct training *t)
{
    struct model *m = &t->run.model;
    const struct adapters *whole = adapters_logical(&m->adapters);
    const int64_t n_exp = m->arch.n_exp, n = m->arch.n_layer * n_exp;
    const bool first = training_is_first(t);
    int64_t *rows = mem_array(n, sizeof(*rows));
    double *gates = mem_array(3 * n, sizeof(*gates)), *norms = gates + n, *ranks = norms + n;
    float *values = first ? mem_array(whole->n_flat, sizeof(*values)) : NULL;
    model_read_experts(m, rows, gates);
    adapters_gather(&m->adapters, &t->run.dev, m->adapters.opt.param, DT_F32, values);
    const bool adapted = first && adapter_norms(whole, values, n_exp, norms);
    struct expert_metrics e = {t->state.step, m->arch.n_layer, n_exp, rows, gates, adapted ? norms : NULL, NULL};
    if (first && m->adapters.budget > 0) {
        adapter_ranks(whole, values, n_exp, ranks);
        e.ranks = ranks;
    }
    if (first) metrics_experts(&t->metrics, &e);
    mem_free(values);
    mem_free(gates);
    mem_free(rows);
}

int saves_checkpoint(struct training *t, struct err *err)
{
    const struct config *cfg = t->run.cfg;
    struct model *m = &t->run.model;
    comm_busy(t->run.par.all, "saving");
    record_experts(t);
    char *card = card_of(t);
    const struct checkpoint_generation generation = policy_run_saved(t);
    int rc = checkpoint_save(cfg->output.dir, &m->adapters, &t->run.dev, &t->state, cfg, &m->arch, t->run.model_name,
                             card, &generation, cfg->output.keep, err);
    mem_free(card);
    if (!rc) t->saved_step = t->state.step, t->saved_best = t->state.best_step;
    if (!rc && config_is_online(cfg)) online_saved(&t->online, t->state.step);
    if (!rc) rc = saves_report(t, err);
    comm_busy(t->run.par.all, NULL);
    return rc;
}

void saves_tell_interrupted(struct training *t, int signal)
{
    const long long step = t->state.step;
    metrics_end_line(&t->metrics);
    if (signal == SIGPIPE)
        log_info("standard output or error was closed after step %lld: saving", step);
    else if (signal == SIGUSR1)
        log_info("interrupted after step %lld: saving", step);
    else if (signal)
        log_info("interrupted by signal %d after step %lld: saving", signal, step);
    else
        log_info("another rank was interrupted after step %lld: saving", step);
}

/* Prints how to continue: with the same command, and if train.resume is never or a directory, with train.resume =
 * auto. */
void saves_tell_continuation(const struct training *t)
{
    if (!training_is_first(t)) return;
    log_info("saved step %lld of %lld: run the same command%s to continue", (long long)t->state.step,
             (long long)t->schedule.total_steps,
             strcmp(t->run.cfg->train.resume, "auto") ? " with train.resume = auto" : "");
}

static void tell_of_patience(const struct training *t)
{
    const struct train_state *s = &t->state;
    const bool online = config_is_online(t->run.cfg);
    char loss[64];
    snprintf(loss, sizeof(loss), "finite %s", online ? "reward" : "loss");
    if (isfinite(s->best_loss) && (online || t->run.cfg->eval.best == CFG_BEST_ACCURACY))
        snprintf(loss, sizeof(loss), "higher %s than %.4f of step %lld", online ? "reward" : "accuracy",
                 1 - s->best_loss, (long long)s->best_step);
    else if (isfinite(s->best_loss))
        snprintf(loss, sizeof(loss), "lower loss than %.4f of step %lld", s->best_loss, (long long)s->best_step);
    log_info("eval.patience = %lld: the last %lld evaluations had no %s: stopped after step %lld of %lld; raise "
             "eval.patience to continue",
             (long long)t->run.cfg->eval.patience, (long long)s->n_worse, loss, (long long)s->step,
             (long long)t->schedule.total_steps);
}

void saves_tell_end(const struct training *t)
{
    if (!training_is_first(t)) return;
    if (t->state.step < t->schedule.total_steps && training_out_of_patience(t, &t->state)) tell_of_patience(t);
    best_print(t->run.cfg->output.dir, &t->state,
               config_is_online(t->run.cfg)                 ? "held-out reward"
               : t->run.cfg->eval.best == CFG_BEST_ACCURACY ? "held-out accuracy"
                                                            : NULL);
}

/* run_objective.c - see run_objective.h. */
#include "train/objective/run_objective.h"

#include <string.h>

#include "train/adapter/adapter_dir.h"
#include "train/objective/preference_keys.h"

static const struct run_objective sft = {.kind = &objective_sft};

const struct run_objective *run_objective(const struct config *c)
{
    if (c->objective.kind == CFG_KTO) return &run_objective_kto;
    if (c->objective.kind >= CFG_GRPO) return &run_objective_policy;
    if (c->objective.kind != CFG_SFT) return &run_objective_pairs;
    return strcmp(c->distill.teacher, "none") ? &run_objective_distill : &sft;
}

enum data_format run_objective_format(const struct config *c, bool eval)
{
    const enum data_format train = (enum data_format)c->data.format, own = run_objective(c)->format;
    const enum data_format answers = own ? own : (enum data_format)c->data.answers;
    if (answers && !(eval && answers == DATA_ROLLOUTS)) return answers;
    return eval && c->data.eval_format != CFG_EVAL_FORMAT_SAME ? (enum data_format)(c->data.eval_format - 1) : train;
}

/* Checks eval.best: only pairs of answers have an accuracy by which adapters can be compared. */
static int check_best(const struct config *c, struct err *err)
{
    if (c->eval.best == CFG_BEST_LOSS || run_objective(c)->format == DATA_PREFERENCE) return 0;
    return err_set(err,
                   "eval.best = accuracy needs an objective over pairs of answers (objective.kind = dpo, ipo, simpo "
                   "or orpo): set loss");
}

/* Checks data.format: a preference objective reads rows only in its own form, and other objectives do not read this
 * form. */
static int check_format(const struct config *c, struct err *err)
{
    const enum data_format own = run_objective(c)->format;
    char name[32], kind[32];
    for (int eval = 0; eval < 2; eval++) {
        const int same = CFG_EVAL_FORMAT_SAME, set = eval ? c->data.eval_format - 1 : c->data.format;
        const bool answers = set == DATA_PREFERENCE || set == DATA_LABELLED || set == DATA_ROLLOUTS;
        if ((eval && c->data.eval_format == same) || set == (int)own || (own ? set == DATA_AUTO : !answers)) continue;
        config_choice(DATA_FORMATS, set, name);
        config_choice(OBJECTIVES, c->objective.kind, kind);
        return err_set(err,
                       "data.%s = %s with objective.kind = %s: leave it out: the objective decides the form of rows",
                       eval ? "eval_format" : "format", name, kind);
    }
    return 0;
}

int run_objective_check(const struct config *c, struct err *err)
{
    const struct run_objective *o = run_objective(c);
    return config_validate(c, err) || preference_keys_check(c, err) || check_format(c, err) || check_best(c, err) ||
                   (o->check && o->check(c, err))
               ? -1
               : 0;
}

const char *run_objective_reference(const struct config *c)
{
    const struct run_objective *o = run_objective(c);
    return o->reference ? o->reference(c) : NULL;
}

int run_objective_find_reference(char dir[MT_PATH], const struct config *c, struct err *err)
{
    const char *given = run_objective_reference(c);
    if (!given) return 0;
    return adapter_dir_find(dir, run_objective(c)->reference_key, given, err) ? -1 : 1;
}

void run_objective_scale(struct model_pass *pass, const struct config *c, const struct step_counts *n)
{
    const int64_t over = run_objective(c)->format ? n->units : n->labels;
    pass->loss_scale = 1 / (double)MT_MAX(over, 1);
    pass->sft_scale = 1 / (double)MT_MAX(n->chosen, 1);
}

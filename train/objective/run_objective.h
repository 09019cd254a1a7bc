/* run_objective.h - the objective that a run minimises, chosen by its settings; a row per objective. */
#ifndef MT_RUN_OBJECTIVE_H
#define MT_RUN_OBJECTIVE_H

#include "data/json/text.h"
#include "model/model.h"
#include "train/config/config.h"
#include "train/objective/micro_batch.h"

/* NULL members: nothing to do. */
struct run_objective {
    const struct objective *kind;                      /* what the model computes */
    enum data_format format;                           /* of its rows; AUTO: those with a loss per token */
    int (*check)(const struct config *, struct err *); /* errors of its settings */
    void (*options)(struct model_options *, const struct config *, const struct arch *);
    /* The adapter of the objective's reference model, as the settings name it (points into the settings); NULL: the
     * reference has no adapter, or there is no reference. Errors begin with reference_key. */
    const char *(*reference)(const struct config *);
    const char *reference_key;
    void (*warn)(const struct config *); /* at the start, about settings that have no effect */
    /* Called before the passes over the n micro-batches b of a step, or of a part of an evaluation. It may run passes
     * without gradient, which the ranks divide. Returns model_pass.baseline of the passes that follow. */
    double (*before_step)(struct model *, const struct batch *b, int64_t n);
    /* Whether the adapters of a new run equal the reference; then first_step checks the loss and its parts. */
    bool (*begins_as_reference)(const struct config *);
    int (*first_step)(const struct model *, double loss, const struct objective_means *, struct err *);
    /* The row of the model card. name: the first column; NULL: no row. describe: appends the second column, as plain
     * text. */
    const char *name;
    void (*describe)(struct text_buf *, const struct config *);
};
extern const struct run_objective run_objective_distill, run_objective_pairs, run_objective_kto, run_objective_policy;

const struct run_objective *run_objective(const struct config *c);
/* config_validate, then the checks of the objective. */
int run_objective_check(const struct config *c, struct err *err) MT_CHECK;
/* The format of the rows of data.train, or of data.eval. */
enum data_format run_objective_format(const struct config *c, bool eval);
/* The reference's adapter as given; NULL: none. */
const char *run_objective_reference(const struct config *c);
/* Finds the directory of the reference's adapter. 1: dir is set; 0: the reference has no adapter; -1: not found. */
int run_objective_find_reference(char dir[MT_PATH], const struct config *c, struct err *err) MT_CHECK;

/* pass.loss_scale and pass.sft_scale of a step's micro-batches. */
void run_objective_scale(struct model_pass *pass, const struct config *c, const struct step_counts *n);

#endif

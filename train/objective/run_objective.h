/* run_objective.h - what a run minimises, as its settings choose it: a row per objective. */
#ifndef MT_RUN_OBJECTIVE_H
#define MT_RUN_OBJECTIVE_H

#include "data/json/text.h"
#include "model/model.h"
#include "train/config/config.h"

/* NULL members: nothing to do. */
struct run_objective {
    const struct objective *kind;                      /* what the model computes */
    int (*check)(const struct config *, struct err *); /* errors of its settings */
    void (*options)(struct model_options *, const struct config *, const struct arch *);
    /* The adapter of its reference model, as the settings name it (points into them); NULL: the reference has none, or
     * there is no reference. Errors begin with reference_key. */
    const char *(*reference)(const struct config *);
    const char *reference_key;
    void (*warn)(const struct config *); /* at the start, about settings that have no effect */
    /* The row of the model card: its name, NULL: no row; what the losses are of, as plain text. */
    const char *name;
    void (*describe)(struct text_buf *, const struct config *);
};
extern const struct run_objective run_objective_distill;

const struct run_objective *run_objective(const struct config *c);
/* config_validate, then the checks of the objective. */
int run_objective_check(const struct config *c, struct err *err) MT_CHECK;
/* The reference's adapter as given; NULL: none. */
const char *run_objective_reference(const struct config *c);
/* The directory of the reference's adapter. 1: dir; 0: it has none; -1: not found. */
int run_objective_find_reference(char dir[MT_PATH], const struct config *c, struct err *err) MT_CHECK;

#endif

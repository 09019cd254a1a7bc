/* resume.h - whether and from what a run continues: found, compared and judged before the model is loaded. */
#ifndef MT_RESUME_H
#define MT_RESUME_H

#include "optim/schedule.h"
#include "train/checkpoint.h"

/* A run as far as a checkpoint must fit it. */
struct resume_run {
    const struct config *cfg;
    struct schedule schedule;
    uint64_t data_hash, eval_hash;
    const struct loader *loader; /* of the training data */
};
/* The checkpoint that a run continues. Zeroed: none. */
struct resume {
    bool found;
    char path[MT_PATH];
    struct train_state state;
    int64_t n_update;
    struct json_doc *doc; /* its settings */
};

/* The checkpoint that train.resume asks for, if there is one, and its settings. An error when it, or all that there
 * are, are damaged, and when an option that changed the steps already made has another value: each is named with both.
 * lora.targets, rank_pattern and layers may be written in another way that adapts the same matrices of `a`. */
int resume_find(struct resume *r, const struct config *cfg, const struct arch *a, struct err *err) MT_CHECK;
/* After the data are read: an error when they are not those of the checkpoint, or when a number of its state is one
 * that this run cannot have come to; it is named. */
int resume_check(const struct resume *r, const struct resume_run *run, struct err *err) MT_CHECK;
/* After the model is read: an error when its weights are not those of the checkpoint. */
int resume_check_model(const struct resume *r, const struct config *cfg, uint64_t mark, struct err *err) MT_CHECK;
/* What is different from here on, and where the run stands. */
void resume_tell(const struct resume *r, const struct resume_run *run);
void resume_free(struct resume *r);

/* The schedule of a run of `total` steps. */
struct schedule resume_schedule(const struct config *cfg, int64_t total);

#endif

/* resume.h - finds the checkpoint to continue from and compares it with the run before the model is loaded. */
#ifndef MT_RESUME_H
#define MT_RESUME_H

#include "optim/schedule.h"
#include "train/state/checkpoint.h"

/* The properties of a run that a checkpoint must match. */
struct resume_run {
    const struct config *cfg;
    struct schedule schedule;
    uint64_t data_hash, eval_hash;
    const struct loader *loader; /* of the training data */
};
/* The checkpoint that a run continues. Zeroed: none. */
struct resume {
    bool found;
    bool elsewhere; /* path is not in output.dir/checkpoints: output.dir has no run, or another run */
    char path[MT_PATH];
    struct train_state state;
    int64_t n_update;
    struct json_doc *doc; /* its settings */
};

/* Finds the checkpoint of train.resume, if there is one, and reads its settings. Errors: the checkpoint, or every
 * checkpoint, is damaged; a CONFIG_MATH option or a value of `a` differs. lora.targets, the patterns and lora.layers
 * may have other texts if they adapt the same matrices of `a`. */
int resume_find(struct resume *r, const struct config *cfg, const struct arch *a, struct err *err) MT_CHECK;
/* Call it after the data are read. Errors: the data are not those of the checkpoint; a member of the state has a value
 * that this run cannot reach. */
int resume_check(const struct resume *r, const struct resume_run *run, struct err *err) MT_CHECK;
/* Call it after the model is read, or after run_fingerprint. Error: a hash of weights that checkpoint and model both
 * have differs. Warns if an older version wrote the checkpoint, so that its hash cannot be compared. */
int resume_check_model(const struct resume *r, const struct config *cfg, uint64_t fingerprint,
                       const struct base_model *base, const struct arch *a, struct err *err) MT_CHECK;
/* For CONFIG_NEXT options, which may change when a run continues. resume_has_settings: whether cfg has the checkpoint's
 * values. resume_take_settings: sets cfg to these values. */
bool resume_has_settings(const struct resume *r, const struct config *cfg);
int resume_take_settings(const struct resume *r, struct config *cfg, struct err *err) MT_CHECK;
/* Logs the step that the run continues from and the changed settings. */
void resume_tell(const struct resume *r, const struct resume_run *run);
void resume_free(struct resume *r);

/* The schedule of a run of `total` steps. */
struct schedule resume_schedule(const struct config *cfg, int64_t total);

#endif

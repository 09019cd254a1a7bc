/* checkpoint.h - what a run needs to continue bit for bit: OUT/checkpoints/step-NNNNNN. */
#ifndef MT_CHECKPOINT_H
#define MT_CHECKPOINT_H

#include "data/json.h"
#include "data/loader.h"
#include "model/lora.h"
#include "train/config.h"

/* Beside adapter and moments. Everything random is a function of (seed, step), so no generator has state. */
struct train_state {
    int64_t step;          /* optimizer steps done, skipped ones included */
    struct loader_pos pos; /* next micro-batch */
    int64_t n_nonfinite;   /* skipped steps */
    int64_t tokens;        /* trained on so far */
    int64_t total_steps;   /* of the run, when this was saved: the schedule's length */
    double smooth_loss;    /* of the step line */
    double first_loss;     /* mean of the first three steps with a finite loss: what divergence is measured by */
    double best_loss;      /* lowest held-out loss; infinity: none yet */
    int64_t best_step;
    int64_t n_worse;   /* evaluations since best_step, none of them lower */
    int64_t eval_step; /* last one evaluated; -1: none */
    int64_t eval_from; /* first one evaluated on the data of eval_hash, which best_loss is the lowest since; -1: none */
    uint64_t seed;
    uint64_t data_hash, model_mark; /* must agree to resume: training data; samples of the model's weights */
    uint64_t eval_hash;             /* what best_loss is a loss of: held-out data and how much of it */
};

/* Writes checkpoints/step-NNNNNN under out_dir: adapter/ (as peft_save), optimizer.safetensors (masters, m, v),
 * state.json with the options of `cfg` that are not CONFIG_FREE, and a manifest with size and CRC-32 of every file.
 * Made under a temporary name, fsynced, renamed; then all but the newest `keep` are deleted (keep 0: all stay); one
 * that cannot be deleted is a warning. Rank 0 writes; the others call it for their parts. */
int checkpoint_save(const char *out_dir, const struct adapters *ad, struct device *dev, const struct train_state *state,
                    const struct config *cfg, const char *base_model, const char *card, int64_t keep,
                    struct err *err) MT_CHECK;
/* Before a run starts: finishes the deletions and removes the half-written saves of processes that were killed. */
int checkpoint_sweep(const char *out_dir, struct err *err) MT_CHECK;
/* state.json of a step-NNNNNN directory: state, number of updates, and in *doc, to be freed, the object "settings":
 * texts of config_value by name. Nothing but its form is checked. */
int checkpoint_peek(const char *dir, struct train_state *state, int64_t *n_update, struct json_doc **doc,
                    struct err *err) MT_CHECK;
/* dir: a step-NNNNNN directory. Verifies the manifest first; an error names the damaged file, or a tensor with a value
 * that no run can have. After an error the adapters may be half loaded. */
int checkpoint_load(const char *dir, struct adapters *ad, struct device *dev, struct train_state *state,
                    struct err *err) MT_CHECK;
/* Newest checkpoint under out_dir that verifies, into path; 1 found, 0 none, -1 when all there are damaged (each is
 * named in a warning). */
int checkpoint_newest(const char *out_dir, char path[MT_PATH], struct err *err) MT_CHECK;

#endif

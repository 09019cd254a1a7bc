/* checkpoint.h - what a run needs to continue bit for bit: OUT/checkpoints/step-NNNNNN. */
#ifndef MT_CHECKPOINT_H
#define MT_CHECKPOINT_H

#include "data/loader.h"
#include "model/lora.h"

/* Beside adapter and moments. Everything random is a function of (seed, step), so no generator has state. */
struct train_state {
    int64_t step;          /* optimizer steps done, skipped ones included */
    struct loader_pos pos; /* next micro-batch */
    int64_t n_nonfinite;   /* skipped steps */
    int64_t tokens;        /* trained on so far */
    double smooth_loss;    /* of the step line */
    double best_loss;      /* lowest held-out loss; infinity: none yet */
    int64_t best_step;
    int64_t eval_step;                  /* last one evaluated; -1: none */
    uint64_t seed, data_hash, run_hash; /* must agree to resume: run_hash covers all settings that change the result */
};

/* Writes checkpoints/step-NNNNNN under out_dir: adapter/ (PEFT), optimizer.safetensors (masters, m, v), state.json, and
 * a manifest with size and CRC-32 of every file. Made under a temporary name, fsynced, renamed; then all but the newest
 * `keep` are deleted (keep 0: all stay); one that cannot be deleted is a warning. Rank 0 writes; the others call it for
 * their parts. */
int checkpoint_save(const char *out_dir, const struct adapters *ad, struct device *dev, const struct train_state *state,
                    const char *base_model, int64_t keep, struct err *err) MT_CHECK;
/* Before a run starts: finishes the deletions and removes the half-written saves of processes that were killed. */
int checkpoint_sweep(const char *out_dir, struct err *err) MT_CHECK;
/* dir: a step-NNNNNN directory. Verifies the manifest first; an error names the damaged file. After an error the
 * adapters may be half loaded. */
int checkpoint_load(const char *dir, struct adapters *ad, struct device *dev, struct train_state *state,
                    struct err *err) MT_CHECK;
/* Newest checkpoint under out_dir that verifies, into path; 1 found, 0 none, -1 when all there are damaged (each is
 * named in a warning). */
int checkpoint_newest(const char *out_dir, char path[MT_PATH], struct err *err) MT_CHECK;

#endif

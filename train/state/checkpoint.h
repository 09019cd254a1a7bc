/* checkpoint.h - checkpoints, OUT/checkpoints/step-NNNNNN: all that a run needs to continue with the same bits. */
#ifndef MT_CHECKPOINT_H
#define MT_CHECKPOINT_H

#include "data/json/json.h"
#include "data/loader.h"
#include "model/lora.h"
#include "train/config/config.h"

/* The state that a checkpoint has in addition to adapter and moments. All random numbers are functions of (seed, step),
 * so there is no generator state.
 */
struct train_state {
    int64_t step;           /* optimizer steps done, skipped ones included */
    struct loader_pos pos;  /* next micro-batch */
    int64_t n_nonfinite;    /* skipped steps */
    int64_t tokens;         /* tokens trained on so far */
    int64_t rollout_tokens; /* online RL: tokens of prompts and completions in all batches up to that of `step` */
    int64_t
        total_steps; /* total steps of the run when the checkpoint was written, which is the length of the schedule */
    double smooth_loss; /* as in the step line */
    double first_loss;  /* loss before the first update: of that step, or the held-out loss at step 0 if that is higher;
                           for the warning of divergence */
    double best_loss; /* lowest held-out loss, or with eval.best = accuracy the lowest 1 - rewards/accuracies; infinity:
                         none yet */
    double best_tie;  /* loss of that evaluation, which decides between equal best_loss with eval.best = accuracy */
    int64_t best_step;
    int64_t n_worse;   /* evaluations since best_step without a lower loss */
    int64_t eval_step; /* last evaluated step; -1: none */
    int64_t eval_from; /* first step that was evaluated with this eval_hash; best_loss is the lowest loss since then;
                          -1: none */
    uint64_t seed;
    uint64_t data_hash;  /* of the training data; must agree to resume */
    uint64_t model_hash; /* weights.fingerprint; must agree to resume. 0: unknown, because an older version wrote it
                            (which had model_mark, a hash of fewer weights) */
    uint64_t
        eval_hash; /* hash of the held-out data, eval.max_batches and eval.best with which best_loss was measured */
};

/* Online RL, between the steps of a generation: log-probabilities of its labels, by the model at the start of the
 * generation (old_nll) and by the reference; NULL: not needed (train/policy/generation.h). */
struct checkpoint_generation {
    int64_t n_label;
    const float *old_nll, *reference_nll; /* [n_label] */
};
/* Writes checkpoints/step-NNNNNN under out_dir: adapter/ (as peft_save), optimizer.safetensors (masters, m, v),
 * state.json with the options of `cfg` that are not CONFIG_FREE and the values of `arch` (NULL: none), and a manifest
 * with size and CRC-32 of these files; the model card and best/ are not in it. generation (NULL: none) is
 * generation.safetensors. Then deletes all but the newest `keep` checkpoints (0: keeps all), and warns if that fails.
 * Rank 0 writes; the other ranks call it to send their parts. */
int checkpoint_save(const char *out_dir, const struct adapters *ad, struct device *dev, const struct train_state *state,
                    const struct config *cfg, const struct arch *arch, const char *base_model, const char *card,
                    const struct checkpoint_generation *generation, int64_t keep, struct err *err) MT_CHECK;
/* Reads the log-probabilities of the n_label labels of the generation in dir; mem_free both. NULL: dir has none. */
int checkpoint_generation_load(const char *dir, int64_t n_label, float **old_nll, float **reference_nll,
                               struct err *err) MT_CHECK;
/* The path that a step's checkpoint has or would have. */
int checkpoint_path(char path[MT_PATH], const char *out_dir, int64_t step, struct err *err) MT_CHECK;
/* Call before a run starts: completes the deletions of killed processes and deletes their incomplete checkpoints. */
int checkpoint_sweep(const char *out_dir, struct err *err) MT_CHECK;
/* Deletes all but the newest `keep` checkpoints up to `step`, since a run that was killed during a save may leave one
 * more. */
int checkpoint_prune(const char *out_dir, int64_t step, int64_t keep, struct err *err) MT_CHECK;
/* Reads state.json of a step-NNNNNN directory: state, number of updates, and in *doc, which the caller frees, the
 * objects "settings" (texts of config_value by name) and "model" (of arch_value). Checks syntax and types only. */
int checkpoint_peek(const char *dir, struct train_state *state, int64_t *n_update, struct json_doc **doc,
                    struct err *err) MT_CHECK;
/* Loads a step-NNNNNN directory. Errors: it does not match its manifest; a tensor has an impossible value. After an
 * error the adapters may be partly loaded. */
int checkpoint_load(const char *dir, struct adapters *ad, struct device *dev, struct train_state *state,
                    struct err *err) MT_CHECK;
/* Whether out_dir/adapter has the bytes of the checkpoint's adapter. */
bool checkpoint_is_saved(const char *dir, const char *out_dir);
/* Sets path to the newest undamaged checkpoint under out_dir. 1: found; 0: there is none; -1: all are damaged (a
 * warning names each). */
int checkpoint_newest(const char *out_dir, char path[MT_PATH], struct err *err) MT_CHECK;
/* Sets folder to the folder of checkpoints under out_dir, and names [n] to the names of checkpoints after `step`,
 * newest first; free the names with file_list_free. */
int checkpoint_after(const char *out_dir, int64_t step, char folder[MT_PATH], char ***names, int64_t *n,
                     struct err *err) MT_CHECK;

#endif

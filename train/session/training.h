/* training.h - the state of a training run, and decisions by it. */
#ifndef MT_TRAINING_H
#define MT_TRAINING_H

#include "optim/schedule.h"
#include "train/generate/eval_prompts.h"
#include "train/objective/run_objective.h"
#include "train/report/metrics.h"
#include "train/policy/generation.h"
#include "train/report/profile.h"
#include "train/rollout/online_eval.h"
#include "train/run/run.h"
#include "train/state/lock.h"
#include "train/state/resume.h"

/* opened: called by rank 0 before the weights are loaded. st: the model's tensors. complete: nothing is left to
 * train. */
struct training_hook {
    void (*opened)(void *user, const struct arch *a, const struct safetensors *st, bool complete);
    void *user;
};

struct training {
    struct comm *all; /* owned by the caller */
    const struct training_hook *hook;
    int n_open; /* stages of session.c that are open */
    struct run run;
    struct loader *loader;
    struct metrics metrics;
    struct schedule schedule;
    struct train_state state;
    struct profile profile;
    struct generation generation; /* of online RL */
    struct {
        double from, share; /* entropy_from, entropy_share of the step's passes */
    } entropy;
    struct eval_prompts samples;
    struct online online; /* of online RL */
    struct resume from;
    int64_t saved_step, saved_best; /* step and best_step of the newest checkpoint; saved_step -1: none */
    struct config settings;         /* run.cfg of a run without a step to make */
    struct lock lock;               /* of output.dir, held by rank 0 */
    struct {
        bool memory, chunks, diverged, importance;
    } warned;      /* warnings that are printed once */
    bool complete; /* a checkpoint has the last step, and nothing is left to do */
    bool stopping; /* all ranks know that one of them got a signal to stop */
};

/* The rank that prints and writes. */
bool training_is_first(const struct training *t);
/* The options of the pass over micro-batch i of the next step. n: the counts of this step. */
struct model_pass training_pass(const struct training *t, int64_t i, const struct step_counts *n);
/* Whether a run in this state evaluates before its next step. */
bool training_evaluation_due(const struct training *t, const struct train_state *state);
/* Whether eval.patience ends the run. The checkpoint has the count, so a restarted run ends again at once. */
bool training_out_of_patience(const struct training *t, const struct train_state *state);

/* The path of a file in output.dir. */
struct training_path {
    char s[MT_PATH];
};
struct training_path training_path(const struct training *t, const char *name);

#endif

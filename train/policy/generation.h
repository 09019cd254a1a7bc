/* generation.h - a generation of completions, on which online RL trains in one or more optimizer steps. Computed once
 * per generation: advantages, log-probabilities of the model at its start and of the reference. */
#ifndef MT_GENERATION_H
#define MT_GENERATION_H

#include "data/rollout/rollouts.h"
#include "train/objective/micro_batch.h"
#include "train/objective/policy.h"
#include "train/run/run.h"

/* Means over the rows of a generation; NaN: over nothing. */
struct generation_stats {
    struct advantage_stats reward;
    double length[3], terminated[3]; /* mean, min, max of the tokens that the model wrote; terminated: only of rows with
                                        an end token, 0 if there are none */
    double truncated;                /* share of rows without an end token */
    double n_token;   /* tokens of prompts and completions in all generations so far; the caller sets it */
    double reward_kl; /* RLOO: mean of lp_old - lp_reference over tokens; NaN: no KL */
    struct generation_reward {
        char mean_name[64], std_name[64]; /* rewards/NAME/mean, std */
        double mean, std;
    } named[ROLLOUT_REWARDS]; /* [n_named] of rows that have rewards by name */
    int64_t n_named;
};
/* A generation: rows first .. first + n - 1 of a data set; zeroed: none. Row i has the labels [label_off[i],
 * label_off[i+1]). */
struct generation {
    int64_t first, n;
    int64_t *label_off;             /* [n+1] */
    double *advantage;              /* [n] */
    float *old_nll, *reference_nll; /* [labels]; NULL: not computed in advance, the loss computes them */
    float *sampler_nll;             /* [labels], NaN: unknown; NULL: no importance weights */
    struct generation_stats stats;
};

/* Makes a generation of n rows from `first` on. ds has the documents of `rows` (rollout_documents). n is a multiple of
 * the rows of a step and of a group. If old or reference log-probabilities are needed, runs passes without gradient.
 * All ranks call it. */
void generation_begin(struct generation *g, struct run *r, const struct dataset *ds, const struct rollouts *rows,
                      int64_t first, int64_t n);
/* As generation_begin, with old and reference log-probabilities from a checkpoint, [labels] or NULL
 * (generation_needs). */
void generation_continue(struct generation *g, const struct run *r, const struct dataset *ds,
                         const struct rollouts *rows, int64_t first, int64_t n, const float *old_nll,
                         const float *reference_nll);
/* Which log-probabilities generation_begin computes. If the loss needs the others, it computes them. */
struct generation_needs {
    bool old, reference;
};
struct generation_needs generation_needs(const struct config *c);
/* Labels of rows first .. first + n - 1. */
int64_t generation_labels(const struct dataset *ds, int64_t first, int64_t n);
void generation_free(struct generation *g);

/* Prepares a micro-batch of rows: completions of a prompt share the rows of its tokens; routers take the sampler's
 * experts if `rows` have them. Call it before generation_attach. */
void generation_batch(struct batch *b, const struct run *r, const struct rollouts *rows);
/* Attaches the inputs of the loss to a micro-batch of rows of g. counts: of the whole optimizer step. */
void generation_attach(const struct generation *g, const struct config *c, const struct step_counts *counts,
                       struct batch *b);
/* For objective.top_entropy_quantile: returns the least entropy with which a token of the step has loss. Runs a pass
 * without gradient over each of the step's n micro-batches b. *n_kept: number of tokens with loss. All ranks call
 * it. */
double generation_entropy(struct run *r, const struct batch *b, const struct model_pass *passes, int64_t n,
                          double quantile, int64_t *n_kept);
/* Adds the metrics of rewards and lengths. */
void generation_parts(struct objective_means *e, const struct generation *g);

#endif

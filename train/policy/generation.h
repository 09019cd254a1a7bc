/* generation.h - a generation of completions: what online RL computes of its rows once and then trains on in one or
 * more optimizer steps: advantages, log-probabilities by the model at its beginning and by the reference, weights that
 * correct for the sampler. */
#ifndef MT_GENERATION_H
#define MT_GENERATION_H

#include "data/rollout/rollouts.h"
#include "train/objective/micro_batch.h"
#include "train/objective/policy.h"
#include "train/run/run.h"

/* Means over the rows of a generation; NaN: over nothing. */
struct generation_stats {
    struct advantage_stats reward;
    double length[3],
        terminated[3]; /* mean, min, max of tokens that the model wrote; of rows with an end token, else 0 */
    double truncated;  /* share of rows without an end token */
    double n_token;    /* of prompts and completions in all generations so far; the caller sets it */
    double reward_kl;  /* RLOO: mean of lp_old - lp_reference over tokens; NaN: no KL */
    struct generation_reward {
        char mean_name[64], std_name[64]; /* rewards/NAME/mean, std */
        double mean, std;
    } named[ROLLOUT_REWARDS]; /* [n_named] of rows that have rewards by name */
    int64_t n_named;
    bool corrected; /* rows have weights that correct for the sampler; the members below are set only then */
    double weight[3], difference[2]; /* min, mean, max after cap and floor; mean, max of |lp_old - lp_sampler| */
};
/* Rows first .. first + n - 1 of a data set. Zeroed: none. Labels of row i: [label_off[i], label_off[i+1]). */
struct generation {
    int64_t first, n;
    int64_t *label_off;             /* [n+1] */
    double *advantage;              /* [n] */
    float *old_nll, *reference_nll; /* [labels]; NULL: not needed before the loss, which then has its own */
    float *weight;                  /* [labels]; NULL: no correction for the sampler */
    double *row_weight;             /* [n], of RLOO */
    struct generation_stats stats;
};

/* Rows first .. of rows, whose documents are those of ds (rollout_documents). n is a multiple of the rows of a step and
 * of groups. Runs passes without gradient where old log-probabilities or a reference are needed; all ranks call it. */
void generation_begin(struct generation *g, struct run *r, const struct dataset *ds, const struct rollouts *rows,
                      int64_t first, int64_t n);
/* The same with the old and reference log-probabilities of a checkpoint, [labels] or NULL, as generation_begin computed
 * them (generation_needs). */
void generation_continue(struct generation *g, const struct run *r, const struct dataset *ds,
                         const struct rollouts *rows, int64_t first, int64_t n, const float *old_nll,
                         const float *reference_nll);
/* Which log-probabilities generation_begin computes for such rows. The loss computes the others where it needs them. */
struct generation_needs {
    bool old, reference;
};
struct generation_needs generation_needs(const struct config *c, const struct rollouts *rows);
/* Labels of rows first .. first + n - 1. */
int64_t generation_labels(const struct dataset *ds, int64_t first, int64_t n);
void generation_free(struct generation *g);

/* A micro-batch of rows shares the rows of prompts, and has the sampler's experts where rows have them: before
 * generation_attach. */
void generation_batch(struct batch *b, const struct run *r, const struct rollouts *rows);
/* Gives a micro-batch of rows of g what the loss reads of them. counts: of the whole optimizer step. */
void generation_attach(const struct generation *g, const struct config *c, const struct step_counts *counts,
                       struct batch *b);
/* objective.top_entropy_quantile: the entropy from which on tokens of a step have loss. Runs a pass without gradient
 * over each of the step's n micro-batches b. *n_kept: number of tokens with loss. All ranks call it. */
double generation_entropy(struct run *r, const struct batch *b, const struct model_pass *passes, int64_t n,
                          double quantile, int64_t *n_kept);
/* The metrics of rows, lengths and the correction. */
void generation_parts(struct objective_means *e, const struct generation *g);

#endif

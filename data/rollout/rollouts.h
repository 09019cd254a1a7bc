/* rollouts.h - completions of prompts with their rewards, in memory, from files (rollout_rows.h) or from the run's own
 * sampler: what online RL trains on. */
#ifndef MT_ROLLOUTS_H
#define MT_ROLLOUTS_H

#include "kernels/base.h"

/* One completion, whose arrays belong to others. */
struct rollout {
    int64_t n_prompt, n_completion; /* tokens; both at least 1 */
    const int32_t *prompt_ids;      /* [n_prompt] */
    const int32_t *completion_ids;  /* [n_completion], the end token included */
    const float *logprobs;          /* [n_completion] by the sampler; NaN: unknown. NULL: none is known */
    const uint8_t *mask;            /* [n_completion] 0: an environment wrote the token; NULL: the model wrote all */
    double reward;                  /* NaN: null, the row is not trained on */
    int64_t group;                  /* the completions of one prompt have one number */
    bool truncated;                 /* the completion stops without an end token */
    const uint16_t *routing;        /* [n_prompt + n_completion - 1, n_routing] the sampler's experts; NULL: none */
};
/* Named rewards, which a row's reward consists of; only for the log. */
enum { ROLLOUT_REWARDS = 16, ROLLOUT_REWARD_NAME = 40 };
struct rollout_rewards {
    int64_t n;
    char names[ROLLOUT_REWARDS][ROLLOUT_REWARD_NAME];
    double *of[ROLLOUT_REWARDS]; /* [rollouts.n] of each name; NaN: null */
};
/* Rows in order; the rows of a group are adjacent. Zeroed is valid. */
struct rollouts {
    int64_t n, n_prompt_tok, n_tok; /* rows; tokens of all prompts; of all completions */
    int64_t n_routing;              /* layers * experts per token; 0: no row has a routing */
    int64_t n_logprobs;             /* rows with log-probabilities */
    int64_t *prompt_off, *off;      /* [n+1] into prompt_ids; into the arrays of completions */
    int32_t *prompt_ids;            /* [n_prompt_tok] */
    int32_t *ids;                   /* [n_tok] */
    float *logprobs;                /* [n_tok] NaN: unknown */
    uint8_t *mask;                  /* [n_tok] 1: the model wrote the token */
    double *reward;                 /* [n] NaN: null */
    int64_t *group;                 /* [n] */
    uint8_t *truncated;             /* [n] */
    uint16_t **routing;             /* [n] owned; NULL where the row has none */
    struct rollout_rewards named;
    int64_t cap, cap_prompt, cap_tok;
};

/* Appends a copy of the row. */
void rollouts_add(struct rollouts *r, const struct rollout *row);
/* Adds a named reward to the last row; NaN: null. */
int rollouts_add_reward(struct rollouts *r, const char *name, double value, struct err *err) MT_CHECK;
/* Row i; points into r, until r changes. */
struct rollout rollouts_row(const struct rollouts *r, int64_t i);
/* Error: rows are not whole groups of n_group adjacent rows; it names the first group. */
int rollouts_check_groups(const struct rollouts *r, int64_t n_group, struct err *err) MT_CHECK;
uint64_t rollouts_hash(const struct rollouts *r); /* of all rows */
void rollouts_clear(struct rollouts *r);          /* no rows; keeps the memory */
void rollouts_free(struct rollouts *r);

#endif

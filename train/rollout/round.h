/* round.h - a round of sampling: completions of some prompts and their rewards. The ranks divide the prompts, and all
 * get all results, which do not depend on the number of ranks. */
#ifndef MT_ROUND_H
#define MT_ROUND_H

#include "train/generate/sample.h"
#include "train/models/message.h"
#include "train/reward/environment.h"
#include "train/reward/rewards.h"
#include "train/rollout/journal.h"
#include "train/run/prompt_rows.h"

/* What the rounds of a run have in common. */
struct round_options {
    struct run *run;
    struct rewards *rewards;
    struct message_rules rules;  /* of the chat template */
    struct sample_params params; /* without the seed */
    int64_t n_sample;            /* completions of a prompt */
    int64_t step;                /* for rewards and messages */
    struct journal *journal;     /* NULL: none */
    const char *key;             /* the batch's key in lines of the journal */
    bool (*stop)(void);
    bool episodes;                   /* an environment answers turns */
    struct environment *environment; /* of the first rank of an expert-parallel group */
    int64_t *n_episode;              /* number of completions so far, which is the next id for the environment */
};

struct round_prompt {
    const struct prompt_row *row;
    int64_t group; /* number of the prompt in the run */
    uint64_t seed;
};
/* A completion, after the round on all ranks. */
struct round_sample {
    char *line; /* of rollout_lines.h, without its line feed */
    int64_t size;
    double total;   /* NaN: all rewards are null */
    double *values; /* [rewards_count] NaN: null */
};
struct round {
    const struct round_options *opt;
    struct round_prompt *prompts; /* [n] owned */
    int64_t n;
    struct round_sample *samples;          /* [n, n_sample] */
    int64_t n_journal, n_sampled_tok;      /* samples from the journal; tokens sampled, by all ranks */
    int64_t n_prefilled_tok, n_cached_tok; /* as in struct engine_stats, by all ranks */
    int64_t n_lost, n_unfit;               /* as in episodes_counts, summed over ranks */
    double sample_ms,
        reward_ms; /* sample_ms: of the slowest rank; reward_ms: waiting for rewards after the last sample */
    struct engine *engine;
    struct episodes *episodes; /* NULL: completions of one turn */
    struct err *err;           /* of the callbacks */
    bool failed;
    int64_t *submitted; /* [n_submitted] the samples whose rewards were requested, in that order */
    int64_t n_submitted;
};

/* Runs the round. It takes over `prompts`. 1: stop() was true on a rank; the journal has the complete samples. */
int round_run(struct round *r, const struct round_options *opt, struct round_prompt *prompts, int64_t n,
              struct err *err) MT_CHECK;
void round_free(struct round *r); /* r may be zeroed */

#endif

/* online.h - online RL: the generation batches of a run, sampled with the weights and adapters that train. A generation
 * batch has the completions on which steps_per_generation optimizer steps train.
 *
 * A batch is sampled when its first step begins. Sampling uses the work arena, which is empty between steps. A sample
 * depends only on the weights, train.seed, the step, its prompt and its number, not on the number of ranks. After a
 * kill the journal has the samples that were complete (journal.h). */
#ifndef MT_ONLINE_H
#define MT_ONLINE_H

#include "train/rollout/online_settings.h"
#include "train/rollout/rollout_stats.h"
#include "train/rollout/round.h"

struct online {
    struct run *run;
    struct online_settings set;
    struct prompt_rows train,
        eval; /* eval: the prompts of data.eval; with data.eval_split the held-out prompts are in `train` */
    struct rewards *rewards;
    struct message_rules rules;
    struct environment *environment; /* NULL: no environment, or another rank has it */
    int64_t n_episode;               /* completions so far, for the ids of the environment */
    char dir[MT_PATH];               /* output.dir/rollouts */
    int64_t *order, of_epoch;        /* the order of the prompts in an epoch */

    /* the generation batch in use */
    int64_t first;           /* its first optimizer step, from 0; -1: none yet */
    struct rollouts rows;    /* [n_row] in the order of the prompts */
    int64_t n_kept;          /* the first n_kept rows count; the others only fill the batch of dynamic sampling */
    struct dataset docs;     /* the rows as documents: prompt and completion; tokens of the completion are labels */
    struct loader_pos after; /* the next prompt */
    struct rollout_stats stats;
    int64_t n_round, n_flat; /* rounds; groups that were replaced */
    int64_t n_journal, n_lost,
        n_unfit; /* n_journal: samples read from the journal; n_lost, n_unfit: as in struct round */
    int64_t n_prefilled_tok, n_cached_tok; /* as in struct round */
    double sample_ms, reward_ms,
        sample_tok; /* sample_tok: tokens sampled by all ranks, without those read from the journal */
};

/* Used instead of run_open_data: reads the prompts into o, and as documents into the data sets of r. Starts the
 * rewards. */
int online_open(struct online *o, struct run *r, struct err *err) MT_CHECK;
void online_close(struct online *o); /* o may be zeroed */

/* Optimizer steps of the run, by train.steps or train.epochs. */
int64_t online_steps(const struct online *o);

/* Samples the generation batch of optimizer step `step`, from 0, unless it is already the batch in use. pos: the place
 * of its first prompt. 1: stop() was true on a rank. If the run continues within a batch, all rows come from the
 * journal. */
int online_batch(struct online *o, int64_t step, struct loader_pos pos, bool (*stop)(void), struct err *err) MT_CHECK;
/* Whether the step is the last one of its generation batch. The next batch begins at o->after. */
bool online_ends(const struct online *o, int64_t step);
/* Call it after a checkpoint of `step` steps: deletes journals that no run needs any more to continue. */
void online_saved(const struct online *o, int64_t step);

#endif

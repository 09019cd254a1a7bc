/* online.h - online RL: the generation batches of a run, sampled with the weights and adapters that train.
 *
 * A batch is sampled when its first step begins, in the work arena, which holds nothing between steps. Its samples
 * depend on train.seed, the step, the prompt and their number alone: not on the number of ranks, and not on a kill,
 * after which the journal gives back what was complete (journal.h). */
#ifndef MT_ONLINE_H
#define MT_ONLINE_H

#include "train/rollout/online_settings.h"
#include "train/rollout/rollout_stats.h"
#include "train/rollout/round.h"

struct online {
    struct run *run;
    struct online_settings set;
    struct prompt_rows train, eval; /* eval: of data.eval; with data.eval_split held-out rows are in train */
    struct rewards *rewards;
    struct message_rules rules;
    struct environment *environment; /* NULL: no environment, or another rank has it */
    int64_t n_episode;               /* completions so far, for its ids */
    char dir[MT_PATH];               /* output.dir/rollouts */
    int64_t *order, of_epoch;        /* the order of the prompts in an epoch */

    /* the generation batch in use */
    int64_t first;           /* its first optimizer step, from 0; -1: none yet */
    struct rollouts rows;    /* [n_row] in the order of the prompts */
    int64_t n_kept;          /* rows that count: those after them complete the batch of dynamic sampling */
    struct dataset docs;     /* the same as documents: prompt and completion, whose tokens are labels */
    struct loader_pos after; /* the next prompt */
    struct rollout_stats stats;
    int64_t n_round, n_flat;                 /* rounds; groups that were replaced */
    int64_t n_journal, n_lost, n_unfit;      /* samples that were read back; as in struct round */
    double sample_ms, reward_ms, sample_tok; /* tok: of all ranks, without those read back */
};

/* Reads prompts into o and, as documents, into the data sets of r, in place of run_open_data; starts the rewards. */
int online_open(struct online *o, struct run *r, struct err *err) MT_CHECK;
void online_close(struct online *o); /* o may be zeroed */

/* Optimizer steps of the run, by train.steps or train.epochs. */
int64_t online_steps(const struct online *o);

/* The generation batch of optimizer step `step`, from 0, whose first prompt is at pos. Nothing to do where it is in
 * use. 1: stop() was true on a rank. A step within a batch, after a continuation, has the rows of the journal alone. */
int online_batch(struct online *o, int64_t step, struct loader_pos pos, bool (*stop)(void), struct err *err) MT_CHECK;
/* Whether the step is the last one of its generation batch: the next one begins at o->after. */
bool online_ends(const struct online *o, int64_t step);
/* After a checkpoint of `step` steps: deletes journals that no continued run reads. */
void online_saved(const struct online *o, int64_t step);

#endif

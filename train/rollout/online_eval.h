/* online_eval.h - the evaluation of online RL: the mean reward of held-out prompts. */
#ifndef MT_ONLINE_EVAL_H
#define MT_ONLINE_EVAL_H

#include "train/rollout/online.h"

struct online_eval {
    struct rollout_stats stats;
    double ms;
};
/* The number of held-out prompts of an evaluation: the first eval.max_batches * train.micro_batch, or all if that is
 * 0. */
int64_t online_eval_prompts(const struct online *o);
/* Answers each held-out prompt once, at temperature 0. The ranks divide the prompts, and all get the result. 1: stop()
 * was true on a rank. */
int online_evaluate(struct online *o, int64_t step, bool (*stop)(void), struct online_eval *out,
                    struct err *err) MT_CHECK;

/* Other samples of the prompts, for `moetrain eval --generate`. */
struct online_eval_options {
    int64_t samples, top_k, seed; /* samples: of each prompt */
    double temperature, top_p;
};
/* The two parts of online_evaluate: samples with their rewards; their statistics. `of` is filled, and r refers to it.
 * Free r, also after an error. */
int online_eval_sample(struct online *o, const struct online_eval_options *how, int64_t step, bool (*stop)(void),
                       struct round_options *of, struct round *r, struct err *err) MT_CHECK;
int online_eval_read(const struct online *o, const struct round *r, struct online_eval *out, struct err *err) MT_CHECK;

#endif

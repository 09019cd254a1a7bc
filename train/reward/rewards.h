/* rewards.h - the rewards of [reward] for the completions of a step: built-in ones (verify.h), those of programs
 * (reward_command.h) and of language models (judge.h), which run while completions are sampled.
 *
 * For each step: rewards_begin, rewards_submit for each completion, rewards_collect. */
#ifndef MT_REWARDS_H
#define MT_REWARDS_H

#include "train/config/config.h"
#include "train/reward/verify.h"

struct rewards;
/* Returns NULL on an error, also if [reward] names no reward. asks: this rank computes rewards, and so starts the
 * commands. */
struct rewards *rewards_open(const struct config *c, bool asks, struct err *err);
void rewards_close(struct rewards *r); /* NULL is fine */

int64_t rewards_count(const struct rewards *r);
const char *rewards_name(const struct rewards *r, int64_t i);
double rewards_weight(const struct rewards *r, int64_t i);
/* Sum of weight * value over values that are not null (NaN); NaN: all are null. values [rewards_count]. */
double rewards_total(const struct rewards *r, const double *values);

struct reward_item {
    const char *prompt;  /* JSON of a text or of messages */
    const char *columns; /* JSON of an object: other keys of the row; NULL: {} */
    struct verify_answer
        answer; /* texts without special tokens, valid UTF-8; whole: with the harmony format only the final channel */
    const char *finish_reason; /* "stop" or "length" */
    const double *environment; /* the reward of its environment, NaN: null; NULL: none */
};
/* Begins a step; forgets the items of the step before. */
int rewards_begin(struct rewards *r, int64_t step, struct err *err) MT_CHECK;
/* Adds an item without waiting, and reads it only during the call. Errors: the columns are not an object; errors of a
 * command as in rewards_collect. */
int rewards_submit(struct rewards *r, const struct reward_item *item, struct err *err) MT_CHECK;

/* Rewards of the step's items, in the order of rewards_submit; NaN: null. Valid until the next rewards_begin. */
struct reward_results {
    int64_t n;              /* items */
    const double *values;   /* [n, rewards_count] */
    const double *totals;   /* [n] rewards_total */
    const int64_t *nulls;   /* [rewards_count] values that are null */
    const int64_t *missing; /* [rewards_count] of these: the command gave no answer */
    struct reward_mean {
        char name[REWARD_NAME + 72]; /* "NAME/metric" */
        double mean;
    } * metrics; /* [n_metric] "metrics" of commands */
    int64_t n_metric;
};
/* Waits for all rewards of the step, at most reward.timeout_s. If a command ends or is late, its missing rewards are
 * null, and it is started again, with a warning. Returns -1 for the third failure of a command in a row or an answer of
 * another form, 1 if stop() (may be NULL) was true. After both only rewards_close may be called. */
int rewards_collect(struct rewards *r, struct reward_results *out, bool (*stop)(void), struct err *err) MT_CHECK;

#endif

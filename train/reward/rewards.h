/* rewards.h - the rewards of [reward] for the completions of a step: built-in ones (verify.h).
 *
 *    rewards_open; for each step: rewards_begin, rewards_submit for each completion while others are sampled,
 *    rewards_collect; rewards_close. */
#ifndef MT_REWARDS_H
#define MT_REWARDS_H

#include "train/config/config.h"
#include "train/reward/verify.h"

struct rewards;
/* NULL: an error, also where [reward] names none. */
struct rewards *rewards_open(const struct config *c, struct err *err);
void rewards_close(struct rewards *r); /* NULL is fine */

int64_t rewards_count(const struct rewards *r);
const char *rewards_name(const struct rewards *r, int64_t i);
double rewards_weight(const struct rewards *r, int64_t i);

struct reward_item {
    const char *prompt;          /* JSON of a text or of messages */
    const char *columns;         /* JSON of an object: other keys of the row; NULL: {} */
    struct verify_answer answer; /* content, whole: without special tokens; valid UTF-8 */
    const char *finish_reason;   /* "stop" or "length" */
};
/* The step that the next items are of; those of the step before are forgotten. */
void rewards_begin(struct rewards *r, int64_t step);
/* Nothing of the item is read after the call, which does not wait. Error: the columns are not an object. */
int rewards_submit(struct rewards *r, const struct reward_item *item, struct err *err) MT_CHECK;

/* Rewards of the step's items, in the order of rewards_submit; NaN: none (null). Valid until rewards_begin. */
struct reward_results {
    int64_t n;            /* items */
    const double *values; /* [n, rewards_count] */
    const double *totals; /* [n] sum of weight * value without nulls; NaN: all are null */
    const int64_t *nulls; /* [rewards_count] values that are null */
};
/* Waits for all rewards of the step. */
int rewards_collect(struct rewards *r, struct reward_results *out, struct err *err) MT_CHECK;

#endif

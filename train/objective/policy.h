/* policy.h - the settings of online RL: [objective] with kind grpo, dr_grpo, dapo, gspo, rloo or cispo. */
#ifndef MT_TRAIN_POLICY_H
#define MT_TRAIN_POLICY_H

#include "data/rollout/advantages.h"
#include "model/model.h"
#include "train/config/config.h"

/* The divisor of a token's loss. POLICY_PER_ROW: tokens of its row * number of rows. POLICY_PER_LENGTH:
 * objective.max_completion_length * number of rows. POLICY_PER_TOKEN: all tokens of the step. POLICY_PER_SUM: a row has
 * one loss, which is divided by the number of rows. */
enum policy_mean { POLICY_PER_ROW, POLICY_PER_LENGTH, POLICY_PER_TOKEN, POLICY_PER_SUM };
struct policy_settings {
    struct policy loss; /* entropy_scale: objective.entropy_coef */
    enum policy_mean mean;
    struct advantage_options advantage;
    double reward_kl; /* RLOO's beta: the factor of sum(lp_old - lp_reference), which is subtracted from a reward; other
                         kinds: 0 */
    bool old_of_rows; /* objective.old = rows */
    int is_mode;      /* enum cfg_is; CFG_IS_AUTO: by the rows */
    double entropy_quantile; /* objective.top_entropy_quantile */
    int64_t step_rows;       /* of an optimizer step */
    int64_t n_step,
        n_iteration; /* optimizer steps among which the rows of a generation are divided; passes over a generation */
    double max_length;
};

bool policy_is(const struct config *c); /* objective.kind is one of these */
struct policy_settings policy_settings(const struct config *c);
int64_t policy_generation_rows(const struct config *c); /* rows of n_step optimizer steps */

#endif

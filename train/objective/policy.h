/* policy.h - the settings of online RL: [objective] with kind grpo, dr_grpo, dapo, gspo, rloo or cispo. */
#ifndef MT_TRAIN_POLICY_H
#define MT_TRAIN_POLICY_H

#include "data/rollout/advantages.h"
#include "model/model.h"
#include "train/config/config.h"

/* What the losses of tokens are divided by: each by the tokens of its row, times rows; by
 * objective.max_completion_length times rows; by all tokens of the step. POLICY_PER_SUM: rows have one loss each,
 * divided by their number. */
enum policy_mean { POLICY_PER_ROW, POLICY_PER_LENGTH, POLICY_PER_TOKEN, POLICY_PER_SUM };
struct policy_settings {
    struct policy loss; /* entropy_scale: objective.entropy_coef */
    enum policy_mean mean;
    struct advantage_options advantage;
    double reward_kl;        /* RLOO's beta: of the sum of lp_old - lp_reference, subtracted from a reward; else 0 */
    bool old_of_rows;        /* objective.old = rows */
    int is_mode;             /* enum cfg_is; CFG_IS_AUTO: by the rows */
    double is_cap, is_floor; /* floor 0: none */
    double entropy_quantile; /* objective.top_entropy_quantile */
    int64_t step_rows;       /* of an optimizer step */
    int64_t n_step, n_iteration; /* optimizer steps that divide the rows of a generation; times that it is trained on */
    double max_length;
};

bool policy_is(const struct config *c); /* objective.kind is one of these */
struct policy_settings policy_settings(const struct config *c);
int64_t policy_generation_rows(const struct config *c); /* rows of n_step optimizer steps */

#endif

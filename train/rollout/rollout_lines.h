/* rollout_lines.h - samples of a generation batch as lines of text, in the form of recorded rollouts. */
#ifndef MT_ROLLOUT_LINES_H
#define MT_ROLLOUT_LINES_H

#include "data/json/text.h"
#include "data/rollout/rollout_rows.h"
#include "train/generate/sample.h"
#include "train/reward/rewards.h"
#include "train/run/run.h"

enum { ROLLOUT_LINE_VALUES = 64 * JSON_ROW_VALUES }; /* a completion may have as many tokens as a model takes */

/* What an environment adds to a sample. */
struct rollout_turns {
    const uint8_t *mask; /* [s->n] 1: the model wrote the token */
    double reward;       /* NaN: null */
};
/* Appends {"id": "GROUP-SAMPLE", "batch": KEY, prompt_ids, completion_ids, "reward": null, group, logprobs, mask?,
 * sampling_logprobs?, routing?, text, finish_reason, environment_reward?} and a line feed
 * (train/generate/row_answer.h). turns NULL: there is no environment. */
void rollout_line_put(struct text_buf *out, const struct run *r, int64_t group, const char *key,
                      const struct sample_request *q, const struct sample *s, const struct rollout_turns *turns);
/* Reads GROUP and SAMPLE from "id"; false: it has another form. */
bool rollout_line_id(struct json row, int64_t *group, int64_t *sample);
/* Appends "reward": reward, "rewards": {NAME: value, ..}. values [rewards_count]; NaN is written as null. */
void rollout_rewards_put(struct text_buf *out, const struct rewards *rewards, double reward, const double *values);
/* Copies the line with "reward" and "rewards" in place of "reward": null. */
void rollout_line_reward(struct text_buf *out, const char *line, int64_t size, const struct rewards *rewards,
                         double reward, const double *values);
/* The line as a row of `to`, with its routing. */
int rollout_line_read(struct rollouts *to, const struct run *r, const char *line, int64_t size,
                      const struct rollout_options *opt, struct err *err) MT_CHECK;

#endif

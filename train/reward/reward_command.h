/* reward_command.h - a reward that a program of the user computes.
 *
 * The program is started once. Its standard input gets a line for each completion that ends,
 *
 *    {"id": 7, "step": 3, "prompt": text or messages, "completion": text, "completion_ids": [..],
 *     "finish_reason": "stop", "columns": {..}}
 *
 * and {"end": 3} after the last completion of a step. It writes a line {"id": 7, "reward": 0.5} for each completion, in
 * any order. A reward may be null; "metrics" may be an object of numbers. */
#ifndef MT_REWARD_COMMAND_H
#define MT_REWARD_COMMAND_H

#include "train/reward/program.h"

enum { REWARD_METRICS = 32 };
struct reward_metric {
    char name[64];
    double sum;
    int64_t n;
};
struct reward_command {
    struct program program;
    bool nan_is_null;
    double timeout_s,
        until; /* until: the clock_ms at which the step's rewards must be there; 0: the step has not ended */
    int64_t step, first_id; /* of the step's rows */
    double *values;         /* [n] of the step's rows; NaN: none */
    bool *answered;         /* [n] */
    int64_t n, cap, n_open; /* n_open: rows that are not answered */
    int64_t n_missing;      /* rows without an answer, after a failure */
    bool failed;            /* in this step: no more answers */
    struct reward_metric metrics[REWARD_METRICS];
    int64_t n_metric;
};
int reward_command_open(struct reward_command *c, const char *key, char *const argv[], struct err *err) MT_CHECK;
void reward_command_close(struct reward_command *c); /* c may be zeroed */

/* Begins a step. Ids continue from step to step, so that an answer to an earlier step is noticed. */
int reward_command_begin(struct reward_command *c, int64_t step, struct err *err) MT_CHECK;
/* row: the members of the line after "step", in braces. */
int reward_command_add(struct reward_command *c, const char *row, int64_t size, struct err *err) MT_CHECK;
int reward_command_end(struct reward_command *c, struct err *err) MT_CHECK;
/* Reads and writes without waiting. Error: an answer of another form, the third failure in a row. */
int reward_command_work(struct reward_command *c, struct err *err) MT_CHECK;
bool reward_command_done(const struct reward_command *c);

#endif

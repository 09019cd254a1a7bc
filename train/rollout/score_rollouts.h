/* score_rollouts.h - `moetrain rewards`: the rewards of a configuration for recorded completions. */
#ifndef MT_SCORE_ROLLOUTS_H
#define MT_SCORE_ROLLOUTS_H

#include <stdio.h>

#include "train/cli/cli.h"

struct score_options {
    struct cli_common common;
    const char *rollouts, *prompts, *output; /* prompts, output NULL: none */
};
/* Scores the rows of a file {prompt_ids, completion_ids, text?, finish_reason?, group?} in batches of whole groups, and
 * prints a table to `report`. The rewards read the row's own `columns`, or if it has none those of the row of prompts
 * with the same tokens. output: the rows with `reward` and `rewards`. */
int score_rollouts(const struct score_options *o, const struct config *cfg, FILE *report, struct err *err) MT_CHECK;

#endif

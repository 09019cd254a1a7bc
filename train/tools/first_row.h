/* first_row.h - finds the objective of a data set by the keys of its first row. */
#ifndef MT_FIRST_ROW_H
#define MT_FIRST_ROW_H

#include "train/config/config.h"

/* Sets *kind to the objective.kind for `files`, a list as data.train: dpo for pairs of answers, kto for answers with
 * labels, otherwise sft. Error: the rows are prompts with an answer to verify, or recorded rollouts; these need
 * settings that the data do not have. If the row cannot be read, the kind is sft; the reader of the data reports the
 * error later. */
int first_row_objective(int *kind, const char *files, struct err *err) MT_CHECK;

#endif

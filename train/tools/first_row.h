/* first_row.h - the objective that a data set is for, by the keys of its first row. */
#ifndef MT_FIRST_ROW_H
#define MT_FIRST_ROW_H

#include "train/config/config.h"

/* objective.kind of rows in `files`, a list as data.train: dpo of pairs of answers, kto of answers with labels, else
 * sft. Error: prompts with an answer to verify, and recorded rollouts, which need settings that the data do not tell. A
 * row that cannot be read is sft: the reader of the data says what is wrong. */
int first_row_objective(int *kind, const char *files, struct err *err) MT_CHECK;

#endif

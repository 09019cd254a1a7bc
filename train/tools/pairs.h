/* pairs.h - `moetrain pairs`: makes rows of preferences from judged answers of `eval --generate`. */
#ifndef MT_PAIRS_H
#define MT_PAIRS_H

#include <stdio.h>

#include "kernels/base.h"

struct pairs_options {
    const char *rows, *answers, *out;
    const char *checkpoint; /* NULL: pairs are not rendered */
};
/* Joins rows and answers by id. If a row's best and worst answer differ in `right` or `reward`, writes {prompt, chosen,
 * rejected}. With a checkpoint, leaves out pairs that training with its tokenizer and chat template refuses. Prints the
 * counts to `report`. */
int pairs_run(const struct pairs_options *o, FILE *report, struct err *err) MT_CHECK;

#endif

/* pairs.h - `moetrain pairs`: judged answers of `eval --generate` as rows of preferences. */
#ifndef MT_PAIRS_H
#define MT_PAIRS_H

#include <stdio.h>

#include "kernels/base.h"

struct pairs_options {
    const char *rows, *answers, *out;
};
/* Joins rows and answers by id, and writes {prompt, chosen, rejected} of each row whose best and worst answer differ in
 * `right`, or in `reward`. Prints the counts to `report`. */
int pairs_run(const struct pairs_options *o, FILE *report, struct err *err) MT_CHECK;

#endif

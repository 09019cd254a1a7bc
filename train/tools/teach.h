/* teach.h - `moetrain teach`: writes the likeliest tokens of a model for every labelled token of the data. */
#ifndef MT_TEACH_H
#define MT_TEACH_H

#include "train/cli/cli.h"
#include "train/config/config.h"

struct teach_options {
    struct cli_common common;
    const char *adapter, *out;
    bool base, eval;
};
/* Writes rows for distill.teacher = rows to o->out, with distill.topk ids per token, at distill.temperature. */
int teach_run(const struct teach_options *o, struct config *cfg, struct err *err) MT_CHECK;

#endif

/* generate.h - `moetrain generate`: text from the base model or an adapter. */
#ifndef MT_GENERATE_H
#define MT_GENERATE_H

#include "train/cli/cli.h"

struct generate_options {
    struct cli_common common;
    const char *adapter, *prompt, *messages; /* one of prompt and messages is NULL */
    int64_t tokens, seed;
    double temperature, top_p;
    bool base, json;
};
/* Prints text to standard output while it is generated. Changes cfg. */
int generate_run(const struct generate_options *o, struct config *cfg, struct err *err) MT_CHECK;

#endif

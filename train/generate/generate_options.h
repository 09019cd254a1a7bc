/* generate_options.h - the arguments of `generate`. */
#ifndef MT_GENERATE_OPTIONS_H
#define MT_GENERATE_OPTIONS_H

#include "train/cli/cli.h"

struct generate_options {
    struct cli_common common;
    const char *adapter;
    const char *prompt, *messages, *input; /* one of them is not NULL */
    const char *output, *format;           /* with input */
    int64_t tokens, seed, n, top_k;
    double temperature, top_p;
    bool base, json, prompt_logprobs, routing;
};

#endif

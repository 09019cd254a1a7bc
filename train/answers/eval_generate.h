/* eval_generate.h - `moetrain eval --generate`: the accuracy of generated answers by a verifier. */
#ifndef MT_EVAL_GENERATE_H
#define MT_EVAL_GENERATE_H

#include "train/cli/cli.h"

struct eval_generate_options {
    const char *verifier, *pattern, *input, *reference, *output; /* input NULL: the held-out data */
    int64_t samples, tokens, rows, top_k, seed;                  /* rows: the first ones; 0: all */
    double temperature, top_p, tolerance;
    bool ignore_case;
};

/* Prints a JSON object to standard output. adapter: a directory; NULL: the base model. Changes cfg. EXIT_SIGNAL: a
 * signal ended the command; it prints no result, and --output has the rows that were complete. */
int eval_generate_run(const struct eval_generate_options *o, const char *adapter, struct config *cfg,
                      struct err *err) MT_CHECK;

#endif

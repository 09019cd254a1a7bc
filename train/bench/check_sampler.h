/* check_sampler.h - `moetrain check CONFIG --sampler`: compares log-probabilities of sampler and training. */
#ifndef MT_CHECK_SAMPLER_H
#define MT_CHECK_SAMPLER_H

#include "train/run/run.h"

/* Samples from the configuration's model with random adapters, then runs the training forward over prompts and answers,
 * and compares the log-probabilities of the sampled tokens. Prints the mean and the largest difference to `out`.
 * Errors: a difference is above its bound; something cannot be opened. */
int check_sampler_run(const struct config *cfg, FILE *out, struct err *err) MT_CHECK;

#endif

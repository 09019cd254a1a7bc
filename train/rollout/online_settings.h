/* online_settings.h - the settings of online RL, from the configuration. */
#ifndef MT_ONLINE_SETTINGS_H
#define MT_ONLINE_SETTINGS_H

#include "train/config/config.h"
#include "train/generate/sample.h"

struct online_settings {
    int64_t n_sample;       /* completions of a prompt: a group */
    int64_t n_row, n_group; /* of a generation batch: rows, groups */
    int64_t n_step;         /* optimizer steps of a generation batch; each row is in num_iterations of these steps */
    int64_t n_part;         /* steps among which the rows of a batch are divided (steps_per_generation) */
    int64_t rounds;         /* of dynamic sampling, at most; 1: off */
    struct sample_params params; /* without the seed */
};
struct online_settings online_settings_of(const struct config *c);

#endif

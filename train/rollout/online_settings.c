/* online_settings.c - see online_settings.h. */
#include "train/rollout/online_settings.h"

struct online_settings online_settings_of(const struct config *c)
{
    struct online_settings s = {.n_sample = c->objective.num_generations,
                                .n_part = c->objective.steps_per_generation,
                                .n_step = c->objective.steps_per_generation * c->objective.num_iterations,
                                .rounds = c->rollout.dynamic_rounds,
                                .params = sample_params_default()};
    s.n_row = c->train.micro_batch * c->train.grad_accum * s.n_part;
    s.n_group = s.n_row / s.n_sample;
    s.params.temperature = c->objective.temperature;
    s.params.top_p = c->rollout.top_p;
    s.params.top_k = c->rollout.top_k;
    s.params.min_p = c->rollout.min_p;
    s.params.max_tokens = c->objective.max_completion_length;
    s.params.routing = c->rollout.replay;
    return s;
}

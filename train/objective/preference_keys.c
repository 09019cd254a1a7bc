/* preference_keys.c - see preference_keys.h. */
#include "train/objective/preference_keys.h"

#include <string.h>

enum { READS_COMPARES = READS_REFERENCE | READS_CACHE, READS_RL = READS_BETA | READS_REFERENCE | READS_POLICY };

static const struct preference_row kinds[] = {
    [CFG_SFT] = {.name = "sft"},
    [CFG_DPO] = {PREFERENCE_DPO, "DPO", READS_BETA | READS_COMPARES | READS_SMOOTHING | READS_SFT, 0.1},
    [CFG_IPO] = {PREFERENCE_IPO, "IPO", READS_BETA | READS_COMPARES, 0.1},
    [CFG_SIMPO] = {PREFERENCE_SIMPO, "SimPO", READS_BETA | READS_GAMMA, 2},
    [CFG_ORPO] = {PREFERENCE_ORPO, "ORPO", READS_BETA | READS_ORPO_NLL, 0.1},
    [CFG_KTO] = {PREFERENCE_KTO, "KTO", READS_BETA | READS_COMPARES | READS_WEIGHTS, 0.1},
    [CFG_GRPO] = {.name = "GRPO", .reads = READS_RL | READS_EPSILON | READS_DELTA | READS_ENTROPY},
    [CFG_DR_GRPO] = {.name = "Dr. GRPO", .reads = READS_RL | READS_EPSILON | READS_DELTA | READS_ENTROPY},
    [CFG_DAPO] = {.name = "DAPO", .reads = READS_RL | READS_EPSILON | READS_DELTA | READS_ENTROPY},
    [CFG_GSPO] = {.name = "GSPO", .reads = READS_RL | READS_EPSILON | READS_DELTA | READS_ENTROPY},
    [CFG_RLOO] = {.name = "RLOO", .reads = READS_RL | READS_EPSILON},
    [CFG_CISPO] = {.name = "CISPO", .reads = READS_RL | READS_ENTROPY},
};

static const struct {
    const char *name;
    enum preference_reads reads;
} keys[] = {
    {"objective.beta", READS_BETA},
    {"objective.reference", READS_REFERENCE},
    {"objective.reference_cache", READS_CACHE},
    {"objective.label_smoothing", READS_SMOOTHING},
    {"objective.orpo_nll", READS_ORPO_NLL},
    {"objective.desirable_weight", READS_WEIGHTS},
    {"objective.undesirable_weight", READS_WEIGHTS},
    {"objective.gamma", READS_GAMMA},
    {"objective.sft_weight", READS_SFT},
    {"objective.num_generations", READS_POLICY},
    {"objective.num_iterations", READS_POLICY},
    {"objective.steps_per_generation", READS_POLICY},
    {"objective.max_completion_length", READS_POLICY},
    {"objective.temperature", READS_POLICY},
    {"objective.epsilon", READS_EPSILON},
    {"objective.epsilon_high", READS_POLICY},
    {"objective.delta", READS_DELTA},
    {"objective.kl", READS_POLICY},
    {"objective.scale_rewards", READS_POLICY},
    {"objective.is_mode", READS_POLICY},
    {"objective.is_cap", READS_POLICY},
    {"objective.is_floor", READS_POLICY},
    {"objective.old", READS_POLICY},
    {"objective.mask_truncated", READS_POLICY},
    {"objective.top_entropy_quantile", READS_ENTROPY},
    {"objective.entropy_coef", READS_ENTROPY},
};

const struct preference_row *preference_row_of(const struct config *c) { return &kinds[c->objective.kind]; }

/* Whether objective.kind reads the key; true for keys of other sections. */
static bool is_read(const struct config *c, const char *name)
{
    for (int k = 0; k < MT_LEN(keys); k++)
        if (!strcmp(name, keys[k].name)) return preference_row_of(c)->reads & keys[k].reads;
    return true;
}

int preference_keys_check(const struct config *c, struct err *err)
{
    struct config *defaults = mem_alloc(sizeof(*defaults));
    struct config_value *now = mem_alloc(2 * (int64_t)sizeof(*now)), *usual = now + 1;
    char kind[32];
    int rc = 0;
    config_defaults(defaults);
    config_choice(OBJECTIVES, c->objective.kind, kind);
    for (int64_t i = 0; !rc && config_value(c, i, now); i++) {
        config_value(defaults, i, usual);
        if (!is_read(c, now->name) && strcmp(now->text, usual->text) != 0)
            rc = err_set(err, "%s = %s has no effect with objective.kind = %s: leave it out", now->name, now->text,
                         kind);
    }
    mem_free(now);
    mem_free(defaults);
    return rc;
}

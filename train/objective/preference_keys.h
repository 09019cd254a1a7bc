/* preference_keys.h - which keys of [objective] each preference objective and each kind of online RL reads. */
#ifndef MT_PREFERENCE_KEYS_H
#define MT_PREFERENCE_KEYS_H

#include "kernels/ops/ops.h"
#include "train/config/config.h"

enum preference_reads {
    READS_BETA = 1,
    READS_REFERENCE = 2,
    READS_SMOOTHING = 4,
    READS_ORPO_NLL = 8,
    READS_WEIGHTS = 16,
    READS_GAMMA = 32,
    READS_SFT = 64,
    READS_CACHE = 128,
    READS_POLICY = 256, /* online RL */
    READS_EPSILON = 512,
    READS_DELTA = 1024,
    READS_ENTROPY = 2048
};
/* What objective.kind reads; sft reads nothing. */
struct preference_row {
    enum preference_kind kind;
    const char *name;
    unsigned reads; /* other keys have no effect on it and are refused */
    double beta;    /* its default; of online RL in policy.c */
};
const struct preference_row *preference_row_of(const struct config *c);
/* Error: a key that objective.kind does not read has another value than its default. */
int preference_keys_check(const struct config *c, struct err *err) MT_CHECK;

#endif

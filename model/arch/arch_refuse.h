/* arch_refuse.h - refuses settings of config.json that moetrain supports for no family, or only for some. */
#ifndef MT_ARCH_REFUSE_H
#define MT_ARCH_REFUSE_H

#include "model/arch/arch_types.h"

int refuse_variants(struct json root, struct err *err) MT_CHECK;
/* Checks keys of DeepSeek's routers. supported: the one supported value of scoring_func. */
int refuse_routers(struct json root, const char *supported, struct err *err) MT_CHECK;
int refuse_softmax_variants(struct json root, struct err *err) MT_CHECK; /* the same keys beside a softmax router */
int refuse_null_groups(struct json root, struct err *err) MT_CHECK;

#endif

/* run_objective.c - which objective the settings choose; finds the adapter of its reference model. */
#include "train/objective/run_objective.h"

#include <string.h>

#include "train/adapter/adapter_dir.h"

static const struct run_objective sft = {.kind = &objective_sft};

const struct run_objective *run_objective(const struct config *c)
{
    return strcmp(c->distill.teacher, "none") ? &run_objective_distill : &sft;
}

int run_objective_check(const struct config *c, struct err *err)
{
    const struct run_objective *o = run_objective(c);
    return config_validate(c, err) || (o->check && o->check(c, err)) ? -1 : 0;
}

const char *run_objective_reference(const struct config *c)
{
    const struct run_objective *o = run_objective(c);
    return o->reference ? o->reference(c) : NULL;
}

int run_objective_find_reference(char dir[MT_PATH], const struct config *c, struct err *err)
{
    const char *given = run_objective_reference(c);
    if (!given) return 0;
    return adapter_dir_find(dir, run_objective(c)->reference_key, given, err) ? -1 : 1;
}

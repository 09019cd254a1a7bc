/* run_banner.h - what a run prints when its model is loaded. */
#ifndef MT_OPENING_H
#define MT_OPENING_H

#include "train/session/run.h"

/* n_step: optimizer steps of the whole run. */
void opening_print(const struct run *r, int64_t n_step);

#endif

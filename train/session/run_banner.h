/* run_banner.h - what a run prints when its model is loaded. */
#ifndef MT_RUN_BANNER_H
#define MT_RUN_BANNER_H

#include "train/run/run.h"

/* n_step: optimizer steps of the whole run. */
void run_banner_print(const struct run *r, int64_t n_step);

#endif
